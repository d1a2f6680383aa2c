"""Segments of one request spoken side by side: the same audio, words, faults and end as one after another."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from families import TinyFamily, noise, tiny
from sine_engines import Clock, Engine, assert_empty, audio, config_of, drain, end, tuned
from sine_models import ErringModel, ShownSineModel, SineModel, VoicedSineModel

from sonoro.core.errors import InvalidRequest
from sonoro.core.types import AudioChunk, Event, Failed, Finished, SpeechRequest
from sonoro.engine.request import Progress, Request
from sonoro.models.base import SpeechModel
from sonoro.text.script import scripted

__all__ = ["tiny"]

TEXT = "One comes first here. Another goes on after that. Now a third one is here. And so on it goes. Here it ends."


@dataclass
class Spoken:
    """What came of a request, and the most slots that were taken at once."""

    events: list[Event] = field(default_factory=list)
    slots: int = 0

    @property
    def audio(self) -> np.ndarray:
        return audio(self.events, "a")

    @property
    def end(self) -> Finished | Failed:
        return end(self.events, "a")

    @property
    def words(self) -> list[tuple[str, int, float]]:
        return [(word.text, word.start, word.start_s) for event in self.events for word in event.words or ()]


def speak(model: SpeechModel, text: str, *, slots: int = 4, **fields: object) -> Spoken:
    engine = Engine(model, config_of(slots=slots), ticks_late=1)
    request = SpeechRequest(**{"id": "a", "text": text, "with_words": True} | fields)
    engine.submit(model.spec.resolve(scripted(request, model.spec)))
    spoken = Spoken()
    while engine.has_work:
        spoken.events += engine.tick()
        spoken.slots = max(spoken.slots, slots - engine.scheduler.free_slots)
    assert_empty(engine)
    return spoken


class ApartSineModel(ShownSineModel):
    """Speaks each segment without those before it."""

    def prepare(self, request, segment, index, before, voice):
        return super().prepare(request, segment, index, [], voice)


def assert_same(one: Spoken, other: Spoken) -> None:
    assert np.array_equal(one.audio, other.audio)
    assert [word[:2] for word in one.words] == [word[:2] for word in other.words]
    assert [word[2] for word in one.words] == pytest.approx([word[2] for word in other.words], abs=0.0011)
    assert one.end.reason == other.end.reason
    assert (one.end.frames, one.end.characters) == (other.end.frames, other.end.characters)
    assert one.end.faults == other.end.faults


@pytest.mark.parametrize("parallel", [2, 3, 8])
def test_the_segments_give_the_same_side_by_side(parallel: int) -> None:
    alone, beside = (speak(ApartSineModel(), TEXT, parallel=count) for count in (1, parallel))
    assert_same(alone, beside)
    assert (alone.slots, beside.slots) == (1, min(parallel, 4))
    assert [word for word, *_ in beside.words] == TEXT.replace(".", "").split()


def test_markup_is_played_as_one_after_another() -> None:
    text = 'One.<break time="750ms"/>Two is here.[voice:high][rate:2]Three is here.[pause:1s][rate:1][voice:low]Four.'
    alone, beside = (speak(ApartSineModel(), text, parallel=count, markup="voices") for count in (1, 4))
    assert_same(alone, beside)
    assert (alone.slots, beside.slots) == (1, 4)
    assert [event.pause_s for event in beside.events if isinstance(event, AudioChunk) and event.pause_s] == [0.75, 1.0]


@pytest.mark.parametrize("on_fault", ["mark", "retry", "continue"])
@pytest.mark.parametrize("fault", ["unreached", "ending", "straying"])
def test_faults_are_found_in_each_segment(fault: str, on_fault: str) -> None:
    class Erring(ErringModel):
        def prepare(self, request, segment, index, before, voice):
            return super().prepare(request, segment, index, [], voice)

    fields = {"on_fault": on_fault, "seed": 9}
    alone, beside = (speak(Erring(fault), TEXT, parallel=count, **fields) for count in (1, 4))
    assert beside.slots == 4
    assert [word[:2] for word in alone.words] == [word[:2] for word in beside.words]
    assert len(alone.end.faults) > 2
    assert alone.end.faults == beside.end.faults
    assert alone.end.reason == beside.end.reason == "stop"


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that reach the limit of frames count as ended: those of random weights seldom end by themselves."""
    monkeypatch.setattr(Progress, "is_at_limit", property(lambda progress: False))


def test_every_family_speaks_the_same_side_by_side(tiny: TinyFamily, short_segments: None) -> None:
    """A family that continues what it has said does so neither way here: each line is one of another voice."""
    model = tiny.load(torch.float64).model
    sizes = {"slots": 3, "max_positions": 1024, "max_frames": 6, "chunk_frames": (1, 3)}
    text = "<speak>Goes on.<break time='20ms'/>And then.<break time='30ms'/>A third one.<break/>And so on.</speak>"

    def speak(parallel: int, **fields: object) -> tuple[np.ndarray, Finished]:
        engine = Engine(model, tuned(**sizes), Clock(), ticks_late=1)
        engine.submit(scripted(SpeechRequest(id="a", text=text, parallel=parallel, **fields), model.spec))
        events = drain(engine)
        return audio(events, "a"), end(events, "a")

    if model.spec.is_continued:
        with pytest.raises(InvalidRequest, match="parallel: 3 is not allowed"):
            speak(3)
        voice = {"references": (noise(16000, 0.5, text="One."),)}
        one, other = speak(2, **voice), speak(4, **voice)
    else:
        one, other = speak(1), speak(3)
    assert (one[1].reason, one[1].frames) == (other[1].reason, other[1].frames) == ("stop", 24)
    # Batches and chunks round by a step of 16 bits.
    np.testing.assert_allclose(other[0], one[0], atol=1.01 / 32768, rtol=0)


