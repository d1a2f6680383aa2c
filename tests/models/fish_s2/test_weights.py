"""The checkpoint folder: released names and counts, strict loading, configurations that are refused, random weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_fish
from reference_assets import load as stored_cases
from sonoro.core.errors import CheckpointError, CheckpointNotFound, TensorMismatch
from sonoro.models.fish_s2 import weights
from sonoro.models.fish_s2.config import model_config
from sonoro.models.fish_s2.weights import count_parts, init_dummy, load, stored_shapes
from sonoro.models.model_files import MODEL_FILES
from tiny_checkpoint import digest
from tiny_dual_ar import tiny_config, tiny_dual_ar

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
    shapes = stored_shapes(model_config("fish-s2-pro"))
    model = shapes[MODEL_FILES]
    assert len(model) == 358
    assert model["text_model.model.layers.35.attention.wqkv.weight"] == (6144, 2560)
    assert model["text_model.model.layers.0.feed_forward.w3.weight"] == (9728, 2560)
    assert model["text_model.model.layers.0.attention.q_norm.weight"] == (128,)
    assert model["audio_decoder.codebook_embeddings.weight"] == (40960, 2560)
    assert not any("layers" in name and "q_norm" in name for name in model if name.startswith("audio_decoder."))
    counts = count_parts(shapes)
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
    assert stored_shapes(tiny_config())[MODEL_FILES] == tiny_fish.shapes()


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
    assert torch.equal(lm.head, table[candidates])


def test_a_single_file_without_an_index_serves_too(tmp_path: Path) -> None:
    tiny_fish.write_checkpoint(tmp_path)
    found = {}
    for file in sorted(tmp_path.glob("*.safetensors")):
        found |= load_file(file)
        file.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    save_file(found, tmp_path / "model.safetensors")
    lm = load(tmp_path, tiny_config(), device=CPU, dtype=torch.float32).lm
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
        load(folder, tiny_config(), device=CPU, dtype=torch.float32)


def test_a_broken_index_or_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointNotFound, match="model-00002-of-00002"):
        load(folder, tiny_config(), device=CPU, dtype=torch.float32)
    for text in ("{", "{}", '{"weight_map": 3}', "[]"):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json is not a readable index"):
            load(folder, tiny_config(), device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("text_config", "tie_word_embeddings"), False, "text_config.tie_word_embeddings is False; it must be True"),
        (("text_config", "attention_o_bias"), True, "text_config.attention_o_bias is True; it must be False"),
        (("audio_decoder_config", "dim"), 32, "audio_decoder_config.dim is 32; it must be 64"),
        (("audio_decoder_config", "vocab_size"), 63, "audio_decoder_config.vocab_size is 63; it must be 64"),
        (("text_config", "n_layer"), 0, "n_layer is 0; it must be at least 1"),
        (("text_config", "n_head"), 7, "7 heads of queries cannot share 2"),
        (("text_config", "head_dim"), 15, "heads of 15 cannot be turned"),
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
    first, second = (init_dummy(tiny_config(), 3, device=CPU, dtype=torch.bfloat16).lm for _ in range(2))
    assert first.head.dtype == torch.bfloat16
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
        assert value.float().std() > 0.01, name
    assert weights.weight_bytes(tiny_config(), torch.bfloat16) > 2 * sum(p.numel() for p in first.parameters())
