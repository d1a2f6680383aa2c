"""What a slot has room for: earlier segments are left out where it has not, and a bound that the operator may lift."""

import pytest
from sine_engines import Engine, config_of, drain, end
from sine_models import SineModel

from sonoro.core.types import SpeechRequest

SENTENCES = [f"This is sentence number {number}." for number in range(7)]


class Remembering(SineModel):
    """Its prompts hold all that was said before."""

    def __init__(self):
        super().__init__()
        self.heard = []

    def prepare(self, request, segment, index, before, voice):
        prompt = super().prepare(request, segment, index, [], voice)
        self.heard.append([text for text, _ in before])
        prompt.positions += sum(len(frames) for _, frames in before)
        return prompt


def said(max_positions):
    """What each segment's prompt was last made after, and how the request ended."""
    model = Remembering()
    engine = Engine(model, config_of(segment_letters=30, max_frames=40, max_positions=max_positions))
    engine.submit(SpeechRequest(id="a", text=" ".join(SENTENCES)))
    return model.heard, end(drain(engine), "a")


def test_earlier_segments_are_left_out_once_a_slot_has_no_room_for_them() -> None:
    length = len(SENTENCES[0])
    heard, finished = said(max_positions=2000)
    assert heard == [SENTENCES[:index] for index in range(7)]
    assert (finished.reason, finished.frames) == ("stop", 7 * length)
    # Its own positions, a limit of 40 frames, and three segments before.
    heard, finished = said(max_positions=length + 40 + 3 * length)
    assert (finished.reason, finished.frames) == ("stop", 7 * length)
    assert heard[:4] == [SENTENCES[:index] for index in range(4)]
    assert heard[4:] == [made for index in range(4, 7) for made in (SENTENCES[:index], SENTENCES[index - 3 : index])]


def test_a_long_text_can_be_one_segment() -> None:
    text = " ".join(SENTENCES * 8)
    for most, segments in ((300, 7), (100_000, 1)):
        model = Remembering()
        sizes = {"max_frames": 2000, "max_positions": 9000, "prefill_tokens": 9000}
        engine = Engine(model, config_of(segment_letters=most, **sizes))
        engine.submit(SpeechRequest(id="a", text=text, max_frames=2000))
        drain(engine)
        assert len(model.heard) == segments


def test_the_white_space_before_a_text_reaches_the_model() -> None:
    class Hearing(SineModel):
        def prepare(self, request, segment, index, before, voice):
            heard.append(segment)
            return super().prepare(request, segment, index, before, voice)

    heard: list[str] = []
    engine = Engine(Hearing(), config_of(segment_letters=30))
    engine.submit(SpeechRequest(id="a", text="  \n One sentence, and another.  Then a third one."))
    assert end(drain(engine), "a").reason == "stop"
    assert heard == ["  \n One sentence, and another.", "Then a third one."]


def test_what_does_not_fit_alone_is_refused() -> None:
    model = Remembering()
    engine = Engine(model, config_of(segment_letters=60, max_frames=40, max_positions=60))
    engine.submit(SpeechRequest(id="a", text="Short one. This one is too long for a slot that has so few."))
    assert "positions; at most 60" in end(drain(engine), "a").facts.message


@pytest.mark.parametrize(("bounds_by_text", "frames"), [(True, 500), (False, 700)])
def test_the_bound_from_the_text_can_be_lifted(bounds_by_text: bool, frames: int) -> None:
    """5 s are the least that a text is given: 500 frames of 10 ms."""
    engine = Engine(SineModel(), config_of(max_frames=700, max_positions=2000, bounds_by_text=bounds_by_text))
    engine.submit(SpeechRequest(id="a", text="Goes on.", ignore_eos=True))
    finished = end(drain(engine), "a")
    assert (finished.reason, finished.frames) == ("runaway", frames)
