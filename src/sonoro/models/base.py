"""The protocols a speech model is reached through. The engine knows these and no model.

Per-request state on the device lies in static tensors of `slots + 1` slots; the last slot is scratch, for padding.
`slots` arguments are int64 `[B]`, all different but for the scratch slot. Everything marked capturable has fixed shapes
for a given B, does not synchronise with the host, and touches no state outside `slots`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy.typing as npt
import torch
from torch import Tensor

from sonoro.core.types import ModelSpec, OptionValue, Reference, SamplingParams, SpeechRequest
from sonoro.models.codec_choice import CodecChoice
from sonoro.runtime.sampling import SamplingControls

__all__ = [
    "Capacity",
    "CloningModel",
    "Codec",
    "CodecChoice",
    "Controls",
    "Description",
    "EmbeddingModel",
    "LiveText",
    "LiveTextModel",
    "LoadedModel",
    "Pages",
    "ProfiledModel",
    "Prompt",
    "SavedVoice",
    "SlotState",
    "SpeechModel",
    "Spoken",
    "TextPromptModel",
    "Voice",
]


@dataclass(frozen=True)
class Capacity:
    """How much static state to allocate.

    Rows for `slots` requests, each of at most `max_positions` backbone positions, `max_frames` frames and `max_text`
    pending text ids. `pages` pages of `page_positions` positions are shared by all slots; one more is scratch.
    `max_tokens` prompt tokens can be staged together, and run out of fused operations if `is_prefill_fused`.
    """

    slots: int
    max_positions: int
    max_frames: int
    max_text: int
    page_positions: int
    pages: int
    max_tokens: int
    is_prefill_fused: bool = True

    @property
    def pages_per_slot(self) -> int:
        """The width of a slot's page table."""
        return -(-self.max_positions // self.page_positions)


@dataclass(frozen=True)
class Controls:
    """The controls of one segment: how it is sampled and when it must end.

    Draws are addressed by (seed, segment, frame, codebook), so they do not depend on the batch. A segment that ends by
    itself after `doubtful_frames` or more is taken for one that ran away, where it may be spoken again.
    """

    sampling: SamplingParams
    seed: int
    segment: int
    max_frames: int
    ignore_eos: bool = False
    options: dict[str, OptionValue] = field(default_factory=dict)
    doubtful_frames: int | None = None

    @classmethod
    def of(cls, request: SpeechRequest, segment: int) -> Controls:
        """Those of segment number `segment` of a resolved request, whose `max_frames` is the segment's own limit."""
        assert request.max_frames is not None
        given = (request.sampling, request.seed, segment, request.max_frames)
        return cls(*given, ignore_eos=request.ignore_eos, options=request.options)

    @property
    def sampling_controls(self) -> SamplingControls:
        """How the first decision of each frame is sampled; the sampling must be complete."""
        sampling = msgspec.structs.asdict(self.sampling)
        assert None not in sampling.values()
        return SamplingControls(
            **sampling,
            seed=self.seed,
            segment=self.segment,
            max_frames=self.max_frames,
            ignore_eos=self.ignore_eos,
        )


@dataclass(frozen=True)
class Voice:
    """What a model made of reference audio.

    `data` belongs to the model; `reference_frames` [R, ...], on the CPU, prime the codec, which keeps what it made of
    them in `primed`: by name, rows whose `tensors` are all that they hold.
    """

    data: Any
    reference_frames: Tensor | None = None
    primed: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


class Spoken(NamedTuple):
    """A segment that was spoken: its text, and its frames [T, ...]."""

    text: str
    frames: Tensor


@dataclass(frozen=True)
class SavedVoice:
    """A voice as it can be stored: all of its tensors by name, and what else the model must know of it."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, str]


class Prompt(Protocol):
    """A segment ready to be prefilled; the rest of it belongs to the model that made it."""

    @property
    def controls(self) -> Controls:
        """How it is sampled and when it must end; `max_frames` is at most what the request was limited to."""

    @property
    def voice(self) -> Voice | None:
        """Whom it speaks as or goes on from, if its tokens do not say; primes the codec in place of the request's."""

    @property
    def positions(self) -> int:
        """Backbone positions the prompt occupies."""

    @property
    def prefix(self) -> npt.NDArray[Any] | None:
        """What its first tokens are made of, [tokens, ...], less the last one and those that depend on its new text.

        Prompts that begin with equal contents begin with equal tokens. None if there is nothing worth sharing.
        """

    @property
    def text_ids(self) -> int:
        """Pending text ids the slot must hold."""


class Pages(NamedTuple):
    """The pages of a slot's prompt in the order of its positions. The first `cached` positions, whole pages, are filled
    already by a prompt that began with the same tokens: they are read by others too, and never written."""

    numbers: Sequence[int]
    cached: int = 0


class LiveText(Protocol):
    """The text of one segment that arrives in pieces, on its way to ids of which each frame takes the next."""

    max_letters: int

    def letters(self, text: str) -> int:
        """How many of `max_letters` the segment `text` takes."""

    def feed(self, text: str) -> list[int]:
        """The next ids of the segment, now that `text` has come: only those that no later text can change."""

    def finish(self) -> list[int]:
        """The remaining ids, with whatever ends a text; none at all if none of it could be spoken."""


class SlotState(Protocol):
    """Rows by slot. Three are the engine's to read, and `page_table` is its to write between launches; everything else
    belongs to the model.

    Every column of `frames` always holds a valid frame, made or not: a chunk is decoded in the very tick in which its
    last frame may turn out not to exist, and the last chunk of a segment is padded to a length that was captured.
    """

    @property
    def done(self) -> Tensor:
        """Whether the slot will make no more frames: [N+1] bool."""

    @property
    def length(self) -> Tensor:
        """Frames made so far: [N+1] int64."""

    @property
    def frames(self) -> Tensor:
        """The frames: [N+1, max_frames, K] int64, or patches of latents [N+1, max_frames, P, D]."""

    @property
    def page_table(self) -> Tensor:
        """The pages of each slot in the order of its positions, scratch where it has none: [N+1, pages per slot] int32.
        Those of its prompt are there once it is admitted; the engine adds the others before they are needed."""


class Codec(Protocol):
    """Frames to audio and back. `History` is the finite left context every layer keeps per slot.

    A frame is codes [K] int64 or a patch of latents [P, D], here `...`.
    """

    sample_rate: int
    hop: int

    def move(self, device: torch.device) -> None:
        """Live on `device` from now on, which need not be that of the model; audio to encode may lie on any."""

    def settle(self, wanted: str, batch: int, chunks: Sequence[int]) -> CodecChoice:
        """Choose what it decodes in, `wanted` being auto or a dtype: to be called before `allocate`. Synchronises.

        Whatever serves has been compared with float32: `batch` streams, in `chunks` frames a call.
        """

    def allocate(self, slots: int) -> Any:
        """A zeroed history for `slots` slots and the scratch slot."""

    def reset(self, history: Any, slots: Tensor) -> None:
        """Forget what `slots` saw."""

    def prime(self, history: Any, slots: Tensor, voice: Voice) -> None:
        """Leave `slots` (freshly reset) as if they had decoded the voice's reference frames; no audio."""

    def decode(self, frames: Tensor, slots: Tensor | None = None, history: Any = None) -> Tensor:
        """Decode `frames` [B, T, ...] to PCM [B, T * hop] in [-1, 1], advancing `slots` of `history`.

        Capturable; no sync. Without a history it is the whole-sequence decode.
        Exact: any split into chunks gives the whole, up to rounding.
        """

    def encode(self, audio: Tensor) -> Tensor:
        """Encode mono `audio` [S] float32, at the rate the codec hears, to frames [T, ...] as long as it or longer."""


class SpeechModel(Protocol):
    """Text to frames: a prefill, then a fixed-shape step that makes one frame for every given slot.

    `state` is what `allocate` returned, `prompts` are what `prepare` returned. What else a model has, optional
    protocols below say.
    """

    spec: ModelSpec
    codec: Codec

    def segments(self, text: str, language: str) -> list[str]:
        """`text` as this model's checkpoint wants it: normalised if it asks for that, and split where it must be."""

    def prepare(
        self, request: SpeechRequest, segment: str, index: int, before: Sequence[Spoken], voice: Voice | None
    ) -> Prompt:
        """The prompt of segment number `index` of a resolved request, on the CPU.

        `before` holds the earlier segments; `request.max_frames` is the limit of this one.
        """

    def allocate(self, capacity: Capacity) -> SlotState:
        """Zeroed state for `capacity.slots` requests and the scratch slot. Raises `ConfigError` for what it lacks."""

    def reset(self, state: Any, slots: Sequence[int]) -> None:
        """Make `slots` free: done, and nothing of an earlier request can be read from them. No sync."""

    def stage(self, state: Any, prompts: Sequence[Any], slots: Sequence[int], pages: Sequence[Pages]) -> int:
        """Copy to the device what `slots` need to speak `prompts`, each on its `pages`; returns the number of tokens.

        Cached tokens are not among them. Does not wait for the copies; touches no state by slot; not capturable.
        """

    def admit(self, state: Any, slots: Tensor) -> None:
        """Reset `slots` and give each what was staged for it in order, ready for `prefill`. Capturable."""

    def prefill(self, state: Any, tokens: Tensor) -> None:
        """Run the staged `tokens` [T] int64, leaving their slots ready for the first frame. Capturable.

        Token `max_tokens` of the staging area is scratch, for padding. All tokens of a prompt are run by one call.
        """

    def frame(self, state: Any, slots: Tensor, record: list[Tensor] | None = None) -> None:
        """One frame for each of `slots`: appended to `frames`, `length` advanced, `done` set at its end. Capturable.

        A slot that is done is left as it is. A frame that carries the end-of-speech decision is appended only if it is
        spoken too. `record` is given the logits [B, V] of every decision, in order.
        """

    def check_kernels(self, state: Any, batch: int) -> None:
        """Run each fused kernel of a `frame` of `batch` slots once against its reference; a wrong one serves no more.

        Leaves `state` as it is. Synchronises. Kernels warn by themselves; without a GPU there is nothing to check.
        """

    @property
    def position_bytes(self) -> int:
        """Memory one backbone position takes, in bytes: keys and values of all stacks that live on pages."""

    @property
    def fingerprint(self) -> str:
        """The same for the same configuration, weights and dtypes, whose voices can be exchanged; costs some ms."""


@runtime_checkable
class LiveTextModel(Protocol):
    """A `SpeechModel` that speaks the text of a segment while it arrives. Others are given whole sentences."""

    def live_text(self, request: SpeechRequest, voice: Voice | None) -> LiveText | None:
        """A new segment of a resolved request; None where the request needs all of its text before its first frame."""

    def prepare_live(self, request: SpeechRequest, ids: Sequence[int], index: int, voice: Voice | None) -> Prompt:
        """As `prepare`, of a segment that begins with `ids` of a `LiveText` (one at least); the others are appended.

        Frame n needs n pending ids, those of the prompt counted, unless the text has ended before.
        """

    def append_text(
        self, state: Any, slots: Sequence[int], starts: Sequence[int], ids: Sequence[Sequence[int]]
    ) -> None:
        """Write `ids` as the pending ids of `slots` from number `starts` on, behind all that was launched.

        No sync; not capturable.
        """


@runtime_checkable
class CloningModel(Protocol):
    """A `SpeechModel` that speaks as recordings do."""

    def encode_voice(self, references: Sequence[Reference]) -> Voice:
        """What the model keeps of reference audio. Raises `InvalidReference` if it cannot be used."""

    def save_voice(self, voice: Voice) -> SavedVoice:
        """All that `load_voice` needs to make `voice` again. Its tensors are those of the voice, on its device."""

    def load_voice(self, saved: SavedVoice) -> Voice:
        """The voice that was saved, on the model's device, bit by bit what it was.

        `saved` may come from anywhere: raises `TensorMismatch` naming what does not belong to a voice of this model.
        """


@runtime_checkable
class EmbeddingModel(Protocol):
    """A `SpeechModel` that speaks as a speaker embedding says; `ModelSpec.speaker_embedding_size` is its length."""

    def voice_of(self, embedding: Sequence[float]) -> Voice:
        """The voice of a speaker embedding that `ModelSpec.resolve` let pass. No sync."""


@runtime_checkable
class TextPromptModel(Protocol):
    """A `SpeechModel` whose prompts are run with less work where they hold text alone."""

    def is_text_alone(self, prompts: Sequence[Any], pages: Sequence[Pages]) -> bool:
        """Whether `prompts` hold nothing but text behind what of each is on its `pages` already."""

    def prefill_text(self, state: Any, tokens: Tensor) -> None:
        """As `SpeechModel.prefill`, of staged `tokens` of prompts that are text alone. Capturable."""


@runtime_checkable
class ProfiledModel(Protocol):
    """A `SpeechModel` that says what a frame is made of, for `bench frame`."""

    def parts(self, state: Any) -> Mapping[str, Callable[[Tensor], Any]]:
        """The pieces of a frame that a profile times, by name: `backbone`, `depth`, `sample`.

        Each takes `slots`, is capturable, and may leave the slots in a state that means nothing.
        """

    def frame_bytes(self, batch: int, context: int) -> int:
        """Bytes that one `frame` of `batch` slots at `context` positions must read: the floor of its time.

        Weights once for each time the chain of the frame needs them, keys and values once a slot.
        """


@dataclass(frozen=True)
class LoadedModel:
    """A model with its device, dtype and parameter counts by part, as `registry.load` returns it.

    `skipped` names the tensors of its files that nothing reads, as they are stored: those that are derived from others
    or foreign to the model, not those that every release holds for training alone. `quantization` is what its layers
    are kept in, "none" for `dtype`.
    """

    model: SpeechModel
    device: torch.device
    dtype: torch.dtype
    parameters: dict[str, int]
    skipped: tuple[str, ...] = ()
    quantization: str = "none"


@dataclass(frozen=True)
class Description:
    """What is known of a model without allocating it, as `registry.describe` returns it.

    `configuration` holds its sizes by name. `parameters` counts those the model keeps by part, `files` all elements
    stored in each released file, unused ones included. `memory_bytes` holds what each kind of memory takes.
    """

    spec: ModelSpec
    configuration: dict[str, str | int | float]
    parameters: dict[str, int]
    files: dict[str, int]
    memory_bytes: dict[str, int]
