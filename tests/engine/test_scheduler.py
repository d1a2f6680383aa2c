"""The scheduler alone: slots, the order of admission, and chunks that follow the listener."""

import subprocess
import sys

import pytest

from sonoro.core.config import EngineConfig
from sonoro.core.types import SpeechRequest
from sonoro.engine.request import RunningRequest
from sonoro.engine.scheduler import Scheduler


def waiting(name: str, limit: int = 100, index: int = 0) -> RunningRequest:
    request = SpeechRequest(id=name, text="a")
    return RunningRequest(request, ["a", "b", "c"], None, accepted_at_s=0.0, index=index, limit=limit)


def names(rows: list[RunningRequest]) -> list[str]:
    return [row.request.id for row in rows]


def run_one_tick(scheduler: Scheduler, lengths: dict[str, int]) -> dict[str, int]:
    """Do what a plan says for requests that end after `lengths` frames; frames decoded by request."""
    plan = scheduler.plan()
    for row in plan.frame:
        if row.length == lengths[row.request.id]:
            row.is_done = True
        else:
            row.length += 1
            row.is_done = row.length == row.limit
    decoded = {}
    for frames, rows in plan.codec.items():
        for row in rows:
            made = min(frames, row.length - row.decoded)
            assert made in (frames, frames - 1), "at most the frame of this tick may be missing"
            row.decoded += made
            decoded[row.request.id] = made
    return decoded


def chunks_of(config: EngineConfig, length: int, limit: int = 1000, frames_before: int = 0) -> list[int]:
    scheduler = Scheduler(config)
    row = waiting("a", limit)
    row.frames_before = frames_before
    scheduler.add(row)
    chunks = []
    while not row.is_drained:
        chunks += [made for made in run_one_tick(scheduler, {"a": length}).values() if made]
    return chunks


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, []),
        (1, [1]),
        (2, [1, 1]),
        (3, [1, 2]),
        (15, [1, 2, 4, 8]),
        (16, [1, 2, 4, 8, 1]),
        (50, [1, 2, 4, 8, 12, 12, 11]),
    ],
)
def test_chunks_double_up_to_the_largest_and_the_last_takes_the_rest(length: int, expected: list[int]) -> None:
    assert chunks_of(EngineConfig(), length) == expected


def test_chunk_policy_is_configured() -> None:
    assert chunks_of(EngineConfig(first_chunk_frames=2, chunk_growth=3, max_chunk_frames=18), 50) == [2, 6, 18, 18, 6]
    assert chunks_of(EngineConfig(first_chunk_frames=5, chunk_growth=1, max_chunk_frames=12), 12) == [5, 5, 2]


def test_a_later_segment_goes_on_with_long_chunks() -> None:
    assert chunks_of(EngineConfig(), 20, frames_before=30) == [12, 8]


def test_a_request_at_its_limit_is_decoded_without_waiting_for_another_tick() -> None:
    scheduler = Scheduler(EngineConfig())
    row = waiting("a", limit=5)
    scheduler.add(row)
    ticks = 0
    while not row.is_drained:
        run_one_tick(scheduler, {"a": 1000})
        ticks += 1
    assert (ticks, row.decoded) == (5, 5)


def test_the_first_frame_is_audio_in_the_tick_that_admits() -> None:
    scheduler = Scheduler(EngineConfig())
    scheduler.add(waiting("a"))
    plan = scheduler.plan()
    assert (names(plan.admit), names(plan.frame), {n: names(rows) for n, rows in plan.codec.items()}) == (
        ["a"],
        ["a"],
        {1: ["a"]},
    )


def test_chunks_of_one_length_are_decoded_together_shortest_first() -> None:
    scheduler = Scheduler(EngineConfig())
    rows = [waiting(name) for name in "abc"]
    for row, decoded, length in zip(rows, (3, 0, 3), (6, 0, 6), strict=True):
        row.decoded, row.length = decoded, length
        scheduler.add(row)
    plan = scheduler.plan()
    assert [(frames, names(due)) for frames, due in plan.codec.items()] == [(1, ["b"]), (4, ["a", "c"])]


def test_slots_are_given_first_come_first_served_and_reused() -> None:
    scheduler = Scheduler(EngineConfig(slots=2))
    rows = {name: waiting(name) for name in "abcd"}
    for row in rows.values():
        scheduler.add(row)
    assert names(scheduler.plan().admit) == ["a", "b"]
    assert scheduler.plan().admit == []
    scheduler.release(rows["a"])
    plan = scheduler.plan()
    assert names(plan.admit) == ["c"]
    assert {row.request.id: row.slot for row in plan.frame} == {"b": 1, "c": 0}
    for name in "bcd":
        scheduler.release(rows[name])
    assert scheduler.free_slots == 2
    assert not scheduler.has_work


def test_a_request_that_has_begun_to_speak_goes_first() -> None:
    scheduler = Scheduler(EngineConfig(slots=1))
    scheduler.add(waiting("new"))
    scheduler.add(waiting("speaking", index=1))
    assert names(scheduler.plan().admit) == ["speaking"]


def test_prefills_per_tick_are_bounded() -> None:
    scheduler = Scheduler(EngineConfig(slots=8, max_prefills=3))
    for name in "abcdefgh":
        scheduler.add(waiting(name))
    assert [len(scheduler.plan().admit) for _ in range(4)] == [3, 3, 2, 0]


def test_the_scheduler_does_not_load_torch() -> None:
    script = "import sys, sonoro.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
