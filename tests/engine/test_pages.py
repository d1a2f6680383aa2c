"""Pages taken as positions are used: with a third of those that all would need, everybody gets the answer they get
alone, nobody who is heard loses a slot, and whoever speaks on to the limit gets there."""

import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
from sine_engines import Clock, Engine, audio, config_of, drain, end, engine_of, speak, tuned
from sine_models import VoicedSineModel

import sonoro
from sonoro.core.config import EngineConfig
from sonoro.core.types import Event, SpeechRequest
from sonoro.engine.pages import AHEAD, PagePool, Pager
from sonoro.engine.prompts import Prompts
from sonoro.engine.request import Playback, Progress, Request
from sonoro.engine.scheduler import Scheduler
from sonoro.models.qwen3_tts.model import FAMILY
from sonoro.text.live_feed import LiveFeed
from sonoro.text.splitting import Segment, SpokenText

PAGE, FRAME_S = 16, 0.08


def request_of(name: str, positions: int, limit: int, expected: int) -> Request:
    request = Request(SpeechRequest(id=name, text="a"), [Segment(SpokenText("a"), 0, 1)], None, Playback(0.0))
    request.progress = Progress(SimpleNamespace(positions=positions, text_ids=0), limit, expected)
    return request


def scheduler_of(pages: int, slots: int = 16) -> Scheduler:
    sizes = {"slots": slots, "max_positions": 400, "max_frames": 300, "page_positions": PAGE, "prefill_tokens": 4000}
    return Scheduler(tuned(**sizes).resolve(), PagePool(pages), FRAME_S)


def hear(request: Request, now_s: float) -> None:
    """Everything launched has come back and is sent."""
    frames = min(request.columns, request.steps) - request.progress.decoded
    if frames > 0:
        request.count_sent(frames, now_s, FRAME_S)


