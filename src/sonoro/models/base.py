"""The protocols between the engine and a speech model.

Per-request state on the device is in static tensors of N + 1 slots; the last slot is scratch, for padding. `slots`
arguments are [B] int64, distinct except for the scratch slot. What is marked capturable has fixed shapes for a given B,
does not synchronise with the host, and touches no state outside `slots`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy.typing as npt
import torch
from torch import Tensor

from sonoro.core.errors import ConfigError
from sonoro.core.types import ModelSpec, Reference, SpeechRequest, TextFormat
from sonoro.models.shared.codec_choice import CodecChoice
from sonoro.runtime.sampling import Controls
from sonoro.text.live_feed import LiveText
from sonoro.text.splitting import SpokenText


@dataclass(frozen=True)
class Capacity:
    """Sizes of the static state.

    Each of `slots` slots holds at most `max_positions` backbone positions, `max_frames` frames and `max_text` pending
    text ids. All slots share `pages` KV pages of `page_positions` positions, and one scratch page. At most `max_tokens`
    prompt tokens are staged at once; `is_prefill_fused` runs them with fused kernels."""

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
        """Width of a slot's page table."""
        return -(-self.max_positions // self.page_positions)

    def check_positions(self, most: int) -> None:
        """Raise `ConfigError` for more positions than the model has, `most`."""
        if self.max_positions > most:
            raise ConfigError("max_positions", self.max_positions, f"at most {most} for this model")


@dataclass(frozen=True)
class Voice:
    """An encoded voice. `data` belongs to the model; `reference_frames` [R, ...], on the CPU, prime the codec.
    `primed` caches the codec state after priming, by name: objects that list their tensors as `tensors`."""

    data: Any
    reference_frames: Tensor | None = None
    primed: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)


class Spoken(NamedTuple):
    """A finished segment: its text, and its frames [T, ...]."""

    text: str
    frames: Tensor


@dataclass(frozen=True)
class SavedVoice:
    """A serialisable voice: its tensors, and other facts the model needs, by name."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, str]


class Prompt(Protocol):
    """A segment ready for prefill; other members belong to the model that made it."""

    @property
    def controls(self) -> Controls:
        """How it is sampled, and when it must end; `max_frames` is at most the request's limit."""

    @property
    def voice(self) -> Voice | None:
        """The voice that primes the codec in place of the request's: of a speaker, or of speech that is continued."""

    @property
    def positions(self) -> int:
        """Backbone positions of the prompt."""

    @property
    def prefix(self) -> npt.NDArray[Any] | None:
        """The key of the prefix cache: contents of the leading tokens, [tokens, ...], without those of the new text and
        without the last. Equal contents mean equal tokens. None if there is nothing to share."""

    @property
    def text_ids(self) -> int:
        """Number of pending text ids the slot must hold."""


class Pages(NamedTuple):
    """Page indices of a slot's prompt, in order of positions. The first `cached` positions, whole pages, come from the
    prefix cache: shared with other requests, and never written."""

    numbers: Sequence[int]
    cached: int = 0


class SlotState(Protocol):
    """Tensors by slot. The engine reads `done`, `length` and `frames`, and writes `page_table` between launches; all
    else belongs to the model.

    Every entry of `frames` is a valid frame, even beyond `length`: a chunk may be decoded before the host knows that
    its last frame does not exist, and the last chunk of a segment is padded to a captured length."""

    @property
    def done(self) -> Tensor:
        """Whether the slot's segment has ended, [N+1] bool."""

    @property
    def length(self) -> Tensor:
        """Number of frames so far, [N+1] int64."""

    @property
    def frames(self) -> Tensor:
        """Codes [N+1, max_frames, K] int64, or patches of latents [N+1, max_frames, P, D]."""

    @property
    def page_table(self) -> Tensor:
        """Page indices in order of positions, [N+1, pages per slot] int32; the scratch page where there is none.
        `admit` writes those of the prompt; the engine adds the others before they are needed."""


