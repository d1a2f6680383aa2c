"""The three ways of getting a model, over a family of three numbers: in which order, of what, and what is counted."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from sonoro.core.errors import CheckpointError
from sonoro.core.types import ModelSpec, SamplingParams
from sonoro.models.shared.loading import Family

CPU = torch.device("cpu")
SHAPES = {"lm.safetensors": {"lm.a": (2, 3), "lm.b": (5,)}, "codec.pth": {"codec.c": (4, 1, 2)}}


class Loaded(NamedTuple):
    config: str
    device: torch.device
    dtype: torch.dtype
    skipped: tuple[str, ...] = ("lm.mask",)


class Calls:
    """A family's parts that say what was asked of them; `broken` is the one that finds something wrong."""

    def __init__(self) -> None:
        self.made: list[str] = []
        self.broken = ""

    def note(self, what: str) -> None:
        self.made.append(what)
        if what.split(maxsplit=1)[0] == self.broken:
            raise CheckpointError(f"{what} is broken")

    def read(self, source: Path | str) -> str:
        self.note(f"read {getattr(source, 'name', source)}")
        return "config"

    def tokenizer(self, config: str, folder: Path | None) -> str:
        self.note(f"tokenizer {folder and folder.name}")
        return "tokenizer"

    def load(self, folder: Path, config: str, *, device: torch.device, dtype: torch.dtype, quantization: str) -> Loaded:
        self.note(f"load {folder.name} {quantization}")
        return Loaded(config, device, dtype)

    def init_dummy(
        self, config: str, seed: int, *, device: torch.device, dtype: torch.dtype, quantization: str
    ) -> tuple[Any, ...]:
        self.note(f"init_dummy {seed} {quantization}")
        return config, device, dtype

    def stored_shapes(self, config: str, folder: Path | None = None) -> dict[str, dict[str, tuple[int, ...]]]:
        assert config == "config"
        self.note(f"shapes {folder and folder.name}")
        return SHAPES

    def count_parts(self, shapes: Any) -> dict[str, int]:
        assert shapes is SHAPES
        return {"lm": 11, "codec": 8}

    def weight_bytes(self, config: str, dtype: torch.dtype) -> int:
        return 19 * dtype.itemsize


@pytest.fixture
def calls() -> Calls:
    return Calls()


@pytest.fixture
def family(calls: Calls) -> Family:
    def spec(name: str, config: str) -> ModelSpec:
        words = {"voice_modes": ("named",), "voices": ("a",), "languages": ("auto",), "sampling": SamplingParams()}
        return ModelSpec(name=name, sample_rate=24000, hop=600, max_frames=9, **words)

    return Family(
        model_type="toy",
        configurations={"toy-1b": "someone/Toy-1B"},
        hub_files=("*.json",),
        read=calls.read,
        files=calls,
        tokenizer=calls.tokenizer,
        tokenizer_file="words.json",
        model=lambda *given: given,
        spec=spec,
        sizes=lambda config: {"layers": 3},
        position_bytes=lambda config, dtype: 10 * dtype.itemsize,
    )


def test_a_family_is_known_by_what_it_was_given(family: Family) -> None:
    assert (family.model_type, family.configurations, family.hub_files) == (
        "toy",
        {"toy-1b": "someone/Toy-1B"},
        ("*.json",),
    )


def test_a_folder_is_loaded_with_all_it_holds(family: Family, calls: Calls, tmp_path: Path) -> None:
    folder = tmp_path / "toys"
    loaded = family.from_folder(folder, "mine", CPU, torch.float32, "int8")
    assert loaded.quantization == "int8"
    assert loaded.model == ("mine", "config", Loaded("config", CPU, torch.float32), "tokenizer")
    assert loaded.skipped == ("lm.mask",)
    assert (loaded.device, loaded.dtype, loaded.parameters) == (CPU, torch.float32, {"lm": 11, "codec": 8})
    # What is small and can be wrong comes before gigabytes.
    assert calls.made == ["read toys", "shapes toys", "tokenizer toys", "load toys int8"]


@pytest.mark.parametrize(("broken", "reached"), [("read", 1), ("shapes", 2), ("tokenizer", 3)])
def test_what_is_wrong_is_said_before_weights_are_read(
    family: Family, calls: Calls, tmp_path: Path, broken: str, reached: int
) -> None:
    calls.broken = broken
    with pytest.raises(CheckpointError, match=f"{broken} .* is broken"):
        family.from_folder(tmp_path, "mine", CPU, torch.float32)
    assert len(calls.made) == reached


def test_random_weights_need_no_folder(family: Family, calls: Calls) -> None:
    loaded = family.from_random("toy-1b", "toy-1b", CPU, torch.bfloat16)
    assert loaded.model == ("toy-1b", "config", ("config", CPU, torch.bfloat16), "tokenizer")
    assert (loaded.dtype, loaded.parameters) == (torch.bfloat16, {"lm": 11, "codec": 8})
    assert calls.made == ["read toy-1b", "tokenizer None", "init_dummy 0 none", "shapes None"]


def test_random_weights_speak_with_the_words_of_a_folder_that_has_some(
    family: Family, calls: Calls, tmp_path: Path
) -> None:
    folder = tmp_path / "toys"
    folder.mkdir()
    family.from_random(folder, "mine", CPU, torch.float32)
    (folder / "words.json").write_text("{}")
    family.from_random(folder, "mine", CPU, torch.float32)
    assert [one for one in calls.made if one.startswith("tokenizer")] == ["tokenizer None", "tokenizer toys"]
    # Its weights are not looked at.
    assert not any(one in calls.made for one in ("load toys", "shapes toys"))


def test_a_description_counts_what_is_stored_and_what_it_takes(family: Family, calls: Calls) -> None:
    described = family.describe("toy-1b", "toy-1b", torch.bfloat16)
    assert described.spec.name == "toy-1b"
    assert described.configuration == {"family": "toy", "layers": 3}
    assert described.parameters == {"lm": 11, "codec": 8}
    assert described.files == {"lm.safetensors": 11, "codec.pth": 8}
    # 40 frames a second.
    assert described.memory_bytes == {"weights": 38, "attention, per second of audio": 800}
    assert calls.made == ["read toy-1b", "shapes None"]


@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json"])
def test_a_described_folder_is_checked_if_it_has_weights(
    family: Family, calls: Calls, tmp_path: Path, file: str
) -> None:
    folder = tmp_path / "toys"
    folder.mkdir()
    family.describe(folder, "mine", torch.float32)
    (folder / file).write_bytes(b"")
    family.describe(folder, "mine", torch.float32)
    assert [one for one in calls.made if one.startswith("shapes")] == ["shapes None", "shapes toys"]
    calls.broken = "shapes"
    with pytest.raises(CheckpointError, match="shapes toys is broken"):
        family.describe(folder, "mine", torch.float32)