@pytest.mark.parametrize("overrun", [0.0, 0.3, 1.0])
def test_random_loads_reach_their_ends_with_a_third_of_the_pages(overrun: float) -> None:
    """A share `overrun` of the requests speaks on to the limit, three times as far as their texts let one expect."""
    for seed in range(6):
        draw = random.Random(seed)
        limits = [draw.randint(30, 240) for _ in range(60)]
        requests = [request_of(str(n), draw.randint(5, 90), limit, limit // 3) for n, limit in enumerate(limits)]
        lengths = {one: one.progress.limit if draw.random() < overrun else one.progress.expected for one in requests}
        scheduler, arriving, ended, most, now_s = scheduler_of(16 * 25 // 3), list(requests), 0, 0, 0.0
        was_heard: set[Request] = set()
        while ended < len(requests):
            if arriving and draw.random() < 0.4:
                scheduler.add(arriving.pop())
            assert scheduler.has_work or arriving
            plan, now_s = scheduler.plan(now_s, 0.01), now_s + 0.01
            for request, _ in plan.preempted:
                assert request not in was_heard, "a listener was cut off"
                request.progress = Progress(request.progress.prompt, request.progress.limit, request.progress.expected)
                scheduler.add(request)
            for request in plan.frame:
                used = request.progress.prompt.positions - 1 + request.steps
                assert used <= PAGE * len(request.allocation.pages)
            held = [page for request in scheduler.running for page in request.allocation.pages]
            assert len(held) == len(set(held)) == scheduler.pages.count - scheduler.pages.free
            most = max(most, len(scheduler.running))
            for request in list(scheduler.running):
                hear(request, now_s)
                was_heard |= {request} if request.playback.has_begun else set()
                if request.steps >= lengths[request]:
                    scheduler.release(request)
                    ended += 1
        assert scheduler.pages.free == scheduler.pages.count
        assert most > 133 // 15, "no more ran at once than if each had all the pages of its limit"


def test_the_quick_counts_are_what_each_request_says_by_itself() -> None:
    """What all need, counted in one look at each or added as one is admitted, and who lacks a page."""

    def pages_of(request: Request, frames: int) -> int:
        used = request.progress.prompt.positions - 1 + min(frames, request.progress.limit)
        return max(-(-used // PAGE), len(request.allocation.pages) if request.allocation else 0)

    def fits(waiting: Request, running: list[Request], free: int) -> bool:
        everybody = [*running, waiting]
        held = {one: len(one.allocation.pages) if one.allocation else pages_of(one, 1) for one in everybody}
        free -= held[waiting]
        speaking = sum(pages_of(one, max(one.progress.expected, one.steps + PAGE)) - held[one] for one in everybody)
        if free < 0 or speaking > free:
            return False
        for need, one in sorted((pages_of(one, one.progress.limit) - held[one], held[one]) for one in everybody):
            if need > free:
                return False
            free += one
        return True

    asked = 0
    for seed in range(40):
        draw = random.Random(seed)
        pool = PagePool(draw.randint(20, 90))
        pager, running, slots = Pager(pool, PAGE), list[Request](), iter(range(1000))
        for number in range(60):
            if draw.random() < 0.3:
                pager.note_change()
            limit = draw.randint(1, 240)
            waiting = request_of(str(number), draw.randint(1, 90), limit, draw.randint(1, limit))
            assert pager.can_admit(waiting, running) == fits(waiting, running, pool.free)
            asked += len(running) > 2
            if pager.can_admit(waiting, running):
                pager.admit(waiting, next(slots))
                running.append(waiting)
            for one in running:
                frames = draw.choice((1, 1, 1, AHEAD))
                wanted = pages_of(one, one.steps + frames) - len(one.allocation.pages)
                assert pager.lacks(one, frames) == wanted
                if frames == 1 and (not wanted or pager.can_grow(one, running)):
                    pager.grow(one)
                    one.allocation.steps += 1
            pager.note_change()
            if running and draw.random() < 0.2:
                ended = running.pop(draw.randrange(len(running)))
                pool.release(ended.allocation.pages)
    assert asked > 300


def test_who_is_not_heard_is_preempted_for_a_listener_and_is_the_next_to_be_admitted() -> None:
    scheduler = scheduler_of(pages=25, slots=4)
    heard, *others = request_of("heard", 16, 290, 16), request_of("1", 32, 60, 1), request_of("2", 32, 60, 1)
    for request in (heard, *others):
        scheduler.add(request)
    scheduler.plan(0.0, 0.01)
    assert scheduler.running == [heard, *others]
    hear(heard, 0.0)
    while not (plan := scheduler.plan(0.0, 0.01)).preempted:
        assert heard in plan.frame
    # The one that was admitted last; its listener has heard nothing, and hears it all later.
    assert plan.preempted == [(others[1], 2)]
    assert heard in plan.frame
    assert scheduler.pages.free > 0
    scheduler.add(request_of("later", 16, 9, 1))
    others[1].progress = Progress(others[1].progress.prompt, 60, 1)
    scheduler.add(others[1])
    admitted: list[str] = []
    while len(admitted) < 2:
        plan = scheduler.plan(0.0, 0.01)
        admitted += [request.params.id for request in plan.admit]
        assert others[1] not in [request for request, _ in plan.preempted], (
            "it was admitted before there was room for it"
        )
        assert heard in plan.frame or heard not in scheduler.running
        if heard.is_ending and heard in scheduler.running:
            scheduler.release(heard)
    assert admitted == ["2", "later"]


@pytest.mark.parametrize("limit", [40, 100])
def test_who_is_preempted_while_it_makes_frames_needs_no_page_in_that_plan(limit: int) -> None:
    """Of all numbers of pages and times to begin, so that some of the preempted need a page in the very same plan."""
    preempted = lacking = 0
    for pages in range(18, 34):
        for start in range(0, 200, 10):
            scheduler = scheduler_of(pages, slots=4)
            heard, *others = request_of("heard", 16, 290, 16), *(request_of(name, 32, limit, 1) for name in "12")
            scheduler.add(heard)
            for tick in range(290):
                for request in others if tick == start else ():
                    scheduler.add(request)
                steps = {request: request.steps for request in others}
                plan = scheduler.plan(0.0, 0.01)
                hear(heard, 0.0)
                assert not {request for request, _ in plan.preempted} & {*plan.frame, *scheduler.running}
                stepping = [request for request, _ in plan.preempted if steps[request] < limit]
                preempted += len(stepping)
                lacking += sum((31 + steps[request]) % PAGE == 0 for request in stepping)
                if plan.preempted:
                    assert heard in plan.frame
                    break
            held = [page for request in scheduler.running for page in request.allocation.pages]
            assert len(held) == scheduler.pages.count - scheduler.pages.free
    assert preempted > lacking > 0


def test_who_waits_for_a_page_is_no_work_until_there_is_one() -> None:
    scheduler = scheduler_of(pages=25, slots=4)
    speaking = [request_of(str(number), 16, 290, 16) for number in range(2)]
    for request in speaking:
        scheduler.add(request)
    now_s = 0.0
    while not any(request.is_ending for request in speaking):
        plan, now_s = scheduler.plan(now_s, 0.01), now_s + 0.01
        for request in speaking:
            hear(request, now_s)
        assert plan.frame, "both wait for each other"
        assert not plan.preempted
    [ending] = [request for request in speaking if request.is_ending]
    [other] = [request for request in speaking if request is not ending]
    assert other.steps < 290 - 16 * 8
    ending.is_paused = True
    for _ in range(12):
        scheduler.plan(now_s, 0.01)
        hear(other, now_s)
    assert other.undecoded == 0
    assert not scheduler.has_work
    scheduler.release(ending)
    assert scheduler.has_work
    assert scheduler.plan(now_s, 0.01).frame == [other]


def short_beside_paused(is_reproducible: bool = False) -> tuple[Scheduler, Request, float]:
    """Two that speak to their limits, of which one is paused just before its end, so that the other lacks a page; and
    what time it is."""
    scheduler = scheduler_of(pages=25, slots=4)
    speaking = [request_of(str(number), 16, 290, 16) for number in range(2)]
    for request in speaking:
        request.params = msgspec.structs.replace(request.params, is_reproducible=is_reproducible)
        scheduler.add(request)
    now_s = 0.0
    while not any(request.is_ending for request in speaking):
        scheduler.plan(now_s, 0.01)
        now_s += 0.01
        for request in speaking:
            hear(request, now_s)
    [ending] = [request for request in speaking if request.is_ending]
    [short] = [request for request in speaking if request is not ending]
    ending.is_paused = True
    return scheduler, short, now_s


@pytest.mark.parametrize("is_reproducible", [False, True])
def test_who_waits_for_a_page_is_no_work_whatever_chunks_it_has_left(is_reproducible: bool) -> None:
    """The time stands still: a tick that would do nothing is not asked for again and again."""
    scheduler, short, now_s = short_beside_paused(is_reproducible)
    for _ in range(12):
        if scheduler.has_work:
            plan = scheduler.plan(now_s, 0.01)
            assert not plan.is_empty
    assert not scheduler.has_work
    assert is_reproducible or short.undecoded == 0


def test_who_waits_for_a_page_keeps_nobody_out_once_it_is_paused() -> None:
    scheduler = scheduler_of(pages=25, slots=4)
    for number in range(2):
        scheduler.add(request_of(str(number), 16, 290, 16))
    scheduler.plan(0.0, 0.01)
    first, second = scheduler.running
    while second in scheduler.plan(0.0, 0.01).frame:
        for request in (first, second):
            hear(request, 0.0)
    # Paused, and without the text that it would need to make the frames that others wait for.
    first.is_paused, first.live = True, LiveFeed(lambda: None, lambda text: [text], "en", 100, 100)
    first.segments = [Segment(SpokenText("a"), 0, 1, ids=[], is_whole=False)]
    while scheduler.has_work:
        scheduler.plan(0.0, 0.01)
    small = request_of("small", 1, 1, 1)
    scheduler.add(small)
    assert not scheduler.has_work
    second.is_paused = True
    assert scheduler.has_work
    assert scheduler.plan(0.0, 0.01).admit == [small]


def test_pages_are_given_ahead_so_that_few_ticks_give_any() -> None:
    scheduler = scheduler_of(pages=400)
    for number in range(16):
        scheduler.add(request_of(str(number), 10 + number, 200, 200))
    giving = [bool(scheduler.plan(0.0, 0.01).pages) for _ in range(128)]
    assert 0 < sum(giving) <= 128 // AHEAD


def test_a_pool_is_safe_only_if_all_can_end_in_turn() -> None:
    pool = PagePool(10)
    pager = Pager(pool, PAGE)
    first, second = request_of("a", 16, 8 * PAGE, 1), request_of("b", 16, 8 * PAGE, 1)
    assert pager.can_admit(first, [])
    pager.admit(first, 0)
    assert pager.can_admit(second, [first])
    pager.admit(second, 1)
    both = [first, second]
    for _ in range(2):
        assert pager.can_grow(first, both)
        first.allocation.steps = PAGE * len(first.allocation.pages)
        pager.grow(first, 1)
    # The first may still need 6 pages, all that are free: the second could not go on if neither of them ended.
    assert pool.free == 6
    first.allocation.steps, second.allocation.steps = PAGE * len(first.allocation.pages), PAGE
    assert pager.can_grow(first, both)
    assert not pager.can_grow(second, both)


def test_the_built_in_voice_says_the_same_with_a_third_of_the_pages() -> None:
    """In float64, so that no frame hangs on who else speaks."""
    folder = Path(sonoro.__file__).parent / "builtin_voice"
    model = FAMILY.from_folder(folder, "builtin", torch.device("cpu"), torch.float64).model
    texts = (
        "Good morning.",
        "The train to the coast leaves at nine.",
        "Yes.",
        "It rained.",
        "And then?",
        "No, thanks.",
    )
    said, frames = [], []
    for pages in (0, 6 * 16 // 3):
        sizes = {"slots": 6, "max_positions": 512, "max_frames": 384, "chunk_frames": (1, 3, 8)}
        engine = Engine(model, EngineConfig(pages=pages, **sizes), ticks_late=1)
        for number, text in enumerate(texts):
            engine.submit(SpeechRequest(id=str(number), text=text, seed=number))
        events = drain(engine)
        said.append([audio(events, str(number)) for number in range(len(texts))])
        frames.append([end(events, str(number)).frames for number in range(len(texts))])
    assert frames[0] == frames[1]
    for ours, theirs in zip(*said, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1.01 / 32768, rtol=0)


def kinds() -> list[SpeechRequest]:
    """Texts, and some that go on far beyond what they let one expect."""
    draw = random.Random(3)
    return [
        SpeechRequest(
            id=str(number),
            text="Hm, " * draw.randint(1, 10) if draw.random() < 0.7 else "One sentence here. And another one there.",
            seed=number,
            attempts=draw.choice([1, 1, 2]),
        )
        for number in range(24)
    ]


def test_an_engine_says_the_same_with_a_third_of_the_pages() -> None:
    alone = {one.id: speak(one) for one in kinds()}
    for seed in range(3):
        draw, engine = random.Random(seed), engine_of(slots=12, pages=12 * 19 // 3, page_positions=32)
        arriving = [msgspec.structs.replace(one) for one in kinds()]
        draw.shuffle(arriving)
        events = []
        while arriving or engine.has_work:
            for _ in range(draw.choice([0, 0, 3])):
                if arriving:
                    engine.submit(arriving.pop())
            events += engine.tick()
        for name, (samples, finished) in alone.items():
            np.testing.assert_array_equal(audio(events, name), samples)
            assert (end(events, name).reason, end(events, name).frames) == (finished.reason, finished.frames)
        assert drain(engine) == []


@pytest.mark.parametrize("seed", range(4))
def test_an_engine_says_the_same_while_requests_lack_pages_are_paused_and_preempted(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with pages for all at once. Some make six times the frames that are expected of them. All end, and ticks that
    do nothing do not go on."""
    draw, sizes = random.Random(seed), {"segment_letters": 60, "page_positions": PAGE}
    monkeypatch.setattr(Prompts, "_expected_frames", lambda self, request, segment: max(1, request.progress.limit // 6))
    asked = [
        SpeechRequest(
            id=str(number),
            text="Hm, " * draw.randint(1, 8) + "one. And another one there.",
            seed=number,
            ignore_eos=draw.random() < 0.6,
            max_frames=draw.randint(100, 480),
            attempts=draw.choice([1, 1, 2]),
        )
        for number in range(16)
    ]
    ample = engine_of(slots=16, **sizes)
    for one in asked:
        ample.submit(one)
    said = drain(ample)
    assert not ample.lifecycle.preemptions
    # No time passes, so that the same are preempted on any machine.
    engine = Engine(VoicedSineModel(), config_of(slots=8, pages=40, **sizes), Clock(), ticks_late=1)
    arriving, events = list(asked), list[Event]()
    paused, idle_ticks = set[str](), 0
    while arriving or not engine.is_idle:
        for one in [arriving.pop() for _ in range(draw.choice([0, 0, 3])) if arriving]:
            engine.submit(one)
        for one in asked:
            if (chance := draw.random()) < 0.02:
                engine.pause(one.id)
                paused.add(one.id)
            elif chance < 0.03 or not (engine.has_work or arriving):
                engine.resume(one.id)
                paused.discard(one.id)
        if not engine.has_work:
            assert arriving or paused or engine.is_idle, "all wait for one another"
            continue
        launched = engine.runner.graphs.launches
        made = engine.tick()
        idle_ticks = 0 if made or engine.runner.graphs.launches != launched else idle_ticks + 1
        assert idle_ticks < 4
        events += made
    assert engine.lifecycle.preemptions
    for name in (one.id for one in asked):
        np.testing.assert_array_equal(audio(events, name), audio(said, name))
        ours, theirs = end(events, name), end(said, name)
        assert (ours.reason, ours.frames) == (theirs.reason, theirs.frames)
    assert drain(engine) == []


def test_a_listener_waits_for_the_pages_of_a_paused_request_only_until_that_has_made_its_frames() -> None:
    """Twelve pages for two requests that may take nine each: the frames of one are made while it is paused, its audio
    once it goes on."""
    scheduler, now_s, waits = scheduler_of(pages=12, slots=2), 0.0, 0
    paused, heard = request_of("paused", 16, 120, 20), request_of("heard", 16, 120, 20)
    for request in (paused, heard):
        scheduler.add(request)

    def tick() -> list[Request]:
        plan = scheduler.plan(now_s, 0.01)
        for request in scheduler.running:
            request.progress.length = request.steps
            request.progress.is_done = request.steps == request.progress.limit
            hear(request, now_s)
        assert not plan.preempted
        assert paused not in [request for rows in plan.codec.values() for request in rows] or not paused.is_paused
        return plan.frame

    while paused.steps < 60:
        now_s += 0.05
        tick()
    paused.is_paused, decoded = True, paused.progress.decoded
    while heard.steps < 120:
        assert scheduler.has_work
        frame = tick()
        waits += heard not in frame
        # Not a frame more than others wait for.
        assert (paused in frame) <= (heard not in frame)
        now_s += 0.05
    assert waits >= 60
    assert paused.progress.decoded == decoded
    while not heard.progress.is_drained:
        tick()
    scheduler.release(heard)
    assert not scheduler.has_work
    assert scheduler.pages.free == scheduler.pages.count
    paused.is_paused = False
    while not paused.progress.is_drained:
        assert scheduler.has_work
        tick()
    scheduler.release(paused)
    assert scheduler.pages.free == scheduler.pages.count
    assert scheduler.free_slots == 2


def test_who_waits_for_admission_waits_for_a_paused_request_only_until_that_has_made_its_frames() -> None:
    """Twelve pages, of which each is expected to take nine."""
    scheduler = scheduler_of(pages=12, slots=2)
    paused, waiting = request_of("paused", 16, 120, 120), request_of("waiting", 16, 120, 120)
    scheduler.add(paused)

    def tick() -> list[Request]:
        assert scheduler.has_work
        plan = scheduler.plan(0.0, 0.01)
        for request in scheduler.running:
            request.progress.length = request.steps
            request.progress.is_done = request.steps == request.progress.limit
            hear(request, 0.0)
        return plan.admit

    while paused.steps < 20:
        tick()
    paused.is_paused, decoded = True, paused.progress.decoded
    assert not scheduler.has_work
    scheduler.add(waiting)
    ticks = 1
    while not tick():
        ticks += 1
    assert ticks <= 102
    while not waiting.progress.is_drained:
        tick()
    assert (paused.steps, paused.progress.decoded) == (120, decoded)
    scheduler.release(waiting)
    assert not scheduler.has_work
    paused.is_paused = False
    while not paused.progress.is_drained:
        tick()
    scheduler.release(paused)
    assert scheduler.pages.free == scheduler.pages.count


def test_chunks_of_a_reproducible_request_are_the_same_after_a_pause_in_which_its_frames_were_made() -> None:
    def chunks(is_paused: bool) -> list[int]:
        scheduler, found, now_s = scheduler_of(pages=10, slots=2), list[int](), 0.0
        first, second = request_of("first", 16, 120, 20), request_of("second", 16, 120, 20)
        for request in (first, second):
            request.params = msgspec.structs.replace(request.params, is_reproducible=True)
            scheduler.add(request)
        while scheduler.running or scheduler.waiting:
            first.is_paused = is_paused and first.steps > 2 and second.allocation is not None
            plan, now_s = scheduler.plan(now_s, 0.01), now_s + 0.05
            found += [frames for frames, batch in plan.codec.items() if first in batch]
            for request in list(scheduler.running):
                request.progress.length = request.steps
                request.progress.is_done = request.steps == request.progress.limit
                hear(request, now_s)
                if request.progress.is_drained:
                    scheduler.release(request)
        return found

    assert chunks(is_paused=True) == chunks(is_paused=False)
