"""Lines of a script in voices that are not the model's own: loaded before the first, each with its own prompt."""

from concurrent.futures import Executor, Future

import numpy as np
import pytest
from families import TinyFamily, noise, tiny
from sine_engines import Clock, Engine, audio, config_of, drain, end, reference, tuned
from sine_models import ShownSineModel, VoicedSineModel

from sonoro.core.errors import InvalidRequest
from sonoro.core.types import Failed, Finished, SpeechRequest
from sonoro.engine.request import Progress
from sonoro.text.script import Cue, dialogue, scripted

__all__ = ["tiny"]

TEXT = "[voice:ann]One is here.[pause:1s][voice:low]Two is here.[pause:1s][voice:Bob]Three is here."


class Later(Executor):
    """Runs a job when told to."""

    def __init__(self) -> None:
        self.jobs = []

    def submit(self, function, /, *args, **kwargs):
        future = Future()
        self.jobs.append(lambda: future.set_result(function(*args, **kwargs)))
        return future


def test_all_voices_are_loaded_before_the_first_line() -> None:
    executor = Later()
    engine = Engine(VoicedSineModel(), config_of(), executor=executor)
    cast = {"ann": reference(), "bob": reference("reference"), "eve": reference("reference", 0.3)}
    request = scripted(SpeechRequest(id="a", text=TEXT, markup="voices", cast=cast), engine.spec)
    assert request.cast.keys() == {"ann", "bob"}
    engine.submit(request)
    assert (len(executor.jobs), engine.waiting, engine.has_work) == (2, 1, False)
    executor.jobs[1]()
    assert not engine.has_work
    executor.jobs[0]()
    events = drain(engine)
    assert end(events, "a").reason == "stop"
    made = audio(events, "a")
    engine.submit(SpeechRequest(id="b", text="Two is here,", voice="low", seed=1))
    alone = audio(drain(engine), "b")
    at = 80 * len("One is here,") + 8000
    assert np.array_equal(made[at : at + len(alone) - 2], alone[:-2])


def test_a_voice_that_cannot_be_encoded_fails_the_request() -> None:
    class Deaf(VoicedSineModel):
        def encode_voice(self, references):
            if references[0].use == "reference":
                raise InvalidRequest("ref_audio", "given", "it cannot be used")
            return super().encode_voice(references)

    engine = Engine(Deaf(), config_of())
    cast = {"ann": reference(), "bob": reference("reference")}
    with pytest.raises(InvalidRequest, match="it cannot be used"):
        engine.submit(scripted(SpeechRequest(id="a", text=TEXT, markup="voices", cast=cast), engine.spec))
    assert not engine.has_work
    engine.submit(SpeechRequest(id="a", text="Hi there."))
    assert not isinstance(end(drain(engine), "a"), Failed)


def test_a_model_that_cannot_clone_refuses_recordings() -> None:
    engine = Engine(ShownSineModel(), config_of())
    request = SpeechRequest(id="a", text=TEXT, markup="voices", cast={"ann": reference(), "bob": reference()})
    with pytest.raises(InvalidRequest, match="cast"):
        engine.submit(scripted(request, engine.spec))


def test_words_carry_the_voice_that_markup_gives() -> None:
    engine = Engine(ShownSineModel(), config_of())
    text = "So it is. [voice:high]One is here.[pause:1s][voice:low]Two."
    engine.submit(scripted(SpeechRequest(id="a", text=text, markup="voices", with_words=True), engine.spec))
    words = [word for event in drain(engine) for word in event.words or ()]
    voices = {"So": None, "it": None, "is": None, "One": "high", "here": "high", "Two": "low"}
    assert [(word.text, word.voice) for word in words][3:] == [
        (name, voices[name] if name != "is" else "high") for name in ("One", "is", "here", "Two")
    ]
    assert [word.voice for word in words[:3]] == [None] * 3
    assert "voice" not in words[0].fields
    assert words[-1].fields["voice"] == "low"


def test_forty_lines_of_four_voices_by_every_family(tiny: TinyFamily, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own voices and of recordings, as far as it has them and can clone; one after another and side by side."""
    # Random weights seldom end a segment by themselves.
    monkeypatch.setattr(Progress, "is_at_limit", property(lambda progress: False))
    model = tiny.load().model
    spec = model.spec
    can_clone = "cloned" in spec.voice_modes
    cast = {f"speaker {at}": noise(24000, 0.5, text=f"Number {at}.") for at in range(3 if can_clone else 0)}
    voices = [*spec.voices[: 4 - len(cast)], *cast] if spec.voices else [*cast]
    cues = [Cue(f"Number {at}.", voices[at % len(voices)]) for at in range(40)]
    sizes = {"slots": 4, "max_positions": 1024, "max_frames": 2, "chunk_frames": (1, 2), "bounds_by_text": False}
    frames = {}
    for parallel in (1, 4):
        engine = Engine(model, tuned(**sizes), Clock(), ticks_late=1)
        own = {"references": (noise(24000, 0.5, text="A."),)} if parallel > 1 and spec.is_continued else {}
        request = SpeechRequest(id="a", text=dialogue(cues), markup="voices", cast=cast, parallel=parallel, **own)
        engine.submit(scripted(request, spec))
        events = drain(engine)
        assert isinstance(end(events, "a"), Finished), end(events, "a")
        assert end(events, "a").reason == "stop"
        frames[parallel] = end(events, "a").frames
        assert len(audio(events, "a")) >= 39 * round(0.3 * spec.sample_rate)
    assert frames[1] == frames[4] == 80
