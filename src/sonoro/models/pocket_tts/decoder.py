"""The codec decoder: latents to audio, with causal layers over [B, T, C] that stream exactly."""

import torch
from torch import Tensor, nn

from sonoro.models.shared.latents import LatentDecoder
from sonoro.nn.causal import CausalConv1d, CausalConvTranspose1d, CausalLayer, name_layers
from sonoro.nn.elu import EluLayers, EluUnit
from sonoro.nn.gelu import GeluWindowLayer
from sonoro.nn.history import Context
from sonoro.nn.window import WindowLayers

from .config import CodecConfig, ConvolutionsConfig

_FADE_SAMPLES = 120  # A segment fades in: a codec without history begins with a click.


class CodecDecoder(LatentDecoder):
    """Latents to audio, `hop` samples each. `layout` is that of its `History`; `reach_frames` the receptive field of
    the state of `render`: less than a frame."""

    reach_frames = 1

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        net, windows = config.decoding
        self.patch, self.columns, self.hop = (1, config.quantizer.dimension), config.columns, config.hop
        self.output_proj = CausalConv1d(config.quantizer.dimension, windows.d_model, 1, bias=False)
        self.upsample = _Upsample(windows.d_model, self.columns)
        self.layers = WindowLayers(windows.window, GeluWindowLayer)
        self.model = _Vocoder(net)
        self.fade = _FadeIn(_FADE_SAMPLES)
        self.layout = name_layers(self)

    def contextualize(self, latents: Tensor, history: Context) -> Tensor:
        """`latents` [B, T, 1, D] through the transformer: the columns of each frame, [B, T, columns * width]."""
        x = self.upsample(self.output_proj(latents.flatten(2), history), history)
        return self.layers(x, history).unflatten(1, (-1, self.columns)).flatten(2)

    def render(self, x: Tensor, history: Context) -> Tensor:
        """The columns [B, T, columns * width] of frames to audio [B, T * hop]."""
        frames = x.shape[1]
        x = x.unflatten(2, (self.columns, -1)).flatten(1, 2)
        return self.fade(self.model(x, history).squeeze(2), frames, history)


class _Vocoder(EluLayers):
    """Columns [B, T, width] to samples [B, T * product of the ratios, 1], not limited."""

    def __init__(self, net: ConvolutionsConfig) -> None:
        inner = net.n_filters << len(net.ratios)
        super().__init__({"0": CausalConv1d(net.dimension, inner, net.kernel_size)})
        for index, ratio in enumerate(net.ratios):
            half = inner >> (index + 1)
            self[str(3 * index + 2)] = CausalConvTranspose1d(2 * half, half, 2 * ratio, ratio)
            self[str(3 * index + 3)] = EluUnit(half, net.residual_kernel_size, net.compress)
        self[str(3 * len(net.ratios) + 2)] = CausalConv1d(net.n_filters, 1, net.last_kernel_size)


class _Upsample(CausalLayer):
    """Upsample by `rate`, each channel by itself, [B, T, C] to [B, T * rate, C]: a transposed convolution whose kernel
    is two strides."""

    def __init__(self, channels: int, rate: int) -> None:
        super().__init__(1, channels)
        self.conv = nn.ConvTranspose1d(channels, channels, 2 * rate, rate, groups=channels, bias=False)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        # [2, rate, C]: the taps of the current column, and of the one before.
        taps = self.conv.weight[:, 0].mT.unflatten(0, (2, -1))
        joined = history.extend(self.key, x, self.length)[:, :, None]
        return torch.addcmul(joined[:, 1:] * taps[0], joined[:, :-1], taps[1]).flatten(1, 2)


class _FadeIn(CausalLayer):
    """Fades in the first `count` samples of a stream. What it keeps is 1 once a frame has been decoded."""

    def __init__(self, count: int) -> None:
        super().__init__(1, 1)
        self.count = count

    def forward(self, samples: Tensor, frames: int, history: Context) -> Tensor:
        """`samples` [B, S] of so many frames."""
        batch = samples.shape[0]
        began = history.extend(self.key, samples.new_ones(batch, frames, 1), self.length)[:, :-1]
        rise = torch.arange(samples.shape[1] // frames, device=samples.device, dtype=samples.dtype)
        gain = torch.maximum(began, (rise / (self.count - 1)).clamp(max=1))
        return samples * gain.flatten(1)
