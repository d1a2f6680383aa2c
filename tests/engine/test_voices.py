"""Voices encoded beside the ticks: who waits for one holds no slot, and nobody else waits."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor

import numpy as np
import pytest
from sine_engines import Engine, assert_empty, audio, config_of, drain, end, reference, speak
from sine_models import VoicedSineModel

from sonoro.audio.references import content_hash
from sonoro.core.errors import EngineBusy, InvalidReference, InvalidRequest, UnknownVoice
from sonoro.core.types import Event, Failed, Finished, Reference, SpeechRequest
from sonoro.models.base import Voice
from sonoro.transport.encoded_voice import EncodedVoice

TEXT = "Some words to say."


class Later(Executor):
    """Runs what was submitted, in order, when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future, Callable]] = []

    def submit(self, function, /, *args, **kwargs):
        future = Future()
        self.jobs.append((future, lambda: function(*args, **kwargs)))
        return future

    def run(self) -> None:
        jobs, self.jobs = self.jobs, []
        for future, job in jobs:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(job())
                except Exception as error:
                    future.set_exception(error)


class Choosy(VoicedSineModel):
    """Cannot use a reference at a rate of 1000; the voice of any other is as high as its transcript is long."""

    def encode_voice(self, references):
        if references[0].sample_rate == 1000:
            self.encoded += 1
            raise InvalidReference("ref_audio", "1000 Hz", "it must be at more")
        voice = super().encode_voice(references)
        return type(voice)(len(references[0].text or ""), voice.reference_frames)


