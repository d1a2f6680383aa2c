"""Requests that any model can speak, however it is told whom to speak as."""

from __future__ import annotations

import numpy as np

from sonoro.core.types import ModelSpec, Reference, SpeechRequest

__all__ = ["speech_request"]

_REFERENCE_S = 3


def speech_request(spec: ModelSpec, number: int, text: str, frames: int) -> SpeechRequest:
    """Request `number`, its seed too: `text` spoken for exactly `frames` frames, as the first voice the model has.

    A model that only clones is given noise to sound like.
    """
    is_described = "described" in spec.voice_modes and spec.accepts_instructions
    references: tuple[Reference, ...] = ()
    if "named" not in spec.voice_modes and "cloned" in spec.voice_modes:
        noise = 0.1 * np.random.default_rng(0).standard_normal(_REFERENCE_S * spec.sample_rate)
        references = (Reference(pcm=noise.astype("<f4").tobytes(), sample_rate=spec.sample_rate, use="reference"),)
    return SpeechRequest(
        id=f"bench-{number}",
        text=text,
        instructions="A calm voice." if is_described else None,
        references=references,
        seed=number,
        max_frames=frames,
        ignore_eos=True,
    )
