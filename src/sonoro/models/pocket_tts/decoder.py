"""The codec decoder: latents to audio, with causal layers over [B, T, C] that stream exactly."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.causal import CausalConv1d, CausalConvTranspose1d, CausalLayer, name_layers
from sonoro.nn.gelu import GeluWindowLayer
from sonoro.nn.history import Context
from sonoro.nn.vocoder import finalize
from sonoro.nn.vocoder_fused import Past
from sonoro.nn.window import WindowLayers

from .config import CodecConfig

_FADE_SAMPLES = 120
"""A segment fades in: a codec without history begins with a click."""


class Unit(nn.Module):
    """Two convolutions, each after an ELU, plus the input."""

    def __init__(self, channels: int, kernel: int, compress: int) -> None:
        super().__init__()
        self.conv1 = CausalConv1d(channels, channels // compress, kernel)
        self.conv2 = CausalConv1d(channels // compress, channels, 1)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        return x + self.conv2(F.elu(self.conv1(F.elu(x), history)), history)


class _Widen(CausalLayer):
    """Upsample by `rate`, each channel by itself: the kernel has two strides. [B, T, C] to [B, T * rate, C]."""

    def __init__(self, channels: int, rate: int) -> None:
        super().__init__(1, channels)
        self.conv = nn.ConvTranspose1d(channels, channels, 2 * rate, rate, groups=channels, bias=False)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        # [2, rate, C]: the taps of the current column, and of the one before.
        taps = self.conv.weight[:, 0].mT.unflatten(0, (2, -1))
        joined = history.extend(self.key, x, self.length)[:, :, None]
        return torch.addcmul(joined[:, 1:] * taps[0], joined[:, :-1], taps[1]).flatten(1, 2)


class _Fade(CausalLayer):
    """Fades in the first frame's samples. What it keeps is 1 once a frame has been decoded."""

    def __init__(self) -> None:
        super().__init__(1, 1)

    def forward(self, samples: Tensor, frames: int, history: Context) -> Tensor:
        """`samples` [B, S] of so many frames."""
        batch = samples.shape[0]
        began = history.extend(self.key, samples.new_ones(batch, frames, 1), self.length)[:, :-1]
        rise = torch.arange(samples.shape[1] // frames, device=samples.device, dtype=samples.dtype)
        gain = torch.maximum(began, (rise / (_FADE_SAMPLES - 1)).clamp(max=1))
        return samples * gain.flatten(1)


class CodecDecoder(nn.Module):
    """Latents to audio, `hop` samples each. `layout` is that of its `History`; `reach_frames` the receptive field of
    the state of `render`: less than a frame."""

    reach_frames = 1

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        net, windows = config.decoding
        width, kernel, ratios = net.n_filters << len(net.ratios), net.kernel_size, net.ratios
        self.latent_width, self.columns, self.hop = config.quantizer.dimension, config.columns, config.hop
        self.output_proj = CausalConv1d(config.quantizer.dimension, windows.d_model, 1, bias=False)
        self.upsample = _Widen(windows.d_model, self.columns)
        self.layers = WindowLayers(windows.window, GeluWindowLayer)
        self.model = nn.ModuleDict({"0": CausalConv1d(net.dimension, width, kernel)})
        for index, ratio in enumerate(ratios):
            half = width >> (index + 1)
            self.model[str(3 * index + 2)] = CausalConvTranspose1d(2 * half, half, 2 * ratio, ratio)
            self.model[str(3 * index + 3)] = Unit(half, net.residual_kernel_size, net.compress)
        self.model[str(3 * len(ratios) + 2)] = CausalConv1d(net.n_filters, 1, net.last_kernel_size)
        self.fade = _Fade()
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
        first, *middle, last = self.model.values()
        x = first(x, history)
        for layer in middle:
            x = layer(x if isinstance(layer, Unit) else F.elu(x), history)
        return self.fade(last(F.elu(x), history).squeeze(2), frames, history)

    def finalize(self) -> None:
        finalize(self)


class HalfDecoder:
    """A finalized `CodecDecoder` in half precision, by its modules. Capturable."""

    def __init__(self, decoder: CodecDecoder, stream_dtype: torch.dtype) -> None:
        self._decoder = decoder

    def contextualize(self, frames: Tensor, past: Past) -> Tensor:
        """Columns of `frames` [B, T, 1, D]; advances the history."""
        return self._decoder.contextualize(self._decoder.latents(frames), past.context)

    @property
    def render(self) -> Callable[[Tensor, Past], Tensor]:
        return lambda x, past: self._decoder.render(x, past.context)
