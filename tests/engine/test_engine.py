"""The engine over a model that speaks sine waves: any mix of requests gives each the answer it gets alone."""

import itertools

import msgspec
import numpy as np
import pytest
import torch
from sine_engines import HOP, Clock, Engine, audio, config_of, drain, end, engine_of, reference, speak
from sine_models import VoicedSineModel

from sonoro.core.config import EngineConfig
from sonoro.core.errors import EngineBusy, InvalidReference, InvalidRequest, UnknownLanguage, UnknownVoice
from sonoro.core.types import AudioChunk, Failed, SamplingParams, SpeechRequest
from sonoro.engine.runner import Launched, Runner
from sonoro.engine.scheduler import Plan

LONG = "A first sentence that is spoken. A second one, with a clause, comes after it! And is this a third? It is."
LONG_SEGMENTS = [
    "A first sentence that is spoken.",
    "A second one, with a clause,",
    "comes after it! And is this a third?",
    "It is.",
]


def test_streamed_audio_equals_the_whole_decode() -> None:
    samples, finished = speak(SpeechRequest(id="a", text="Twenty-one frames. ok", seed=3))
    model = VoicedSineModel()
    codes = torch.tensor([[[(3 + at * at) % 50, 50] for at in range(21)]])
    whole = model.codec.decode(codes)[0].numpy()
    assert (finished.reason, finished.frames) == ("stop", 21)
    # Half a step of PCM16, and what float rounding adds to it.
    np.testing.assert_allclose(samples, whole, atol=0.51 / 32768)


def test_segments_are_fresh_prompts_joined_end_to_end() -> None:
    samples, finished = speak(SpeechRequest(id="a", text=LONG))
    assert (finished.reason, finished.frames) == ("stop", sum(map(len, LONG_SEGMENTS)))
    model, parts, before = VoicedSineModel(), [], 0
    for index, segment in enumerate(LONG_SEGMENTS):
        codes = torch.tensor([[[(index + before + at * at) % 50, 50] for at in range(len(segment))]])
        parts.append(model.codec.decode(codes)[0].numpy())
        before += len(segment) + int(codes[..., 0].sum())
    np.testing.assert_allclose(samples, np.concatenate(parts), atol=0.51 / 32768)


def test_the_first_chunk_is_launched_by_the_first_tick_and_comes_with_the_second() -> None:
    engine = engine_of()
    engine.submit(SpeechRequest(id="a", text="Hello there."))
    assert engine.tick() == []
    assert {kind: sum(counts.values()) for kind, counts in engine.runner.graphs.launches.items()} == {
        "admit": 1,
        "prefill": 1,
        "frame": 1,
        "codec": 1,
    }
    [chunk] = engine.tick()
    assert len(chunk.pcm) == HOP * 2


@pytest.mark.parametrize(
    ("request_of", "reason", "frames"),
    [
        ({"text": "Ends by itself."}, "stop", 15),
        ({"text": "Ends by itself.", "max_frames": 15}, "length", 15),
        ({"text": "Ends by itself.", "max_frames": 16}, "stop", 15),
        ({"text": "Ends by itself.", "max_frames": 1}, "length", 1),
        ({"text": LONG, "max_frames": 40}, "length", 40),
        ({"text": "Goes on.", "max_frames": 50, "ignore_eos": True}, "length", 50),
        # 5 s is the least that a text is given: 500 frames of 10 ms.
        ({"text": "Goes on.", "ignore_eos": True}, "runaway", 500),
        ({"text": "It goes on for ever, to all it has.", "ignore_eos": True}, "runaway", 512),
    ],
)
def test_finish_reasons(request_of: dict, reason: str, frames: int) -> None:
    samples, finished = speak(SpeechRequest(id="a", **request_of))
    assert (finished.reason, finished.frames, len(samples)) == (reason, frames, frames * HOP)
    assert 0 < finished.timings.first_audio_s <= finished.timings.total_s


