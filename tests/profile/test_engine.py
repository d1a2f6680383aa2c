"""`bench engine` on the sine model in a process of its own: what listeners heard is what is reported."""

import json
from pathlib import Path

import pytest
from sine_engines import FACTORY, nothing_left
from tiny_checkpoint import write_checkpoint

from sonoro.core.config import EngineConfig, Tuning
from sonoro.core.errors import ConfigError, EngineError
from sonoro.profile.engine import EngineBench, Listener, run
from sonoro.transport.messages import DEFAULT_FACTORY

__all__ = ["nothing_left"]

CONFIG = EngineConfig(slots=4, max_positions=600, max_frames=64)
FIELDS = {
    *("concurrency", "xrt", "ttfp_p50_ms", "ttfp_p95_ms", "frame_p50_ms", "frame_p99_ms", "underruns"),
    *("graph_launches", "eager_launches", "prefilled_tokens", "cached_tokens", "requests", "failed"),
}


@pytest.fixture
def out(tmp_path: Path, nothing_left: Path) -> Path:  # in this order: the latter moves the folder of the former
    return tmp_path / "engine.json"


def bench(**changes: object) -> EngineBench:
    values = {"concurrency": (1, 4), "frames": (5, 12), "duration_s": 1.0, "warm_up_s": 0.2, "config": CONFIG}
    return EngineBench(**values | {"model": "slow", "factory": FACTORY, "device": "cpu"} | changes)


def pcm(duration_s: float) -> bytes:
    return bytes(2 * int(8000 * duration_s))


def test_a_listener_who_is_served_in_time_never_runs_out() -> None:
    listener = Listener(sent_at_s=9.0, sample_rate=8000)
    assert not listener.play(pcm(0.5), 10.0)
    assert not listener.play(pcm(1.0), 10.4)
    assert not listener.play(pcm(0.5), 11.5)
    assert (listener.first_audio_at_s, listener.plays_until_s) == (10.0, 12.0)


def test_a_listener_runs_out_once_for_every_chunk_that_is_late() -> None:
    listener = Listener(sent_at_s=9.0, sample_rate=8000)
    heard = [listener.play(pcm(0.5), now_s) for now_s in (10.0, 10.6, 11.0, 12.0)]
    assert heard == [False, True, False, True]
    assert listener.plays_until_s == 12.5


def test_levels_are_reported_as_the_design_says(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = run(bench(out=out))
    stored = json.loads(out.read_text())
    assert stored == json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (values["bench"], values["model"], values["arm"]) == ("engine", "sine", "eager")
    assert 0 < values["ready_s"] < 60
    assert values["gpu_memory_mib"] == values["graph_memory_mib"] == 0
    assert stored["settings"]["config"]["slots"] == 4
    for row, clients in zip(values["rows"], (1, 4), strict=True):
        assert set(row) == FIELDS
        assert (row["concurrency"], row["failed"]) == (clients, 0)
        assert row["requests"] >= clients
        # The model takes 5 ms for a frame of 10 ms, of as many rows as there are.
        assert 5 <= row["frame_p50_ms"] <= row["frame_p99_ms"]
        assert 0.1 * clients < row["xrt"] < 2 * clients
        assert 5 <= row["ttfp_p50_ms"] <= row["ttfp_p95_ms"]
        assert set(row["graph_launches"].values()) == {0}
        assert row["prefilled_tokens"] > row["cached_tokens"] == 0
        assert row["eager_launches"]["frame"] <= 0.8 / 0.005 + 60
        # A frame has at most as many rows as there are clients, and each makes 10 ms of audio.
        assert row["xrt"] * 0.8 <= row["eager_launches"]["frame"] * 0.01 * clients * 1.2 + 0.12 * clients


def test_requests_that_fail_are_told_and_the_levels_kept(out: Path) -> None:
    # Texts of more than 16 letters do not fit beside the frames.
    tight = EngineConfig(slots=2, max_positions=28, max_frames=20, tuning=Tuning(page_positions=16))
    with pytest.raises(EngineError, match=r"concurrency 2: text: .* at most 28"):
        run(bench(concurrency=(1, 2), frames=(12, 12), config=tight, out=out, duration_s=0.5))
    rows = json.loads(out.read_text())["rows"]
    assert [row["concurrency"] for row in rows] == [1, 2]
    assert all(row["failed"] > 0 and "positions" in row["error"] for row in rows)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": ()}, "concurrency: "),
        ({"concurrency": (0, 1)}, "concurrency: "),
        ({"concurrency": (1, 5)}, "concurrency: 5 is not allowed; at most the engine's slots, 4"),
        ({"concurrency": (1, 4), "slots": 3}, "concurrency: 4 is not allowed; at most the engine's slots, 3"),
        ({"frames": (12, 5)}, "frames: "),
        ({"frames": (5, 65)}, "frames: .* max_frames, 64"),
        ({"frames": (0, 5)}, "frames: "),
        ({"warm_up_s": 1.0}, "warm_up_s: "),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match="^" + message):
        bench(**changes)


def test_slots_follow_the_clients_unless_they_are_said() -> None:
    assert bench(config=None, concurrency=(1, 24)).engine.slots == 24
    assert bench(config=None, concurrency=(1, 4), slots=9).engine.slots == 9
    assert bench(is_eager=True).engine.is_eager


def test_sizes_that_are_left_out_are_left_to_the_engine() -> None:
    """A CPU pads to the sizes it is given: a bench that filled them in would time other batches than are served."""
    assert bench(config=None).engine.frame_batches == ()
    assert bench(config=EngineConfig(slots=4, frame_batches=(2, 4))).engine.frame_batches == (2, 4)


@pytest.mark.gpu
@pytest.mark.usefixtures("out")
def test_the_graph_arm_replays_every_frame_and_chunk(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "tiny")
    arms = [
        run(bench(model=str(tmp_path / "tiny"), factory=DEFAULT_FACTORY, device="cuda", is_eager=is_eager))
        for is_eager in (False, True)
    ]
    assert [values["arm"] for values in arms] == ["graph", "eager"]
    assert arms[0]["graph_memory_mib"] > 0 == arms[1]["graph_memory_mib"]
    for values, used, unused in zip(arms, ("graph", "eager"), ("eager", "graph"), strict=True):
        assert values["gpu_memory_mib"] > 0
        for row in values["rows"]:
            for kind in ("frame", "codec", "prefill"):
                assert row[f"{used}_launches"][kind] > 0
                assert row[f"{unused}_launches"][kind] == 0
