"""Causal convolutions over [B, T, C] with their left context in a `Context`, so that streaming is exact.

Channels are last in memory: a convolution of few columns is then one matrix product over windows, and a transposed
convolution two products whose outputs are already in order."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.history import Context
from sonoro.ops.causal import depthwise

FEW_ROWS = 64
"""Up to this many output columns a convolution is one matrix product over copied windows.
1024 to 1536 channels, kernel 7, 16 columns, float32 on 2 cores: 5.7 ms; oneDNN 25.7 ms. Equal from 64 columns on."""


class CausalLayer(nn.Module):
    """A layer whose left context, `length` columns of width `width`, is kept under `key` (set by `name_layers`)."""

    key = ""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.length = length
        self.width = width


def name_layers(root: nn.Module) -> dict[str, tuple[int, int]]:
    """Set the `key` of each causal layer below `root` to its module path; returns the layout of their `History`."""
    layout = {}
    for name, layer in root.named_modules():
        if isinstance(layer, CausalLayer) and layer.length:
            layer.key = name
            layout[name] = (layer.length, layer.width)
    return layout


def lay_out(root: nn.Module) -> None:
    """Store each convolution weight below `root` in the order its products read it, shape unchanged. Idempotent."""
    for layer in root.modules():
        if isinstance(layer, (CausalConv1d, CausalConvTranspose1d)):
            weight, order = layer.conv.weight, layer.memory_order
            weight.data = weight.data.permute(order).contiguous().permute(order)


class CausalConv1d(CausalLayer):
    """Causal convolution, stride 1, [B, T, C_in] to [B, T, C_out]; left context (kernel - 1) * dilation columns."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int,
        dilation: int = 1,
        groups: int = 1,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__((kernel - 1) * dilation, in_channels)
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, dilation=dilation, groups=groups, bias=bias)
        self.is_depthwise = groups == in_channels == out_channels > 1
        self.memory_order = (2, 1, 0) if self.is_depthwise else (0, 2, 1)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        rows = x.shape[0] * x.shape[1]
        conv, weight = self.conv, self.conv.weight
        if weight.shape[2] == 1 and conv.groups == 1:
            return F.linear(x, weight[:, :, 0], conv.bias)
        x = history.extend(self.key, x, self.length)
        if self.is_depthwise:
            assert conv.bias is not None
            return depthwise(x, weight[:, 0].mT.contiguous(), conv.bias, conv.dilation[0])
        if rows <= FEW_ROWS and conv.groups == 1:
            windows = x.unfold(1, self.length + 1, 1)[..., :: conv.dilation[0]]
            return F.linear(windows.mT.flatten(2), weight.mT.flatten(1), conv.bias)
        # Unlike conv1d, a 2D convolution of height 1 reads channels-last memory without a copy.
        pixels = x.mT.unsqueeze(2)
        y = F.conv2d(pixels, weight.unsqueeze(2), conv.bias, dilation=(1, conv.dilation[0]), groups=conv.groups)
        return y.squeeze(2).mT


class CausalStridedConv1d(CausalLayer):
    """Strided causal convolution, [B, T, C_in] to [B, ceil(T / stride), C_out]; left context kernel - stride columns.
    T is a multiple of the stride but for the last columns of a stream, which zeros follow."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int) -> None:
        super().__init__(kernel - stride, in_channels)
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, stride)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        x, beyond = history.extend(self.key, x, self.length).mT, -x.shape[1] % self.conv.stride[0]
        return self.conv(F.pad(x, (0, beyond)) if beyond else x).mT


class CausalConvTranspose1d(CausalLayer):
    """Causal transposed convolution, [B, T, C_in] to [B, T * stride, C_out]; the kernel is one or two strides.

    Output columns t * stride to (t + 1) * stride come from column t and, if the kernel is two strides, column t - 1:

        kernel      |<- first half ->|<- second half ->|
        from t - 1  ....cut or past..|  kept           |
        from t                       |  kept           |  waits for the next call

    The bias is added once to each output column; columns before the start are zeros."""

    memory_order = (2, 1, 0)

    def __init__(self, in_channels: int, out_channels: int, kernel: int, stride: int) -> None:
        assert kernel in (stride, 2 * stride), (kernel, stride)
        super().__init__(kernel // stride - 1, in_channels)
        self.conv = nn.ConvTranspose1d(in_channels, out_channels, kernel, stride=stride)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        batch, columns, _ = x.shape
        (stride,), taps, bias = self.conv.stride, self.conv.weight.permute(2, 1, 0), self.conv.bias
        assert bias is not None
        joined = history.extend(self.key, x, self.length)
        y = F.linear(joined[:, self.length :], taps[:stride].flatten(0, 1), bias.repeat(stride))
        if self.length:
            y = torch.addmm(y.flatten(0, 1), joined[:, :-1].flatten(0, 1), taps[stride:].flatten(0, 1).t())
        return y.reshape(batch, columns * stride, -1)