def test_cancel_waiting_running_and_unknown() -> None:
    engine = engine_of(slots=1)
    for name in ("running", "waiting", "next"):
        engine.submit(SpeechRequest(id=name, text="Some words to say."))
    events = [*engine.tick(), *engine.tick()]
    for name in ("running", "waiting", "unknown"):
        engine.cancel(name)
    events += drain(engine)
    assert (end(events, "running").reason, end(events, "running").frames) == ("cancelled", 1)
    assert (end(events, "waiting").reason, end(events, "waiting").frames) == ("cancelled", 0)
    assert end(events, "next").reason == "stop"
    assert not any(event.request_id == "unknown" for event in events)


def test_a_cancel_with_nothing_else_to_do_is_still_answered() -> None:
    engine = engine_of()
    engine.submit(SpeechRequest(id="a", text="Some words."))
    engine.cancel("a")
    assert engine.has_work
    assert end(engine.tick(), "a").reason == "cancelled"


def test_a_prefill_that_fails_fails_its_request_alone() -> None:
    engine = engine_of()
    texts = {"good": "Good day to you.", "bad": "An explosive one.", "fine": "Fine words here."}
    for name, text in texts.items():
        engine.submit(SpeechRequest(id=name, text=text))
    events = drain(engine)
    assert end(events, "bad") == Failed.of("bad", RuntimeError("it exploded"))
    for name in ("good", "fine"):
        np.testing.assert_array_equal(audio(events, name), speak(SpeechRequest(id=name, text=texts[name]))[0])


def test_a_later_segment_that_cannot_be_prepared_fails_after_the_audio_before_it() -> None:
    engine = engine_of()
    engine.submit(SpeechRequest(id="a", text="This sentence is quite alright. But this one is unspeakable, alas."))
    events = drain(engine)
    failed = end(events, "a")
    assert (failed.facts.code, "speakable" in failed.facts.message) == ("invalid_request", True)
    assert len(audio(events, "a")) == len("This sentence is quite alright.") * HOP


@pytest.mark.parametrize(
    ("request_of", "error", "field"),
    [
        ({"text": "This is unspeakable."}, InvalidRequest, "text"),
        ({"text": "Hi", "voice": "nobody"}, UnknownVoice, "voice"),
        ({"text": "Hi", "language": "klingon"}, UnknownLanguage, "language"),
        ({"text": "Hi", "instructions": "Whisper."}, InvalidRequest, "instructions"),
        ({"text": "Hi", "max_frames": 513}, InvalidRequest, "max_frames"),
        ({"text": "Hi", "max_frames": 2001}, InvalidRequest, "max_frames"),
        ({"text": "Hi", "options": {"strength": 101}}, InvalidRequest, "strength"),
        ({"text": "Hi", "options": {"pace": 2}}, InvalidRequest, "options.pace"),
        ({"text": "Hi", "voice": "low", "references": (reference(),)}, InvalidRequest, "voice"),
    ],
)
def test_what_the_model_cannot_speak_is_refused_at_once(request_of: dict, error: type, field: str) -> None:
    engine = engine_of()
    with pytest.raises(error) as refusal:
        engine.submit(SpeechRequest(id="a", **request_of))
    assert refusal.value.field == field
    assert not engine.has_work


def test_a_model_that_only_clones_asks_for_a_reference() -> None:
    engine = Engine(VoicedSineModel(voices=()), config_of())
    with pytest.raises(InvalidReference, match="ref_audio"):
        engine.submit(SpeechRequest(id="a", text="Hi"))


@pytest.mark.parametrize(("max_text", "max_positions", "words"), [(10, 600, "10"), (1024, 513, "513")])
def test_a_prompt_that_does_not_fit_its_slot_is_refused(
    max_text: int, max_positions: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineConfig, "max_text", max_text)
    engine = engine_of(max_positions=max_positions)
    with pytest.raises(InvalidRequest, match=words) as refusal:
        engine.submit(SpeechRequest(id="a", text="A bit too long to fit.", max_frames=512, language="english"))
    assert refusal.value.field == "text"


