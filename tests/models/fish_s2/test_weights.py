"""The checkpoint folder: released names and counts, strict loading, configurations that are refused, random weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_fish
import torch
from parity import load as stored_cases
from safetensors.torch import load_file, save_file
from tiny_checkpoint import digest
from tiny_dual_ar import tiny_config, tiny_dual_ar

from sonoro.core.errors import CheckpointError, CheckpointNotFound, TensorMismatch
from sonoro.models import registry
from sonoro.models.fish_s2 import weights
from sonoro.models.fish_s2.config import ModelConfig, model_config
from sonoro.models.shared.model_files import MODEL_FILES

CPU = torch.device("cpu")


def test_the_weights_drawn_here_are_those_the_official_code_ran_with(reference_root: Path) -> None:
    root = reference_root.parent / "fish_s2"
    digests = json.loads((root / "scenarios.json").read_text())["digests"]
    uniforms = digests.pop("uniforms")
    assert {scale: digest(tiny_fish.state_dict(float(scale))) for scale in digests} == digests
    assert digest({"uniforms": tiny_fish.uniforms(0, 2)}) == uniforms
    assert {case.facts["end_scale"] for case in stored_cases("greedy", root).values()} == {float(s) for s in digests}
    assert sum(path.stat().st_size for path in root.iterdir()) < 1_000_000


def test_the_released_model_has_the_released_tensors() -> None:
    shapes = weights.FILES.stored_shapes(model_config("fish-s2-pro"))
    model = shapes[MODEL_FILES]
    assert len(model) == 358
    assert model["text_model.model.layers.35.attention.wqkv.weight"] == (6144, 2560)
    assert model["text_model.model.layers.0.feed_forward.w3.weight"] == (9728, 2560)
    assert model["text_model.model.layers.0.attention.q_norm.weight"] == (128,)
    assert model["audio_decoder.codebook_embeddings.weight"] == (40960, 2560)
    assert not any("layers" in name and "q_norm" in name for name in model if name.startswith("audio_decoder."))
    counts = weights.FILES.count_parts(shapes)
    expected = {
        "slow layers": 3_633_509_376,
        "text embedding and head": 398_786_560,
        "fast layers": 403_722_240,
        "fast embedding": 10_485_760,
        "fast head": 10_485_760,
        "codebook embeddings": 104_857_600,
        "norms": 5_120,
    }
    assert {part: counts[part] for part in expected} == expected
    assert sum(expected.values()) == 4_561_852_416


def test_the_tiny_checkpoint_has_the_released_names() -> None:
    assert weights.FILES.stored_shapes(tiny_config())[MODEL_FILES] == tiny_fish.shapes()


def test_every_tensor_arrives_and_pairs_become_halves() -> None:
    stored, lm = tiny_fish.state_dict(), tiny_dual_ar()
    state, width = lm.state_dict(), 16
    halves = torch.arange(width).view(-1, 2).t().flatten()
    layer, ours = "text_model.model.layers.2.", "text_model.model.layers.2."
    heads = torch.from_numpy(stored[f"{layer}attention.wqkv.weight"]).view(12, width, 64)
    heads[:10] = heads[:10, halves]
    assert torch.equal(state[f"{ours}self_attn.qkv_proj.weight"], heads.flatten(0, 1))
    norm = torch.from_numpy(stored[f"{layer}attention.k_norm.weight"])
    assert torch.equal(state[f"{ours}self_attn.k_norm.weight"], norm[halves])
    gates = [torch.from_numpy(stored[f"{layer}feed_forward.{name}.weight"]) for name in ("w1", "w3")]
    assert torch.equal(state[f"{ours}mlp.gate_up_proj.weight"], torch.cat(gates))
    table = torch.from_numpy(stored["text_model.model.embeddings.weight"])
    config = tiny_config()
    candidates = [*range(config.semantic_start_token_id, config.semantic_end_token_id + 1), config.eos_token_id]
    assert torch.equal(lm.head.weight, table[candidates])


def test_a_single_file_without_an_index_serves_too(tmp_path: Path) -> None:
    tiny_fish.write_checkpoint(tmp_path)
    save_file(joined(tmp_path), tmp_path / "model.safetensors")
    lm = weights.FILES.load(tmp_path, tiny_config(), device=CPU, dtype=torch.float32).lm
    assert torch.equal(lm.fast.output.weight, tiny_dual_ar().fast.output.weight)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_fish.write_checkpoint(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: dict[str, torch.Tensor | None]) -> None:
    """Change tensors of the first shard; None takes one out."""
    file = folder / "model-00001-of-00002.safetensors"
    values = {name: value for name, value in (load_file(file) | change).items() if value is not None}
    save_file(values, file)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"audio_decoder.codebook_embeddings.weight": None}, "audio_decoder.codebook_embeddings.weight.*is missing"),
        ({"audio_decoder.extra": torch.zeros(2)}, "audio_decoder.extra.*is not part of the model"),
        ({"audio_decoder.codebook_embeddings.weight": torch.zeros(3, 2)}, r"has shape \[3, 2\], expected \[640, 64\]"),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, change: dict[str, torch.Tensor | None], reason: str) -> None:
    rewrite(folder, change)
    with pytest.raises(TensorMismatch, match=reason):
        weights.FILES.load(folder, tiny_config(), device=CPU, dtype=torch.float32)


def joined(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of the language model, whose files are taken out."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    return found


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`tensors` with queries, keys and values each by itself: 8, 2 and 2 heads of 16."""
    found = {}
    for name, value in tensors.items():
        if ".wqkv." in name:
            parts = (part.contiguous() for part in value.split([128, 32, 32]))
            found |= {name.replace("wqkv", part): rows for part, rows in zip(("wq", "wk", "wv"), parts, strict=True)}
        else:
            found[name] = value
    return found


