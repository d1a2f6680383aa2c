"""Choose the heads of a loaded model that point at its text: it speaks a few sentences while all of them are watched.

Knows the protocols of `models` and no model. How heads are judged is in `words.calibration`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError
from sonoro.core.text import Segment
from sonoro.core.types import Failed, SpeechRequest
from sonoro.engine.engine import Engine
from sonoro.engine.words import RequestWords
from sonoro.models.words import ShowsWords
from sonoro.words.calibration import Candidate, Reading, candidates, choose
from sonoro.words.heads import WordHeads
from sonoro.words.tracking import AHEAD, Pointing

if TYPE_CHECKING:
    import numpy.typing as npt

    from sonoro.core.types import ModelSpec
    from sonoro.models.base import SpeechModel

__all__ = ["TEXTS", "Calibration", "calibrate"]

logger = logging.getLogger(__name__)

TEXTS = (
    "When the rain had stopped, the children ran outside, and their mother closed the window.",
    "On Monday we talked about the garden, the kitchen, and the colour of the front door.",
    "She put the letter on the table, turned off the light, and waited for the morning train.",
    "If you ask me, the old bridge is too narrow, but nobody wants to build another one.",
    "My brother lives near the harbour, so he hears the ships, even in the middle of the night.",
    "First we bought some apples, then we walked home slowly, because the sun was still warm.",
)
"""Short enough for every model to take at once, with marks to pause at."""


@dataclass(frozen=True)
class Calibration:
    """The table that was found, and how every head that looked at the text did, by layout."""

    heads: WordHeads
    judged: dict[str, list[Candidate]]


def calibrate(model: SpeechModel, *, voice: str | None = None, texts: Sequence[str] = TEXTS) -> Calibration:
    """Find which heads of `model` point at its text, and leave them set in it.

    Has to come before any engine of `model`. On a random model it finds none. Raises `ConfigError` for a model that
    cannot show what it looks at, and what the model raises for the texts.
    """
    if not isinstance(model, ShowsWords):
        raise ConfigError("model", model.spec.name, "it cannot show what its attention looks at")
    layers, heads = model.attention_heads
    places = tuple((layer, head) for layer in range(layers) for head in range(heads))
    judged: dict[str, list[Candidate]] = {}
    chosen: dict[str, Pointing | None] = {}
    model.word_heads = WordHeads(candidates=places)
    try:
        engine = _Listening(
            model,
            EngineConfig(slots=len(texts), max_positions=1024, max_frames=300, prefill_tokens=1024, is_eager=True),
        )
        for layout, options in model.text_layouts.items():
            requests = [
                SpeechRequest(
                    id=f"{layout}-{number}",
                    text=text,
                    voice=voice,
                    seed=number,
                    with_words=True,
                    attempts=1,
                    options=dict(options),
                )
                for number, text in enumerate(texts)
            ]
            along = layout == "text_along"
            readings = engine.read(requests, along=along)
            judged[layout] = candidates(readings, places, model.spec.frame_s, model.spec.sample_rate)
            chosen[layout] = choose(judged[layout], along=along)
    finally:
        model.word_heads = WordHeads()
    model.word_heads = WordHeads(text_first=chosen.get("text_first"), text_along=chosen.get("text_along"))
    logger.info("event=calibrated model=%r heads=%s", model.spec.name, model.word_heads.places)
    return Calibration(model.word_heads, judged)


class _Listening(Engine):
    """An engine that keeps what all watched heads looked at."""

    def read(self, requests: Sequence[SpeechRequest], *, along: bool) -> list[Reading]:
        """Speak `requests`, of a segment each."""
        kept = []
        for request in requests:
            self.submit(self.spec.resolve(request))
            running = self._running[request.id]
            segment, prompt = running.segment, running.progress.prompt
            assert segment is not None
            assert prompt is not None
            assert isinstance(self._model, ShowsWords)
            running.words = _Kept(self._model, self.spec, request.text)
            running.words.keep(segment, self._model.text_start(prompt))
            kept.append(running.words)
        while self.has_work:
            for event in self.tick():
                if isinstance(event, Failed):
                    raise event.error
        return [one.reading(along=along) for one in kept]


class _Kept(RequestWords):
    """All that comes of a request's only segment."""

    def __init__(self, model: ShowsWords, spec: ModelSpec, text: str) -> None:
        super().__init__(model, spec, text)
        self._seen: list[npt.NDArray[np.float32]] = []
        self._pcm = bytearray()
        self._start = 0

    def keep(self, segment: Segment, start: int) -> None:
        """Its text begins at position `start`."""
        layer, head = self._model.word_heads.places[0]
        self.begin(segment, Pointing(layer=layer, head=head), 0.0)
        self._start = start

    def see(self, attention: npt.NDArray[np.float32], frames: int) -> None:
        self._seen.append(attention[:, self._start : self._start + self._tokens + AHEAD].copy())

    def hear(self, pcm: bytes) -> None:
        self._pcm += pcm

    def end(self) -> None:
        """There is nothing to tell."""

    def reading(self, *, along: bool) -> Reading:
        """What was kept."""
        assert self.clock is not None
        return Reading(self.clock.words, self._tokens, bytes(self._pcm), np.stack(self._seen), along)