def test_a_prompt_longer_than_all_pages_hold_is_refused_and_names_the_text() -> None:
    engine = engine_of(slots=8, max_positions=544, pages=17)
    with pytest.raises(InvalidRequest, match="545 positions; at most 544") as refusal:
        engine.submit(SpeechRequest(id="a", text="x" * 33, max_frames=512))
    assert refusal.value.field == "text"
    engine.submit(SpeechRequest(id="a", text="x" * 32, max_frames=512))
    assert end(drain(engine), "a").reason == "stop"


def test_too_few_pages_for_all_slots_queue_and_never_fail() -> None:
    engine = engine_of(slots=8, pages=19)
    for number in range(20):
        engine.submit(SpeechRequest(id=str(number), text=f"Words number {number}.", seed=number))
    assert engine.runner.pages == 19
    for _ in range(3):
        engine.tick()
    # Each may need 17 of 19 pages: 500 frames may come, five seconds being the least that a text is given. As far as
    # its text lets one expect it needs 7.
    assert (engine.scheduler.free_slots, engine.waiting) == (6, 18)
    events = drain(engine)
    for number in range(20):
        assert end(events, str(number)).reason == "stop"


def test_a_full_queue_refuses_until_there_is_room() -> None:
    engine = engine_of(slots=1, max_queued=2)
    for name in "abc":
        engine.submit(SpeechRequest(id=name, text="Some words."))
    with pytest.raises(EngineBusy, match="2 requests are waiting"):
        engine.submit(SpeechRequest(id="d", text="Some words."))
    engine.cancel("b")
    engine.submit(SpeechRequest(id="d", text="Some words."))
    events = drain(engine)
    assert [end(events, name).reason for name in "abcd"] == ["stop", "cancelled", "stop", "stop"]


def test_a_paused_request_goes_on_where_it_was() -> None:
    text = "A text that is long enough."
    engine = engine_of(chunk_frames=(1,))
    for name in ("paused", "other"):
        engine.submit(SpeechRequest(id=name, text=text, seed=3))
    events = [event for _ in range(4) for event in engine.tick()]
    engine.pause("paused")
    engine.pause("unknown")
    events += engine.tick()
    before = len(audio(events, "paused"))
    while engine.has_work:
        events += engine.tick()
    assert end(events, "other").reason == "stop"
    assert len(audio(events, "paused")) == before < len(audio(events, "other"))
    assert engine.scheduler.free_slots == 2
    engine.resume("paused")
    engine.resume("unknown")
    events += drain(engine)
    assert end(events, "paused").reason == "stop"
    np.testing.assert_array_equal(audio(events, "paused"), speak(SpeechRequest(id="a", text=text, seed=3))[0])


def test_a_paused_request_can_be_cancelled() -> None:
    engine = engine_of()
    engine.submit(SpeechRequest(id="a", text="Some words."))
    engine.tick()
    engine.pause("a")
    engine.cancel("a")
    assert end(drain(engine), "a").reason == "cancelled"


def test_results_of_a_request_that_left_are_not_taken_for_those_of_the_next_in_its_slot() -> None:
    engine, events = engine_of(slots=1), []
    for number in range(6):
        engine.submit(SpeechRequest(id=str(number), text="Words of some length.", seed=number))
        events += [event for _ in range(number) for event in engine.tick()]
        engine.cancel(str(number))
    last = SpeechRequest(id="last", text="Hello there.", seed=9)
    engine.submit(last)
    events += drain(engine)
    np.testing.assert_array_equal(audio(events, "last"), speak(last)[0])


