"""Models whose answers are known: what a server over one of them is to say, from an engine in this process."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from engine_processes import LONG, alone
from fakes.live_sine import LiveSineModel

from sonoro.api import speech_request
from sonoro.models import registry
from sonoro.models.base import SpeechModel


@dataclass(frozen=True, eq=False)
class Speaker:
    """A model that takes its text while it speaks, and what to ask it for.

    `load` gives the model, `options` are some of its own that are heard, `live_options` what live text is spoken with
    unless told otherwise, `seeds` are for a crowd. Two answers to the same request differ by `tolerance` steps of 16
    bits.
    """

    name: str
    load: Callable[[], SpeechModel]
    voices: tuple[str, ...]
    sample_rate: int
    hop: int
    long_text: str
    options: Mapping[str, float]
    live_options: Mapping[str, bool] = field(default_factory=dict)
    can_clone: bool = False
    lead_in: int = 0
    seeds: tuple[int, ...] = tuple(range(20))
    tolerance: int = 0

    def spoken(self, text: str = "Some words.", **fields: Any) -> bytes:
        """The PCM16 of a request, whose fields `sonoro.api.speech_request` takes."""
        return _spoken(self, text, **{"voice": self.voices[0]} | fields)

    def spoken_live(self, text: str, **fields: Any) -> bytes:
        """The PCM16 of a text that came in pieces."""
        return self.spoken(text, **{**self.live_options, **fields})

    def is_same(self, heard: bytes, expected: bytes) -> bool:
        """Whether that is the same sound: as long, and nowhere further apart than two answers may be."""
        if len(heard) != len(expected):
            return False
        samples, others = (np.frombuffer(pcm, "<i2").astype(int) for pcm in (heard, expected))
        return bool(np.abs(samples - others).max(initial=0) <= self.tolerance)


@functools.cache
def _spoken(speaker: Speaker, text: str, **fields: Any) -> bytes:
    return alone(speech_request(text, **fields), model=speaker.load())


SINE = Speaker(
    name="sine",
    load=LiveSineModel,
    voices=("low", "high"),
    sample_rate=8000,
    hop=80,
    long_text=LONG,
    options={"loudness": 20},
    can_clone=True,
)

BUILTIN = Speaker(
    name=registry.BUILTIN,
    load=functools.cache(lambda: registry.load(None, device="cpu").model),
    voices=("nora", "miles", "edith", "hugh"),
    sample_rate=24000,
    hop=1920,
    lead_in=1200,
    long_text="Rice is often served in round bowls.",
    options={"subtalker_temperature": 0.9},
    live_options={"non_streaming_mode": False},
    # With these no draw is so near a tie that rounding, 1e-5 of a logit, decides it: the nearest is 5e-4 away.
    seeds=(7, 29, 19, 9, 1, 20, 21, 30),
    # Which chunk lengths there are follows the clock, and how many rows there are the others; both round differently.
    tolerance=1,
)
