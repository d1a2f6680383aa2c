"""Requests whose text arrives while they are spoken: the same audio as of the whole text, and an end in any case."""

import itertools
import random

import msgspec
import numpy as np
import pytest

from fakes.live_sine import LiveSineModel
from fakes.sine import SineModel
from listening import assert_empty, audio, config_of, drain, end, reference, speak
from sonoro.core.errors import InvalidRequest
from sonoro.core.types import Event, Failed, Finished, SpeechRequest
from sonoro.engine.engine import Engine

TEXT = "A text that comes in pieces."
LONG = "A first sentence that is spoken. A second one, with a clause, comes after it! And is this a third? It is."


def live_engine(ticks_late: int = 1, model: SineModel | None = None, **changes: object) -> Engine:
    return Engine(model or LiveSineModel(), config_of(**changes), ticks_late=ticks_late)


def pieces_of(text: str, seed: int) -> list[str]:
    """`text` cut anywhere, empty pieces included."""
    draw = random.Random(seed)
    cuts = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(0, 12)))
    return [text[start:stop] for start, stop in itertools.pairwise([0, *cuts, len(text)])]


def settle(engine: Engine) -> list[Event]:
    """Tick as long as there is something to do, as if no text ever came again."""
    return list(itertools.chain.from_iterable(engine.tick() for _ in iter(lambda: engine.has_work, False)))


def speak_live(engine: Engine, pieces: list[str], ticks: int = 2, **fields: object) -> list[Event]:
    """The events of a live request alone: `ticks` of the engine, if it has work, after each piece."""
    engine.submit(SpeechRequest(id="a", text=pieces[0], is_live=True, **fields))
    events: list[Event] = []
    for piece in pieces[1:]:
        events += [event for _ in range(ticks) if engine.has_work for event in engine.tick()]
        engine.append("a", piece)
    engine.end_text("a")
    return events + drain(engine)


@pytest.mark.parametrize("ticks_late", [0, 1])
@pytest.mark.parametrize("ticks", [0, 1, 3, 50])
def test_any_split_gives_the_audio_of_the_whole_text(ticks: int, ticks_late: int) -> None:
    whole, finished = speak(SpeechRequest(id="a", text=TEXT, seed=3), live_engine())
    for seed in range(12):
        events = speak_live(live_engine(ticks_late), pieces_of(f"  {TEXT} \n", seed), ticks, seed=3)
        np.testing.assert_array_equal(audio(events, "a"), whole)
        ended = end(events, "a")
        assert (ended.reason, ended.frames, ended.characters) == ("stop", finished.frames, len(TEXT) + 4)
