"""A busy engine over a model that speaks sine waves: any mix of requests gives each the answer it gets alone, in time,
and nothing is left behind."""

import functools
import itertools
import random

import msgspec
import numpy as np
import pytest
from sine_engines import Clock, Engine, SlowModel, audio, config_of, drain, end, engine_of, reference, speak, underruns

from sonoro.core.errors import EngineBusy
from sonoro.core.types import AudioChunk, Event, Finished, SpeechRequest

LONG = "A first sentence that is spoken. A second one, with a clause, comes after it! And is this a third? It is."
PADDED = {"frame_batches": (1, 2, 4, 8), "prefill_buckets": (16, 64, 256), "codec_batches": (1, 4, 8)}


def kinds(count: int, seed: int) -> list[SpeechRequest]:
    """Requests of many shapes: one or several segments, cloned or not, ending by themselves or by a limit."""
    draw, requests = random.Random(seed), []
    for number in range(count):
        is_cloned = draw.random() < 0.3
        requests.append(
            SpeechRequest(
                id=str(number),
                text=draw.choice([LONG, "Short.", "A text of middling length", "Hm, " * draw.randint(1, 12)]),
                voice=None if is_cloned else draw.choice(["low", "high", None]),
                references=(reference(draw.choice(["prompt", "reference"])),) if is_cloned else (),
                seed=draw.randint(0, 99),
                max_frames=draw.choice([None, None, 7, 30]),
                options={"strength": draw.randint(10, 90)},
            )
        )
    return requests


@functools.cache
def alone(count: int, seed: int) -> list[tuple[np.ndarray, Finished]]:
    """What a fresh engine says to each of `kinds`, alone."""
    return [speak(request) for request in kinds(count, seed)]


def assert_as_alone(events: list[Event], request_id: str, expected: tuple[np.ndarray, Finished]) -> None:
    """The whole answer, or a beginning of it if the request was cancelled."""
    samples, finished = expected
    got, ended = audio(events, request_id), end(events, request_id)
    if ended.reason == "cancelled":
        np.testing.assert_array_equal(got, samples[: len(got)])
    else:
        assert (ended.reason, ended.frames) == (finished.reason, finished.frames)
        np.testing.assert_array_equal(got, samples)


@pytest.mark.parametrize("padding", [{}, PADDED], ids=["exact", "padded"])
def test_a_thousand_requests_that_come_and_go_leave_nothing_behind(padding: dict) -> None:
    """Twice: with exact batches, as a CPU runs them, and padded, as a GPU does."""
    count, variety = 1000, 80
    engine, draw = engine_of(slots=8, pages=60, max_queued=6, codec_frames=16, **padding), random.Random(5)
    events: dict[str, list[Event]] = {}
    kind_of, made = {}, kinds(variety, 1)
    live: list[str] = []
    arriving = iter(range(count))
    number = next(arriving, None)
    while number is not None or engine.has_work or live:
        if number is not None and draw.random() < 0.5:
            kind_of[str(number)] = kind = draw.randrange(variety)
            try:
                engine.submit(msgspec.structs.replace(made[kind], id=str(number)))
            except EngineBusy:
                pass
            else:
                events[str(number)] = []
                live.append(str(number))
                number = next(arriving, None)
        if live and draw.random() < 0.03:
            engine.cancel(draw.choice(live))
        if live:
            draw.choice([engine.pause, engine.resume])(draw.choice(live))
        if draw.random() < 0.1 or not engine.has_work:
            for name in live:
                engine.resume(name)
        for event in engine.tick():
            events[event.request_id].append(event)
            if not isinstance(event, AudioChunk):
                live.remove(event.request_id)
    assert drain(engine) == []
    assert len(events) == count
    for name, mine in events.items():
        assert_as_alone(mine, name, alone(variety, 1)[kind_of[name]])
    reasons = [end(mine, name).reason for name, mine in events.items()]
    assert 20 < reasons.count("cancelled") < 500
    assert {"stop", "length"} < set(reasons)


@pytest.mark.parametrize("bounds", [{}, {"codec_frames": 3}, {"codec_wait": 4}], ids=str)
@pytest.mark.parametrize("chunk_frames", [(1,), (3,), (2, 5), (1, 2, 4, 12), (40,)], ids=str)
def test_any_chunk_policy_gives_the_same_audio(chunk_frames: tuple[int, ...], bounds: dict[str, int]) -> None:
    for ticks_late, padding in itertools.product((0, 1), ({}, PADDED | {"frame_batches": (3,)})):
        engine = engine_of(ticks_late, chunk_frames=chunk_frames, **bounds, **padding)
        for request in kinds(8, 2):
            engine.submit(request)
        events = drain(engine)
        for request, expected in zip(kinds(8, 2), alone(8, 2), strict=True):
            assert_as_alone(events, request.id, expected)


