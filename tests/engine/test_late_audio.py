"""Audio that may come late: of a large step the lengths are read first, and the audio when it is there, after the next
launch at the latest. That changes when audio comes, and nothing else."""

import random

import msgspec
import numpy as np
import pytest
from sine_engines import Clock, Engine, assert_empty, audio, config_of, drain, end, speak
from sine_models import VoicedSineModel

from sonoro.core.types import AudioChunk, Event, Failed, SpeechRequest
from sonoro.engine.scheduler import Plan
from sonoro.runtime.ring import Entry


@pytest.fixture(autouse=True)
def has_come(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the audio of all launches is there; a step of two requests is a large one."""
    state = [True]
    monkeypatch.setattr("sonoro.engine.engine._LARGE_STEP", 1)
    monkeypatch.setattr(Entry, "is_ready", property(lambda entry: state[0]))
    return state


def request(name: str, **changes: object) -> SpeechRequest:
    return SpeechRequest(id=name, text="One, two. Three, four, five.", seed=3, **changes)


def engine_of(clock: Clock | None = None) -> Engine:
    return Engine(VoicedSineModel(), config_of(slots=4), clock or Clock(), ticks_late=1)


def chunks(events: list[Event]) -> list[str]:
    return [event.request_id for event in events if isinstance(event, AudioChunk)]


def test_audio_that_is_not_there_comes_after_the_next_launch(has_come: list[bool]) -> None:
    engine = engine_of()
    for name in "ab":
        engine.submit(request(name))
    has_come[0] = False
    assert engine.tick() == engine.tick() == []
    assert sorted(chunks(engine.tick())) == ["a", "b"]


def test_audio_that_is_there_is_taken_between_two_ticks(has_come: list[bool]) -> None:
    engine = engine_of()
    for name in "ab":
        engine.submit(request(name))
    assert not engine.take_lengths()
    assert engine.tick() == []
    assert not engine.take_lengths()
    has_come[0] = False
    assert engine.tick() == []
    assert engine.late_audio() == []
    assert [engine.take_lengths(), engine.take_lengths()] == [True, False]
    assert engine.late_audio() == []
    has_come[0] = True
    assert sorted(chunks(engine.late_audio())) == ["a", "b"]


def test_the_audio_of_a_small_step_comes_with_the_next_launch(has_come: list[bool]) -> None:
    engine = engine_of()
    engine.submit(request("a"))
    has_come[0] = False
    assert engine.tick() == []
    assert chunks(engine.tick()) == ["a"]
    assert not engine.take_lengths()


@pytest.mark.parametrize("seed", range(4))
def test_any_mix_says_the_same_however_late_its_audio_is(seed: int, has_come: list[bool]) -> None:
    draw, engine, events = random.Random(seed), engine_of(), list[Event]()
    sent: dict[str, SpeechRequest] = {}
    while len(sent) < 20:
        has_come[0] = draw.random() < 0.5
        if draw.random() < 0.4:
            name = str(len(sent))
            sent[name] = request(name, max_frames=draw.choice([4, 9, 400]), attempts=draw.choice([1, 2]))
            engine.submit(sent[name])
        elif sent:
            draw.choice([engine.pause, engine.resume, engine.resume])(draw.choice(list(sent)))
        if sent and draw.random() < 0.05:
            engine.cancel(draw.choice(list(sent)))
        if draw.random() < 0.5:
            engine.take_lengths()
            events += engine.late_audio()
        events += engine.tick()
    for name in sent:
        engine.resume(name)
    has_come[0] = False
    events += drain(engine)
    for name, one in sent.items():
        expected, finished = speak(msgspec.structs.replace(one, id="alone"))
        got, ended = audio(events, name), end(events, name)
        assert not isinstance(ended, Failed), ended
        np.testing.assert_array_equal(got, expected[: len(got)])
        if ended.reason != "cancelled":
            assert (ended.reason, len(got)) == (finished.reason, len(expected))


def test_a_step_whose_lengths_cannot_be_read_fails_all(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of()
    for name in "ab":
        engine.submit(request(name))
    engine.tick()
    engine.tick()

    def fail(launched: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(engine.lifecycle, "take_lengths", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        engine.take_lengths()
    events = engine.tick()
    assert all("broken off by RuntimeError: an illegal" in str(end(events, name)) for name in "ab")
    assert_empty(engine)


def test_a_wait_for_the_step_is_part_of_the_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told_s = Clock(), list[float]()
    engine = engine_of(clock)
    plan, take_lengths = engine.scheduler.plan, engine.lifecycle.take_lengths

    def plan_for(now_s: float, tick_s: float) -> Plan:
        told_s.append(tick_s)
        clock.now_s += 0.002
        return plan(now_s, tick_s)

    def take_slowly(launched: object) -> None:
        clock.now_s += 0.008
        take_lengths(launched)

    monkeypatch.setattr(engine.scheduler, "plan", plan_for)
    monkeypatch.setattr(engine.lifecycle, "take_lengths", take_slowly)
    for name in "ab":
        engine.submit(request(name, max_frames=400, ignore_eos=True))
    for _ in range(8):
        engine.tick()
    # The first two are planned before a tick has waited for the device, which is idle at first.
    assert told_s[:2] == [engine.spec.frame_s / 2] * 2
    assert told_s[3:] == pytest.approx([0.01] * 5, rel=0.02)
