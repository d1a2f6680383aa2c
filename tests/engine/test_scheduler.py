"""The scheduler alone: places, the order of admission, and chunks that follow the listener. Time is told, not taken."""

import dataclasses
import random
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import pytest
from sine_engines import tuned

from sonoro.core.types import SpeechRequest
from sonoro.engine.pages import PagePool
from sonoro.engine.request import Playback, Progress, Request
from sonoro.engine.scheduler import Plan, Scheduler
from sonoro.text.splitting import Segment, SpokenText

FRAME_S = 0.08
LIMIT = 1000


def scheduler_of(pages: int = 1_000_000, **changes: object) -> Scheduler:
    values = {"slots": 16, "max_positions": 20_000, "prefill_tokens": 20_000, "codec_wait": 0} | changes
    values.setdefault("chunk_frames", (1, 2, 4, 12))
    config = dataclasses.replace(tuned(**values).resolve(), codec_batches=values.get("codec_batches", ()))
    return Scheduler(config, PagePool(pages, max_cached=pages), FRAME_S)


def waiting(name: str, limit: int = LIMIT, index: int = 0, positions: int = 10) -> Request:
    params = SpeechRequest(id=name, text="a")
    segments = [Segment(SpokenText(text), 0, 1) for text in "abc"]
    request = Request(params, segments, None, Playback(0.0), index=index)
    request.progress = Progress(SimpleNamespace(positions=positions, text_ids=0), limit)
    return request


def names(requests: list[Request]) -> list[str]:
    return [request.params.id for request in requests]


def codec_of(plan: Plan) -> dict[int, list[str]]:
    return {frames: names(requests) for frames, requests in plan.codec.items()}


class Simulation:
    """Ticks of known duration over requests of known length, their results read one tick late."""

    def __init__(self, scheduler: Scheduler, lengths: dict[str, int], tick_s: Callable[[], float]) -> None:
        self.scheduler, self.lengths, self._next_tick_s = scheduler, lengths, tick_s
        self.now_s, self.average_s, self.ticks = 0.0, FRAME_S / 2, 0
        self.heard: dict[str, list[tuple[float, int]]] = {name: [] for name in lengths}
        self.plans: list[tuple[Plan, dict[Request, int]]] = []

    def tick(self) -> Plan:
        plan = self.scheduler.plan(self.now_s, self.average_s)
        tick_s = self._next_tick_s()
        self.average_s += 0.2 * (tick_s - self.average_s)
        self.now_s += tick_s
        self.ticks += 1
        self.plans.append((plan, {request: request.steps for request in self.scheduler.running}))
        if len(self.plans) > 1:
            self._collect(*self.plans.pop(0))
        return plan

    def run(self) -> None:
        while self.scheduler.has_work:
            self.tick()

    def _collect(self, plan: Plan, steps: dict[Request, int]) -> None:
        for request in plan.frame:
            if request.allocation is not None:
                length, progress = self.lengths[request.params.id], request.progress
                progress.length = min(steps[request], length)
                progress.is_done = steps[request] > length or steps[request] == progress.limit
        for frames, requests in plan.codec.items():
            for request in requests:
                made = min(frames, request.progress.length - request.progress.decoded)
                if request.allocation is not None and made:
                    request.count_sent(made, self.now_s, made * FRAME_S)
                    self.heard[request.params.id].append((self.now_s, made))
        for request in list(self.scheduler.running):
            if request.progress.is_drained:
                self.scheduler.release(request)

    def underruns(self, name: str) -> int:
        """How often a listener who plays from the first chunk on had nothing left."""
        [(until_s, _), *_] = self.heard[name]
        count = 0
        for at_s, frames in self.heard[name]:
            count += at_s > until_s + 1e-9
            until_s = max(until_s, at_s) + frames * FRAME_S
        return count


def chunks_of(tick_s: float, length: int, limit: int = LIMIT, **changes: object) -> list[int]:
    scheduler = scheduler_of(**changes)
    simulation = Simulation(scheduler, {"a": length}, lambda: tick_s)
    simulation.average_s = tick_s
    scheduler.add(waiting("a", limit))
    simulation.run()
    return [frames for _, frames in simulation.heard["a"]]


