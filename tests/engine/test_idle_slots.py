"""A live request that waits for text keeps its slot until others have waited for it: then it is spoken as far as it has
come, and goes on when its text does."""

import numpy as np
import pytest
from sine_engines import Clock, Engine, assert_empty, audio, config_of, drain, end, speak
from sine_models import LiveSineModel, SineText

from sonoro.core.types import Event, SpeechRequest
from sonoro.engine.scheduler import IDLE_SLOT_S


class WordText(SineText):
    """The ids of a word are certain once a space follows it."""

    def feed(self, text, held=1):
        self.text += text
        spoken = self.text.strip()
        certain = self.text.lstrip().rfind(" ") if held else len(spoken)
        ready = spoken[self.given : max(certain, self.given)]
        self.given += len(ready)
        return [ord(character) for character in ready]


class WordModel(LiveSineModel):
    def live_text(self, request, voice):
        return WordText()


class Idle:
    """An engine of one slot, in which request "a" has come as far as `text`, and waits for more."""

    def __init__(self, text: str, model: LiveSineModel | None = None, **changes: object) -> None:
        self.clock, self.model, self.events = Clock(), model or WordModel(), list[Event]()
        self.engine = Engine(self.model, config_of(slots=1, **changes), self.clock, 1)
        self.submit("a", text, is_live=True)
        self.settle()

    def submit(self, name: str, text: str, **fields: object) -> None:
        self.engine.submit(SpeechRequest(id=name, text=text, **fields))

    def settle(self, after_s: float = 0.0) -> None:
        """Tick as long as there is something to do, `after_s` from now."""
        self.clock.now_s += after_s
        while self.engine.has_work:
            self.events += self.engine.tick()

    def ended(self) -> list[str]:
        return [event.request_id for event in self.events if not hasattr(event, "pcm")]


@pytest.mark.parametrize(
    ("model", "text", "spoken", "rest"),
    [
        (WordModel(), "Half of a sen", "Half of a", "tence, goes on."),
        (WordModel(), "Half of a ", "Half of a", "sentence goes on."),
        (WordModel(), "A whole sentence. And", "A whole sentence.", " another."),
        # The model has the first letters of the word.
        (LiveSineModel(), "Half of a sen", "Half of a sen", "tence, goes on."),
        (LiveSineModel(), "Half", "Half", " a sentence."),
    ],
)
def test_a_half_sentence_is_spoken_and_makes_room(model: LiveSineModel, text: str, spoken: str, rest: str) -> None:
    idle = Idle(text, model)
    idle.submit("b", "Somebody else.")
    idle.settle()
    idle.settle(IDLE_SLOT_S - 0.1)
    assert idle.ended() == []
    idle.settle(0.2)
    assert idle.ended() == ["b"]
    np.testing.assert_array_equal(audio(idle.events, "b"), speak(SpeechRequest(id="b", text="Somebody else."))[0])
    np.testing.assert_array_equal(audio(idle.events, "a"), speak(SpeechRequest(id="a", text=spoken))[0])
    assert (idle.engine.scheduler.free_slots, idle.engine.waiting) == (1, 1)
    idle.engine.append("a", rest)
    idle.engine.end_text("a")
    idle.settle(100.0)
    ended = end(idle.events, "a")
    later = (text + rest).removeprefix(spoken).strip()
    assert (ended.reason, ended.frames, ended.characters) == ("stop", len(spoken) + len(later), len(text + rest))
    assert len(audio(idle.events, "a")) == 80 * ended.frames
    assert_empty(idle.engine)


def test_it_keeps_its_slot_while_nobody_waits_and_while_it_goes_on() -> None:
    idle = Idle("Half of a ")
    idle.settle(3600.0)
    assert idle.engine.scheduler.free_slots == 0
    idle.submit("b", "Somebody else.")
    for word in ("sentence ", "which ", "goes ", "on "):
        idle.settle(IDLE_SLOT_S - 0.1)
        idle.engine.append("a", word)
        idle.settle()
    idle.engine.end_text("a")
    idle.settle()
    assert idle.ended() == ["a", "b"]
    whole = speak(SpeechRequest(id="a", text="Half of a sentence which goes on"))[0]
    np.testing.assert_array_equal(audio(idle.events, "a"), whole)


def test_who_goes_on_after_it_waits_behind_those_who_wait() -> None:
    idle = Idle("Half of a ", segment_letters=40)
    for name in ("b", "c"):
        idle.submit(name, "Somebody else.")
    idle.settle()
    idle.clock.now_s += IDLE_SLOT_S
    idle.events += idle.engine.tick()
    idle.engine.append("a", "sentence that goes on. And then on in another one.")
    idle.engine.end_text("a")
    # Its next segment comes after them, the others before who comes later.
    while "b" not in idle.ended():
        idle.events += idle.engine.tick()
    idle.submit("d", "Who comes later.")
    idle.events += drain(idle.engine)
    assert idle.ended() == ["b", "c", "a", "d"]


def test_it_can_be_cancelled_while_its_last_words_are_spoken() -> None:
    idle = Idle("Half of a ")
    idle.submit("b", "Somebody else.")
    idle.settle()
    idle.clock.now_s += IDLE_SLOT_S
    idle.events += idle.engine.tick()
    idle.engine.cancel("a")
    idle.events += drain(idle.engine)
    assert idle.ended() == ["a", "b"]
    assert end(idle.events, "a").reason == "cancelled"
