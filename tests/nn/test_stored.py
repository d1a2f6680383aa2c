"""Finding a checkpoint's files in every format, and telling what nothing reads from what must not be there."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sonoro.core.errors import CheckpointError, CheckpointNotFound, TensorMismatch
from sonoro.nn import stored
from sonoro.nn.stored import Entry, check_tied, find, headers, opened, sort_out

FILE = Path("model.safetensors")
EXPECTED = {
    "lm.embed_tokens.weight": (8, 4),
    "lm.layers.0.proj.weight": (4, 4),
    "lm.layers.1.proj.weight": (4, 4),
    "speaker.weight": (3,),
}


def entries(shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> dict[str, Entry]:
    return {name: Entry(FILE, dtype, shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("present", "found"),
    [
        ([], ["model.safetensors"]),
        (["model.pth", "pytorch_model.bin", "model.safetensors"], ["model.safetensors"]),
        (["model.pth", "pytorch_model.bin"], ["pytorch_model.bin"]),
        (["model.bin"], ["model.bin"]),
        (["model.pth"], ["model.pth"]),
        (["model.safetensors", "model.safetensors.index.json"], ["one", "two"]),
        (["pytorch_model.bin.index.json"], ["one", "two"]),
        (["pytorch_model.bin.index.json", "model.safetensors"], ["model.safetensors"]),
    ],
)
def test_the_files_are_the_shards_of_an_index_or_one_of_any_format(
    tmp_path: Path, present: list[str], found: list[str]
) -> None:
    for name in present:
        (tmp_path / name).write_text('{"weight_map": {"b": "two", "a": "one", "c": "two"}}')
    assert find(tmp_path / "model.safetensors") == [tmp_path / name for name in found]


@pytest.mark.parametrize(("file", "other"), [("codec.pth", "codec.safetensors"), ("codec.pth", "codec.bin")])
def test_a_codec_may_be_of_the_other_format(tmp_path: Path, file: str, other: str) -> None:
    assert find(tmp_path / file) == [tmp_path / file]
    (tmp_path / other).write_bytes(b"")
    assert find(tmp_path / file) == [tmp_path / other]


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}', "[]", '{"weight_map": {"a": 1}}'])
@pytest.mark.parametrize("name", ["model.safetensors.index.json", "pytorch_model.bin.index.json"])
def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=rf"{name} is not a readable index"):
        find(tmp_path / "model.safetensors")


def test_files_of_both_formats_hold_tensors_by_name(tmp_path: Path) -> None:
    files = [tmp_path / "a.safetensors", tmp_path / "b.bin"]
    save_file({"x": torch.arange(3.0)}, files[0])
    torch.save({"state_dict": {"y": torch.arange(4, dtype=torch.int32)}}, files[1])
    found = headers(files)
    assert {name: entry.shape for name, entry in found.items()} == {"x": (3,), "y": (4,)}
    with opened(files) as (entries, get, _):
        assert entries == found
        assert get("x").tolist() == [0, 1, 2]
        assert get("y").tolist() == [0, 1, 2, 3]
    with pytest.raises(CheckpointNotFound, match=r"c\.bin does not exist"):
        headers([*files, tmp_path / "c.bin"])
    torch.save({"x": torch.zeros(3)}, files[1])
    with pytest.raises(TensorMismatch, match=r"'x' is in .*a\.safetensors and again in .*b\.bin"):
        headers(files)


@pytest.mark.parametrize(
    "name",
    [
        "lm.layers.0.self_attn.rotary_emb.inv_freq",
        "lm.rope_emb.short_factor",
        "lm.freqs_cis",
        "lm.layers.1.cos_cached",
        "lm.layers.0.attn.causal_mask",
        "lm.mask",
        "lm.lm_head.weight",
        "lm_head.weight",
        "ema.lm.layers.0.proj.weight",
        "lm.discriminators.0.conv.bias",
        "lm.stop_loss.weight",
        "vision.layers.0.proj.weight",
        "step",
    ],
)
def test_what_is_derived_or_foreign_is_skipped(name: str) -> None:
    found = entries(EXPECTED | {name: (8, 4)})
    assert sort_out(found, EXPECTED, {}, where="here") == (name,)


def test_integers_that_nothing_expects_are_skipped() -> None:
    for dtype in ("I64", "BOOL", "U8", "torch.int32", "torch.bool", "torch.uint8"):
        found = entries(EXPECTED) | entries({"lm.layers.0.count": ()}, dtype)
        assert sort_out(found, EXPECTED, {}, where="here") == ("lm.layers.0.count",)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("lm.layers.0.proj.bias", (4,)),  # the model would add it
        ("lm.layers.2.proj.weight", (4, 4)),  # one layer more than the configuration says
        ("lm.layers.0.q_norm.weight", (4,)),
        ("lm.layers.0.proj.weight_scale", (4,)),
        ("lm.layers.0.proj.lora_A.weight", (4, 2)),
        ("lora.lm.weight", (4, 2)),
        ("lm.lm_head.weight", (9, 4)),  # of another size than any embedding
        ("speaker.bias", (3,)),
    ],
)
def test_what_would_change_the_model_is_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(TensorMismatch, match=rf"here: tensor '{name}' .* is not part of the model"):
        sort_out(entries(EXPECTED | {name: shape}), EXPECTED, {}, where="here")


def test_what_is_needed_must_be_there_in_its_shape_and_of_floats() -> None:
    for dtype in ("I8", "F8_E4M3", "torch.int64", "torch.float8_e4m3fn"):
        found = entries(EXPECTED) | entries({"speaker.weight": (3,)}, dtype)
        with pytest.raises(TensorMismatch, match=rf"'speaker\.weight' is stored as {dtype}"):
            sort_out(found, EXPECTED, {}, where="here")
    for dtype in ("F64", "BF16", "F16", "torch.bfloat16", "torch.float16"):
        assert sort_out(entries(EXPECTED, dtype), EXPECTED, {}, where="here") == ()
    rest = entries({name: shape for name, shape in EXPECTED.items() if name != "speaker.weight"})
    with pytest.raises(TensorMismatch, match=r"'speaker\.weight' \[3\] is missing"):
        sort_out(rest, EXPECTED, {}, where="here")
    with pytest.raises(TensorMismatch, match=r"has shape \[4\], expected \[3\]"):
        sort_out(rest | entries({"speaker.weight": (4,)}), EXPECTED, {}, where="here")


def test_a_tied_head_must_be_the_embedding() -> None:
    table = torch.arange(32.0).view(8, 4)
    values: dict[str, Tensor] = {"lm.embed_tokens.weight": table, "lm_head.weight": table.clone(), "x.mask": table}
    check_tied(["lm_head.weight", "x.mask"], EXPECTED, values.__getitem__, "here")
    values["lm_head.weight"][7, 3] += 1
    with pytest.raises(TensorMismatch, match=r"'lm_head\.weight' is not part .* no copy of 'lm\.embed_tokens\.weight'"):
        check_tied(["lm_head.weight"], EXPECTED, values.__getitem__, "here")


def test_one_warning_names_all_that_was_skipped(caplog: pytest.LogCaptureFixture) -> None:
    names = [f"lm.layers.{index}.rotary_emb.inv_freq" for index in range(28)]
    with caplog.at_level(logging.WARNING):
        stored.warn("mine", ())
        assert not caplog.records
        stored.warn("mine", [*names, "step"])
    (record,) = caplog.records
    assert record.getMessage() == (
        "event=tensors_skipped model=mine count=29 names=lm.layers.*.rotary_emb.inv_freq,step"
    )


def test_an_index_names_files_beside_it(tmp_path: Path) -> None:
    folder = tmp_path / "speech_tokenizer"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    assert find(folder / "model.safetensors") == [folder / "model-1.safetensors"]
