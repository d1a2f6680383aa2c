"""The convolutional half of a codec's decoder: columns widened in time by transposed convolutions between residual
units with periodic activations, down to samples; and of an encoder the mirrored block. All take their left context from
a `Context`.

Sequences are [B, T, C]. Knows no codebook and no transformer; `sonoro.nn.vocoder_fused` runs the same weights on a GPU.
"""

from __future__ import annotations

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

__all__ = [
    "ConvNext",
    "DepthwiseUnit",
    "DownsampleBlock",
    "Downsampler",
    "LinearSnake",
    "LogSnake",
    "ResidualUnit",
    "Snake",
    "UpsampleBlock",
    "Upsampler",
    "Vocoder",
    "finalize",
    "reach_frames",
]

UNIT_DILATIONS = (1, 3, 9)


class Snake(nn.Module, ABC):
    """x + scale * sin(rate * x)^2 by channel of [B, T, C]; a subclass says what rate and scale are made of.

    `finalize` keeps both for when no gradient is wanted.
    """

    rate: Tensor | None
    scale: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rate", None, persistent=False)
        self.register_buffer("scale", None, persistent=False)

    @abstractmethod
    def derive(self) -> Rates:
        """Rate and scale from the parameters, [C] each, in float32 or wider. Differentiable."""

    def finalize(self) -> None:
        self.rate, self.scale = (tensor.detach() for tensor in self.derive())

    @property
    def rates(self) -> Rates:
        """Rate and scale as `finalize` kept them."""
        assert self.rate is not None
        assert self.scale is not None
        return self.rate, self.scale

    def forward(self, x: Tensor) -> Tensor:
        is_derived = self.rate is None or torch.is_grad_enabled()
        return snake_beta(x, *(self.derive() if is_derived else self.rates), channel_dim=-1)


class LogSnake(Snake):
    """SnakeBeta: rate and amplitude apart, and stored as logarithms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))

    def derive(self) -> Rates:
        return snake_beta_rates(self.alpha, self.beta)


class LinearSnake(Snake):
    """Snake: the rate as it is stored, and its inverse as the amplitude."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(channels))

    def derive(self) -> Rates:
        return snake_rates(self.alpha)


class ConvNext(nn.Module):
    """A residual block of a depthwise convolution and two linear layers."""

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
    """A dilated convolution and a pointwise one, each after an activation, added to their input."""

    def __init__(self, channels: int, dilation: int, snake: Callable[[int], Snake]) -> None:
        super().__init__()
        self.act1, self.act2 = snake(channels), snake(channels)
        self.conv1 = CausalConv1d(channels, channels, 7, dilation)
        self.conv2 = CausalConv1d(channels, channels, 1)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x), history)), history)


class DepthwiseUnit(ResidualUnit):
    """One whose dilated convolution is of each channel by itself."""

    def __init__(self, channels: int, dilation: int, snake: Callable[[int], Snake]) -> None:
        super().__init__(channels, dilation, snake)
        self.conv1 = CausalConv1d(channels, channels, 7, dilation, groups=channels)


class UpsampleBlock(nn.Module):
    """`rate` times as many columns of half the channels."""

    def __init__(
        self, channels: int, rate: int, snake: Callable[[int], Snake], unit: type[ResidualUnit] = ResidualUnit
    ) -> None:
        super().__init__()
        half = channels // 2
        units = [unit(half, dilation, snake) for dilation in UNIT_DILATIONS]
        self.block = nn.ModuleList([snake(channels), CausalConvTranspose1d(channels, half, 2 * rate, rate), *units])

    @property
    def affine(self) -> tuple[Tensor, Tensor] | None:
        """What its input is multiplied by, and what is then added, by channel; None: nothing."""
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
    """1 / `rate` of the columns with twice the channels, through the layers `after`, which take a history too."""

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
    def forward(self, x: Tensor, history: Context) -> Tensor:
        """`x` through both layers of each pair."""
        for pair in self:
            for layer in cast(nn.ModuleList, pair):
                x = layer(x, history)
        return x


class Upsampler(_Pairs):
    """Pairs of a transposed convolution and a `ConvNext`: columns of one width, `ratio` times as many after each."""

    def __init__(self, width: int, ratios: Sequence[int]) -> None:
        super().__init__(
            nn.ModuleList([CausalConvTranspose1d(width, width, ratio, ratio), ConvNext(width)]) for ratio in ratios
        )


class Downsampler(_Pairs):
    """Pairs of a strided convolution and a `ConvNext`: columns of one width, 1 / `ratio` as many after each."""

    def __init__(self, width: int, ratios: Sequence[int]) -> None:
        super().__init__(
            nn.ModuleList([CausalStridedConv1d(width, width, ratio, ratio), ConvNext(width)]) for ratio in ratios
        )


class Vocoder(nn.ModuleList):
    """Columns [B, T, width] to samples [B, T * product of `rates`], brought within [-1, 1] as `bound` says."""

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
    """How many frames back anything kept within an upsampler of `ratios` and a vocoder of `rates` depends on."""
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
    """Derive what activations below `root` need, and order the weights of convolutions: once, after loading."""
    for module in root.modules():
        if isinstance(module, Snake):
            module.finalize()
    lay_out(root)