@pytest.mark.parametrize("chunk", [5, 12, 100])
def test_the_last_chunk_may_be_padded_beyond_the_last_column(chunk: int) -> None:
    engine = engine_of(chunk_frames=(1, chunk), max_frames=130)
    request = SpeechRequest(id="a", text="Goes on.", ignore_eos=True, max_frames=130)
    samples, finished = speak(request, engine)
    assert (finished.reason, finished.frames) == ("length", 130)
    np.testing.assert_array_equal(samples, speak(request)[0])


def test_batches_of_changing_size_equal_fresh_runs() -> None:
    """Padded rows and whatever an earlier, larger batch left in the static rows are never heard."""
    engine = engine_of(slots=8, **PADDED)
    requests = iter(kinds(30, 3))
    expected = iter(alone(30, 3))
    for size in (5, 1, 8, 2, 7, 3, 4):
        batch = list(itertools.islice(requests, size))
        for request in batch:
            engine.submit(request)
        events = drain(engine)
        for request in batch:
            assert_as_alone(events, request.id, next(expected))
    assert sum(engine.runner.graphs.launches["codec"].values()) > 0


def test_more_rows_than_the_largest_codec_batch_are_split() -> None:
    engine = engine_of(slots=5, codec_batches=(1, 2), chunk_frames=(1,))
    for request in kinds(5, 4):
        engine.submit(request)
    engine.tick()
    assert engine.runner.graphs.launches["codec"] == {"graph": 0, "reference_graph": 0, "compiled": 0, "eager": 3}
    events = drain(engine)
    for request, expected in zip(kinds(5, 4), alone(5, 4), strict=True):
        assert_as_alone(events, request.id, expected)


@pytest.mark.parametrize(("frame_ms", "codec_us"), [(1, 10), (2, 100), (5, 50), (7, 20)])
def test_a_listener_at_playback_speed_never_runs_out(frame_ms: float, codec_us: float) -> None:
    """Frames last 10 ms. Requests arrive all the time; frames take from a half to one and a half times their mean, and
    the codec so long for each frame."""
    draw, clock = random.Random(7), Clock()
    model = SlowModel(
        clock, lambda: frame_ms / 1000 * draw.uniform(0.5, 1.25), lambda frames: codec_us / 1_000_000 * frames
    )
    engine = Engine(model, config_of(slots=6, codec_frames=24), clock)
    heard: dict[str, list[tuple[float, int]]] = {}
    coming = kinds(40, 6)
    while coming or engine.has_work:
        if coming and draw.random() < 0.1:
            engine.submit(coming.pop())
        for event in engine.tick():
            if isinstance(event, AudioChunk):
                heard.setdefault(event.request_id, []).append((clock(), len(event.pcm) // 160))
        clock.now_s += 0.0005
    assert len(heard) == 40
    for name, chunks in heard.items():
        assert underruns(chunks, model.spec.frame_s) == 0, (name, chunks)


def test_a_burst_of_long_prompts_does_not_stop_those_who_speak() -> None:
    engine = engine_of(
        slots=12,
        segment_letters=300,
        max_positions=850,
        pages=12 * 54,
        prefill_tokens=849,
        chunk_frames=(1,),
        codec_wait=0,
    )
    engine.submit(SpeechRequest(id="speaking", text="word " * 50))
    engine.tick()
    for number in range(11):
        engine.submit(SpeechRequest(id=str(number), text="x" * 290, seed=number))
    for tick in range(2, 12):
        events = engine.tick()
        # One frame of it in every tick, whoever else comes: 290 of 849 prompt rows, so two of them at once.
        assert [event.request_id for event in events].count("speaking") == 1
        assert engine.scheduler.free_slots == max(0, 11 - 2 * (tick - 1))


def test_those_who_speak_do_not_stop_one_who_comes() -> None:
    engine = engine_of(slots=12, pages=12 * 38, codec_frames=12)
    for number in range(11):
        engine.submit(SpeechRequest(id=str(number), text="word " * 60, seed=number))
    for _ in range(30):
        engine.tick()
    engine.submit(SpeechRequest(id="new", text="Hello there."))
    events = [*engine.tick(), *engine.tick()]
    assert [event.index for event in events if event.request_id == "new"] == [0]
