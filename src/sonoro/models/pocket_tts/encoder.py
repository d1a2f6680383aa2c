"""The codec encoder: recordings at 24 kHz to latents, with causal layers that run piece by piece."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.causal import name_layers
from sonoro.nn.elu import EluEncoder
from sonoro.nn.gelu import GeluWindowLayer
from sonoro.nn.history import WHOLE, Context, in_pieces
from sonoro.nn.window import WindowLayers

from .config import CodecConfig

_PIECE_FRAMES = 50  # Convolved at a time, 4 s of audio.


class CodecEncoder(nn.Module):
    """Audio to latents, one per `hop` samples. Use float32."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        net = config.seanet
        kernels = net.kernel_size, net.residual_kernel_size, net.last_kernel_size
        self.model = EluEncoder(net.dimension, net.n_filters, net.ratios[::-1], kernels, net.compress)
        self.layers = WindowLayers(config.transformer.window, GeluWindowLayer)
        columns = config.columns
        self.downsample = nn.Conv1d(net.dimension, config.inner_dim, 2 * columns, columns, bias=False)
        self.hop, self.columns = columns * self.model.hop, columns
        self.layout = name_layers(self)

    def forward(self, audio: Tensor, history: Context = WHOLE) -> Tensor:
        """The columns [B, T * columns, C] of `audio` [B, T * hop] after the transformer."""
        return self.layers(self.model(audio, history), history)

    @torch.no_grad()
    def encode(self, audio: Tensor) -> Tensor:
        """Encode mono `audio` [S], S at least 1, to latents [ceil(S / hop), D]. No sync."""
        weight = self.downsample.weight
        filled = F.pad(audio.to(weight), (0, -len(audio) % self.hop))[None]
        x = in_pieces(self, filled, _PIECE_FRAMES * self.hop, self.layout)
        # The first column stands for those before it.
        return self.downsample(F.pad(x.mT, (self.columns, 0), "replicate"))[0].mT