class Faulty(VoicedSineModel):
    """Raises `error` in the next `frame`, or in the next `decode` of its codec."""

    def __init__(self) -> None:
        super().__init__()
        self.fault, self.error = "", RuntimeError("out of order")
        self.codec.decode = self._watched("decode", self.codec.decode)
        self.frame = self._watched("frame", self.frame)

    def _watched(self, name, function):
        def call(*args):
            if self.fault == name:
                self.fault = ""
                raise self.error
            return function(*args)

        return call


@pytest.mark.parametrize("fault", ["frame", "decode"])
def test_a_launch_that_fails_fails_its_requests_and_the_engine_lives_on(fault: str) -> None:
    model = Faulty()
    engine = Engine(model, config_of(slots=2), ticks_late=1)
    requests = [SpeechRequest(id=str(number), text=f"Request number {number}.", seed=number) for number in range(4)]
    for request in requests:
        engine.submit(request)
    events = engine.tick()
    model.fault = fault
    events += drain(engine)
    for request in requests[:2]:
        assert end(events, request.id) == Failed.of(request.id, RuntimeError("out of order"))
    for request in requests[2:]:
        np.testing.assert_array_equal(audio(events, request.id), speak(request)[0])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_silent_and_counted(value: float, caplog: pytest.LogCaptureFixture) -> None:
    """In the samples of the request that it happened to alone; as its codec made the others, they are heard."""
    model, requests = VoicedSineModel(), [SpeechRequest(id=name, text="Hello there.") for name in "ab"]
    decode = model.codec.decode

    def spoilt(frames, slots, history):
        pcm = decode(frames, slots, history)
        pcm[slots == 0, 3:6] = value
        return pcm

    model.codec.decode = spoilt
    engine = Engine(model, config_of(slots=2))
    for request in requests:
        engine.submit(request)
    events = drain(engine)
    chunks = sum(isinstance(event, AudioChunk) and event.request_id == "a" for event in events)
    expected, found = speak(requests[0])[0], audio(events, "a")
    is_silent = (found == 0) & (expected != 0)
    assert engine.output.broken_samples == 3 * chunks
    assert 2 * chunks <= is_silent.sum() <= 3 * chunks
    np.testing.assert_array_equal(found[~is_silent], expected[~is_silent])
    np.testing.assert_array_equal(audio(events, "b"), speak(requests[1])[0])
    assert caplog.text.count("event=samples_not_finite request=a") == (3 * chunks).bit_length() - 1
    assert "request=b" not in caplog.text


def test_a_tick_that_is_broken_off_fails_who_runs_and_keeps_who_waits() -> None:
    model = Faulty()
    engine = Engine(model, config_of(slots=1), ticks_late=1)
    for name in ("running", "waiting"):
        engine.submit(SpeechRequest(id=name, text="Some words to say."))
    events = engine.tick()
    model.fault, model.error = "frame", KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.tick()
    events += drain(engine)
    failed = end(events, "running")
    assert (failed.facts.code, "KeyboardInterrupt" in failed.facts.message) == ("engine", True)
    np.testing.assert_array_equal(audio(events, "waiting"), speak(SpeechRequest(id="a", text="Some words to say."))[0])


def test_a_tick_that_is_broken_off_between_two_segments_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(runner: Runner, codes: object) -> None:
        raise MemoryError

    engine, events = engine_of(slots=1), []
    engine.submit(SpeechRequest(id="a", text="A first sentence that is spoken. And a second one comes after it!"))
    monkeypatch.setattr(Runner, "join", fail)
    with pytest.raises(MemoryError):
        events.extend(itertools.chain.from_iterable(iter(engine.tick, None)))
    assert "MemoryError" in end(events + drain(engine), "a").facts.message


def test_an_id_can_be_used_again_only_after_its_end() -> None:
    engine = engine_of()
    engine.submit(SpeechRequest(id="a", text="Hi"))
    with pytest.raises(InvalidRequest, match="still running"):
        engine.submit(SpeechRequest(id="a", text="Hi"))
    drain(engine)
    assert speak(SpeechRequest(id="a", text="Hi"), engine)[1].reason == "stop"


