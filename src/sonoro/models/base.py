"""The protocols a speech model is reached through. The engine knows these and no model.

Per-request state on the device is rows of static tensors with `slots + 1` rows; the last row is scratch, for padding.
`slots` arguments are int64 `[B]` of distinct rows (the scratch row may repeat). Everything marked capturable has fixed
shapes for a given B, does not synchronise with the host, and touches no row outside `slots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sonoro.core.types import ModelSpec, OptionValue, Reference, SamplingParams, SpeechRequest

__all__ = ["Capacity", "Codec", "Controls", "LoadedModel", "Prompt", "SlotState", "SpeechModel", "Voice"]


@dataclass(frozen=True)
class Capacity:
    """How much static state to allocate: rows for requests, backbone positions, frames and pending text ids per row."""

    slots: int
    max_positions: int
    max_frames: int
    max_text: int


@dataclass(frozen=True)
class Controls:
    """The per-row controls of one segment: how it is drawn and when it must end.

    Draws are addressed by (seed, segment, frame, codebook), so they do not depend on the batch.
    """

    sampling: SamplingParams
    seed: int
    segment: int
    max_frames: int
    ignore_eos: bool = False
    options: dict[str, OptionValue] = field(default_factory=dict)


@dataclass(frozen=True)
class Voice:
    """What a model made of reference audio.

    `data` belongs to the model; `reference_frames` [R, K] int64 prime the codec.
    """

    data: Any
    reference_frames: Tensor | None = None


class Prompt(Protocol):
    """A segment ready to be prefilled; the rest of it belongs to the model that made it."""

    controls: Controls
    voice: Voice | None

    @property
    def positions(self) -> int:
        """Backbone positions the prompt occupies."""

    @property
    def text_ids(self) -> int:
        """Pending text ids the slot must hold."""


class SlotState(Protocol):
    """Rows by slot. These three are the engine's to read; everything else belongs to the model.

    `done` [N+1] bool, `length` [N+1] int64 frames made so far, `frames` [N+1, max_frames, K] int64.
    """

    done: Tensor
    length: Tensor
    frames: Tensor


class Codec(Protocol):
    """Frames to audio and back. `History` is the finite left context every layer keeps per slot."""

    sample_rate: int
    hop: int

    def allocate(self, slots: int) -> Any:
        """A zeroed history for `slots` rows and the scratch row."""

    def reset(self, history: Any, slots: Tensor) -> None:
        """Forget what rows `slots` saw."""

    def prime(self, history: Any, slots: Tensor, voice: Voice) -> None:
        """Leave rows `slots` (freshly reset) as if they had decoded the voice's reference frames; no audio."""

    def decode(self, frames: Tensor, slots: Tensor | None = None, history: Any = None) -> Tensor:
        """Decode `frames` [B, T, K] int64 to PCM [B, T * hop] in [-1, 1], advancing rows `slots` of `history`.

        Capturable; no sync. Without a history it is the whole-sequence decode.
        Exact: any split into chunks gives the whole, up to rounding.
        """

    def encode(self, audio: Tensor) -> Tensor:
        """Encode mono `audio` [S] float32 at `sample_rate` to frames [T, K] int64, T = ceil(S / hop)."""


class SpeechModel(Protocol):
    """Text to frames: a prefill, then a fixed-shape step that makes one frame for every given row."""

    spec: ModelSpec
    codec: Codec

    def prepare(
        self, request: SpeechRequest, segment: str, index: int, before: Sequence[Tensor], voice: Voice | None
    ) -> Prompt:
        """The prompt of segment number `index` of a resolved request, on the CPU.

        `before` holds the frames [T, K] of the earlier segments.
        """

    def segments(self, text: str, language: str) -> list[str]:
        """`text` as this model's checkpoint wants it: normalised if it asks for that, and split where it must be."""

    def encode_voice(self, references: Sequence[Reference]) -> Voice:
        """What the model keeps of reference audio. Raises `InvalidReference` if it cannot be used."""

    def allocate(self, capacity: Capacity) -> SlotState:
        """Zeroed rows for `capacity.slots` requests and the scratch row."""

    def reset(self, state: SlotState, slots: Tensor) -> None:
        """Make rows `slots` free: nothing of an earlier request can be read from them."""

    def prefill(self, state: SlotState, prompts: Sequence[Prompt], slots: Tensor) -> None:
        """Run all prompt rows, leaving each slot ready for its first frame. Resets the rows first."""

    def frame(self, state: SlotState, slots: Tensor) -> None:
        """One frame for each of `slots`: appended to `frames`, `length` advanced, `done` set at its end. Capturable.

        A row that is done is left as it is. The frame that carries the end-of-speech decision is not appended.
        """


@dataclass(frozen=True)
class LoadedModel:
    """A model with its device, dtype and parameter counts by part, as `registry.load` returns it."""

    model: SpeechModel
    device: torch.device
    dtype: torch.dtype
    parameters: dict[str, int]
