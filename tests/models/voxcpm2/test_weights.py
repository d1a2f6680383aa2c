"""The checkpoint folder: released names and counts, strict loading, configurations that are refused, random weights."""

import json
from pathlib import Path

import pytest
import tiny_vox
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import digest
from tiny_vox_lm import tiny_config, tiny_lm

from sonoro.core.errors import CheckpointError, CheckpointNotFound, TensorMismatch
from sonoro.models import registry
from sonoro.models.shared.model_files import MODEL_FILES
from sonoro.models.voxcpm2 import weights
from sonoro.models.voxcpm2.config import read

CPU = torch.device("cpu")


def test_the_weights_drawn_here_are_those_the_official_code_ran_with(reference_root: Path) -> None:
    root = reference_root.parent / "voxcpm2"
    digests = json.loads((root / "scenarios.json").read_text())["digests"]
    drawn = digests.pop("noise")
    assert {stop: digest(tiny_vox.state_dict(stop)) for stop in digests} == digests
    assert digest({"noise": tiny_vox.noise(0, 2), "recording": tiny_vox.recording(0, 2)}) == drawn
    assert sum(path.stat().st_size for path in root.iterdir()) < 1_000_000


def test_the_released_model_has_the_released_tensors() -> None:
    shapes = weights.FILES.stored_shapes(read("voxcpm2"))
    model = shapes[MODEL_FILES]
    assert len(model) == 577
    assert model["base_lm.layers.27.self_attn.k_proj.weight"] == (256, 2048)
    assert model["residual_lm.layers.7.mlp.up_proj.weight"] == (6144, 2048)
    assert model["feat_decoder.estimator.decoder.layers.11.self_attn.o_proj.weight"] == (1024, 2048)
    assert model["feat_encoder.special_token"] == (1, 1, 1, 1024)
    assert model["fusion_concat_proj.weight"] == (2048, 4096)
    assert "stop_head.bias" not in model
    assert not any("q_norm" in name or name.startswith("residual_lm.embed") for name in model)
    counts = weights.FILES.count_parts(shapes)
    expected = {
        "base LM": 1_321_322_496,
        "text embedding": 150_421_504,
        "residual LM": 377_522_176,
        "local encoder": 207_711_232,
        "flow": 212_040_768,
        "quantiser and projections": 20_986_368,
    }
    assert {part: counts[part] for part in expected} == expected
    assert sum(expected.values()) == 2_290_004_544


def test_the_tiny_checkpoint_has_the_released_names() -> None:
    assert weights.FILES.stored_shapes(tiny_config())[MODEL_FILES] == tiny_vox.shapes()


def test_every_tensor_arrives() -> None:
    stored, state = tiny_vox.state_dict(), tiny_lm().state_dict()
    for prefix in ("base_lm.layers.2", "feat_decoder.estimator.decoder.layers.1"):
        for ours, theirs in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            parts = [torch.from_numpy(stored[f"{prefix}.{name}.weight"]) for name in theirs]
            assert torch.equal(state[f"{prefix}.{ours}.weight"], torch.cat(parts))
    whole = [name for name in state if "qkv_proj" not in name and "gate_up_proj" not in name]
    assert len(whole) == len(stored) - 9 * (5 - 2 - 2 + 4)
    assert all(torch.equal(state[name], torch.from_numpy(stored[name])) for name in whole)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_vox.write_checkpoint(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"feat_encoder.special_token": None}, r"feat_encoder.special_token.*is missing"),
        ({"residual_lm.embed_tokens.weight": torch.zeros(2)}, r"residual_lm.embed_tokens.*is not part of the model"),
        ({"stop_head.weight": torch.zeros(3, 48)}, r"has shape \[3, 48\], expected \[2, 48\]"),
        ({"base_lm.layers.0.self_attn.v_proj.weight": None}, r"v_proj.weight.*is missing"),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, change: dict[str, torch.Tensor | None], reason: str) -> None:
    values = load_file(folder / MODEL_FILES) | change
    save_file({name: value for name, value in values.items() if value is not None}, folder / MODEL_FILES)
    with pytest.raises(TensorMismatch, match=reason):
        weights.FILES.load(folder, tiny_config(), device=CPU, dtype=torch.float32)
    with pytest.raises(TensorMismatch, match=reason):
        registry.describe(folder)


def test_a_folder_without_its_codec_is_refused(folder: Path) -> None:
    (folder / "audiovae.pth").unlink()
    with pytest.raises(CheckpointNotFound, match=r"audiovae\.pth"):
        registry.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("lm_config", "use_mup"), True, "lm_config.use_mup is True; it must be False"),
        (("residual_lm_no_rope",), False, "residual_lm_no_rope is False; it must be True"),
        (("lm_config", "rope_scaling", "type"), "yarn", "rope_scaling.type is yarn; it must be longrope"),
        (("lm_config", "rope_scaling", "original_max_position_embeddings"), 512, "is 512; it must be 4096"),
        (("lm_config", "rope_scaling", "short_factor"), [1.0] * 7, "7 rotary divisors; heads have 8 rotary pairs"),
        (("lm_config", "num_attention_heads"), 5, "5 query heads cannot share 2"),
        (("dit_config", "kv_channels"), 32, "dit_config.kv_channels is 32; it must be 16"),
        (("audio_vae_config", "latent_dim"), 16, "audio_vae_config.latent_dim is 16; it must be 8"),
        (("max_length",), 8192, "max_length is 8192; it must be 4096"),
        (("lm_config", "rms_norm_eps"), 0.0, "rms_norm_eps is 0.0; it must be above 0"),
        (("lm_config", "num_hidden_layers"), 0, "num_hidden_layers is 0; it must be at least 1"),
        (("patch_size",), "4", "Expected `int`"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(
    folder: Path, path: tuple[str, ...], value: object, reason: str
) -> None:
    values = tiny_vox.config()
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=reason):
        read(folder)


def test_random_weights_are_the_same_each_time_and_lively() -> None:
    first, second = (weights.FILES.init_dummy(tiny_config(), 3, device=CPU, dtype=torch.bfloat16).lm for _ in range(2))
    assert first.weight.dtype == torch.bfloat16
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
        assert value.float().std() > 0.01, name
    assert weights.FILES.weight_bytes(tiny_config(), torch.bfloat16) > 2 * sum(p.numel() for p in first.parameters())