@pytest.mark.parametrize(
    ("tick_s", "length", "expected"),
    [
        (0.001, 0, []),
        (0.001, 1, [1]),
        (0.001, 3, [1, 2]),
        (0.001, 40, [1, 12, 12, 12, 3]),
        (0.011, 40, [1, 2, 4, 12, 12, 9]),
        (0.020, 20, [1, 1, 2, 4, 12]),
        (0.070, 8, [1] * 8),
        (0.100, 20, [1, 12, 7]),
    ],
)
def test_chunks_grow_as_the_lead_of_the_listener_allows(tick_s: float, length: int, expected: list[int]) -> None:
    """At 100 ms a tick the engine is slower than playback, and nothing is gained by short chunks."""
    assert chunks_of(tick_s, length) == expected


@pytest.mark.parametrize("changes", [{}, {"chunk_frames": (3, 5)}, {"codec_frames": 16}, {"codec_wait": 5}])
def test_reproducible_requests_are_cut_alike_whatever_the_clock_says(changes: dict[str, object]) -> None:
    lengths = {"a": 40, "b": 17, "c": 1, "d": 90}
    heard = []
    for seed in range(4):
        draw = random.Random(seed)
        scheduler = scheduler_of(**changes)
        simulation = Simulation(scheduler, lengths, lambda draw=draw: 0.3 * draw.random() ** 4)
        for name in lengths:
            request = waiting(name)
            request.params = msgspec.structs.replace(request.params, is_reproducible=True)
            scheduler.add(request)
        simulation.run()
        heard.append({name: [frames for _, frames in chunks] for name, chunks in simulation.heard.items()})
    assert {name: sum(chunks) for name, chunks in heard[0].items()} == lengths
    assert all(other == heard[0] for other in heard[1:])
    if not changes:
        # None longer than all before it, so that whoever plays them as they come need not wait.
        assert heard[0]["a"] == [1, 1, 2, 4, 4, 12, 12, 4]


def test_the_lengths_of_chunks_are_configured() -> None:
    assert chunks_of(0.001, 50, chunk_frames=(2, 7)) == [2, 7, 7, 7, 7, 7, 7, 6]
    assert chunks_of(0.001, 12, chunk_frames=(5,)) == [5, 5, 2]


def test_a_chunk_is_one_of_the_captured_lengths_and_the_last_is_padded_up() -> None:
    scheduler = scheduler_of()
    simulation = Simulation(scheduler, {"a": 1000}, lambda: 0.001)
    scheduler.add(waiting("a", limit=20))
    launched = []
    while scheduler.has_work:
        launched += simulation.tick().codec
    assert set(launched) <= {1, 2, 4, 12}
    heard = [frames for _, frames in simulation.heard["a"]]
    assert sum(heard) == 20
    assert launched[:-1] == heard[:-1]
    assert launched[-1] == next(size for size in (1, 2, 4, 12) if size >= heard[-1])


def test_a_request_at_its_limit_is_decoded_without_waiting_for_another_tick() -> None:
    scheduler = scheduler_of()
    simulation = Simulation(scheduler, {"a": 1000}, lambda: 0.001)
    simulation.average_s = 0.001
    scheduler.add(waiting("a", limit=5))
    plans = [simulation.tick() for _ in range(6)]
    assert [codec_of(plan) for plan in plans] == [{1: ["a"]}, {}, {}, {}, {4: ["a"]}, {}]
    assert [names(plan.frame) for plan in plans] == [["a"]] * 5 + [[]]
    assert not scheduler.has_work