def test_no_segment_is_prompted_with_those_before_it() -> None:
    """With the model that continues: each is as if it were the first, but for its number."""
    made = speak(SineModel(), "One is here.[pause:1s]Two is here.", parallel=2).audio
    first = speak(SineModel(), "One is here,").audio
    second = speak(SineModel(), "Two is here.", seed=1).audio
    assert np.array_equal(made, np.concatenate([first, np.zeros(8000), second]))


def test_others_take_the_slots_that_come_free_before_further_segments() -> None:
    engine = Engine(ApartSineModel(), config_of(slots=3), ticks_late=0)
    engine.submit(SpeechRequest(id="a", text=TEXT, parallel=8))
    events = engine.tick() + engine.tick()
    for name in "bcd":
        engine.submit(SpeechRequest(id=name, text=TEXT))
    admitted = list[Request]()
    while engine.has_work:
        admitted += [one for one in engine.scheduler.running if one not in admitted]
        events += engine.tick()
    assert_empty(engine)
    assert "".join(one.params.id for one in admitted[:7]) == "aaabcad"
    alone = speak(ApartSineModel(), TEXT).audio
    assert all(np.array_equal(audio(events, name), alone) for name in "abcd")


@pytest.mark.parametrize("ticks", [0, 1, 9, 30, 50])
def test_a_cancelled_request_leaves_nothing(ticks: int) -> None:
    engine = Engine(ApartSineModel(), config_of(slots=3), ticks_late=1)
    engine.submit(SpeechRequest(id="a", text=TEXT, parallel=3, with_words=True))
    events = [event for _ in range(ticks) for event in engine.tick()]
    engine.cancel("a")
    events += drain(engine)
    assert end(events, "a").reason == "cancelled"
    whole = speak(ApartSineModel(), TEXT).audio
    assert np.array_equal(audio(events, "a"), whole[: len(audio(events, "a"))])
    engine.submit(SpeechRequest(id="a", text=TEXT, parallel=3))
    assert np.array_equal(audio(drain(engine), "a"), whole)


@pytest.mark.parametrize("bad", ["unspeakable", "explosive"])
@pytest.mark.parametrize("at", [1, 4])
def test_an_error_in_one_segment_fails_the_request_alone(bad: str, at: int) -> None:
    texts = TEXT.split(". ")
    texts[at] = f"And this is {bad}"
    engine = Engine(VoicedSineModel(), config_of(slots=4), ticks_late=1)
    engine.submit(SpeechRequest(id="a", text=". ".join(texts), parallel=4))
    engine.submit(SpeechRequest(id="b", text=TEXT))
    events = drain(engine)
    assert isinstance(end(events, "a"), Failed)
    assert end(events, "b").reason == "stop"


def test_a_paused_request_stops_and_goes_on() -> None:
    engine = Engine(ApartSineModel(), config_of(slots=3), ticks_late=1)
    engine.submit(SpeechRequest(id="a", text=TEXT, parallel=2))
    events = [event for _ in range(10) for event in engine.tick()]
    engine.pause("a")
    for _ in range(5):
        events += engine.tick()
    assert not engine.has_work
    engine.resume("a")
    events += drain(engine)
    assert np.array_equal(audio(events, "a"), speak(ApartSineModel(), TEXT).audio)


@pytest.mark.parametrize("pages", [6, 8, 11])
def test_segments_share_the_pages_that_there_are(pages: int) -> None:
    engine = Engine(
        ApartSineModel(), config_of(slots=4, page_positions=16, pages=pages, max_positions=96, max_frames=60), Clock()
    )
    for name in "ab":
        engine.submit(SpeechRequest(id=name, text=TEXT, parallel=4))
    events = drain(engine)
    alone = speak(ApartSineModel(), TEXT).audio
    assert all(np.array_equal(audio(events, name), alone) for name in "ab")


def test_a_runaway_ends_the_request_where_it_would_alone() -> None:
    alone, beside = (speak(ErringModel("", runs=(3,)), TEXT, seed=3, parallel=count) for count in (1, 4))
    assert (alone.end.reason, alone.end.frames) == (beside.end.reason, beside.end.frames)
    assert alone.end.reason == "runaway"
    assert np.array_equal(alone.audio, beside.audio)


def test_held_audio_is_bounded_while_one_segment_lasts() -> None:
    """Of those behind a long one, as many begin as twice the number of segments at once."""
    engine = Engine(ApartSineModel(), config_of(slots=3), ticks_late=1)
    text = " ".join(["This one is a longer one than the others.", *(f"Number {at}." for at in range(9))])
    engine.submit(scripted(SpeechRequest(id="a", text=text.replace(". ", ".[pause:1ms]"), parallel=2), engine.spec))
    begun = 0
    while engine.has_work:
        made = engine.tick()
        begun = max([begun, *(one.first for one in engine.scheduler.running)])
        if any(isinstance(event, AudioChunk) for event in made):
            break
    assert begun == 3
    engine.cancel("a")
    drain(engine)


def test_what_parallel_cannot_do_is_refused() -> None:
    spec = SineModel().spec
    with pytest.raises(InvalidRequest, match="parallel: 2 is not allowed; a maximum of frames counts"):
        spec.resolve(SpeechRequest(id="a", text="Hi.", parallel=2, max_frames=9))
    with pytest.raises(InvalidRequest, match="parallel: 2 is not allowed; live text"):
        spec.resolve(SpeechRequest(id="a", text="Hi.", parallel=2, is_live=True))
    with pytest.raises(InvalidRequest, match="parallel: 257"):
        SpeechRequest(id="a", text="Hi.", parallel=257)
