"""The codec encoder: recordings to frames of codes, for references. The convolutions run piece by piece.

Follows fishaudio/fish-speech fish_speech/models/dac/modded_dac.py Encoder and rvq.py DownsampleResidualVectorQuantize.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.causal import CausalConv1d, name_layers
from sonoro.nn.codebooks import encode
from sonoro.nn.history import WHOLE, Context, in_pieces
from sonoro.nn.vocoder import DownsampleBlock, Downsampler, LinearSnake
from sonoro.nn.window import WindowTransformer

from .decoder import CodecConfig, Quantizer

_PIECE_FRAMES = 43  # Convolved at a time, 2 s of audio.


class CodecEncoder(nn.Module):
    """Audio to frames, `hop` samples each. Use float32: codes near a tie depend on rounding."""

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
        self.hop, self.layout = math.prod(rates) * math.prod(config.downsample), name_layers(self.block)

    @torch.no_grad()
    def encode(self, audio: Tensor, quantizer: Quantizer) -> Tensor:
        """Encode mono `audio` [S], S at least 1, to frames [T, K] int64, T = ceil(S / hop)."""
        weight = self.pre_module.norm.weight
        padded = F.pad(audio.to(weight), (0, -len(audio) % self.hop))[None, :, None]
        x = self.downsample(in_pieces(self._convolved, padded, _PIECE_FRAMES * self.hop, self.layout), WHOLE)
        return encode(quantizer.levels, self.pre_module(x, WHOLE))[0]

    def _convolved(self, x: Tensor, history: Context) -> Tensor:
        """Convolve a piece of audio `x` [1, S, 1], with the earlier pieces in `history`."""
        for layer in self.block:
            x = layer(x) if isinstance(layer, LinearSnake) else layer(x, history)
        return x
