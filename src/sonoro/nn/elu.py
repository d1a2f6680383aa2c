"""The convolutional half of a codec with ELU activations, causal.

Sequences are [B, T, C]; left context comes from a `Context`. Layers have the numbers of the released "SEANet"."""

import math
from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.causal import CausalConv1d, CausalStridedConv1d
from sonoro.nn.history import Context


class EluUnit(nn.Module):
    """Two convolutions, each after an ELU, plus the input; the inner width is `channels` / `compress`."""

    def __init__(self, channels: int, kernel: int, compress: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv1 = CausalConv1d(channels, channels // compress, kernel, dilation)
        self.conv2 = CausalConv1d(channels // compress, channels, 1)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        return x + self.conv2(F.elu(self.conv1(F.elu(x), history)), history)


class EluLayers(nn.ModuleDict):
    """Convolutions and units by number, [B, T, C] to [B, T', C']: an ELU before each convolution but the first."""

    def forward(self, x: Tensor, history: Context) -> Tensor:
        for name, layer in self.items():
            x = layer(x if isinstance(layer, EluUnit) or name == "0" else F.elu(x), history)
        return x


class EluEncoder(EluLayers):
    """Samples [B, T * `hop`] to columns [B, T, width], the last of a stream to the columns begun. `ratios` are from the
    samples on, with a unit for each of `dilations`; `kernels` those of the first convolution, of units, of the last."""

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
        return super().forward(audio[:, :, None], history)
