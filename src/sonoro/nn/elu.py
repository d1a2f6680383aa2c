"""The convolutional half of a codec with ELU activations, causal: of a decoder, up to samples, and of an encoder.

Sequences are [B, T, C]; left context comes from a `Context`. Layers have the numbers of the released "SEANet"."""

import math
from collections.abc import Sequence
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.causal import CausalConv1d, CausalConvTranspose1d, CausalStridedConv1d
from sonoro.nn.history import Context


class EluUnit(nn.Module):
    """Two convolutions, each after an ELU, plus the input; the inner width is `channels` / `compress`."""

    def __init__(self, channels: int, kernel: int, compress: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = CausalConv1d(channels, channels // compress, kernel, dilation)
        self.conv2 = CausalConv1d(channels // compress, channels, 1)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        return x + self.conv2(F.elu(self.conv1(F.elu(x), history)), history)


class EluVocoder(nn.ModuleDict):
    """Columns [B, T, width] to samples [B, T * product of `ratios`], not limited. `kernels` are those of the first
    convolution, of the units and of the last one; the first has `channels` << number of ratios outputs."""

    def __init__(
        self, width: int, channels: int, ratios: Sequence[int], kernels: tuple[int, int, int], compress: int
    ) -> None:
        inner = channels << len(ratios)
        super().__init__({"0": CausalConv1d(width, inner, kernels[0])})
        for index, ratio in enumerate(ratios):
            half = inner >> (index + 1)
            self[str(3 * index + 2)] = CausalConvTranspose1d(2 * half, half, 2 * ratio, ratio)
            self[str(3 * index + 3)] = EluUnit(half, kernels[1], compress)
        self[str(3 * len(ratios) + 2)] = CausalConv1d(channels, 1, kernels[2])

    @property
    def ends(self) -> tuple[CausalConv1d, CausalConv1d]:
        """The first and the last convolution."""
        first, *_, last = self.values()
        return cast(CausalConv1d, first), cast(CausalConv1d, last)

    @property
    def blocks(self) -> list[tuple[CausalConvTranspose1d, EluUnit]]:
        """For each ratio, what upsamples, and the unit after it."""
        layers: list[Any] = [*self.values()][1:-1]
        return [*zip(layers[::2], layers[1::2], strict=True)]

    def forward(self, x: Tensor, history: Context) -> Tensor:
        first, last = self.ends
        x = first(x, history)
        for up, unit in self.blocks:
            x = unit(up(F.elu(x), history), history)
        return last(F.elu(x), history).squeeze(2)


class EluEncoder(nn.ModuleDict):
    """Samples [B, T * `hop`] to columns [B, T, width], by the same layers in mirrored order, the last of a stream to
    the columns begun; `ratios` from the samples on, with a unit for each of `dilations`."""

    def __init__(
        self,
        width: int,
        channels: int,
        ratios: Sequence[int],
        kernels: tuple[int, int, int],
        compress: int,
        *,
        dilations: Sequence[int] = (1,),
    ) -> None:
        super().__init__({"0": CausalConv1d(1, channels, kernels[0])})
        at = 1
        for ratio in ratios:
            self.update({str(at + n): EluUnit(channels, kernels[1], compress, d) for n, d in enumerate(dilations)})
            at += len(dilations) + 2
            self[str(at - 1)] = CausalStridedConv1d(channels, 2 * channels, 2 * ratio, ratio)
            channels *= 2
        self[str(at + 1)] = CausalConv1d(channels, width, kernels[2])
        self.hop = math.prod(ratios)

    def forward(self, audio: Tensor, history: Context) -> Tensor:
        x = audio[:, :, None]
        for name, layer in self.items():
            x = layer(x if isinstance(layer, EluUnit) or name == "0" else F.elu(x), history)
        return x
