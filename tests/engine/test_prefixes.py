"""Prompts that begin alike over a model that speaks sine waves: their first pages are filled once, and whoever shares
them says what it says alone. What a text has up to its last "|" can be shared; a page is 16 characters."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
from sine_engines import Engine, audio, config_of, drain, end, speak
from sine_models import PrefixedSineModel

from sonoro.core.types import AudioChunk, Event, Failed, SpeechRequest
from sonoro.transport.messages import PrefixCounts

PAGE, PAGE_BYTES = 16, 16 * 64


def engine_of(ticks_late: int = 1, model: PrefixedSineModel | None = None, **changes: object) -> Engine:
    config = config_of(**{"page_positions": PAGE, "segment_letters": 300} | changes)
    return Engine(model or PrefixedSineModel(), config, ticks_late=ticks_late)


def text_of(voice: str, pages: int, words: str) -> str:
    """Text that shares so many pages with any of the same `voice`, a letter, and has a partly filled one."""
    return voice * (pages * PAGE + 5) + "|" + words


def request(name: str, voice: str, pages: int = 2, words: str = "words", **fields: object) -> SpeechRequest:
    return SpeechRequest(id=name, text=text_of(voice, pages, words), **fields)


def say(engine: Engine, *requests: SpeechRequest) -> list[Event]:
    for one in requests:
        engine.submit(one)
    return drain(engine)


def assert_as_alone(events: Sequence[Event], one: SpeechRequest) -> None:
    """As an engine that keeps nothing speaks it alone, or the beginning of it if it was cancelled."""
    got, ended = audio(events, one.id), end(events, one.id)
    samples, finished = speak(one, engine_of(prefix_cache_bytes=0))
    if ended.reason == "cancelled":
        np.testing.assert_array_equal(got, samples[: len(got)])
    else:
        assert (ended.reason, ended.frames) == (finished.reason, finished.frames)
        np.testing.assert_array_equal(got, samples)


def test_a_second_prompt_runs_only_its_own_rows() -> None:
    engine, run = engine_of(), []
    prefill = engine._model.prefill
    engine._model.prefill = lambda state, tokens: (run.append(len(tokens)), prefill(state, tokens))[1]
    first, second, other = request("1", "a"), request("2", "a", words="else"), request("3", "b")
    for one in (first, second, other):
        assert_as_alone(say(engine, one), one)
    # 37 characters of the voice, "|" and the words; two pages of the second are there.
    assert run == [43, 42 - 32, 43]
    assert engine.prefixes.tokens_prefilled == sum(run)
    assert engine.prefixes.tokens_cached == 32
    assert (engine.prefixes.hits, engine.prefixes.misses) == (1, 2)
    assert engine.prefixes.kept_bytes == 4 * PAGE_BYTES
    assert engine.scheduler.pages.free == engine.runner.pages


def test_a_longer_and_a_shorter_beginning_share_what_they_have_in_common() -> None:
    engine = engine_of()
    for name, pages in (("short", 1), ("long", 3), ("middle", 2)):
        one = request(name, "a", pages)
        assert_as_alone(say(engine, one), one)
    # 1 page, then 3 of which one is there, then 2 of them.
    assert (engine.prefixes.tokens_cached, engine.prefixes.kept_bytes) == (3 * PAGE, 3 * PAGE_BYTES)
    assert (engine.prefixes.hits, engine.prefixes.misses) == (2, 1)


def test_less_than_a_page_and_other_beginnings_are_not_shared() -> None:
    engine = engine_of()
    same, moved = "x" * PAGE, "y" * PAGE
    for number, text in enumerate([same[1:] + "|a", same[1:] + "|b", same + moved + "|a", moved + same + "|a"]):
        one = SpeechRequest(id=str(number), text=text)
        assert_as_alone(say(engine, one), one)
    assert engine.prefixes.tokens_cached == 0
    assert (engine.prefixes.hits, engine.prefixes.misses) == (0, 2)


def test_those_of_one_tick_run_their_own_and_those_after_share_while_they_still_speak() -> None:
    engine = engine_of(slots=3)
    first = [request(str(number), "a", words="word " * (8 - number), seed=number) for number in range(2)]
    later = request("later", "a", seed=5)
    for one in first:
        engine.submit(one)
    events = engine.tick()
    assert engine.prefixes.tokens_cached == 0
    engine.submit(later)
    events += engine.tick()
    assert (engine.prefixes.tokens_cached, engine.scheduler.free_slots) == (2 * PAGE, 0)
    events += drain(engine)
    for one in (*first, later):
        assert_as_alone(events, one)
    assert (engine.prefixes.hits, engine.prefixes.misses, engine.prefixes.kept_bytes) == (1, 2, 2 * PAGE_BYTES)


def test_what_is_cached_does_not_count_against_the_prompt_rows_of_a_tick() -> None:
    engine = engine_of(slots=4, max_positions=120, max_frames=20, prefill_tokens=119)
    requests = [request(str(number), "a", pages=5, max_frames=9) for number in range(4)]
    say(engine, requests[0])
    for one in requests[1:]:
        engine.submit(one)
    # Of 91 rows each 11 are their own.
    engine.tick()
    assert engine.scheduler.free_slots == 1
    drain(engine)


def test_pages_that_are_kept_make_nobody_wait() -> None:
    """A pool of 40 pages, nearly all kept by the time that one comes which may need 37 of them."""
    engine = engine_of(slots=2, max_positions=600, pages=40)
    for number in range(14):
        say(engine, request(str(number), "abcdefghijklmn"[number], pages=2 + number % 3, max_frames=4))
    assert engine.prefixes.kept_bytes >= 38 * PAGE_BYTES
    engine.submit(big := request("big", "z", words="w" * 42, max_frames=512, ignore_eos=True))
    events = engine.tick()
    assert (engine.scheduler.free_slots, engine.scheduler.pages.free) == (1, 35)
    assert_as_alone(events + drain(engine), big)
    assert engine.prefixes.evictions >= 30


def test_no_more_is_kept_than_was_asked_for() -> None:
    engine, kept = engine_of(prefix_cache_bytes=5 * PAGE_BYTES + 9), []
    for number in range(30):
        one = request(str(number), "abcd"[number * number % 4], pages=1 + number % 3)
        assert_as_alone(say(engine, one), one)
        kept.append(engine.prefixes.kept_bytes)
    assert max(kept) == 5 * PAGE_BYTES
    assert engine.prefixes.evictions > 0
    assert engine.prefixes.hits > 0
    assert "at most 5" in engine.runner.graphs.report


def test_nothing_is_kept_if_none_is_asked_for() -> None:
    engine = engine_of(prefix_cache_bytes=0)
    say(engine, request("1", "a"))
    say(engine, request("2", "a"))
    assert (engine.prefixes.tokens_cached, engine.prefixes.kept_bytes) == (0, 0)
    assert (engine.prefixes.hits, engine.prefixes.misses) == (0, 0)


@pytest.mark.parametrize("fault", ["stage", "prefill", "frame"])
def test_who_fails_leaves_nothing_to_share(fault: str) -> None:
    model = PrefixedSineModel()
    engine, works = engine_of(model=model), getattr(model, fault)

    def fail(*given: object) -> None:
        raise RuntimeError("it exploded")

    setattr(model, fault, fail)
    assert isinstance(end(say(engine, request("1", "a")), "1"), Failed)
    assert engine.prefixes == PrefixCounts()
    setattr(model, fault, works)
    for name in "23":
        one = request(name, "a", words=name)
        assert_as_alone(say(engine, one), one)
    assert (engine.prefixes.hits, engine.prefixes.misses) == (1, 1)


def test_who_fails_beside_others_takes_nothing_from_them() -> None:
    engine = engine_of()
    say(engine, request("0", "a"))
    requests = [request("1", "a"), request("2", "a", words="explosive"), request("3", "b")]
    events = say(engine, *requests)
    assert isinstance(end(events, "2"), Failed)
    for one in (requests[0], requests[2]):
        assert_as_alone(events, one)
    assert (engine.prefixes.hits, engine.prefixes.misses) == (1, 2)


def test_what_a_cancelled_request_has_begun_with_can_be_shared() -> None:
    engine = engine_of()
    engine.submit(one := request("1", "a", words="word " * 9))
    events = [*engine.tick(), *engine.tick()]
    engine.cancel("1")
    assert_as_alone(events + drain(engine), one)
    engine.submit(request("waits", "b"))
    engine.cancel("waits")
    drain(engine)
    for two in (request("2", "a", words="else"), request("3", "b")):
        assert_as_alone(say(engine, two), two)
    # Who was cancelled before its prompt was run has left nothing.
    assert (engine.prefixes.hits, engine.prefixes.misses) == (1, 2)


def test_a_tick_that_is_broken_off_leaves_nothing_to_share() -> None:
    model = PrefixedSineModel()
    engine, frame = engine_of(model=model), model.frame
    say(engine, request("0", "a"))
    engine.submit(request("1", "a"))

    def interrupted(*given: object) -> None:
        raise KeyboardInterrupt

    model.frame = interrupted
    with pytest.raises(KeyboardInterrupt):
        engine.tick()
    model.frame = frame
    assert isinstance(end(drain(engine), "1"), Failed)
    assert engine.prefixes.kept_bytes == 0
    one = request("2", "a")
    assert_as_alone(say(engine, one), one)


@pytest.mark.parametrize("kept", [0, 4, 10**6])
def test_many_that_begin_alike_come_and_go(kept: int) -> None:
    """250 requests of 18 beginnings in 4 slots and a pool that is too small to keep them all; a tenth is cancelled."""
    draw, requests, small = random.Random(kept), {}, {"max_positions": 320, "max_frames": 200}
    engine = engine_of(slots=4, max_queued=250, prefix_cache_bytes=kept * PAGE_BYTES, pages=20, **small)
    events: list[Event] = []
    for number in range(250):
        voice, pages, words = draw.choice("abcdef"), draw.choice([1, 3, 4]), "hm, " * draw.choice([1, 5])
        one = request(str(number), voice, pages, words, seed=draw.randint(0, 1), max_frames=draw.choice([100, 6]))
        requests[one.id] = one
        engine.submit(one)
        for _ in range(draw.randint(0, 8)):
            events += engine.tick()
            assert engine.prefixes.kept_bytes <= kept * PAGE_BYTES
        if draw.random() < 0.1:
            engine.cancel(str(draw.randrange(number + 1)))
    events += drain(engine)
    mine: dict[str, list[Event]] = {name: [] for name in requests}
    for event in events:
        mine[event.request_id].append(event)
    expected: dict[tuple[object, ...], np.ndarray] = {}
    uncached = engine_of(prefix_cache_bytes=0)
    for name, one in requests.items():
        kind = one.text, one.seed, one.max_frames
        if kind not in expected:
            expected[kind] = speak(one, uncached)[0]
        got, ended = audio(mine[name], name), end(mine[name], name)
        assert not isinstance(ended, Failed), ended
        np.testing.assert_array_equal(got, expected[kind][: len(got)])
        assert len(got) == len(expected[kind]) or ended.reason == "cancelled"
    assert isinstance(events[0], AudioChunk)
    assert (engine.prefixes.hits > 50) == (kept > 0)
    assert engine.prefixes.evictions > 0 or not kept
