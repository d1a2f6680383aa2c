"""The engine over a model that speaks sine waves: any mix of requests gives each the answer it gets alone."""

import random

import numpy as np
import pytest
import torch

from fakes.sine import SineModel
from sonoro.core.audio import from_pcm16
from sonoro.core.config import EngineConfig
from sonoro.core.errors import InvalidReference, InvalidRequest, UnknownLanguage, UnknownVoice
from sonoro.core.types import AudioChunk, Event, Failed, Finished, Reference, SamplingParams, SpeechRequest
from sonoro.engine.engine import Engine

HOP = 80
LONG = "A first sentence that is spoken. A second one, with a clause, comes after it! And is this a third? It is."
LONG_SEGMENTS = [
    "A first sentence that is spoken.",
    "A second one, with a clause,",
    "comes after it! And is this a third?",
    "It is.",
]
CONFIG = EngineConfig(slots=3, max_positions=600, max_frames=512, max_characters=40)


def engine_of(**changes: int) -> Engine:
    values = {"slots": 3, "max_positions": 600, "max_frames": 512, "max_characters": 40} | changes
    return Engine(SineModel(), EngineConfig(**values))


def drain(engine: Engine) -> list[Event]:
    events = []
    while engine.has_work:
        events += engine.tick()
    return events


def audio(events: list[Event], request_id: str) -> np.ndarray:
    """All audio of one request, its chunks numbered without a gap."""
    chunks = [event for event in events if isinstance(event, AudioChunk) and event.request_id == request_id]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    return from_pcm16(b"".join(chunk.pcm for chunk in chunks))


def end(events: list[Event], request_id: str) -> Finished | Failed:
    """The last event of one request, which must be its only end."""
    mine = [event for event in events if event.request_id == request_id]
    assert isinstance(mine[-1], Finished | Failed)
    assert all(isinstance(event, AudioChunk) for event in mine[:-1])
    return mine[-1]


def speak(request: SpeechRequest, engine: Engine | None = None) -> tuple[np.ndarray, Finished | Failed]:
    engine = engine or engine_of()
    engine.submit(request)
    events = drain(engine)
    return audio(events, request.id), end(events, request.id)


def reference(use: str = "prompt", pitch: float = 0.1) -> Reference:
    tone = np.sin(np.arange(8000) * pitch).astype("<f4")
    return Reference(pcm=tone.tobytes(), sample_rate=8000, text="hm" if use == "prompt" else None, use=use)


def test_streamed_audio_equals_the_whole_decode() -> None:
    samples, finished = speak(SpeechRequest(id="a", text="Twenty-one frames. ok", seed=3))
    model = SineModel()
    codes = torch.tensor([[[(3 + at * at) % 50, 50] for at in range(21)]])
    whole = model.codec.decode(codes)[0].numpy()
    assert (finished.reason, finished.frames) == ("stop", 21)
    # Half a step of PCM16, and what float rounding adds to it.
    np.testing.assert_allclose(samples, whole, atol=0.51 / 32768)


def test_segments_are_fresh_prompts_joined_end_to_end() -> None:
    samples, finished = speak(SpeechRequest(id="a", text=LONG))
    assert (finished.reason, finished.frames) == ("stop", sum(map(len, LONG_SEGMENTS)))
    model, parts, before = SineModel(), [], 0
    for index, segment in enumerate(LONG_SEGMENTS):
        codes = torch.tensor([[[(index + before + at * at) % 50, 50] for at in range(len(segment))]])
        parts.append(model.codec.decode(codes)[0].numpy())
        before += len(segment)
    np.testing.assert_allclose(samples, np.concatenate(parts), atol=0.51 / 32768)


def requests_of(seed: int) -> list[SpeechRequest]:
    draw = random.Random(seed)
    requests = []
    for number in range(14):
        text = draw.choice([LONG, "Short.", "A text of middling length", "Hm, " * draw.randint(1, 30)])
        cloned = draw.random() < 0.3
        requests.append(
            SpeechRequest(
                id=str(number),
                text=text,
                voice=None if cloned else draw.choice(["low", "high", None]),
                references=(reference(draw.choice(["prompt", "reference"])),) if cloned else (),
                seed=draw.randint(0, 99),
                max_frames=draw.choice([None, None, 7, 60]),
                options={"loudness": draw.randint(10, 90)},
            )
        )
    return requests


@pytest.mark.parametrize("seed", range(6))
def test_every_answer_of_a_busy_engine_equals_its_solo_run(seed: int) -> None:
    draw, engine, events = random.Random(seed), engine_of(), []
    requests = requests_of(seed)
    pending, cancelled = list(requests), set()
    while pending or engine.has_work:
        if pending and draw.random() < 0.3:
            engine.submit(pending.pop())
        events += engine.tick()
        if draw.random() < 0.02:
            cancelled.add(str(draw.randrange(14)))
            for request_id in cancelled:
                engine.cancel(request_id)
    assert engine.free_slots == 3
    for request in requests:
        samples, finished = speak(request)
        got, ended = audio(events, request.id), end(events, request.id)
        if ended.reason == "cancelled":
            assert request.id in cancelled
            np.testing.assert_array_equal(got, samples[: len(got)])
        else:
            assert (ended.reason, ended.frames) == (finished.reason, finished.frames)
            np.testing.assert_array_equal(got, samples)
        assert len(got) == ended.frames * HOP


