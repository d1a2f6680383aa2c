"""The convolutional half of a codec, causal: a decoder's blocks of Snake activations, transposed convolutions and
residual units, up to samples, and an encoder's mirrored downsampling blocks.

Sequences are [B, T, C]; left context comes from a `Context`. `nn.vocoder_fused` runs the same weights on a GPU."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.causal import CausalConv1d, CausalConvTranspose1d, CausalStridedConv1d, lay_out
from sonoro.nn.history import Context
from sonoro.nn.linear import Linear
from sonoro.ops.activation import Rates, snake_beta, snake_beta_rates, snake_rates

UNIT_DILATIONS = (1, 3, 9)


class Snake(nn.Module, ABC):
    """x + scale * sin(rate * x)^2 by channel of [B, T, C]; a subclass derives rate and scale from its parameters.
    `finalize` stores both, for use without gradients."""

    rate: Tensor | None
    scale: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", None, persistent=False)
        self.register_buffer("scale", None, persistent=False)

    @abstractmethod
    def derive(self) -> Rates:
        """Rate and scale, [C] each, from the parameters, in float32 or wider. Differentiable."""

    def finalize(self) -> None:
        self.rate, self.scale = (tensor.detach() for tensor in self.derive())

    @property
    def rates(self) -> Rates:
        """Rate and scale stored by `finalize`, [C] each."""
        assert self.rate is not None
        assert self.scale is not None
        return self.rate, self.scale

    def forward(self, x: Tensor) -> Tensor:
        is_derived = self.rate is None or torch.is_grad_enabled()
        return snake_beta(x, *(self.derive() if is_derived else self.rates), channel_dim=-1)


class LogSnake(Snake):
    """SnakeBeta: separate rate and amplitude, stored as logarithms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def derive(self) -> Rates:
        return snake_beta_rates(self.alpha, self.beta)


class LinearSnake(Snake):
    """Snake: amplitude 1 / rate; the rate is stored as it is."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))

    def derive(self) -> Rates:
        return snake_rates(self.alpha)


class ConvNext(nn.Module):
    """A causal ConvNeXt block: depthwise convolution, LayerNorm and two linear layers, scaled, plus the input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv1d(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = Linear(width, 4 * width)
        self.pwconv2 = Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor, history: Context) -> Tensor:
        y = self.norm(self.dwconv(x, history))
        return x + self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))


class ResidualUnit(nn.Module):
    """A dilated and a pointwise convolution, each after an activation, plus the input."""

    def __init__(self, channels: int, dilation: int, snake: Callable[[int], Snake]) -> None:
        super().__init__()
        self.act1, self.act2 = snake(channels), snake(channels)
        self.conv1 = CausalConv1d(channels, channels, 7, dilation)
        self.conv2 = CausalConv1d(channels, channels, 1)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x), history)), history)


class DepthwiseUnit(ResidualUnit):
    """A residual unit whose dilated convolution is depthwise."""

    def __init__(self, channels: int, dilation: int, snake: Callable[[int], Snake]) -> None:
        super().__init__(channels, dilation, snake)
        self.conv1 = CausalConv1d(channels, channels, 7, dilation, groups=channels)


class UpsampleBlock(nn.Module):
    """Upsample by `rate` and halve the channels: [B, T, C] to [B, T * rate, C / 2]."""

    def __init__(
        self, channels: int, rate: int, snake: Callable[[int], Snake], unit: type[ResidualUnit] = ResidualUnit
    ) -> None:
        super().__init__()
        half = channels // 2
        units = [unit(half, dilation, snake) for dilation in UNIT_DILATIONS]
        self.block = nn.ModuleList([snake(channels), CausalConvTranspose1d(channels, half, 2 * rate, rate), *units])

    @property
    def affine(self) -> tuple[Tensor, Tensor] | None:
        """Scale and shift of the input by channel, [C] each; None for neither."""
        return None

    def forward(self, x: Tensor, history: Context) -> Tensor:
        activation, *layers = self.block
        if self.affine is not None:
            x = (x * self.affine[0] + self.affine[1]).to(x.dtype)
        x = activation(x)
        for layer in layers:
            x = layer(x, history)
        return x


