"""What codecs share whose decoder is made of causal layers: streaming by slot, priming, and the fused decoder where it
can serve. Knows no model; a codec brings its decoder and encodes by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from sonoro.models.base import Voice
from sonoro.nn.history import WHOLE, Context, History, Layout
from sonoro.nn.vocoder_fused import Past
from sonoro.runtime.ring import overwrite

__all__ = ["PRIMED", "Fused", "StreamingCodec", "codec_dtype_for", "example_codes"]

logger = logging.getLogger(__name__)

FUSED_TOLERANCE = 0.2
"""How far the fused decoder may be from the modules in half precision, of the sound: seen are .01 to .05 with random
weights, most of it the modules' rounding. What a wrong kernel makes is as loud as the sound.
"""

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
    """Frames to audio: `sonoro.models.base.Codec` but for `encode`. Call `finalize` once after loading.

    `fuse` makes a `Fused` of a finalized decoder, with residual streams in the dtype given; `fused` is the one that
    serves, if one does. `skipped` names the stored tensors that nothing reads, as `LoadedModel` has them.
    """

    decoder: Any
    skipped: tuple[str, ...] = ()

    def __init__(self, sample_rate: int, decoder: _Decoder, fuse: Callable[[Any, torch.dtype], Fused]) -> None:
        super().__init__()
        self.sample_rate, self.hop = sample_rate, decoder.hop
        self.decoder = decoder
        self.fused: Any = None
        self.fuse = fuse

    def finalize(self) -> None:
        """Make what is derived from the loaded weights. Not capturable.

        In half precision on a GPU decoding is fused from then on.
        """
        self.decoder.finalize()
        weight = self.decoder.weight
        is_fused = not weight.is_cpu and weight.dtype in (torch.bfloat16, torch.float16)
        self.fused = self.fuse(self.decoder, weight.dtype) if is_fused else None

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

    @torch.no_grad()
    def check_kernels(self, rows: int, columns: int) -> None:
        """Stream `rows` rows, `columns` frames a call, fused and compare with the modules' whole decode. Synchronises.

        If they disagree, or it fails, it warns, and from then on the modules serve.
        """
        if self.fused is None:
            return
        frames = self.decoder.example(rows, 2 * columns)
        history, slots = self.allocate(rows), torch.arange(rows, device=frames.device)
        try:
            with torch.cuda.device_of(frames):
                chunks = [self.decode(chunk, slots, history) for chunk in frames.split(columns, dim=1)]
                streamed = torch.cat(chunks, dim=1)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # as for a single operation: the modules can always serve
            self.fused = None
            logger.warning("kernel=codec fallback=modules status=failed error=%r", error)
            return
        fused, self.fused = self.fused, None
        with torch.cuda.device_of(frames):
            expected = self.decode(frames).to(streamed.dtype)
        apart = streamed - expected
        difference = 0.0 if apart.is_meta else float(apart.norm() / expected.norm())
        if difference <= FUSED_TOLERANCE:
            self.fused = fused
        else:
            message = "kernel=codec fallback=modules status=disagrees difference=%.3g limit=%.3g"
            logger.warning(message, difference, FUSED_TOLERANCE)

    def allocate(self, slots: int) -> History:
        """A zeroed history for `slots` rows and the scratch row, in the dtype and on the device of the weights."""
        weight = self.decoder.weight
        return History(self.decoder.layout, slots, device=weight.device, dtype=weight.dtype)

    def reset(self, history: History, slots: Tensor) -> None:
        """Forget what rows `slots` saw. Capturable."""
        history.reset(slots)

    @torch.no_grad()
    def prime(self, history: History, slots: Tensor, voice: Voice) -> None:
        """Leave rows `slots` (freshly reset) as if they had decoded the voice's reference frames. No sync.

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
        """Decode `frames` [B, T, ...] to PCM [B, T * hop] in [-1, 1], advancing rows `slots` of `history`.

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


def codec_dtype_for(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """What a codec's decoder runs in beside a backbone in `dtype`: float16 on a GPU, unless float32 is asked for.

    Its fused operations round once a layer, and saturate. What that adds to the built-in voice on a GPU is 57 dB below
    it in float16 and 41 dB in bfloat16, at the same speed.
    """
    return torch.float16 if device.type != "cpu" and dtype.itemsize == 2 else torch.float32