def test_the_first_frame_is_audio_in_the_tick_that_admits() -> None:
    scheduler = scheduler_of()
    scheduler.add(waiting("a"))
    plan = scheduler.plan(0.0, 0.01)
    assert (names(plan.admit), names(plan.frame), codec_of(plan)) == (["a"], ["a"], {1: ["a"]})


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("mean_s", [0.004, 0.015, 0.03, 0.05])
def test_a_listener_at_playback_speed_never_runs_out(mean_s: float, seed: int) -> None:
    """Requests come and go; a tick takes between a half and one and a half times its average, 75 ms at most."""
    draw = random.Random(seed)
    scheduler = scheduler_of(slots=8, codec_frames=draw.choice([8, 16, 32]), codec_batches=(1, 4, 8))
    lengths = {str(number): draw.randint(20, 120) for number in range(24)}
    simulation = Simulation(scheduler, lengths, lambda: mean_s * draw.uniform(0.5, 1.5))
    requests = [waiting(name) for name in lengths]
    while requests or scheduler.has_work:
        if requests and draw.random() < 0.2:
            scheduler.add(requests.pop())
        simulation.tick()
    for name, length in lengths.items():
        assert sum(frames for _, frames in simulation.heard[name]) == length
        assert simulation.underruns(name) == 0, (name, simulation.heard[name])


def begin_speaking(scheduler: Scheduler, **lead_frames: float) -> None:
    """Admit requests that have 12 frames to decode after the next step and, at 10 s, so much audio left to play."""
    requests = {waiting(name.removeprefix("_")): lead for name, lead in lead_frames.items()}
    for request in requests:
        scheduler.add(request)
    scheduler.plan(10.0, 0.001)
    for request, lead in requests.items():
        request.allocation.steps, request.allocation.columns, request.progress.decoded = 111, 100, 100
        request.playback = Playback(0.0, chunks=1, plays_until_s=10.0 + lead * FRAME_S)


def test_first_chunks_go_first_then_the_earliest_deadline_within_the_frames_of_a_tick() -> None:
    scheduler = scheduler_of(slots=8, codec_frames=24)
    begin_speaking(scheduler, long=50, short=20, middle=30)
    scheduler.add(waiting("new"))
    first = scheduler.plan(10.0, 0.001)
    assert codec_of(first) == {1: ["new"], 12: ["short"]}
    # What was left over is still due, whatever came meanwhile.
    assert codec_of(scheduler.plan(10.0, 0.001)) == {12: ["middle", "long"]}
    assert codec_of(scheduler.plan(10.0, 0.001)) == {}


def test_whoever_would_run_out_goes_beyond_the_frames_of_a_tick() -> None:
    scheduler = scheduler_of(slots=8, codec_frames=12)
    begin_speaking(scheduler, a=1, b=40, c=2, d=3)
    assert codec_of(scheduler.plan(10.0, 0.05)) == {12: ["a", "c", "d"]}


def test_a_first_chunk_is_not_held_up_by_those_who_would_run_out() -> None:
    scheduler = scheduler_of(slots=8, codec_frames=12)
    begin_speaking(scheduler, late=0.1)
    scheduler.add(waiting("new"))
    assert codec_of(scheduler.plan(10.0, 0.05)) == {1: ["new"], 12: ["late"]}


def test_a_launch_goes_even_if_it_alone_is_more_than_the_frames_of_a_tick() -> None:
    scheduler = scheduler_of(slots=2, codec_frames=4)
    begin_speaking(scheduler, a=60, b=60)
    assert codec_of(scheduler.plan(10.0, 0.001)) == {12: ["a"]}


def test_those_that_can_wait_fill_captured_batches() -> None:
    scheduler = scheduler_of(codec_batches=(1, 4, 16), codec_frames=1000)
    begin_speaking(scheduler, **{f"_{number}": 60 + number for number in range(6)})
    assert codec_of(scheduler.plan(10.0, 0.001)) == {12: ["0", "1", "2", "3"]}
    assert codec_of(scheduler.plan(10.0, 0.001)) == {12: ["4"]}
    # A deadline does not wait for company, nor does a slot that is only held.
    begin_speaking(scheduler, late=0.1, ended=60)
    ended = scheduler.running[-1].progress
    ended.is_done, ended.length = True, 112
    assert codec_of(scheduler.plan(10.0, 0.01)) == {12: ["late", "ended"]}


