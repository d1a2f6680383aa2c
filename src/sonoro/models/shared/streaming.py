"""The shared part of codecs with a causal decoder: streaming by slot, priming, choice of dtype, and the fused decoder.

Each family adds its decoder and its encoder."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sonoro.core.errors import ConfigError, border
from sonoro.models.base import Voice
from sonoro.models.shared.codec_choice import (
    HALF_LIMIT,
    LEAST_DB,
    MARGIN,
    SERVED_DB,
    CodecChoice,
    dtype_name,
    no_tf32,
    peaks,
    snr_db,
)
from sonoro.models.shared.compiled_codec import PackedConvs
from sonoro.native.library import PACKING, load
from sonoro.nn.history import WHOLE, Context, History, Layout
from sonoro.nn.vocoder import finalize
from sonoro.nn.vocoder_fused import Past, keep_folded
from sonoro.ops.device import is_recorded
from sonoro.runtime.memory import compact_heap
from sonoro.runtime.ring import overwrite
from sonoro.runtime.threads import is_small

logger = logging.getLogger(__name__)

Decode = Callable[[Tensor, Tensor], Tensor]
"""Frames [B, T, ...] of slots [B] to audio [B, T * hop]."""

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

PRIMED = "codec history"
"""Key of `Voice.primed` for the history after decoding the reference, a `SavedRow`."""


class _Decoder(Protocol):
    hop: int
    """Samples per frame."""
    reach_frames: int
    """Receptive field of the state of `render`, in frames back."""

    @property
    def layout(self) -> Layout:
        """Layout of its `History`."""

    @property
    def weight(self) -> Tensor:
        """A weight; its dtype and device are those the decoder runs in."""

    @staticmethod
    def is_wide(name: str) -> bool:
        """Whether the tensor `name` stays in float32 in any dtype."""

    def example(self, rows: int, columns: int) -> Tensor:
        """Valid frames [rows, columns, ...] that vary, on the device of `weight`."""

    def latents(self, frames: Tensor) -> Tensor:
        """The input of `contextualize` for `frames` [B, T, ...]."""

    def contextualize(self, latents: Tensor, history: Context) -> Tensor:
        """Run the layers of long left context (window attention), if any: T columns."""

    def render(self, x: Tensor, history: Context) -> Tensor:
        """Run the layers of short left context, `reach_frames` (convolutions): columns to audio [B, T * hop]."""

    def finalize(self) -> None:
        """Derive tables and lay out convolution weights. Call once after loading and casting."""


class Fused(Protocol):
    """The same decoder as a chain of fused kernels. Capturable; called without gradients."""

    def contextualize(self, frames: Tensor, past: Past) -> Tensor:
        """Embed `frames` [B, T, ...] and run the layers of long left context, if any."""

    @property
    def render(self) -> Callable[[Tensor, Past], Tensor]:
        """The layers of short left context: columns to audio [B, T * hop]."""


class ModuleDecoder:
    """`Fused` for a decoder without fused kernels: its modules, in half precision."""

    def __init__(self, decoder: _Decoder, stream_dtype: torch.dtype) -> None:
        self._decoder = decoder

    def contextualize(self, frames: Tensor, past: Past) -> Tensor:
        """`Fused.contextualize`, by the modules."""
        return self._decoder.contextualize(self._decoder.latents(frames), past.context)

    @property
    def render(self) -> Callable[[Tensor, Past], Tensor]:
        return lambda x, past: self._decoder.render(x, past.context)


class StreamingCodec(nn.Module):
    """`sonoro.models.base.Codec` without `encode`. The decoder is loaded in float32.

    Call `finalize` once after loading, and `settle` before the first history is allocated. `fuse` makes a `Fused` of a
    finalized decoder, with residual streams in the given dtype; `fused` is the one in use, if any. `model_dtype` is
    the dtype of the language model; `skipped` names unused stored tensors, as in `LoadedModel`; `compiled` makes the
    decoder's compiled code for a CPU, for families that have some."""

    decoder: Any
    skipped: tuple[str, ...] = ()
    compiled: Callable[[Any, History, PackedConvs, int], Decode] | None = None

    def __init__(self, sample_rate: int, decoder: _Decoder, fuse: Callable[[Any, torch.dtype], Fused]) -> None:
        super().__init__()
        self.sample_rate, self.hop = sample_rate, decoder.hop
        self.decoder = decoder
        self.fused: Any = None
        self.fuse = fuse
        self.model_dtype = torch.float32
        self.choice: CodecChoice | None = None
        """The last result of `settle`."""
        self._packed: PackedConvs | None = None
        self._runs_in_torch = False

    def finalize(self) -> None:
        """Compute what is derived from the weights of decoder and encoder. Not capturable."""
        finalize(self)
        self.decoder.finalize()
        self.fused = self.fuse(self.decoder, self.decoder.weight.dtype) if self.fused is not None else None

    @torch.inference_mode(False)
    @torch.no_grad()
    def move(self, device: torch.device) -> None:
        """Move the codec to `device`, with all that is derived from the weights. Not capturable."""
        self._keep_in_torch()
        self.to(device)
        self.finalize()

    @contextmanager
    def hearing(self, audio: Tensor) -> Iterator[Tensor]:
        """A context that gives `audio` on the codec's device, and makes that the current CUDA device."""
        heard = audio.to(self.decoder.weight.device)
        with torch.cuda.device_of(heard):
            yield heard

    def compiled_decode(self, history: History, most_frames: int) -> Decode | None:
        """`CompiledCodec.compiled_decode`; None on a GPU, for dtypes other than float32, and for a large decoder, which
        needs more threads."""
        weight, library = self.decoder.weight, load() if self.compiled is not None else None
        if library is None or weight.dtype != torch.float32 or not weight.is_cpu or not is_small(self.decoder):
            return None
        with PACKING, compact_heap():
            assert self.compiled is not None
            self._packed = self._packed or PackedConvs(library, frees=not self._runs_in_torch)
            return self.compiled(self.decoder, history, self._packed, most_frames)

    def _keep_in_torch(self) -> None:
        """From now on the decoder has its weights in torch, whatever compiled code has packed."""
        if not self._runs_in_torch:
            with PACKING:
                self._runs_in_torch = True
                if self._packed is not None:
                    self._packed.restore()

    @torch.inference_mode(False)
    @torch.no_grad()
    def settle(self, wanted: str, batch: int, chunks: Sequence[int]) -> CodecChoice:
        """`Codec.settle`, where `wanted` is auto, float16, bfloat16 or float32. Not capturable.

        Half precision uses the fused decoder, which is rejected for the float32 modules if its SNR is too low or it
        raises. `auto` is float32 on a CPU or beside a float32 model; else float16 if it holds every layer's float32
        peak with a margin of 4; else bfloat16; either must reach 40 dB. On the meta device nothing is compared. Raises
        `ConfigError` if an earlier choice has replaced the float32 weights."""
        weight, given = self.decoder.weight, self.choice
        if given is not None and weight.dtype in HALVES.values():
            if wanted not in (given.wanted, dtype_name(given.dtype)):
                limit = f"the codec is in {dtype_name(given.dtype)}: load the model again"
                raise ConfigError("codec_dtype", wanted, limit)
            return given
        is_plain = wanted == "float32" or (wanted == "auto" and (weight.is_cpu or self.model_dtype.itemsize > 2))
        if is_plain:
            reason = "asked for" if wanted == "float32" else "on a CPU" if weight.is_cpu else "as the model"
            choice = CodecChoice(wanted, weight.dtype, reason)
        elif weight.is_meta:
            choice = CodecChoice(wanted, HALVES.get(wanted, torch.float16), "without weights")
            if is_recorded():
                # Record the launches of both runs that a real start compares.
                self.decode(self.decoder.example(batch, sum(chunks)))
            self._narrow(choice.dtype)
            if is_recorded():
                self._decode_in(chunks, self.decoder.example(batch, sum(chunks)))
        else:
            with torch.cuda.device_of(weight), no_tf32():
                choice = self._calibrated(wanted, batch, chunks)
        is_fallback = not is_plain and choice.dtype not in HALVES.values()
        logger.log(logging.WARNING if is_fallback else logging.INFO, "event=codec_dtype what=%r", str(choice))
        self.choice = choice
        return choice

    def _calibrated(self, wanted: str, batch: int, chunks: Sequence[int]) -> CodecChoice:
        """Install the decoder in the dtype that peaks in float32 and the SNR in half precision allow."""
        wide, frames, heard = self.decoder, self.decoder.example(batch, sum(chunks)), list[Tensor]()
        found = peaks(wide, lambda: heard.append(self.decode(frames)))
        dtype, reason = HALVES.get(wanted), "asked for"
        limit_db = SERVED_DB if dtype is None else LEAST_DB[dtype]
        if dtype is None:
            # A value that is not finite has no room.
            dtype = torch.float16 if found[0].value * MARGIN <= HALF_LIMIT else torch.bfloat16
            reason = f"float16 holds {HALF_LIMIT / max(found[0].value, 1e-30):.3g} times the largest value"
        self._narrow(dtype)
        tried = dtype_name(dtype)
        ratio_db: float | None = None
        failures: list[str] = []

        def fail(error: Exception) -> None:
            # Fall back to the float32 modules, unless memory ran out: that is not the kernels' fault.
            if isinstance(error, torch.OutOfMemoryError):
                raise error
            failures.append(f", but it failed: {error!r}")

        with border(fail):
            ratio_db = snr_db(self._decode_in(chunks, frames), heard[0])
            reason += "" if ratio_db >= limit_db else f", but less than {limit_db:g} dB"
        reason += "".join(failures)
        if ratio_db is None or ratio_db < limit_db:
            self.decoder, self.fused, dtype = wide, None, wide.weight.dtype
        return CodecChoice(wanted, dtype, reason, found, tried, ratio_db)

    def _decode_in(self, chunks: Sequence[int], frames: Tensor) -> Tensor:
        """`frames` [B, T, ...] decoded in `chunks`, whose sum is T: [B, T * hop]."""
        history, slots = self.allocate(len(frames)), torch.arange(len(frames), device=frames.device)
        return torch.cat([self.decode(part, slots, history) for part in frames.split([*chunks], dim=1)], dim=1)

    def _narrow(self, dtype: torch.dtype) -> None:
        """Replace the decoder by a copy in `dtype`, fused."""
        # Free cached blocks first, so that the copy does not fragment them. `narrowed` spares deepcopy the weights.
        torch.cuda.empty_cache()
        narrowed: dict[int, Any] = {
            id(parameter): nn.Parameter(parameter.to(dtype), requires_grad=parameter.requires_grad)
            for name, parameter in self.decoder.named_parameters()
            if not self.decoder.is_wide(name)
        }
        self.decoder = copy.deepcopy(self.decoder, narrowed)
        self.decoder.finalize()
        keep_folded(self.decoder)
        self.fused = self.fuse(self.decoder, dtype)

    def allocate(self, slots: int) -> History:
        weight = self.decoder.weight
        return History(self.decoder.layout, slots, device=weight.device, dtype=weight.dtype)

    def reset(self, history: History, slots: Tensor) -> None:
        history.reset(slots)

    @torch.no_grad()
    def prime(self, history: History, slots: Tensor, voice: Voice) -> None:
        """`Codec.prime`: renders only the last `reach_frames`, which determine the state of `render`. The state is
        computed once per voice, then copied from `voice.primed`. No sync."""
        assert voice.reference_frames is not None
        if PRIMED not in voice.primed:
            first, heard = slots[:1], voice.reference_frames[None]
            frames = torch.empty_like(heard, device=slots.device)
            overwrite(frames, heard)
            self._decode(frames, first, history, self.decoder.reach_frames)
            voice.primed[PRIMED] = history.save(first)
        history.load(slots, voice.primed[PRIMED])

    @torch.no_grad()
    def decode(self, frames: Tensor, slots: Tensor | None = None, history: History | None = None) -> Tensor:
        """`Codec.decode`, to PCM in float32, or float64 if the weights are."""
        assert (history is None) == (slots is None)
        pcm = self._decode(frames, slots, history, frames.shape[1])
        return pcm.to(torch.promote_types(pcm.dtype, torch.float32))

    def _decode(self, frames: Tensor, slots: Tensor | None, history: History | None, rendered: int) -> Tensor:
        """The audio of the last `rendered` of `frames`; all of them pass through `contextualize`."""
        self._keep_in_torch()
        if self.fused is not None:
            past = Past(slots, history)
            return self.fused.render(self.fused.contextualize(frames, past)[:, -rendered:].contiguous(), past)
        rows: Context = WHOLE if history is None or slots is None else history.at(slots)
        x = self.decoder.contextualize(self.decoder.latents(frames), rows)
        return self.decoder.render(x[:, -rendered:], rows)


def example_codes(rows: int, columns: int, codes: tuple[int, int], device: torch.device) -> Tensor:
    """Varied frames [rows, columns, K] int64; `codes` is K and the size of the smallest codebook."""
    books, size = codes
    return (torch.arange(rows * columns * books, device=device) * 7919 % size).view(rows, columns, books)
