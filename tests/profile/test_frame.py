"""`bench frame` on a tiny model: rows speak where they are said to, and a failure costs its own figure alone."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import TinyFamily, tiny
from tiny_checkpoint import write_checkpoint

from sonoro.core.errors import ConfigError, EngineError
from sonoro.models import registry
from sonoro.models.base import LoadedModel
from sonoro.ops.dispatch import Operation
from sonoro.profile import frame, timing
from sonoro.profile.frame import FrameBench, run

__all__ = ["tiny"]

FIELDS = {"batch", "context", "eager_ms", "graph_ms", "floor_ms", "codec_ms", "xrt"}
PARTS = {"backbone_ms", "depth_ms", "sample_ms"}


REPEATS, WARM_UPS = 2, 1


@pytest.fixture(autouse=True)
def few_repeats(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Time fewer launches on a CPU: no test looks at how long they take."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(frame, "EAGER_REPEATS", REPEATS)
        monkeypatch.setattr(frame, "WARM_UPS", WARM_UPS)
        monkeypatch.setitem(timing._COPY_BYTES, "cpu", 1 << 20)


@pytest.fixture(scope="module")
def loaded(tiny: TinyFamily) -> LoadedModel:
    return tiny.load()


def load(folder: Path, variant: str, device: str = "cpu") -> LoadedModel:
    write_checkpoint(folder, variant=variant)
    return registry.load(folder, device=device, dtype="float32")


class Watched:
    """Notes at which positions which rows of a model are stepped, and can be told to fail."""

    def __init__(self, model: Any, failing_batch: int = 0, failing_frames: int = 0) -> None:
        self.failing_batch, self.failing_frames = failing_batch, failing_frames
        self.stepped: list[tuple[list[int], list[int]]] = []
        self._frame, self._decode = model.frame, model.codec.decode

    def frame(self, state: Any, slots: torch.Tensor) -> None:
        if len(slots) == self.failing_batch:
            raise RuntimeError("out of luck")
        self.stepped.append((slots.tolist(), (state.position[slots] + 1).tolist()))
        assert not state.done[slots].any()
        self._frame(state, slots)
        assert not state.done[slots].any()

    def decode(self, frames: torch.Tensor, slots: torch.Tensor, history: Any) -> torch.Tensor:
        if frames.shape[1] == self.failing_frames:
            raise RuntimeError("cannot decode")
        return self._decode(frames, slots, history)


def watched(loaded: LoadedModel, **failing: int) -> tuple[LoadedModel, Watched]:
    """A copy of `loaded`, which has all of its members, and what notes how it is used."""
    model: Any = copy.copy(loaded.model)
    notes = Watched(model, **failing)
    model.frame, model.codec = notes.frame, copy.copy(model.codec)
    model.codec.decode = notes.decode
    return replace(loaded, model=model), notes


def test_rows_hold_what_the_design_says(
    loaded: LoadedModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "frame.json"
    values = run(FrameBench(batch=(1, 3), context=64, out=out), loaded)
    stored = json.loads(out.read_text())
    assert stored["rows"] == values["rows"]
    assert stored == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (values["bench"], values["arm"], values["dtype"]) == ("frame", "eager", "float32")
    for row, batch in zip(values["rows"], (1, 3), strict=True):
        assert set(row) == FIELDS | PARTS
        assert (row["batch"], row["context"], row["graph_ms"]) == (batch, 64, None)
        assert min(row["eager_ms"], row["floor_ms"], *row["codec_ms"].values(), *(row[name] for name in PARTS)) > 0
        bandwidth = values["settings"]["copy_gb_per_s"] * 1e9
        floor_ms = 1000 * loaded.model.frame_bytes(batch, 64) / bandwidth
        assert row["floor_ms"] == pytest.approx(floor_ms, rel=0.02)
        frame_s = loaded.model.spec.frame_s
        together_ms = row["eager_ms"] + row["codec_ms"]["4"] / 4
        assert row["xrt"] == pytest.approx(batch * frame_s * 1000 / together_ms, rel=1e-3)
    assert values["rows"][1]["floor_ms"] > values["rows"][0]["floor_ms"]


def test_kernels_that_are_not_what_is_timed_are_named(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    (operation,) = (one for one in Operation.known if one.name == "norm_linear")
    assert run(FrameBench(batch=(1,), context=64), loaded)["fallbacks"] == {}
    monkeypatch.setattr(operation, "disagreement", "status=disagrees")
    assert run(FrameBench(batch=(1,), context=64), loaded)["fallbacks"] == {"norm_linear": {"reference": 1}}


@pytest.mark.parametrize("context", [70, 150])
def test_all_rows_are_timed_around_the_context(loaded: LoadedModel, context: int) -> None:
    made, model = watched(loaded)
    values = run(FrameBench(batch=(3,), context=context), made)
    timed = model.stepped[-(REPEATS + WARM_UPS) :]
    low, high = values["settings"]["contexts_timed"]
    assert context - 32 <= low <= context <= high <= context + 32
    for slots, positions in timed:
        assert slots == [0, 1, 2]
        assert len(set(positions)) == 1
        assert low <= positions[0] <= high


def test_text_that_comes_with_the_frames_fills_the_context_too(tmp_path: Path) -> None:
    """The cloning variant takes its text a token a frame: the prompt is short and the frames lead to the context."""
    made, model = watched(load(tmp_path, "base"))
    values = run(FrameBench(batch=(2,), context=60), made)
    assert values["settings"]["prompt_positions"] < 20
    assert [positions[0] for _, positions in model.stepped][:2] == [
        values["settings"]["prompt_positions"],
        values["settings"]["prompt_positions"] + 1,
    ]
    assert model.stepped[-1][1][0] <= values["settings"]["contexts_timed"][1]
    assert values["rows"][0]["xrt"] > 0


def test_a_described_voice_can_be_timed(tmp_path: Path) -> None:
    values = run(FrameBench(batch=(1,), context=64), load(tmp_path, "voice_design"))
    assert values["rows"][0]["xrt"] > 0


def test_a_batch_that_fails_leaves_the_others_theirs(loaded: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "frame.json"
    with pytest.raises(EngineError, match=r"batch 2: .*out of luck"):
        run(FrameBench(batch=(1, 2, 3), context=64, out=out), watched(loaded, failing_batch=2)[0])
    rows = json.loads(out.read_text())["rows"]
    assert [row["batch"] for row in rows] == [1, 2, 3]
    assert rows[1]["eager_ms"] is rows[1]["xrt"] is None
    assert all(row["xrt"] > 0 for row in (rows[0], rows[2]))


def test_a_piece_that_fails_leaves_the_others_theirs(loaded: LoadedModel, tmp_path: Path) -> None:
    out = tmp_path / "frame.json"
    with pytest.raises(EngineError, match="batch 1: codec_12: RuntimeError: cannot decode"):
        run(FrameBench(batch=(1,), context=64, out=out), watched(loaded, failing_frames=12)[0])
    row = json.loads(out.read_text())["rows"][0]
    assert row["codec_ms"]["12"] is None
    assert min(row["codec_ms"]["1"], row["codec_ms"]["4"], row["xrt"], row["sample_ms"]) > 0


@pytest.mark.parametrize("batch", [(), (0,), (1, 5000)])
def test_batches_are_bounded(batch: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^batch: "):
        FrameBench(batch=batch)


def test_a_context_below_the_shortest_prompt_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match=r"^context: 20 is not allowed; at least ") as refusal:
        run(FrameBench(batch=(1,), context=20), loaded)
    least = int(refusal.value.limit.split()[2].rstrip(":"))
    with pytest.raises(ConfigError, match=r"^context: "):
        run(FrameBench(batch=(1,), context=least - 1), loaded)
    assert run(FrameBench(batch=(1,), context=least), loaded)["rows"][0]["xrt"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("is_eager", [False, True])
def test_both_arms_run_on_a_gpu(is_eager: bool, tmp_path: Path) -> None:
    made = load(tmp_path, "custom_voice", "cuda")
    values = run(FrameBench(batch=(1, 3, 70), context=64, is_eager=is_eager), made)
    assert values["arm"] == ("eager" if is_eager else "graph")
    assert values["gpu"]
    assert values["driver"]
    for row in values["rows"]:
        assert (row["graph_ms"] is None) == is_eager
        assert min(row["eager_ms"], row["xrt"], *row["codec_ms"].values(), *(row[name] for name in PARTS)) > 0
        assert is_eager or row["graph_ms"] < row["eager_ms"]
