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
from sonoro.models.shared import remote
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
        (("flow_lm", "transformer", "num_heads"), 5, "width of all heads is 64; it must be 60"),
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


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def community(folder: Path, file: Path, **changes: object) -> Path:
    values = tiny_pocket.config() | {"weights_path": str(folder / MODEL_FILES)} | changes
    values["flow_lm"]["lookup_table"]["tokenizer_path"] = str(folder / "tokenizer.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(values))
    return file


def test_a_configuration_file_names_its_weights(folder: Path, tmp_path: Path, cache: Path) -> None:
    file = community(folder, tmp_path / "elsewhere" / "french_mine.yaml")
    expected, model = registry.load(folder, device="cpu").model, registry.load(file, device="cpu").model
    assert (model.spec.name, model.spec.languages, model.spec.voices) == ("french_mine", ("auto", "french"), ())
    assert model.fingerprint == expected.fingerprint
    (file.parent / "embeddings").symlink_to(folder / "embeddings")
    assert registry.load(str(file), device="cpu").model.spec.voices == ("alba",)
    with pytest.raises(CheckpointError, match="names no weights_path"):
        registry.load(community(folder, file, weights_path=None), device="cpu")
    with pytest.raises(CheckpointNotFound, match=r"nowhere\.safetensors"):
        registry.load(community(folder, file, weights_path="nowhere.safetensors"), device="cpu")
    assert registry.load(file, device="cpu", load_format="dummy").model.spec.name == "french_mine"


def test_a_release_on_the_hub_is_gathered_from_both_repositories(
    folder: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of one, tokeniser and voices of the other; a configuration file may name a file by its commit."""
    hub, asked = tmp_path / "hub", []
    gated, public = hub / "pocket-tts", hub / "pocket-tts-without-voice-cloning"
    for name in ("english_2026-10", "english_2026-09"):
        (public / "languages" / name).mkdir(parents=True)
    (gated / "languages" / "english_2026-10").mkdir(parents=True)
    (folder / MODEL_FILES).rename(gated / "languages" / "english_2026-10" / MODEL_FILES)
    (folder / "tokenizer.json").rename(public / "languages" / "english_2026-09" / "tokenizer.json")
    (folder / "embeddings").rename(public / "languages" / "english_2026-10" / "embeddings")

    def snapshot(hub_id: str, allow_patterns: list[str]) -> str:
        asked.append(hub_id)
        return str(hub / hub_id.split("/")[1])

    def download(hub_id: str, file: str, revision: str | None) -> str:
        asked.append(f"{hub_id} {file} {revision}")
        return str(hub / hub_id.split("/")[1] / file)

    monkeypatch.setattr(remote.huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(remote.huggingface_hub, "hf_hub_download", download)
    # The tiny weights do not fit the release; all else was found.
    with pytest.raises(TensorMismatch, match="has shape"):
        registry.load("kyutai/pocket-tts/languages/english_2026-10", device="cpu")
    assert asked == ["kyutai/pocket-tts-without-voice-cloning", "kyutai/pocket-tts"]
    (made,) = cache.glob("sonoro/checkpoints/*/english_2026-10")
    assert {path.name for path in made.iterdir()} == {"model.safetensors", "tokenizer.json", "embeddings"}
    for name in ("kyutai/pocket-tts", "kyutai/pocket-tts/languages/klingon"):
        with pytest.raises(
            CheckpointNotFound, match="no release; on the hub: kyutai/pocket-tts/languages/english_2026"
        ):
            registry.load(name, device="cpu")
    path = "hf://kyutai/pocket-tts/languages/english_2026-10/model.safetensors@abc"
    values = tiny_pocket.config() | {"weights_path": path}
    table = "hf://kyutai/pocket-tts-without-voice-cloning/languages/english_2026-09/tokenizer.json"
    values["flow_lm"]["lookup_table"]["tokenizer_path"] = table
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    assert registry.load(tmp_path / "mine.yaml", device="cpu").skipped == ()
    assert asked[-1] == "kyutai/pocket-tts languages/english_2026-10/model.safetensors abc"