def test_a_deadline_takes_along_as_many_as_its_padding_costs() -> None:
    scheduler = scheduler_of(codec_batches=(1, 4, 16), codec_frames=1000, codec_wait=5)
    begin_speaking(scheduler, late=0.1, **{f"_{number}": 60 + number for number in range(5)})
    assert codec_of(scheduler.plan(10.0, 0.01)) == {12: ["late", "0", "1", "2"]}
    assert codec_of(scheduler.plan(10.0, 0.01)) == {}


def test_chunks_that_can_wait_do_for_some_ticks_and_go_together() -> None:
    """Those out of phase by up to as many ticks are decoded in one launch; one that runs alone has nobody to wait for,
    and no listener runs out for it."""

    def launches(apart: int, **changes: object) -> list[list[str]]:
        scheduler = scheduler_of(**changes)
        lengths = dict.fromkeys("abcd", 90)
        simulation, launched = Simulation(scheduler, lengths, lambda: 0.002), []
        simulation.average_s = 0.002
        for name in lengths:
            scheduler.add(waiting(name, limit=90))
            for _ in range(apart):
                launched += [codec_of(simulation.tick())]
        while scheduler.has_work:
            launched += [codec_of(simulation.tick())]
        assert all(sum(frames for _, frames in heard) == 90 for heard in simulation.heard.values())
        assert not any(map(simulation.underruns, lengths))
        return [batch for codec in launched for batch in codec.values() if codec.keys() == {12}]

    assert max(map(len, launches(apart=1))) == 1
    assert sum(len(batch) == 4 for batch in launches(apart=1, codec_wait=3)) >= 5
    assert max(map(len, launches(apart=2, codec_wait=3))) < 4
    # As many as the largest batch holds wait for no others.
    assert max(map(len, launches(apart=1, codec_wait=9, codec_batches=(1, 2)))) == 2
    assert chunks_of(0.001, 40) == chunks_of(0.001, 40, codec_wait=8) == [1, 12, 12, 12, 3]


def test_slots_are_given_first_come_first_served_and_reused() -> None:
    scheduler = scheduler_of(slots=2)
    requests = {name: waiting(name) for name in "abcd"}
    for request in requests.values():
        scheduler.add(request)
    assert names(scheduler.plan(0.0, 0.01).admit) == ["a", "b"]
    assert scheduler.plan(0.0, 0.01).admit == []
    allocation = requests["a"].allocation
    scheduler.release(requests["a"])
    plan = scheduler.plan(0.0, 0.01)
    assert names(plan.admit) == ["c"]
    assert {request.params.id: request.allocation.slot for request in plan.frame} == {"b": 1, "c": 0}
    assert requests["c"].allocation is not allocation
    for name in "bcd":
        scheduler.release(requests[name])
    assert (scheduler.free_slots, scheduler.pages.free, scheduler.waiting) == (2, 1_000_000, 0)
    assert not scheduler.has_work


def test_the_lowest_free_slot_is_given_first() -> None:
    scheduler = scheduler_of(slots=3)
    requests = {name: waiting(name) for name in "abcd"}
    for name in "abc":
        scheduler.add(requests[name])
    assert [request.allocation.slot for request in scheduler.plan(0.0, 0.01).admit] == [0, 1, 2]
    for name in "cab":
        scheduler.release(requests[name])
    scheduler.add(requests["d"])
    assert [request.allocation.slot for request in scheduler.plan(0.0, 0.01).admit] == [0]


def test_pages_are_taken_as_positions_are_used() -> None:
    scheduler = scheduler_of(page_positions=32, pages=700, max_frames=1024, max_positions=20_000)
    request = waiting("a", limit=119, positions=10)
    scheduler.add(request)
    held = []
    while not request.is_ending:
        scheduler.plan(0.0, 0.01)
        # Frame n is made at the last position of what came before it.
        assert 10 - 1 + request.steps <= 32 * len(request.allocation.pages) <= 10 - 1 + request.steps + 8 + 32
        held.append(len(request.allocation.pages))
    assert (held[0], held[-1], scheduler.pages.free) == (1, 4, 696)
    scheduler.release(request)
    assert scheduler.pages.free == 700