def test_a_reference_is_encoded_once_and_the_cache_is_bounded() -> None:
    model = VoicedSineModel()
    engine = Engine(model, EngineConfig(slots=2, max_voices=2))

    def speak_as(pitch: float, **changes: object) -> None:
        speak(SpeechRequest(id="a", text="Hi", references=(reference(pitch=pitch),), **changes), engine)

    for pitch in (0.1, 0.1, 0.2, 0.1):
        speak_as(pitch)
    assert model.encoded == 2
    speak_as(0.3)
    speak_as(0.1)
    assert model.encoded == 3
    speak_as(0.2)
    assert model.encoded == 4


def test_a_reference_that_is_a_prompt_primes_the_codec() -> None:
    primed, _ = speak(SpeechRequest(id="a", text="Same words", references=(reference("prompt"),)))
    unprimed, _ = speak(SpeechRequest(id="a", text="Same words", references=(reference("reference"),)))
    model = VoicedSineModel()
    voice = model.encode_voice([reference("prompt")])
    codes = torch.tensor([[[(5 + at * at) % 50, 50] for at in range(10)]])
    whole = model.codec.decode(torch.cat([voice.reference_frames[None], codes], 1))[0].numpy()
    np.testing.assert_allclose(primed, whole[9 * HOP :], atol=0.51 / 32768)
    np.testing.assert_allclose(unprimed, model.codec.decode(codes)[0].numpy(), atol=0.51 / 32768)


def test_the_prompt_is_told_resolved_sampling_and_the_limit_of_its_segment() -> None:
    seen = []

    class Recorder(VoicedSineModel):
        def prepare(self, request, segment, index, before, voice):
            seen.append((request.max_frames, request.sampling, request.language))
            return super().prepare(request, segment, index, before, voice)

    engine = Engine(Recorder(), config_of(), ticks_late=1)
    speak(SpeechRequest(id="a", text=LONG, max_frames=100, sampling=SamplingParams(top_k=7)), engine)
    assert [limit for limit, _, _ in seen] == [100, 68, 40, 4]
    assert {(s.top_k, s.temperature, language) for _, s, language in seen} == {(7, 1.0, "auto")}


def test_on_a_cpu_the_first_chunk_comes_with_its_own_tick() -> None:
    """Nothing runs beside the host there, so a result that is read late is late and nothing else."""
    for engine, ticks in ((Engine(VoicedSineModel(), config_of()), 1), (engine_of(ticks_late=1), 2)):
        engine.submit(SpeechRequest(id="a", text="Hello there."))
        counts = [len(engine.tick()) for _ in range(2)]
        assert counts.index(1) + 1 == ticks


def test_the_end_says_how_much_of_the_text_was_spoken() -> None:
    for text in (LONG, "Short. ", "Hm! ... "):
        assert speak(SpeechRequest(id="a", text=text))[1].characters == len(text)
    first = LONG.index(". ") + 1
    engine = engine_of()
    engine.submit(SpeechRequest(id="a", text=LONG))
    events = []
    while sum(len(event.pcm) for event in events) < 2 * HOP * (first + 10):
        events += engine.tick()
    engine.cancel("a")
    ended = end(events + drain(engine), "a")
    # All of the first segment, and of the second what is ordinarily said in its frames of 10 ms: 15 letters a second.
    assert first < ended.characters == first + int((ended.frames - first) * 0.01 * 15) < len(LONG)
    engine.submit(SpeechRequest(id="a", text=LONG))
    engine.cancel("a")
    assert end(drain(engine), "a").characters == 0


@pytest.mark.parametrize("attempts", [1, 2])
def test_the_silence_before_a_request_is_left_out_once(attempts: int) -> None:
    request = SpeechRequest(id="a", text=LONG, attempts=attempts)
    whole, finished = speak(request)
    model = VoicedSineModel()
    model.spec = msgspec.structs.replace(model.spec, lead_in=HOP - 1)
    samples, made = speak(request, Engine(model, config_of()))
    np.testing.assert_array_equal(samples, whole[HOP - 1 :])
    assert made.frames == finished.frames