class Codec(Protocol):
    """Frames to audio and back. A history holds the finite left context of every layer, by slot.
    `...` is the shape of a frame: codes [K] int64 or a patch of latents [P, D]."""

    sample_rate: int
    hop: int

    def move(self, device: torch.device) -> None:
        """Move the codec to `device`, which may differ from the model's. `encode` takes audio on any device."""

    def settle(self, wanted: str, batch: int, chunks: Sequence[int]) -> CodecChoice:
        """Choose the decoder's dtype; `wanted` is auto or a dtype. Call it before `allocate`. Synchronises.
        Half precision is compared with float32 on `batch` streams, decoded in calls of `chunks` frames."""

    def allocate(self, slots: int) -> Any:
        """A zeroed history for `slots` slots and the scratch slot."""

    def reset(self, history: Any, slots: Tensor) -> None:
        """Clear the state of `slots`."""

    def prime(self, history: Any, slots: Tensor, voice: Voice) -> None:
        """Set `slots` (freshly reset) to the state after decoding the voice's reference frames."""

    def decode(self, frames: Tensor, slots: Tensor | None = None, history: Any = None) -> Tensor:
        """Decode `frames` [B, T, ...] to PCM [B, T * hop] in [-1, 1], advancing `slots` of `history`; without a
        history, whole sequences. Capturable; no sync. Exact: any split into chunks gives the whole decode, up to
        rounding."""

    def encode(self, audio: Tensor) -> Tensor:
        """Encode mono `audio` [S] float32, at the encoder's sample rate, to frames [T, ...] that cover all of it."""


class SpeechModel(Protocol):
    """Text to frames: a prefill, then a frame step of fixed shape that appends one frame to each slot of the batch.
    `state` comes from `allocate`, `prompts` from `prepare`. The protocols below are optional capabilities."""

    spec: ModelSpec
    codec: Codec

    def segments(
        self, text: str, language: str, text_format: TextFormat = "auto", voice: str | None = None
    ) -> list[SpokenText]:
        """`text` split into segments as the checkpoint needs. If it must be read, as `text_format`, and as `voice`, one
        of the model's own, reads it."""

    def prepare(
        self, request: SpeechRequest, segment: str, index: int, before: Sequence[Spoken], voice: Voice | None
    ) -> Prompt:
        """Build the prompt of segment number `index` of a resolved request, on the CPU.
        `before` are the earlier segments; `request.max_frames` limits this one."""

    def allocate(self, capacity: Capacity) -> SlotState:
        """Zeroed state of all slots and scratch. Raises `ConfigError` for a capacity beyond the model's limits."""

    def reset(self, state: Any, slots: Sequence[int]) -> None:
        """Free `slots`: set `done` and erase every trace of the request. No sync."""

    def stage(self, state: Any, prompts: Sequence[Any], slots: Sequence[int], pages: Sequence[Pages]) -> int:
        """Copy `prompts`, for `slots` and `pages`, to the staging area on the device; returns the number of tokens
        staged, without cached ones. Does not wait for the copies; touches no state by slot; not capturable."""

    def admit(self, state: Any, slots: Tensor) -> None:
        """Reset `slots` and write the staged state to them, in order, ready for `prefill`. Capturable."""

    def prefill(self, state: Any, tokens: Tensor) -> None:
        """Run `tokens` [T] int64, indices into the staging area; their slots are then ready for `frame`. Capturable.
        Index `max_tokens` is scratch, for padding. One call must run all tokens of a prompt."""

    def frame(self, state: Any, slots: Tensor, record: list[Tensor] | None = None) -> None:
        """Decode step: append one frame to each of `slots`, advance `length`, set `done` at the end. Capturable.
        Slots that are done do not change. The frame of the end-of-speech decision is appended only if it is audio.
        The logits [B, V] of every decision are appended to `record`, in order."""

    def check_kernels(self, state: Any, batch: int) -> None:
        """Compare each fused kernel of `frame` at batch size `batch` with its reference; disable any that disagrees.
        Does not change `state`. Synchronises. A disabled kernel logs a warning. Does nothing on a CPU."""

    @property
    def position_bytes(self) -> int:
        """Bytes of KV cache per backbone position, over all stacks with paged KV."""

    @property
    def fingerprint(self) -> str:
        """A hash of configuration, weights and dtypes: models of equal hash can exchange voices. Takes some ms."""


@runtime_checkable
class LiveTextModel(Protocol):
    """A `SpeechModel` that speaks a segment while its text arrives. Other models get whole sentences."""

    def live_text(self, request: SpeechRequest, voice: Voice | None) -> LiveText | None:
        """The tokeniser of a new segment; None if the request needs all of its text before the first frame."""

    def prepare_live(self, request: SpeechRequest, ids: Sequence[int], index: int, voice: Voice | None) -> Prompt:
        """As `prepare`, for a segment that begins with `ids` of a `LiveText` (at least one); `append_text` adds the
        rest. Frame n needs n pending ids, including those of the prompt, unless the text has ended."""

    def append_text(
        self, state: Any, slots: Sequence[int], starts: Sequence[int], ids: Sequence[Sequence[int]]
    ) -> None:
        """Append `ids` to the pending ids of `slots`, from index `starts` on. No sync; not capturable."""


