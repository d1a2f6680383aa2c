"""The codec encoder: recordings at 24 kHz to latents, with causal layers that run piece by piece."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.causal import CausalConv1d, CausalStridedConv1d, name_layers
from sonoro.nn.gelu import GeluWindowLayer
from sonoro.nn.history import WHOLE, Context, History
from sonoro.nn.vocoder import EluUnit
from sonoro.nn.window import WindowLayers

from .config import CodecConfig

_PIECE_FRAMES = 50
"""Frames at a time, 4 s of audio: a minute at once takes gigabytes and occupies the GPU for long."""


class CodecEncoder(nn.Module):
    """Audio to latents, one per `hop` samples. Use float32."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        net, ratios = config.seanet, config.seanet.ratios[::-1]
        width = net.n_filters
        self.model = nn.ModuleDict({"0": CausalConv1d(net.channels, width, net.kernel_size)})
        for index, ratio in enumerate(ratios):
            self.model[str(3 * index + 1)] = EluUnit(width, net.residual_kernel_size, net.compress)
            self.model[str(3 * index + 3)] = CausalStridedConv1d(width, 2 * width, 2 * ratio, ratio)
            width *= 2
        self.model[str(3 * len(ratios) + 2)] = CausalConv1d(width, net.dimension, net.last_kernel_size)
        self.layers = WindowLayers(config.transformer.window, GeluWindowLayer)
        columns = config.columns
        self.downsample = nn.Conv1d(net.dimension, config.inner_dim, 2 * columns, columns, bias=False)
        self.hop, self.columns = columns * math.prod(ratios), columns
        self.layout = name_layers(self)

    def forward(self, audio: Tensor, history: Context = WHOLE) -> Tensor:
        """The columns [B, T * columns, C] of `audio` [B, T * hop] after the transformer."""
        x = audio[:, :, None]
        for name, layer in self.model.items():
            x = layer(x if isinstance(layer, EluUnit) or name == "0" else F.elu(x), history)
        return self.layers(x, history)

    @torch.no_grad()
    def encode(self, audio: Tensor) -> Tensor:
        """Encode mono `audio` [S], S at least 1, to latents [ceil(S / hop), D]. No sync."""
        weight = self.downsample.weight
        history = History(self.layout, 1, device=weight.device, dtype=weight.dtype)
        context = history.at(torch.zeros(1, dtype=torch.int64, device=weight.device))
        filled = F.pad(audio.to(weight), (0, -len(audio) % self.hop))[None]
        x = torch.cat([self(piece, context) for piece in filled.split(_PIECE_FRAMES * self.hop, dim=1)], dim=1)
        # The first column stands for those before it.
        return self.downsample(F.pad(x.mT, (self.columns, 0), "replicate"))[0].mT
