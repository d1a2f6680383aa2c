"""One accepted request on its way through the engine. Pure bookkeeping: imports no torch and calls no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sonoro.core.types import FinishReason, SpeechRequest

if TYPE_CHECKING:
    from torch import Tensor

    from sonoro.models.base import Prompt, Voice

__all__ = ["RunningRequest"]


@dataclass(eq=False)
class RunningRequest:
    """A resolved request and how far it is. The scheduler owns `slot`; the engine writes the rest.

    `limit`, `length`, `decoded` and `is_done` speak of the current segment: the most frames it may have, frames made,
    frames turned into audio, and whether it will make no more. `before` holds the frames [T, K] of earlier segments.
    """

    request: SpeechRequest
    segments: list[str]
    voice: Voice | None
    accepted_at_s: float
    index: int = 0
    prompt: Prompt | None = None
    limit: int = 0
    before: list[Tensor] = field(default_factory=list)
    frames_before: int = 0
    slot: int | None = None
    length: int = 0
    decoded: int = 0
    is_done: bool = False
    chunks: int = 0
    first_audio_at_s: float | None = None

    @property
    def audio_frames(self) -> int:
        """Frames of the whole request turned into audio so far."""
        return self.frames_before + self.decoded

    @property
    def is_drained(self) -> bool:
        """Whether the segment has ended and all of it is audio."""
        return self.is_done and self.decoded == self.length

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request is over now that its segment is drained; None while it has another segment to speak.

        A segment that runs into its limit ends the whole request: what would follow a runaway cannot be trusted.
        """
        if self.length >= self.limit:
            return "length" if self.audio_frames == self.request.max_frames else "runaway"
        return "stop" if self.index == len(self.segments) - 1 else None

    def next_segment(self, frames: Tensor) -> None:
        """Move on to the following segment; `frames` [T, K] are those of the one that ended."""
        self.before.append(frames)
        self.frames_before += self.length
        self.index += 1
        self.length = self.decoded = 0
        self.is_done = False
