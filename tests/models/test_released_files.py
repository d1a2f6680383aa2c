"""Checkpoints as people have them: sharded, of the other format, with tensors that nothing reads. In every family."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from families import FAMILIES, TinyFamily
from families import tiny as tiny  # noqa: PLC0414 (a fixture)
from safetensors.torch import load_file, save_file
from torch import Tensor

from sonoro.core.errors import TensorMismatch
from sonoro.models import registry
from sonoro.models.base import LoadedModel
from sonoro.models.fish_s2 import config as fish_s2_config
from sonoro.models.voxcpm2 import config as voxcpm2_config
from sonoro.nn import stored

CODECS = {
    "talker": "speech_tokenizer/model.safetensors",
    "dual_ar": "codec.pth",
    "patches": "audiovae.pth",
    "latents": "model.safetensors",
}
"""Pocket TTS has both in one file."""
HEADS = {
    "talker": ("talker.lm_head.weight", "talker.model.text_embedding.weight"),
    "dual_ar": ("lm_head.weight", "text_model.model.embeddings.weight"),
    "patches": ("base_lm.lm_head.weight", "base_lm.embed_tokens.weight"),
    "latents": ("flow_lm.lm_head.weight", "flow_lm.conditioner.embed.weight"),
}
LAYERS = {
    "talker": "talker.model.",
    "dual_ar": "text_model.model.",
    "patches": "base_lm.",
    "latents": "flow_lm.transformer.",
}


@pytest.fixture
def name(tiny: TinyFamily) -> str:
    return next(name for name, family in FAMILIES.items() if family is tiny)


@pytest.fixture
def folder(tiny: TinyFamily, tmp_path: Path) -> Path:
    tiny.write(tmp_path)
    return tmp_path


def take(file: Path) -> dict[str, Tensor]:
    """The tensors of `file`, of whatever format it is, which is taken away."""
    found: dict[str, Tensor] = {}
    for one in stored.find(file):
        read = load_file(one) if one.suffix == ".safetensors" else torch.load(one, weights_only=True)
        found |= {name: value.clone() for name, value in read.get("state_dict", read).items()}
        one.unlink()
    for index in file.parent.glob(f"*{file.stem}*.index.json"):
        index.unlink()
    return found


def shard(tensors: dict[str, Tensor], index: Path, save: Callable[[dict[str, Tensor], Path], object], end: str) -> None:
    """`tensors` in two files, and their index."""
    stem = index.name.split(".")[0]
    where = {name: f"{stem}-{number % 2}{end}" for number, name in enumerate(tensors)}
    for file in set(where.values()):
        save({name: tensors[name] for name in tensors if where[name] == file}, index.with_name(file))
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))


def write(kind: str, file: Path) -> None:
    """The tensors of `file` again, as `kind`."""
    tensors, pytorch = take(file), "pytorch_model.bin" if file.stem == "model" else f"{file.stem}.bin"
    if kind == "safetensors":
        save_file(tensors, file.with_suffix(".safetensors"))
    elif kind == "shards":
        shard(tensors, file.with_name(f"{file.stem}.safetensors.index.json"), save_file, ".safetensors")
    elif kind == "bin":
        torch.save(tensors, file.with_name(pytorch))
    elif kind == "wrapped bin":
        torch.save({"state_dict": tensors, "epoch": 3}, file.with_name(pytorch))
    else:
        shard(tensors, file.with_name(f"{pytorch}.index.json"), torch.save, ".bin")


def load(folder: Path) -> LoadedModel:
    loaded = registry.load(folder, device="cpu")
    assert registry.describe(folder).parameters == loaded.parameters
    return loaded


CONFIGS = {
    "fish-s2-pro": (fish_s2_config, fish_s2_config.model_config),
    "voxcpm2": (voxcpm2_config, voxcpm2_config.read),
}
"""Of the released names: where the configuration is, and what reads it. For Qwen3-TTS see qwen3_tts/test_config.py."""


def at_their_defaults(kind: type, values: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """The keys of `values`, and where they are, that hold what they would be if they were absent."""
    kinds = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in values and dataclasses.is_dataclass(inner := kinds[field.name]):
            yield from at_their_defaults(inner, values[field.name])
        elif field.name in values and values[field.name] == field.default:
            yield values, field.name


@pytest.mark.parametrize("how", ["absent", "null", "beside unknown ones"])
@pytest.mark.parametrize("released", CONFIGS)
def test_a_configuration_may_lack_keys_and_have_others(released: str, how: str, tmp_path: Path) -> None:
    module, read = CONFIGS[released]
    values = json.loads((Path(module.__file__).parent / "configs" / f"{released}.json").read_text())
    found = [*at_their_defaults(module.ModelConfig, values)]
    assert len(found) > 5
    for section, key in found:
        if how == "beside unknown ones":
            section[f"{key}_of_tomorrow"] = {"a": [None]}
        elif how == "null":
            section[key] = None
        else:
            del section[key]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read(tmp_path) == read(released)


@pytest.mark.parametrize("kind", ["safetensors", "shards", "bin", "wrapped bin", "bin shards"])
def test_both_files_load_in_every_format(folder: Path, name: str, kind: str) -> None:
    expected = load(folder)
    for file in dict.fromkeys(("model.safetensors", CODECS[name])):
        write(kind, folder / file)
        found = load(folder)
        assert found.model.fingerprint == expected.model.fingerprint
        assert found.skipped == expected.skipped


def test_no_format_runs_what_is_in_the_file(folder: Path, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    trap = tmp_path_factory.mktemp("trap") / "sprung"

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (open, (str(trap), "w"))

    for file in dict.fromkeys(("model.safetensors", CODECS[name])):
        tensors = take(folder / file)
        stem = (folder / file).stem
        other = (folder / file).with_name("pytorch_model.bin" if stem == "model" else f"{stem}.bin")
        torch.save({"x": Trap()}, other)
        with pytest.raises(Exception, match=rf"{other.name} is not a readable file of tensors alone"):
            registry.load(folder, device="cpu")
        torch.save(tensors, other)
    assert not trap.exists()


def test_what_nothing_reads_is_skipped_and_named_once(
    folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = load(folder)
    caplog.clear()
    model = take(folder / "model.safetensors")
    head, embedding = HEADS[name]
    extra = {
        head: model[embedding].clone(),
        f"{LAYERS[name]}layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        f"{LAYERS[name]}causal_mask": torch.ones(4, 4, dtype=torch.bool),
        f"{LAYERS[name]}steps": torch.ones((), dtype=torch.int64),
        "reward_model.layers.0.weight": torch.ones(3),
    }
    beside = {"decoder.freqs_cis": torch.ones(3), "discriminator.0.weight": torch.ones(2, 2)}
    if CODECS[name] == "model.safetensors":
        model |= beside
    else:
        torch.save(take(folder / CODECS[name]) | beside, (folder / CODECS[name]).with_suffix(".bin"))
    torch.save(model | extra, folder / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING):
        loaded = load(folder)
    assert set(loaded.skipped) == {*extra, *beside, *expected.skipped}
    assert loaded.model.fingerprint == expected.model.fingerprint
    (record,) = (record for record in caplog.records if "tensors_skipped" in record.getMessage())
    for one in ("rotary_emb.inv_freq", "causal_mask", "discriminator", "reward_model", head):
        assert one in record.getMessage()


def test_a_head_that_is_not_the_embedding_is_refused(folder: Path, name: str) -> None:
    model, (head, embedding) = take(folder / "model.safetensors"), HEADS[name]
    torch.save(model | {head: model[embedding] + 1}, folder / "pytorch_model.bin")
    with pytest.raises(TensorMismatch, match=head):
        registry.load(folder, device="cpu")


@pytest.mark.parametrize("kind", ["bin", "bin shards", "shards"])
def test_what_is_needed_stays_needed_in_every_format(folder: Path, name: str, kind: str) -> None:
    for file in dict.fromkeys(("model.safetensors", CODECS[name])):
        tensors = take(folder / file)
        needed = next(one for one in tensors if one.endswith(".bias") or "norm" in one)
        for wrong in (None, tensors[needed][:-1].clone(), tensors[needed]):
            changed = {one: value for one, value in (tensors | {needed: wrong}).items() if value is not None}
            torch.save(changed, (folder / file).with_suffix(".pth"))
            write(kind, folder / file)
            if wrong is tensors[needed]:
                load(folder)
            else:
                with pytest.raises(TensorMismatch, match=needed):
                    registry.load(folder, device="cpu")
                take(folder / file)
