"""The codec: frames of codes to audio, and audio to frames for cloning."""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor, nn

from sonoro.core.errors import CheckpointError
from sonoro.models.base import Voice
from sonoro.nn.history import WHOLE, Context, History

from .config import CodecConfig
from .decoder import CodecDecoder
from .decoder_fused import FusedDecoder
from .encoder import CodecEncoder

__all__ = ["PRIMED", "CodecDecoder", "Qwen3Codec"]

logger = logging.getLogger(__name__)

FUSED_TOLERANCE = 0.2
"""How far the fused decoder may be from the modules in half precision, of the sound: seen are .01 to .05 with random
weights, most of it the modules' rounding. What a wrong kernel makes is as loud as the sound.
"""

PRIMED = "codec history"
"""Where a voice keeps what decoding its reference left: a `SavedRow`."""


class Qwen3Codec(nn.Module):
    """Frames to audio and back; implements `sonoro.models.base.Codec`. Its state_dict is speech_tokenizer's file.

    Call `finalize` once after loading. Raises `CheckpointError` for a configuration that contradicts itself.
    """

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.sample_rate = config.output_sample_rate
        self.decoder = CodecDecoder(config.decoder_config)
        self.fused: FusedDecoder | None = None
        self.hop = self.decoder.hop
        _check_equal("decode_upsample_rate", config.decode_upsample_rate, "product of its rates", self.hop)
        self.encoder = None
        if config.encoder_config is not None:
            self.encoder = CodecEncoder(config.encoder_config, config.encoder_valid_num_quantizers)
            _check_equal("encode_downsample_rate", config.encode_downsample_rate, "encoder's stride", self.encoder.hop)

    def finalize(self) -> None:
        """Make what is derived from the loaded weights. Not capturable.

        In half precision on a GPU decoding is fused from then on.
        """
        self.decoder.finalize()
        weight = self.decoder.pre_conv.conv.weight
        is_fused = weight.is_cuda and weight.dtype in (torch.bfloat16, torch.float16)
        self.fused = FusedDecoder(self.decoder, weight.dtype) if is_fused else None

    @torch.no_grad()
    def check_kernels(self, rows: int, columns: int) -> None:
        """Stream `rows` rows, `columns` frames a call, fused and compare with the modules' whole decode. Synchronises.

        If they disagree, it warns, and from then on the modules serve.
        """
        if self.fused is None:
            return
        weight, config = self.decoder.pre_conv.conv.weight, self.decoder.config
        shape = (rows, 2 * columns, config.num_quantizers)
        frames = (torch.arange(math.prod(shape), device=weight.device) * 7919 % config.codebook_size).view(shape)
        history, slots = self.allocate(rows), torch.arange(rows, device=weight.device)
        streamed = [self.fused.decode(chunk, slots, history) for chunk in frames.split(columns, dim=1)]
        expected = self.decoder(self.decoder.latents(frames)).to(streamed[0].dtype)
        difference = float((torch.cat(streamed, dim=1) - expected).norm() / expected.norm())
        if not difference <= FUSED_TOLERANCE:
            message = "kernel=codec fallback=modules status=disagrees difference=%.3g limit=%.3g"
            logger.warning(message, difference, FUSED_TOLERANCE)
            self.fused = None

    def allocate(self, slots: int) -> History:
        """A zeroed history for `slots` rows and the scratch row, in the dtype and on the device of the weights."""
        weight = self.decoder.pre_conv.conv.weight
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
            first, frames = slots[:1], voice.reference_frames.to(slots.device)[None]
            if self.fused is not None:
                x = self.fused.contextualize(frames, first, history)
                self.fused.render(x[:, -self.decoder.reach_frames :].contiguous(), first, history)
            else:
                rows = history.at(first)
                x = self.decoder.contextualize(self.decoder.latents(frames), rows)
                self.decoder.render(x[:, -self.decoder.reach_frames :], rows)
            voice.primed[PRIMED] = history.save(first)
        history.load(slots, voice.primed[PRIMED])

    @torch.no_grad()
    def decode(self, frames: Tensor, slots: Tensor | None = None, history: History | None = None) -> Tensor:
        """Decode `frames` [B, T, K] int64 to PCM [B, T * hop] in [-1, 1], advancing rows `slots` of `history`.

        Float32, or float64 if the weights are. Capturable; no sync. Without a history it is the whole-sequence decode.
        Exact: equals the whole-sequence decode up to rounding, for any split into chunks.
        """
        assert (history is None) == (slots is None)
        if self.fused is not None:
            return self.fused.decode(frames, slots, history)
        rows: Context = WHOLE if history is None or slots is None else history.at(slots)
        pcm = self.decoder(self.decoder.latents(frames), rows)
        return pcm.to(torch.promote_types(pcm.dtype, torch.float32))

    @torch.no_grad()
    def encode(self, audio: Tensor) -> Tensor:
        """Encode mono `audio` [S] at `sample_rate` to frames [T, K] int64, T = ceil(S / hop). Synchronises nothing.

        Raises `CheckpointError` if the checkpoint has no encoder.
        """
        if self.encoder is None:
            raise CheckpointError("speech_tokenizer/config.json has no encoder_config: this codec cannot encode audio")
        return self.encoder.encode(audio)


def _check_equal(field: str, value: int, what: str, derived: int) -> None:
    if value != derived:
        raise CheckpointError(f"speech_tokenizer/config.json: {field} is {value}, but the {what} is {derived}")
