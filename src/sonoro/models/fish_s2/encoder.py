"""The codec encoder: audio to frames of codes, for references. Runs on whole recordings.

Follows fishaudio/fish-speech fish_speech/models/dac/modded_dac.py Encoder and rvq.py DownsampleResidualVectorQuantize.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.causal import CausalConv1d
from sonoro.nn.codebooks import encode
from sonoro.nn.history import WHOLE
from sonoro.nn.vocoder import DownsampleBlock, Downsampler, LinearSnake
from sonoro.nn.window import WindowTransformer

from .decoder import CodecConfig, Quantizer

__all__ = ["CodecEncoder"]


class CodecEncoder(nn.Module):
    """Audio to frames, `hop` samples each. For float32: codes near a tie depend on rounding."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        rates, width = config.encoder_rates, config.transformer.width
        after = [*([] for _ in rates[1:]), [WindowTransformer(config.encoder_transformer)]]
        sizes = zip((config.encoder_dim << index for index in range(len(rates))), rates, after, strict=True)
        blocks = [DownsampleBlock(channels, rate, LinearSnake, layers) for channels, rate, layers in sizes]
        first, final = CausalConv1d(1, config.encoder_dim, 7), CausalConv1d(width, width, 3)
        self.block = nn.ModuleList([first, *blocks, LinearSnake(width), final])
        self.downsample = Downsampler(width, config.downsample)
        self.pre_module = WindowTransformer(config.transformer)
        self.hop = math.prod(rates) * math.prod(config.downsample)

    @torch.no_grad()
    def encode(self, audio: Tensor, quantizer: Quantizer) -> Tensor:
        """Frames [T, K] int64 of mono `audio` [S], T = ceil(S / hop); S at least 1."""
        first, *blocks, activation, final = self.block
        x = first(F.pad(audio.to(self.pre_module.norm.weight), (0, -len(audio) % self.hop))[None, :, None], WHOLE)
        for block in blocks:
            x = block(x, WHOLE)
        x = self.downsample(final(activation(x), WHOLE), WHOLE)
        return encode(quantizer.levels, self.pre_module(x, WHOLE))[0]
