"""What codecs share whose decoder is made of causal layers: streaming by slot, priming, and the fused decoder where it
can serve. Knows no model; a codec brings its decoder and encodes by itself.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sonoro.core.errors import ConfigError, border
from sonoro.models.base import Voice
from sonoro.models.codec_choice import (
    HALF_LIMIT,
    LEAST_DB,
    SERVED_DB,
    CodecChoice,
    dtype_name,
    has_room,
    no_tf32,
    peaks,
    snr_db,
)
from sonoro.nn.history import WHOLE, Context, History, Layout
from sonoro.nn.vocoder_fused import Past
from sonoro.ops.device import is_recorded
from sonoro.runtime.ring import overwrite

__all__ = ["PRIMED", "Fused", "StreamingCodec", "example_codes"]

logger = logging.getLogger(__name__)

HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

PRIMED = "codec history"
"""Where a voice keeps what decoding its reference left: a `SavedRow`."""


class _Decoder(Protocol):
    @property
    def layout(self) -> Layout:
        """What a `History` must keep for it."""

    @property
    def hop(self) -> int:
        """Samples per frame."""

    @property
    def reach_frames(self) -> int:
        """How many frames back anything kept within `render` depends on."""

    @property
    def weight(self) -> Tensor:
        """One whose dtype and device are those that it runs in."""

    @staticmethod
    def is_wide(name: str) -> bool:
        """Whether the tensor `name` stays in float32 whatever it runs in."""

    def example(self, rows: int, columns: int) -> Tensor:
        """Valid frames [rows, columns, ...] that vary, on the device of `weight`."""

    def latents(self, frames: Tensor) -> Tensor:
        """What `contextualize` takes of `frames` [B, T, ...]."""

    def contextualize(self, latents: Tensor, history: Context) -> Tensor:
        """The long memory, if there is one: T columns."""

    def render(self, x: Tensor, history: Context) -> Tensor:
        """The short memory, `reach_frames`: columns to audio [B, T * hop]."""

    def finalize(self) -> None:
        """Make what is derived from the loaded weights."""


class Fused(Protocol):
    """The same decoder as a chain of fused operations, capturable. Gradients are off when it is called."""

    def contextualize(self, frames: Tensor, past: Past) -> Tensor:
        """`frames` [B, T, ...] through the long memory, if there is one."""

    @property
    def render(self) -> Callable[[Tensor, Past], Tensor]:
        """The short memory: columns to audio [B, T * hop]."""


class StreamingCodec(nn.Module):
    """Frames to audio: `sonoro.models.base.Codec` but for `encode`. Its decoder is loaded in float32.

    Call `finalize` once after loading, and `settle` before its first history is allocated. `fuse` makes a `Fused` of a
    finalized decoder, with residual streams in the dtype given; `fused` is the one that serves, if one does.
    `model_dtype` is that of the model it speaks beside; `skipped` names the stored tensors that nothing reads, as
    `LoadedModel` has them.
    """

    decoder: Any
    skipped: tuple[str, ...] = ()

    def __init__(self, sample_rate: int, decoder: _Decoder, fuse: Callable[[Any, torch.dtype], Fused]) -> None:
        super().__init__()
        self.sample_rate, self.hop = sample_rate, decoder.hop
        self.decoder = decoder
        self.fused: Any = None
        self.fuse = fuse
        self.model_dtype = torch.float32
        self.choice: CodecChoice | None = None
        """What `settle` last chose."""

    def finalize(self) -> None:
        """Make what is derived from the weights. Not capturable."""
        self.decoder.finalize()
        self.fused = self.fuse(self.decoder, self.decoder.weight.dtype) if self.fused is not None else None

    @torch.inference_mode(False)
    @torch.no_grad()
    def move(self, device: torch.device) -> None:
        """Live on `device` from now on, with all that is derived from the weights. Not capturable."""
        self.to(device)
        self.finalize()

    @contextmanager
    def hearing(self, audio: Tensor) -> Iterator[Tensor]:
        """`audio` on the codec's device, which is the current one meanwhile."""
        heard = audio.to(self.decoder.weight.device)
        with torch.cuda.device_of(heard):
            yield heard

    @torch.inference_mode(False)
    @torch.no_grad()
    def settle(self, wanted: str, batch: int, chunks: Sequence[int]) -> CodecChoice:
        """Serve in the dtype `wanted`: auto, float16, bfloat16 or float32. Synchronises; not capturable.

        In half precision decoding is fused. `batch` streams are then decoded in `chunks` frames a call and compared
        with the modules in float32, which serve instead where they are too far apart or it fails. `auto` is float32 on
        a CPU or beside a model in it; otherwise float16 if that holds the float32 peaks of every layer with a margin
        of 4, else bfloat16 if that is 40 dB from float32, else float32. Without memory nothing is compared.

        Raises `ConfigError` if the float32 weights that it takes were given up for an earlier choice.
        """
        weight, given = self.decoder.weight, self.choice
        if given is not None and weight.dtype in HALVES.values():
            if wanted not in (given.wanted, dtype_name(given.dtype)):
                raise ConfigError(
                    "codec_dtype", wanted, f"the codec is in {dtype_name(given.dtype)}: load the model again"
                )
            return given
        is_plain = wanted == "float32" or (wanted == "auto" and (weight.is_cpu or self.model_dtype.itemsize > 2))
        if is_plain:
            reason = "asked for" if wanted == "float32" else "on a CPU" if weight.is_cpu else "as the model"
            choice = CodecChoice(wanted, weight.dtype, reason)
        elif weight.is_meta:
            choice = CodecChoice(wanted, HALVES.get(wanted, torch.float16), "without weights")
            if is_recorded():
                # What both runs that are compared launch, is noted.
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
        """What to serve in, by a run in float32, and by one in the dtype which that suggests; it serves from now on."""
        wide, frames, heard = self.decoder, self.decoder.example(batch, sum(chunks)), list[Tensor]()
        found = peaks(wide, lambda: heard.append(self.decode(frames)))
        dtype, reason = HALVES.get(wanted), "asked for"
        limit_db = SERVED_DB if dtype is None else LEAST_DB[dtype]
        if dtype is None:
            dtype = torch.float16 if has_room(found) else torch.bfloat16
            reason = f"float16 holds {HALF_LIMIT / max(found[0].value, 1e-30):.3g} times the largest value"
        self._narrow(dtype)
        tried = dtype_name(dtype)
        ratio_db: float | None = None
        failures: list[str] = []

        def fail(error: Exception) -> None:
            # As for a single operation: the modules can always serve.
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
        """Serve a copy of the decoder in `dtype`, fused."""
        # What is kept does not lie among what a run before it has freed; those that are narrowed are not copied.
        torch.cuda.empty_cache()
        narrowed: dict[int, Any] = {
            id(parameter): nn.Parameter(parameter.to(dtype), requires_grad=parameter.requires_grad)
            for name, parameter in self.decoder.named_parameters()
            if not self.decoder.is_wide(name)
        }
        self.decoder = copy.deepcopy(self.decoder, narrowed)
        self.decoder.finalize()
        self.fused = self.fuse(self.decoder, dtype)

    def allocate(self, slots: int) -> History:
        """A zeroed history for `slots` slots and the scratch slot, in the dtype and on the device of the weights."""
        weight = self.decoder.weight
        return History(self.decoder.layout, slots, device=weight.device, dtype=weight.dtype)

    def reset(self, history: History, slots: Tensor) -> None:
        """Forget what `slots` saw. Capturable."""
        history.reset(slots)

    @torch.no_grad()
    def prime(self, history: History, slots: Tensor, voice: Voice) -> None:
        """Leave `slots` (freshly reset) as if they had decoded the voice's reference frames. No sync.

        Only the last `reach_frames` are rendered, as what the layers of `render` keep depends on no more; and only the
        first time: what that left is kept in `voice.primed`.
        """
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
        """Decode `frames` [B, T, ...] to PCM [B, T * hop] in [-1, 1], advancing `slots` of `history`.

        Float32, or float64 if the weights are. Capturable; no sync. Without a history it is the whole-sequence decode.
        Exact: equals the whole-sequence decode up to rounding, for any split into chunks.
        """
        assert (history is None) == (slots is None)
        pcm = self._decode(frames, slots, history, frames.shape[1])
        return pcm.to(torch.promote_types(pcm.dtype, torch.float32))

    def _decode(self, frames: Tensor, slots: Tensor | None, history: History | None, rendered: int) -> Tensor:
        """The audio of the last `rendered` of `frames`, having seen all of them."""
        if self.fused is not None:
            past = Past(slots, history)
            return self.fused.render(self.fused.contextualize(frames, past)[:, -rendered:].contiguous(), past)
        rows: Context = WHOLE if history is None or slots is None else history.at(slots)
        x = self.decoder.contextualize(self.decoder.latents(frames), rows)
        return self.decoder.render(x[:, -rendered:], rows)


def example_codes(rows: int, columns: int, codes: tuple[int, int], device: torch.device) -> Tensor:
    """Frames [rows, columns, K] int64 that vary, `codes` being K and how many values each code has at least."""
    books, size = codes
    return (torch.arange(rows * columns * books, device=device) * 7919 % size).view(rows, columns, books)