def test_the_time_to_spare_grows_until_the_device_was_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tick the runner says whether the device still had something to do when it was launched."""
    clock = Clock()
    engine, busy = Engine(VoicedSineModel(), config_of(), clock, ticks_late=1), [True]
    run = engine.runner.run

    def launch(plan: Plan) -> Launched:
        launched = run(plan)
        launched.was_idle = not busy[0]
        clock.now_s += 0.01
        return launched

    monkeypatch.setattr(engine.runner, "run", launch)
    engine.submit(SpeechRequest(id="a", text="x" * 30, max_frames=500, ignore_eos=True))
    spared_s = []
    for _ in range(150):
        engine.tick()
        spared_s.append(engine.spare_s)
    assert spared_s == sorted(spared_s)
    assert spared_s[20] > 0
    assert 0.006 < spared_s[-1] <= 0.0075 + 1e-9
    busy[0] = False
    engine.tick()
    assert 0 < engine.spare_s < 0.9 * spared_s[-1]


def test_nothing_is_left_of_the_time_to_spare_when_the_load_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is still busy with the last large batch when the first small one is launched."""
    clock = Clock()
    engine = Engine(VoicedSineModel(), config_of(slots=5), clock, ticks_late=1)
    run = engine.runner.run

    def launch(plan: Plan) -> Launched:
        launched = run(plan)
        launched.was_idle = False
        clock.now_s += 0.01
        return launched

    monkeypatch.setattr(engine.runner, "run", launch)
    for name in "abcde":
        engine.submit(SpeechRequest(id=name, text="x" * 30, max_frames=500, ignore_eos=True))
    for _ in range(40):
        engine.tick()
    before_s = engine.spare_s
    for name in "ab":
        engine.cancel(name)
    engine.tick()
    assert engine.spare_s > before_s > 0
    for name in "cd":
        engine.cancel(name)
    engine.tick()
    assert engine.spare_s == 0
    for _ in range(40):
        engine.tick()
    assert engine.spare_s > 0


def test_a_caller_that_takes_its_time_between_ticks_makes_no_tick_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who plays each piece before it asks for the next leaves an engine alone for longer than a tick takes."""
    clock, told_s = Clock(), list[float]()
    engine = Engine(VoicedSineModel(), config_of(), clock, ticks_late=1)
    run, plan = engine.runner.run, engine.scheduler.plan

    def launch(planned: Plan) -> Launched:
        clock.now_s += 0.01
        return run(planned)

    def plan_for(now_s: float, tick_s: float) -> Plan:
        told_s.append(tick_s)
        return plan(now_s, tick_s)

    monkeypatch.setattr(engine.runner, "run", launch)
    monkeypatch.setattr(engine.scheduler, "plan", plan_for)
    engine.submit(SpeechRequest(id="a", text="x" * 30, max_frames=500, ignore_eos=True))
    for _ in range(50):
        engine.tick()
        clock.now_s += 1.0
    assert told_s[-1] == pytest.approx(0.01, rel=0.01)


def test_no_tick_that_was_held_up_leaves_much_time_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    engine, takes_s = Engine(VoicedSineModel(), config_of(), clock, ticks_late=1), [0.01]
    run = engine.runner.run

    def launch(plan: Plan) -> Launched:
        launched = run(plan)
        launched.was_idle = False
        clock.now_s += takes_s[0]
        return launched

    monkeypatch.setattr(engine.runner, "run", launch)
    engine.submit(SpeechRequest(id="a", text="x" * 30, max_frames=500, ignore_eos=True))
    for takes_s[0] in (0.01, 0.01, 60.0, 0.01, 0.01):
        engine.tick()
    assert engine.spare_s < 0.05 * engine.spec.frame_s