class Held(VoicedSineModel):
    """Says when it has begun to encode, and goes on when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def encode_voice(self, references):
        self.has_begun.set()
        assert self.may_end.wait(60)
        return super().encode_voice(references)


def clone(name: str, text: str = TEXT, **kind: object) -> SpeechRequest:
    return SpeechRequest(id=name, text=text, references=(reference(**kind),))


def bad(name: str) -> SpeechRequest:
    return SpeechRequest(id=name, text=TEXT, references=(Reference(pcm=bytes(4000), sample_rate=1000, text="hm"),))


def said(text: str) -> tuple[Reference, ...]:
    made = reference()
    return (Reference(pcm=made.pcm, sample_rate=made.sample_rate, text=text),)


@pytest.fixture
def later() -> Later:
    return Later()


@pytest.fixture
def model() -> VoicedSineModel:
    return Choosy()


@pytest.fixture
def engine(model: VoicedSineModel, later: Later) -> Engine:
    return Engine(model, config_of(), ticks_late=1, executor=later)


@pytest.fixture
def thread() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def until_idle(engine: Engine) -> list[Event]:
    events = []
    while engine.has_work or engine.voices.awaiting:
        events += engine.tick()
    assert_empty(engine)
    return events


def test_wherever_a_voice_is_encoded_it_sounds_the_same(thread: Executor) -> None:
    expected, _ = speak(clone("a"), Engine(Choosy(), config_of()))
    engine = Engine(Choosy(), config_of(), executor=thread)
    engine.submit(clone("a"))
    np.testing.assert_array_equal(audio(until_idle(engine), "a"), expected)


def test_who_waits_for_a_voice_holds_no_slot_and_is_no_work(engine: Engine, later: Later) -> None:
    engine.submit(clone("a"))
    assert (engine.scheduler.free_slots, engine.waiting, len(engine.voices.awaiting)) == (3, 1, 1)
    assert not engine.has_work
    assert engine.tick() == []
    later.run()
    assert engine.has_work
    events = drain(engine)
    assert end(events, "a").reason == "stop"
    assert not engine.voices.awaiting
    np.testing.assert_array_equal(audio(events, "a"), speak(clone("a"), Engine(Choosy(), config_of()))[0])


def test_a_stream_goes_on_while_a_reference_is_encoded(thread: Executor) -> None:
    """The reference is done only once the stream has ended, so a tick that waited for it would wait for ever."""
    model = Held()
    engine = Engine(model, config_of(), ticks_late=1, executor=thread)
    engine.submit(clone("cloned"))
    assert model.has_begun.wait(60)
    engine.submit(SpeechRequest(id="steady", text=TEXT))
    events = []
    while not any(isinstance(event, Finished) for event in events):
        assert engine.has_work
        events += engine.tick()
    assert {event.request_id for event in events} == {"steady"}
    model.may_end.set()
    assert end(until_idle(engine), "cloned").reason == "stop"


def test_a_reference_asked_for_twice_at_once_is_encoded_once(
    engine: Engine, model: VoicedSineModel, later: Later
) -> None:
    for name in ("a", "b", "c"):
        engine.submit(clone(name))
    later.run()
    events = drain(engine)
    assert model.encoded == 1
    assert [end(events, name).reason for name in "abc"] == ["stop"] * 3
    engine.submit(clone("d"))
    assert not later.jobs
    assert end(drain(engine), "d").reason == "stop"


def test_a_reference_that_cannot_be_used_fails_its_requests_and_is_tried_again(
    engine: Engine, model: VoicedSineModel, later: Later
) -> None:
    for turn in (1, 2):
        for request in (bad("a"), bad("b"), SpeechRequest(id="good", text=TEXT)):
            engine.submit(request)
        later.run()
        events = drain(engine)
        for name in "ab":
            failed = end(events, name)
            assert isinstance(failed, Failed)
            facts = failed.facts
            assert (facts.code, facts.field, facts.value) == ("invalid_reference", "ref_audio", "'1000 Hz'")
        assert end(events, "good").reason == "stop"
        assert model.encoded == turn


def test_encoded_at_once_it_is_refused_at_once() -> None:
    engine = Engine(Choosy(), config_of())
    for _ in range(2):
        with pytest.raises(InvalidReference, match="1000 Hz"):
            engine.submit(bad("a"))
    assert_empty(engine)


def test_a_text_that_cannot_be_spoken_fails_once_the_voice_is_there(engine: Engine, later: Later) -> None:
    engine.submit(clone("a", "It is unspeakable."))
    later.run()
    assert end(drain(engine), "a").facts.code == "invalid_request"


def test_a_request_that_is_cancelled_gives_up_its_voice(engine: Engine, model: VoicedSineModel, later: Later) -> None:
    engine.submit(clone("a"))
    engine.submit(clone("b"))
    engine.cancel("a")
    assert (end(engine.tick(), "a").reason, engine.waiting) == ("cancelled", 1)
    # The other still wants it.
    later.run()
    assert (model.encoded, end(drain(engine), "b").reason) == (1, "stop")
    engine.submit(clone("c", pitch=0.7))
    engine.cancel("c")
    later.run()
    assert (model.encoded, end(drain(engine), "c").frames) == (1, 0)
    engine.submit(clone("c", pitch=0.7))
    later.run()
    assert (model.encoded, end(drain(engine), "c").reason) == (2, "stop")


def test_a_cancel_while_its_reference_is_being_encoded_is_answered_at_once(thread: Executor) -> None:
    model = Held()
    engine = Engine(model, config_of(), executor=thread)
    engine.submit(clone("a"))
    assert model.has_begun.wait(60)
    engine.cancel("a")
    assert end(engine.tick(), "a").reason == "cancelled"
    assert_empty(engine)
    model.may_end.set()
    engine.submit(clone("a"))
    assert end(until_idle(engine), "a").reason == "stop"


def test_what_failed_when_nobody_waited_for_it_any_more_is_tried_again(thread: Executor) -> None:
    class Faulty(Held):
        def encode_voice(self, references):
            voice = super().encode_voice(references)
            if self.encoded == 1:
                raise MemoryError
            return voice

    model = Faulty()
    engine = Engine(model, config_of(), executor=thread)
    engine.submit(clone("a"))
    assert model.has_begun.wait(60)
    engine.cancel("a")
    model.may_end.set()
    thread.submit(int).result(60)  # one thing after the other: the reference has failed by then
    engine.submit(clone("b"))
    assert end(until_idle(engine), "b").reason == "stop"


def test_who_waits_for_a_voice_counts_as_waiting(model: VoicedSineModel, later: Later) -> None:
    engine = Engine(model, config_of(slots=1, max_queued=2), executor=later)
    for name in ("a", "b", "c"):
        engine.submit(clone(name))
    with pytest.raises(EngineBusy):
        engine.submit(SpeechRequest(id="d", text=TEXT))
    with pytest.raises(EngineBusy):
        engine.encode_voice(said("hm"))
    later.run()
    events = drain(engine)
    assert [end(events, name).reason for name in "abc"] == ["stop"] * 3


def test_a_request_that_is_paused_before_its_voice_is_there_stays_paused(engine: Engine, later: Later) -> None:
    engine.submit(clone("a"))
    engine.pause("a")
    later.run()
    assert engine.tick() == engine.tick() == []
    assert not engine.has_work
    engine.resume("a")
    assert end(drain(engine), "a").reason == "stop"


def encode(engine: Engine, later: Later, text: str) -> EncodedVoice:
    encoded = engine.encode_voice(said(text))
    later.run()
    return encoded.result(0)


def named(name: str, digest: str) -> SpeechRequest:
    """A request for a registered voice, as a server resolves it."""
    return SpeechRequest(id=name, text=TEXT, voice="anna", voice_digest=digest)


def test_an_upload_is_encoded_once_and_kept_for_who_speaks_first(
    engine: Engine, model: VoicedSineModel, later: Later
) -> None:
    encoded = encode(engine, later, "hm")
    engine.submit(named("a", encoded.digest))
    engine.submit(SpeechRequest(id="b", text=TEXT, references=said("hm")))
    assert (later.jobs, engine.voices.take_wanted()) == ([], []), "nothing is encoded again, nor fetched"
    events = drain(engine)
    np.testing.assert_array_equal(audio(events, "a"), audio(events, "b"))
    assert model.encoded == 1


def test_an_encoded_voice_that_is_not_here_is_asked_for_once_and_sounds_like_its_reference(
    engine: Engine, model: VoicedSineModel, later: Later
) -> None:
    digest, data = encode(Engine(Choosy(), config_of(), executor=later), later, "as long as this")
    for name in "ab":
        engine.submit(named(name, digest))
    assert engine.voices.take_wanted() == [digest]
    assert (engine.voices.take_wanted(), len(engine.voices.awaiting), engine.has_work) == ([], 2, False)
    engine.voices.load(digest, data)
    later.run()
    events = drain(engine)
    assert model.encoded == 0
    inline = SpeechRequest(id="a", text=TEXT, references=said("as long as this"))
    expected, _ = speak(inline, Engine(Choosy(), config_of()))
    for name in "ab":
        np.testing.assert_array_equal(audio(events, name), expected)
    engine.submit(named("c", digest))
    assert (engine.voices.take_wanted(), later.jobs) == ([], [])
    drain(engine)


def test_a_voice_that_cannot_be_had_fails_its_requests_and_is_asked_for_again(engine: Engine, later: Later) -> None:
    digest, data = encode(Engine(Choosy(), config_of(), executor=later), later, "hm")
    engine.submit(named("a", digest))
    assert engine.voices.take_wanted() == [digest]
    engine.voices.lose(digest, UnknownVoice("voice", "anna", "it has just been deleted"))
    assert end(drain(engine), "a").facts.code == "unknown_voice"
    engine.submit(named("a", digest))
    assert engine.voices.take_wanted() == [digest]
    engine.voices.load(digest, data)
    later.run()
    assert end(drain(engine), "a").reason == "stop"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data[:-1], "its header says"),
        (lambda data: b"", "no encoded voice"),
        (lambda data: b"\xff" * 100, "no encoded voice"),
        (lambda data: data.replace(b"of a sine", b"of others"), "with other weights or another dtype"),
        (lambda data: data.replace(b'"pitch', b'"patch').replace(b"pitch", b"patch"), "pitch"),
    ],
)
def test_what_is_no_voice_of_this_model_fails_who_asked_for_it(
    change: Callable[[bytes], bytes], words: str, engine: Engine, later: Later
) -> None:
    digest, data = encode(Engine(Choosy(), config_of(), executor=later), later, "hm")
    engine.submit(named("a", digest))
    engine.voices.load(digest, change(data))
    later.run()
    failed = end(drain(engine), "a")
    assert isinstance(failed, Failed)
    assert words in failed.facts.message
    assert_empty(engine)


def test_a_voice_that_comes_when_nobody_wants_it_any_more_is_passed_over(engine: Engine, later: Later) -> None:
    digest, data = encode(Engine(Choosy(), config_of(), executor=later), later, "hm")
    engine.voices.load(digest, data)
    engine.submit(named("a", digest))
    engine.cancel("a")
    engine.voices.load(digest, data)
    engine.voices.lose(digest, EngineBusy("late"))
    assert later.jobs == []
    assert end(drain(engine), "a").reason == "cancelled"
    engine.submit(named("a", digest))
    assert engine.voices.take_wanted() == [digest] * 2
    engine.voices.load(digest, data)
    later.run()
    assert end(drain(engine), "a").reason == "stop"


def test_an_upload_goes_on_when_nobody_else_wants_its_voice(engine: Engine, later: Later) -> None:
    engine.submit(SpeechRequest(id="a", text=TEXT, references=said("hm")))
    encoded = engine.encode_voice(said("hm"))
    engine.cancel("a")
    later.run()
    assert encoded.result(0).data
    drain(engine)


def test_nothing_is_kept_of_a_voice_that_was_left_while_it_was_being_saved(
    model: VoicedSineModel, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, made, encode_voice = Engine(model, config_of(max_voices=1), executor=later), [], model.encode_voice

    def watched(references: tuple[Reference, ...]) -> Voice:
        voice = encode_voice(references)
        made.append(weakref.ref(voice))
        return voice

    monkeypatch.setattr(model, "encode_voice", watched)
    engine.submit(SpeechRequest(id="a", text=TEXT, references=said("hm")))
    encoded = engine.encode_voice(said("hm"))
    engine.cancel("a")
    later.run()
    assert encoded.result(0).data
    drain(engine)
    encode(engine, later, "another")
    gc.collect()
    assert [voice() is None for voice in made] == [True, False]


def test_an_upload_does_not_wait_for_its_voice_to_be_fetched(engine: Engine, later: Later) -> None:
    """The same recording was registered before, and a request with that voice came first."""
    stored = encode(Engine(Choosy(), config_of(), executor=later), later, "hm")
    engine.submit(named("a", stored.digest))
    encoded = engine.encode_voice(said("hm"))
    later.run()
    assert encoded.result(0).digest == stored.digest
    engine.voices.load(stored.digest, stored.data)
    later.run()
    assert end(drain(engine), "a").reason == "stop"


def test_an_upload_that_cannot_be_used_says_why_and_is_tried_again(
    engine: Engine, model: VoicedSineModel, later: Later
) -> None:
    for turn in (1, 2):
        failed = engine.encode_voice(bad("a").references)
        later.run()
        with pytest.raises(InvalidReference, match="1000 Hz"):
            failed.result(0)
        assert model.encoded == turn


def test_a_model_that_only_clones_speaks_as_a_registered_voice() -> None:
    engine = Engine(VoicedSineModel(voices=()), config_of())
    with pytest.raises(UnknownVoice, match="sine has no named voices"):
        engine.submit(SpeechRequest(id="a", text=TEXT, voice="anna"))
    digest = engine.encode_voice(said("hm")).result(0).digest
    assert speak(named("a", digest), engine)[1].reason == "stop"


def test_a_speaker_embedding_is_a_voice() -> None:
    """That of the sine model is as high as the sum of its numbers."""
    embedded, _ = speak(SpeechRequest(id="a", text=TEXT, speaker_embedding=(2.0, 3.0)))
    np.testing.assert_array_equal(embedded, speak(clone("a", use="reference"))[0])


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"speaker_embedding": (1.0,)}, "speaker_embedding", "it must have 2"),
        ({"speaker_embedding": ()}, "speaker_embedding", "it must have 2"),
        ({"speaker_embedding": (1.0, float("nan"))}, "speaker_embedding", "each number must be finite"),
        ({"speaker_embedding": (1.0, float("-inf"))}, "speaker_embedding", "each number must be finite"),
        ({"speaker_embedding": (1e5, 0.0)}, "speaker_embedding", "at most 10000 away from 0"),
        ({"speaker_embedding": (0.0, "1")}, "speaker_embedding", "each number must be finite"),
        ({"speaker_embedding": (0.0, 0.0), "voice": "low"}, "voice", "the speaker embedding is the voice"),
        (
            {"speaker_embedding": (0.0, 0.0), "references": said("hm")},
            "references",
            "the speaker embedding is the voice",
        ),
    ],
)
def test_a_speaker_embedding_that_cannot_be_used_is_refused(changes: dict, field: str, words: str) -> None:
    engine = Engine(VoicedSineModel(), config_of())
    with pytest.raises(InvalidRequest, match=words) as refusal:
        engine.submit(SpeechRequest(id="a", text=TEXT, **changes))
    assert refusal.value.field == field
    assert_empty(engine)


def test_the_hash_tells_audio_rate_transcript_and_use_apart() -> None:
    made = reference()
    others = [
        reference(pitch=0.2),
        reference("reference"),
        Reference(pcm=made.pcm, sample_rate=16000, text=made.text),
        Reference(pcm=made.pcm, sample_rate=8000, text="hmm"),
    ]
    hashes = {content_hash((other,)) for other in (made, *others)} | {content_hash((made, made))}
    assert len(hashes) == 6
    assert content_hash((made,)) == content_hash((reference(),))