class DownsampleBlock(nn.Module):
    """Downsample by `rate` and double the channels, [B, T, C] to [B, T / rate, 2 * C], then run the layers `after`."""

    def __init__(
        self,
        channels: int,
        rate: int,
        snake: Callable[[int], Snake],
        after: Sequence[nn.Module] = (),
        unit: type[ResidualUnit] = ResidualUnit,
    ) -> None:
        super().__init__()
        units = [unit(channels, dilation, snake) for dilation in UNIT_DILATIONS]
        shrink = CausalStridedConv1d(channels, 2 * channels, 2 * rate, rate)
        self.block = nn.ModuleList([*units, snake(channels), shrink, *after])

    def forward(self, x: Tensor, history: Context) -> Tensor:
        for layer in self.block:
            x = layer(x) if isinstance(layer, Snake) else layer(x, history)
        return x


class _Pairs(nn.ModuleList):
    resampling: type[CausalConvTranspose1d] | type[CausalStridedConv1d]

    def __init__(self, width: int, ratios: Sequence[int]) -> None:
        super().__init__(
            nn.ModuleList([self.resampling(width, width, ratio, ratio), ConvNext(width)]) for ratio in ratios
        )

    def forward(self, x: Tensor, history: Context) -> Tensor:
        for pair in self:
            for layer in cast(nn.ModuleList, pair):
                x = layer(x, history)
        return x


class Upsampler(_Pairs):
    """For each ratio, a transposed convolution and a `ConvNext`: upsample by `ratio` at constant width."""

    resampling = CausalConvTranspose1d


class Downsampler(_Pairs):
    """For each ratio, a strided convolution and a `ConvNext`: downsample by `ratio` at constant width."""

    resampling = CausalStridedConv1d


class Vocoder(nn.ModuleList):
    """Columns [B, T, width] to samples [B, T * product of `rates`], limited to [-1, 1] by `bound`."""

    def __init__(
        self,
        width: int,
        channels: int,
        rates: Sequence[int],
        snake: Callable[[int], Snake],
        bound: Literal["clamp", "tanh"],
    ) -> None:
        widths = [channels >> index for index in range(len(rates) + 1)]
        blocks = [UpsampleBlock(width, rate, snake) for width, rate in zip(widths, rates, strict=False)]
        first, last = CausalConv1d(width, channels, 7), CausalConv1d(widths[-1], 1, 7)
        super().__init__([first, *blocks, snake(widths[-1]), last])
        self.bound = bound

    def forward(self, x: Tensor, history: Context) -> Tensor:
        first, *blocks, activation, last = self
        x = first(x, history)
        for block in blocks:
            x = block(x, history)
        samples = last(activation(x), history).squeeze(2)
        return samples.tanh() if self.bound == "tanh" else samples.clamp(-1, 1)


def reach_frames(ratios: Sequence[int], rates: Sequence[int]) -> int:
    """The receptive field, in frames back, of the state of an `Upsampler` of `ratios` and a `Vocoder` of `rates`."""
    reach, rate = 0.0, 1
    for ratio in ratios:
        rate *= ratio
        reach += 6 / rate
    reach += 6 / rate
    for ratio in rates:
        reach += 1 / rate
        rate *= ratio
        reach += 6 * sum(UNIT_DILATIONS) / rate
    return math.ceil(reach + 6 / rate)


@torch.no_grad()
def finalize(root: nn.Module) -> None:
    """Prepare `root` for inference, once after loading: derive Snake rates, lay out convolution weights."""
    for module in root.modules():
        if isinstance(module, Snake):
            module.finalize()
    lay_out(root)