def test_the_first_chunk_comes_with_the_first_tick() -> None:
    engine = engine_of()
    engine.submit(SpeechRequest(id="a", text="Hello there."))
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
    events = engine.tick()
    for name in ("running", "waiting", "unknown"):
        engine.cancel(name)
    events += drain(engine)
    assert (end(events, "running").reason, end(events, "running").frames) == ("cancelled", 1)
    assert (end(events, "waiting").reason, end(events, "waiting").frames) == ("cancelled", 0)
    assert end(events, "next").reason == "stop"
    assert engine.free_slots == 1
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
    assert end(events, "bad") == Failed(request_id="bad", code="engine", message="RuntimeError: it exploded")
    for name in ("good", "fine"):
        np.testing.assert_array_equal(audio(events, name), speak(SpeechRequest(id=name, text=texts[name]))[0])
    assert engine.free_slots == 3


def test_a_later_segment_that_cannot_be_prepared_fails_after_the_audio_before_it() -> None:
    engine = engine_of()
    engine.submit(SpeechRequest(id="a", text="This sentence is quite alright. But this one is unspeakable, alas."))
    events = drain(engine)
    failed = end(events, "a")
    assert (failed.code, "speakable" in failed.message) == ("invalid_request", True)
    assert len(audio(events, "a")) == len("This sentence is quite alright.") * HOP
    assert engine.free_slots == 3


@pytest.mark.parametrize(
    ("request_of", "error", "field"),
    [
        ({"text": "This is unspeakable."}, InvalidRequest, "text"),
        ({"text": "Hi", "voice": "nobody"}, UnknownVoice, "voice"),
        ({"text": "Hi", "language": "klingon"}, UnknownLanguage, "language"),
        ({"text": "Hi", "instructions": "Whisper."}, InvalidRequest, "instructions"),
        ({"text": "Hi", "max_frames": 513}, InvalidRequest, "max_frames"),
        ({"text": "Hi", "max_frames": 2001}, InvalidRequest, "max_frames"),
        ({"text": "Hi", "options": {"loudness": 101}}, InvalidRequest, "loudness"),
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
    engine = Engine(SineModel(voices=()), CONFIG)
    with pytest.raises(InvalidReference, match="ref_audio"):
        engine.submit(SpeechRequest(id="a", text="Hi"))


@pytest.mark.parametrize(("limit", "words"), [({"max_text": 10}, "10"), ({"max_positions": 513}, "513")])
def test_a_prompt_that_does_not_fit_its_slot_is_refused(limit: dict, words: str) -> None:
    engine = engine_of(**limit)
    with pytest.raises(InvalidRequest, match=words) as refusal:
        engine.submit(SpeechRequest(id="a", text="A bit too long to fit.", max_frames=512, language="english"))
    assert refusal.value.field == "text"


def test_an_id_can_be_used_again_only_after_its_end() -> None:
    engine = engine_of()
    engine.submit(SpeechRequest(id="a", text="Hi"))
    with pytest.raises(InvalidRequest, match="still running"):
        engine.submit(SpeechRequest(id="a", text="Hi"))
    drain(engine)
    assert speak(SpeechRequest(id="a", text="Hi"), engine)[1].reason == "stop"


def test_a_reference_is_encoded_once_and_the_cache_is_bounded() -> None:
    model = SineModel()
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
    model = SineModel()
    voice = model.encode_voice([reference("prompt")])
    codes = torch.tensor([[[(5 + at * at) % 50, 50] for at in range(10)]])
    whole = model.codec.decode(torch.cat([voice.reference_frames[None], codes], 1))[0].numpy()
    np.testing.assert_allclose(primed, whole[9 * HOP :], atol=0.51 / 32768)
    np.testing.assert_allclose(unprimed, model.codec.decode(codes)[0].numpy(), atol=0.51 / 32768)


def test_the_prompt_is_told_resolved_sampling_and_the_limit_of_its_segment() -> None:
    seen = []

    class Recorder(SineModel):
        def prepare(self, request, segment, index, before, voice):
            seen.append((request.max_frames, request.sampling, request.language))
            return super().prepare(request, segment, index, before, voice)

    engine = Engine(Recorder(), CONFIG)
    speak(SpeechRequest(id="a", text=LONG, max_frames=100, sampling=SamplingParams(top_k=7)), engine)
    assert [limit for limit, _, _ in seen] == [100, 68, 40, 4]
    assert {(s.top_k, s.temperature, language) for _, s, language in seen} == {(7, 1.0, "auto")}