@runtime_checkable
class CloningModel(Protocol):
    """A `SpeechModel` that clones voices from recordings."""

    def encode_voice(self, references: Sequence[Reference]) -> Voice:
        """Encode reference audio to a voice. Raises `InvalidReference` if it cannot be used."""

    def save_voice(self, voice: Voice) -> SavedVoice:
        """What `load_voice` needs to restore `voice`. Shares the voice's tensors, on their device."""

    def load_voice(self, saved: SavedVoice) -> Voice:
        """Restore a saved voice bit for bit, on the model's device.
        `saved` is untrusted: raises `TensorMismatch` naming what does not fit a voice of this model."""


@runtime_checkable
class EmbeddingModel(Protocol):
    """A `SpeechModel` that takes speaker embeddings, of `ModelSpec.speaker_embedding_size` numbers."""

    def voice_of(self, embedding: Sequence[float]) -> Voice:
        """The voice of a speaker embedding that passed `ModelSpec.resolve`. No sync."""


@runtime_checkable
class PackingModel(Protocol):
    """A `SpeechModel` whose decode step can prefill prompts in the same pass over its weights."""

    def prefill_and_frame(self, state: Any, tokens: Tensor, slots: Tensor) -> None:
        """`SpeechModel.prefill` of `tokens`, then `frame` of `slots`, up to rounding. The prompts of a
        `TextPromptModel` must be of text alone. Capturable."""


@runtime_checkable
class TextPromptModel(Protocol):
    """A `SpeechModel` with a cheaper prefill for prompts of text alone."""

    def is_text_alone(self, prompts: Sequence[Any], pages: Sequence[Pages]) -> bool:
        """Whether `prompts` hold only text after the cached prefix on their `pages`."""

    def prefill_text(self, state: Any, tokens: Tensor) -> None:
        """As `SpeechModel.prefill`, for prompts of text alone. Capturable."""


@runtime_checkable
class WatchedModel(Protocol):
    """A `SpeechModel` that can output the attention of some of its heads to the text."""

    def watching(self, state: Any) -> Any:
        """`state` with buffers for the heads to watch now; shares all other tensors. No slot may be in use."""

    def attention(self, state: Any) -> Tensor | None:
        """Attention of the watched heads in the last frame, by slot: [N+1, H, W] float32, W positions from the text's
        first on; None if nothing is watched."""


class CompiledSteps(Protocol):
    """`SpeechModel.frame`, for at most `most` slots, and `SpeechModel.prefill` of one state in compiled code: the same
    up to the rounding of sums in another order."""

    most: int

    def frame(self, slots: Tensor) -> None:
        """A frame for each of `slots` [B] int64."""

    def prefill(self, tokens: Tensor) -> None:
        """Run `tokens` [T] int64 of the staging area."""


@runtime_checkable
class CompiledModel(Protocol):
    """A `SpeechModel` with compiled code for a CPU."""

    def compiled_steps(self, state: Any) -> CompiledSteps | None:
        """Those of `state`; None, with the reason in the log, where there is no compiled code for it."""


@runtime_checkable
class CompiledCodec(Protocol):
    """A `Codec` whose decoder is compiled code on a CPU."""

    def compiled_decode(self, history: Any, most_frames: int) -> Callable[[Tensor, Tensor], Tensor] | None:
        """`Codec.decode` of frames [B, T, ...] for slots [B] of `history`, T at most `most_frames`; None where there is
        no compiled code for it."""


@runtime_checkable
class ProfiledModel(Protocol):
    """A `SpeechModel` whose frame can be timed by parts, for `bench frame`."""

    def parts(self, state: Any) -> Mapping[str, Callable[[Tensor], Any]]:
        """The parts of a frame, by name: `backbone`, `depth`, `sample`.
        Each takes `slots`, is capturable, and may leave their state undefined."""

    def frame_bytes(self, batch: int, context: int) -> int:
        """Bytes that one `frame` of `batch` slots at `context` positions must read, for the bandwidth floor.
        Counts weights once for each pass that needs them, and KV once per slot."""


@dataclass(frozen=True)
class LoadedModel:
    """What `registry.load` returns: a model, its device and dtype, and its parameter counts by part.
    `skipped` names stored tensors that were not used (derived, or foreign to the model), except those that every
    release holds for training alone. `quantization` is the format of the layers' weights; "none" is `dtype`."""

    model: SpeechModel
    device: torch.device
    dtype: torch.dtype
    parameters: dict[str, int]
    skipped: tuple[str, ...] = ()
    quantization: str = "none"


@dataclass(frozen=True)
class Description:
    """What `registry.describe` returns: facts about a model that is not allocated.
    `configuration`: sizes by name. `parameters`: parameter counts by part. `files`: elements stored in each released
    file, unused ones included. `memory_bytes`: bytes by kind of memory."""

    spec: ModelSpec
    configuration: dict[str, str | int | float]
    parameters: dict[str, int]
    files: dict[str, int]
    memory_bytes: dict[str, int]
