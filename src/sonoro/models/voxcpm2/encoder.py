"""The codec encoder: recordings at 16 kHz to latents, with causal convolutions that run piece by piece."""

import math

import torch
from torch import Tensor, nn

from sonoro.nn.causal import CausalConv1d, name_layers
from sonoro.nn.history import WHOLE, Context, in_pieces
from sonoro.nn.vocoder import DepthwiseUnit, DownsampleBlock, LinearSnake

from .decoder import CodecConfig

_PIECE_COLUMNS = 100  # Convolved at a time, 4 s of audio.


class CodecEncoder(nn.Module):
    """Audio to latents, one per `hop` samples: the VAE's means, without sampling. Use float32."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        rates = config.encoder_rates
        widths = [config.encoder_dim << index for index in range(len(rates) + 1)]
        sizes = zip(widths, rates, strict=False)
        blocks = [DownsampleBlock(width, rate, LinearSnake, unit=DepthwiseUnit) for width, rate in sizes]
        self.block = nn.ModuleList([CausalConv1d(1, widths[0], 7), *blocks])
        self.fc_mu = CausalConv1d(widths[-1], config.latent_dim, 3)
        self.hop, self.layout = math.prod(rates), name_layers(self)

    def forward(self, audio: Tensor, history: Context = WHOLE) -> Tensor:
        """Encode `audio` [B, T * hop] to latents [B, T, D]."""
        x = audio[:, :, None]
        for layer in self.block:
            x = layer(x, history)
        return self.fc_mu(x, history)

    @torch.no_grad()
    def encode(self, audio: Tensor) -> Tensor:
        """Encode mono `audio` [T * hop], T at least 1, to latents [T, D]. No sync."""
        weight = self.fc_mu.conv.weight
        return in_pieces(self, audio.to(weight)[None], _PIECE_COLUMNS * self.hop, self.layout)[0]
