"""What codecs in compiled code have in common, on a CPU: convolutions and window layers with packed weights, and
pointers into the history that the modules keep too, so that either may decode the next chunk. The C code is in
`sonoro.native`."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.models.shared.compiled import Addresses, affine
from sonoro.native.library import BLOCK, CompiledCode, Conv, WindowLayer, Windows
from sonoro.nn.causal import CausalConv1d, CausalConvTranspose1d
from sonoro.nn.history import History
from sonoro.nn.linear import Linear
from sonoro.nn.window import WindowLayer as Layer
from sonoro.nn.window import WindowLayers


class PackedLayers(Addresses):
    """A codec's layers for the compiled code, with their left context in `history`."""

    def __init__(self, history: History, library: CompiledCode) -> None:
        super().__init__(history)
        self.history, self._code = history, library

    def linear(self, part: Linear) -> Conv:
        return self._packed(part.weight[:, :, None], part.bias)

    def conv(self, part: CausalConv1d, *, is_packed: bool = True) -> Conv:
        """`part`; its weight in order of taps, if not `is_packed`, for one output channel."""
        made = self._packed(part.conv.weight, part.conv.bias, part.key if part.length else "", part.conv.dilation[0])
        if not is_packed:
            made.weight = self.at(part.conv.weight[0].t().contiguous())
        return made

    def transposed(self, part: CausalConvTranspose1d) -> Conv:
        """`part` as a convolution with `stride` outputs a row, of two taps if it has left context."""
        (stride,), taps, bias = part.conv.stride, part.conv.weight.permute(2, 1, 0), part.conv.bias
        assert bias is not None
        parts = (taps[stride:], taps[:stride]) if part.length else (taps,)
        weight = torch.stack([half.flatten(0, 1) for half in parts], dim=-1)
        return self._packed(weight, bias.repeat(stride), part.key if part.length else "")

    def windows(self, layers: WindowLayers) -> Windows:
        config = layers.config
        made = (WindowLayer * config.layers)(*(self._window(cast(Layer, layer)) for layer in layers))
        exponents = torch.arange(0, config.head_width, 2, dtype=torch.float32) / config.head_width
        frequencies, seen = self.at(1.0 / config.rope_theta**exponents), self.at(self.history.seen)
        return Windows(
            made, frequencies, seen, config.layers, config.width, config.heads, config.kv_heads, config.head_width,
            config.window, config.norm_eps,
        )  # fmt: skip

    def _window(self, layer: Layer) -> WindowLayer:
        attention, feed = layer.self_attn, layer.mlp
        up = feed.gate_up_proj if hasattr(feed, "gate_up_proj") else feed.up_proj
        parts = attention.qkv_proj, attention.o_proj, up, feed.down_proj
        first, second = affine(layer.input_layernorm), affine(layer.post_attention_layernorm)
        scales = layer.self_attn_layer_scale.scale, layer.mlp_layer_scale.scale
        tensors = first[0], second[0], *scales, first[1], second[1], self.history.columns[attention.key]
        return WindowLayer(*(self.linear(cast(Linear, part)) for part in parts), *map(self.at, tensors))

    def _packed(self, weight: Tensor, bias: Tensor | None, key: str = "", dilation: int = 1) -> Conv:
        """A `Conv` of `weight` [N, C, taps] and `bias` [N], that keeps its left context under `key`; in 8 bits if the
        checkpoint has it so."""
        outputs, inputs, taps = weight.shape
        padding = (0, -outputs % BLOCK)
        by_input = weight.permute(2, 1, 0).reshape(taps * inputs, outputs).contiguous()
        bias = F.pad(torch.zeros(outputs) if bias is None else bias, padding)
        history = self.history.columns[key] if key else None
        packed = self._code.pack(by_input.t())
        if packed is None:
            blocks = F.pad(by_input, padding).unflatten(1, (-1, BLOCK)).transpose(0, 1).contiguous()
            weights: tuple[int | None, ...] = (self.at(blocks), None, None)
        else:
            weights = (None, self.at(packed[0]), self.at(F.pad(packed[1], padding)))
        return Conv(
            *weights, self.at(bias), self.at(history),
            inputs, outputs, taps, dilation, 0 if history is None else history.shape[1],
        )  # fmt: skip