def official(tensors: dict[str, torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
    """`tensors` under the official code's own names."""
    found = {}
    for name, value in tensors.items():
        own = name.replace("text_model.model.", "").replace("audio_decoder.codebook", "codebook")
        found[prefix + own.replace("audio_decoder.", "fast_")] = value
    return found


def assert_loads(folder: Path) -> None:
    """Like the released files, and the check agrees."""
    lm, expected = (
        weights.FILES.load(folder, tiny_config(), device=CPU, dtype=torch.float32).lm,
        tiny_dual_ar().state_dict(),
    )
    for name, value in lm.state_dict().items():
        assert torch.equal(value, expected[name]), name
    released = weights.FILES.count_parts(weights.FILES.stored_shapes(tiny_config()))
    assert weights.FILES.count_parts(weights.FILES.stored_shapes(tiny_config(), folder)) == released


def test_queries_keys_and_values_may_be_apart(folder: Path) -> None:
    tensors = apart(joined(folder))
    save_file(tensors, folder / "model.safetensors")
    assert_loads(folder)
    del tensors["audio_decoder.layers.1.attention.wk.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(TensorMismatch, match=r"audio_decoder.layers.1.attention.wk.weight' \[32, 64\] is missing"):
        weights.FILES.load(folder, tiny_config(), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_the_older_file_serves_under_its_own_names(folder: Path, is_apart: bool, prefix: str, is_wrapped: bool) -> None:
    tensors = joined(folder)
    old = official(apart(tensors) if is_apart else tensors, prefix)
    old[f"{prefix}audio_projector.weight"] = torch.zeros(2, 2)
    torch.save({"state_dict": old} if is_wrapped else old, folder / "model.pth")
    assert_loads(folder)
    with pytest.raises(TensorMismatch, match=r"layers.0.attention.wo.weight' has shape \[64, 128\], expected"):
        weights.FILES.load(folder, wider(), device=CPU, dtype=torch.float32)


def wider() -> ModelConfig:
    config = tiny_config()
    return replace(config, text_config=replace(config.text_config, n_head=16))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fast_output.weight": None}, r"model.pth: tensor 'fast_output.weight' \[64, 64\] is missing"),
        (
            {"fast_layers.0.attention.wo.bias": torch.zeros(1)},
            "fast_layers.0.attention.wo.bias.*is not part of the model",
        ),
        ({"model.norm.weight": torch.zeros(64)}, "model.norm.weight.*is not part of the model"),
        ({"layers.0.attention.wq.weight": torch.zeros(128, 64)}, "layers.0.attention.wk.weight.*is missing"),
        ({"norm.weight": torch.zeros(64, dtype=torch.int64)}, "'norm.weight' is stored as torch.int64"),
    ],
)
def test_an_older_file_is_read_as_strictly(folder: Path, change: dict[str, torch.Tensor | None], reason: str) -> None:
    old = official(joined(folder)) | change
    torch.save({name: value for name, value in old.items() if value is not None}, folder / "model.pth")
    for read in (weights.FILES.load, lambda *_, **__: weights.FILES.stored_shapes(tiny_config(), folder)):
        with pytest.raises(TensorMismatch, match=reason):
            read(folder, tiny_config(), device=CPU, dtype=torch.float32)


def test_released_files_come_before_older_ones(folder: Path) -> None:
    torch.save({"norm.weight": torch.zeros(64)}, folder / "model.pth")
    assert_loads(folder)
    (folder / "model-00001-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFound, match="model-00001-of-00002"):
        weights.FILES.load(folder, tiny_config(), device=CPU, dtype=torch.float32)


def test_a_folder_of_the_older_file_is_described_and_checked(folder: Path) -> None:
    old = official(joined(folder))
    torch.save(old, folder / "model.pth")
    assert sum(registry.describe(str(folder)).parameters.values()) > 0
    del old["fast_norm.weight"]
    torch.save(old, folder / "model.pth")
    with pytest.raises(TensorMismatch, match=r"fast_norm\.weight"):
        registry.describe(str(folder))


def test_a_broken_index_or_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFound, match="model-00002-of-00002"):
        weights.FILES.load(folder, tiny_config(), device=CPU, dtype=torch.float32)
    for text in ("{", "{}", '{"weight_map": 3}', "[]"):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is not a readable index"):
            weights.FILES.load(folder, tiny_config(), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("text_config", "tie_word_embeddings"), False, "text_config.tie_word_embeddings is False; it must be True"),
        (("text_config", "attention_o_bias"), True, "text_config.attention_o_bias is True; it must be False"),
        (("audio_decoder_config", "dim"), 32, "audio_decoder_config.dim is 32; it must be 64"),
        (("audio_decoder_config", "vocab_size"), 63, "audio_decoder_config.vocab_size is 63; it must be 64"),
        (("text_config", "rope_base"), -1.0, "rope_base is -1.0; it must be above 0"),
        (("text_config", "n_layer"), 0, "n_layer is 0; it must be at least 1"),
        (("text_config", "n_head"), 7, "7 query heads cannot share 2"),
        (("text_config", "head_dim"), 15, "heads of width 15: a rotary embedding"),
        (("eos_token_id",), 99999, r"eos_token_id is 99999; it must be \d+"),
        (("eos_token_id",), "x", "Expected `int`"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(
    folder: Path, path: tuple[str, ...], value: object, reason: str
) -> None:
    values = tiny_fish.config()
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=reason):
        model_config(folder)


def test_random_weights_are_the_same_each_time_and_lively() -> None:
    first, second = (weights.FILES.init_dummy(tiny_config(), 3, device=CPU, dtype=torch.bfloat16).lm for _ in range(2))
    assert first.head.weight.dtype == torch.bfloat16
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
        assert value.float().std() > 0.01, name
    assert weights.FILES.weight_bytes(tiny_config(), torch.bfloat16) > 2 * sum(p.numel() for p in first.parameters())
