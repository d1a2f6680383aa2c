"""The codec decoder: latents to audio, with causal layers over [B, T, C] that stream exactly."""

import torch
from torch import Tensor, nn

from sonoro.nn.causal import CausalConv1d, DepthwiseUpsample, FadeIn, name_layers
from sonoro.nn.elu import EluVocoder
from sonoro.nn.gelu import GeluWindowLayer
from sonoro.nn.history import Context
from sonoro.nn.vocoder import finalize
from sonoro.nn.window import WindowLayers

from .config import CodecConfig

_FADE_SAMPLES = 120  # A segment fades in: a codec without history begins with a click.


class CodecDecoder(nn.Module):
    """Latents to audio, `hop` samples each. `layout` is that of its `History`; `reach_frames` the receptive field of
    the state of `render`: less than a frame."""

    reach_frames = 1

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        net, windows = config.decoding
        self.latent_width, self.columns, self.hop = config.quantizer.dimension, config.columns, config.hop
        self.output_proj = CausalConv1d(config.quantizer.dimension, windows.d_model, 1, bias=False)
        self.upsample = DepthwiseUpsample(windows.d_model, self.columns)
        self.layers = WindowLayers(windows.window, GeluWindowLayer)
        self.model = EluVocoder(net.dimension, net.n_filters, net.ratios, net.kernels, net.compress)
        self.fade = FadeIn(_FADE_SAMPLES)
        self.layout = name_layers(self)

    @staticmethod
    def is_wide(name: str) -> bool:
        """No tensor stays in float32."""
        return False

    @property
    def weight(self) -> Tensor:
        return self.output_proj.conv.weight

    def example(self, rows: int, columns: int) -> Tensor:
        count = rows * columns * self.latent_width
        return (torch.arange(count, device=self.weight.device) * 7919.0).sin().view(rows, columns, 1, -1)

    def latents(self, frames: Tensor) -> Tensor:
        """`frames` [B, T, 1, D] in the decoder's dtype."""
        return frames.to(self.weight.dtype).flatten(2)

    def contextualize(self, latents: Tensor, history: Context) -> Tensor:
        """`latents` [B, T, D] through the transformer: the columns of each frame, [B, T, columns * width]."""
        x = self.upsample(self.output_proj(latents, history), history)
        return self.layers(x, history).unflatten(1, (-1, self.columns)).flatten(2)

    def render(self, x: Tensor, history: Context) -> Tensor:
        """The columns [B, T, columns * width] of frames to audio [B, T * hop]."""
        frames = x.shape[1]
        x = x.unflatten(2, (self.columns, -1)).flatten(1, 2)
        return self.fade(self.model(x, history), frames, history)

    def finalize(self) -> None:
        finalize(self)