def test_too_few_pages_queue_and_nobody_overtakes() -> None:
    scheduler = scheduler_of(pages=10, page_positions=32)
    requests = {name: waiting(name, limit=limit) for name, limit in (("a", 180), ("b", 150), ("c", 20))}
    for request in requests.values():
        request.progress.expected = request.progress.limit
        scheduler.add(request)
    assert names(scheduler.plan(0.0, 0.01).admit) == ["a"]
    assert scheduler.pages.free == 9
    assert scheduler.plan(0.0, 0.01).admit == []
    scheduler.release(requests["a"])
    assert names(scheduler.plan(0.0, 0.01).admit) == ["b", "c"]


def test_a_request_that_has_begun_to_speak_goes_first() -> None:
    scheduler = scheduler_of(slots=1)
    for request in (waiting("new"), waiting("speaking", index=1), waiting("too", index=2)):
        scheduler.add(request)
    admitted = []
    while scheduler.waiting:
        [request] = scheduler.plan(0.0, 0.01).admit
        admitted.append(request.params.id)
        scheduler.release(request)
    assert admitted == ["speaking", "too", "new"]


def test_prompt_rows_per_tick_are_bounded() -> None:
    scheduler = scheduler_of(slots=8, max_frames=12, max_positions=112, prefill_tokens=111)
    for name, positions in zip("abcdefg", (40, 50, 30, 60, 90, 10, 20), strict=True):
        scheduler.add(waiting(name, limit=10, positions=positions))
    admitted = [names(scheduler.plan(0.0, 0.01).admit) for _ in range(4)]
    assert admitted == [["a", "b"], ["c", "d"], ["e", "f"], ["g"]]


def test_those_who_run_take_part_in_every_tick_that_admits_others() -> None:
    scheduler = scheduler_of(slots=8, max_frames=12, max_positions=112, prefill_tokens=111)
    first = waiting("first", limit=10)
    scheduler.add(first)
    scheduler.plan(0.0, 0.01)
    for number in range(5):
        scheduler.add(waiting(str(number), limit=10, positions=90))
    for number in range(5):
        plan = scheduler.plan(0.0, 0.01)
        assert names(plan.admit) == [str(number)]
        assert {"first", str(number)} <= set(names(plan.frame))
    assert first.steps == 6


def test_a_paused_request_keeps_its_slot_and_takes_part_in_nothing() -> None:
    scheduler = scheduler_of(slots=2)
    requests = {name: waiting(name) for name in "abc"}
    for request in requests.values():
        scheduler.add(request)
    requests["b"].is_paused = True
    plan = scheduler.plan(0.0, 0.01)
    assert (names(plan.admit), names(plan.frame)) == (["a", "c"], ["a", "c"])
    requests["a"].is_paused = requests["c"].is_paused = True
    steps, allocation = requests["a"].steps, requests["a"].allocation
    assert not scheduler.has_work
    assert scheduler.plan(5.0, 0.01).is_empty
    assert (requests["a"].steps, requests["a"].allocation) == (steps, allocation)
    requests["a"].is_paused = False
    assert scheduler.has_work
    assert names(scheduler.plan(5.0, 0.01).frame) == ["a"]


def test_the_queue_is_bounded_beyond_the_free_slots() -> None:
    scheduler = scheduler_of(slots=2, max_queued=3)
    for number in range(5):
        assert not scheduler.is_full()
        scheduler.add(waiting(str(number)))
    assert scheduler.is_full()
    scheduler.plan(0.0, 0.01)
    assert scheduler.is_full()
    scheduler.release(scheduler.running[0])
    assert not scheduler.is_full()


def test_a_request_between_two_segments_keeps_its_place_in_the_bound() -> None:
    scheduler = scheduler_of(slots=1, max_queued=0)
    scheduler.add(request := waiting("a"))
    scheduler.plan(0.0, 0.01)
    scheduler.release(request)
    assert not scheduler.is_full()
    request.index = 1
    scheduler.add(request)
    # The free slot is its own: whoever came now would have to wait.
    assert scheduler.is_full()


def test_the_scheduler_does_not_load_torch() -> None:
    script = "import sys, sonoro.engine.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
