"""The checkpoint folder: released names and counts, strict loading, configurations that are refused, random weights."""

import json
from pathlib import Path

import pytest
import tiny_pocket
import torch
import yaml
from safetensors.torch import load_file, save_file
from tiny_checkpoint import digest

from sonoro.core.errors import CheckpointError, CheckpointNotFound, TensorMismatch
from sonoro.models import registry
from sonoro.models.pocket_tts import weights
from sonoro.models.pocket_tts.config import RELEASED, read
from sonoro.models.shared.model_files import MODEL_FILES

CPU = torch.device("cpu")

TENSORS = {
    "english_2026-10": (214, 89.4, 10.3, 9.7),
    "english_2026-01": (213, 89.9, 10.3, 17.6),
    "german_24l": (358, 316.0, 10.3, 9.7),
    "english_drifting_26-09": (202, 88.7, 10.3, 9.7),
    "english_18m_2026-10": (303, 15.6, 2.6, 9.7),
    "english_7m_refl_2026-10": (304, 4.2, 2.6, 9.7),
    "english_2m_2026-10": (224, 0.88, 1.04, 9.7),
}
"""By release: tensors, and millions of parameters of language model, decoder and encoder."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_pocket.write_checkpoint(tmp_path / "english_tiny")
    return tmp_path / "english_tiny"


def test_the_weights_drawn_here_are_those_the_official_code_ran_with(reference_root: Path) -> None:
    root = reference_root.parent / "pocket_tts"
    digests = json.loads((root / "scenarios.json").read_text())["digests"]
    assert {variant: digest(tiny_pocket.state_dict(variant)) for variant in tiny_pocket.VARIANTS} == digests
    assert sum(path.stat().st_size for path in root.iterdir()) < 500_000


@pytest.mark.parametrize("name", TENSORS)
def test_released_models_have_the_released_tensors(name: str) -> None:
    count, lm, decoder, encoder = TENSORS[name]
    shapes = weights.FILES.stored_shapes(read(f"pocket-{name}"))
    assert list(shapes) == [MODEL_FILES]
    assert len(shapes[MODEL_FILES]) == count
    parts = weights.FILES.count_parts(shapes)
    sides = [parts.pop("codec decoder"), parts.pop("codec encoder")]
    found = [sum(parts.values()), *sides]
    assert [round(number / 1e6, 2 if number < 1.1e6 else 1) for number in found] == [lm, decoder, encoder]


def test_all_27_releases_are_known() -> None:
    assert len(RELEASED) == 27
    for name in RELEASED:
        described = registry.describe(name, device="cpu")
        assert described.spec.sample_rate == 24000
        assert described.spec.hop == tiny_pocket.HOP
        assert len(described.spec.languages) == 2
        # The main part in four bytes each, and so is the codec.
        assert (
            described.memory_bytes["weights"]
            == 4 * described.files[MODEL_FILES]
            == 4 * sum(described.parameters.values())
        )


@pytest.mark.parametrize("variant", tiny_pocket.VARIANTS)
def test_the_tiny_checkpoint_has_the_released_names(variant: str, tmp_path: Path) -> None:
    tiny_pocket.write_checkpoint(tmp_path, variant)
    named = weights.FILES.stored_shapes(read(tmp_path))[MODEL_FILES]
    spell = weights.FILES.spelling(named)
    spelled = {name if name.startswith("mimi.") else spell(name): shape for name, shape in named.items()}
    assert spelled == tiny_pocket.shapes(variant)
    loaded = registry.load(tmp_path, device="cpu")
    assert loaded.skipped == ()
    assert sum(loaded.parameters.values()) == sum(value.size for value in tiny_pocket.state_dict(variant).values())


def test_a_folder_is_known_without_config_json(folder: Path) -> None:
    model = registry.load(folder, device="cpu").model
    assert (model.spec.name, model.spec.voices, model.spec.languages) == (
        "english_tiny",
        ("alba",),
        ("auto", "english"),
    )
    assert model.spec.voice_modes == ("named", "cloned")
    assert registry.describe(folder).configuration["family"] == "pocket_tts"


def test_a_released_folder_has_no_configuration(folder: Path) -> None:
    (folder / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match="named like none of english_2026-01"):
        registry.describe(folder)
    released = folder.rename(folder.parent / "english_2m_2026-10")
    with pytest.raises(TensorMismatch, match="has shape"):
        registry.describe(released)


def test_a_folder_without_voices_speaks_as_recordings_alone(folder: Path) -> None:
    (folder / "embeddings" / "alba.safetensors").unlink()
    assert registry.load(folder, device="cpu").model.spec.voice_modes == ("cloned",)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"flow_lm.bos_before_voice": None}, r"flow_lm.bos_before_voice.*is missing"),
        ({"flow_lm.z_proj.weight": torch.zeros(2, 64)}, r"flow_lm.z_proj.*is not part of the model"),
        ({"flow_lm.out_eos.weight": torch.zeros(2, 64)}, r"has shape \[2, 64\], expected \[1, 64\]"),
        ({"mimi.upsample.convtr.convtr.weight": None}, r"mimi.upsample.convtr.convtr.weight.*is missing"),
        ({"mimi.decoder.model.8.convtr.bias": torch.zeros(5)}, r"has shape \[5\], expected \[4\]"),
        ({"mimi.quantizer.vq.weight": torch.zeros(5)}, r"mimi.quantizer.vq.weight.*is not part of the model"),
    ],
)
def test_a_wrong_tensor_is_named(folder: Path, change: dict[str, torch.Tensor | None], reason: str) -> None:
    values = load_file(folder / MODEL_FILES) | change
    save_file({name: value for name, value in values.items() if value is not None}, folder / MODEL_FILES)
    with pytest.raises(TensorMismatch, match=reason):
        registry.load(folder, device="cpu")
    with pytest.raises(TensorMismatch, match=reason):
        registry.describe(folder)


def test_a_folder_of_a_configuration_alone_lacks_its_weights(folder: Path) -> None:
    (folder / MODEL_FILES).unlink()
    with pytest.raises(CheckpointNotFound, match=r"model\.safetensors"):
        registry.load(folder, device="cpu")
    assert registry.load(folder, device="cpu", load_format="dummy").model.spec.voices == ("alba",)


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        (("flow_lm", "flow", "type"), "flow_matching", "Invalid enum value 'flow_matching'"),
        (("flow_lm", "transformer", "num_heads"), 5, "attn_dim is 64; it must divide by num_heads, 5"),
        (("flow_lm", "transformer", "num_kv_heads"), 3, "4 query heads cannot share 3"),
        (("flow_lm", "transformer", "num_layers"), 0, "Expected `int` >= 1"),
        (("flow_lm", "lookup_table", "dim"), 32, "lookup_table.dim is 32; it must be 64"),
        (("flow_lm", "more"), 1, "unknown field `more`"),
        (("mimi", "frame_rate"), 7, "frame_rate is 7.0; it must be"),
        (("mimi", "quantizer", "output_dimension"), 16, "outer_dim is 32; it must be 16"),
        (("mimi", "seanet", "ratios"), [6, 5], "must be"),
        (("mimi", "seanet", "pad_mode"), "reflect", "it must be"),
        (("default_temperature",), -1.0, "Expected `float` >= 0"),
        (("weights",), "hf://", "unknown field `weights`"),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused(
    folder: Path, path: tuple[str, ...], value: object, reason: str
) -> None:
    values = tiny_pocket.config()
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(CheckpointError, match=reason):
        read(folder)


@pytest.mark.parametrize("text", ["{", "- 1", "", "flow_lm: 1"])
def test_a_file_that_is_no_configuration_is_named(folder: Path, text: str) -> None:
    (folder / "config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.yaml"):
        registry.load(folder, device="cpu")


def test_random_weights_are_the_same_each_time_and_lively(tmp_path: Path) -> None:
    tiny_pocket.write_checkpoint(tmp_path, "pointwise")
    config = read(tmp_path)
    first, second = (weights.FILES.init_dummy(config, 3, device=CPU, dtype=torch.bfloat16).lm for _ in range(2))
    assert first.weight.dtype == torch.bfloat16
    assert first.flow_net.input_proj.weight.dtype == first.bos_emb.dtype == torch.float32
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
        assert value.numel() == 1 or value.float().std() > 0.01, name
