"""What codecs in compiled code have in common, on a CPU: convolutions and window layers with packed weights, and
pointers into the history that the modules keep too, so that either may decode the next chunk. Their C code is in
`sonoro.native`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import Structure
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.models.shared.compiled import Addresses, affine
from sonoro.native.library import BLOCK, CompiledCode
from sonoro.native.structures import SHARED
from sonoro.nn.causal import CausalConv1d, CausalConvTranspose1d, CausalLayer, lay_out
from sonoro.nn.history import History
from sonoro.nn.linear import Linear
from sonoro.nn.window import WindowLayer as Layer
from sonoro.nn.window import WindowLayers

Conv, WindowLayer, Windows = (SHARED[name] for name in ("Conv", "WindowLayer", "Windows"))
_ROOMS = 4


class PackedConvs:
    """Weights and biases of a codec's layers for the compiled code: packed at first use, once for all histories.
    With `frees` the layers' own copies are freed; their shapes and first rows stay, for fingerprints."""

    def __init__(self, library: CompiledCode, *, frees: bool = False) -> None:
        self.library, self._frees = library, frees
        self._convs: dict[nn.Module, _PackedConv] = {}

    def conv(self, part: nn.Module, history: Tensor | None) -> Structure:
        """That of `part`, keeping its left context in `history`."""
        if part not in self._convs:
            self._convs[part] = _PackedConv(part, self.library)
            if self._frees:
                weight = _weight(part)
                weight.data = weight.data[:1].clone().expand_as(weight)
        return self._convs[part].conv(history)

    @torch.no_grad()
    def restore(self) -> None:
        """Give the layers back what was freed: the same numbers. Nothing is freed from now on."""
        if self._frees:
            self._frees = False
            for part, conv in self._convs.items():
                _weight(part).data = conv.unpacked()
                lay_out(part)


class _PackedConv:
    """Weight and bias of `part`: blocks [ceil(N / BLOCK), taps * C, BLOCK], in 8 bits with a `scale` [N] where the
    checkpoint has it so. The weight of one output channel is as it is, in order of taps."""

    def __init__(self, part: nn.Module, library: CompiledCode) -> None:
        self._part, by_input = part, _by_input(part, _weight(part))
        self._shape, flat = by_input.shape, by_input.flatten(0, 1).contiguous()
        outputs = flat.shape[1]
        self._scale: Tensor | None = None
        if outputs == 1:
            self._blocks = flat[None].clone()
        elif (packed := library.pack(flat.t())) is None:
            self._blocks = _padded(flat).unflatten(1, (-1, BLOCK)).transpose(0, 1).contiguous()
        else:
            self._blocks, self._scale = packed[0], _padded(packed[1])
        bias = part.bias if isinstance(part, Linear) else cast(CausalConv1d, part).conv.bias
        repeated = torch.zeros(outputs) if bias is None else bias.repeat(outputs // len(bias))
        self._bias = _padded(repeated.detach())

    def conv(self, history: Tensor | None) -> Structure:
        """This, keeping its left context in `history`."""
        assert history is None or (history.is_contiguous() and history.dtype == torch.float32)
        (taps, inputs, outputs), dilation = self._shape, 1
        if isinstance(self._part, CausalConv1d):
            (dilation,) = self._part.conv.dilation
        blocks, scale = self._blocks.data_ptr(), self._scale
        weights = (blocks, None, None) if scale is None else (None, blocks, scale.data_ptr())
        kept = (None, 0) if history is None else (history.data_ptr(), history.shape[1])
        return Conv(*weights, self._bias.data_ptr(), kept[0], inputs, outputs, taps, dilation, kept[1])

    def unpacked(self) -> Tensor:
        """The weight of the part, in its shape."""
        outputs, shape = self._shape[2], _weight(self._part).shape
        flat = self._blocks.transpose(0, 1).flatten(1)[:, :outputs].float()
        values = flat if self._scale is None else flat * self._scale[:outputs]
        # Where each number stood: those of the weight are the same in another order.
        order = _by_input(self._part, torch.arange(values.numel()).view(shape))
        return torch.empty(values.numel()).index_copy_(0, order.flatten(), values.flatten()).view(shape)


def _weight(part: nn.Module) -> Tensor:
    return part.weight if isinstance(part, Linear) else cast(CausalConv1d, part).conv.weight


def _by_input(part: nn.Module, weight: Tensor) -> Tensor:
    """`weight` of `part` as that of a convolution, [taps, C, N]. A transposed one is a convolution with `stride`
    outputs a row, of two taps if it has left context."""
    if isinstance(part, Linear):
        return weight.t()[None]
    taps = weight.permute(2, 1, 0)
    if isinstance(part, CausalConv1d):
        return taps
    (stride,) = cast(CausalConvTranspose1d, part).conv.stride
    return torch.stack([half.flatten(0, 1).t() for half in reversed(taps.split(stride))])


def _padded(rows: Tensor) -> Tensor:
    """`rows` [..., N] with zeros up to a whole block."""
    return F.pad(rows, (0, -rows.shape[-1] % BLOCK))


class PackedLayers(Addresses):
    """A codec's layers for the compiled code, with their left context in `history`, for at most `most_frames` frames of
    each slot at once. Subclasses fill a structure of the C code, and call their function of it by `run`."""

    def __init__(self, history: History, weights: PackedConvs, most_frames: int) -> None:
        super().__init__(history, weights)
        self.history, self._weights, self.library = history, weights, weights.library
        self.most_frames = most_frames

    def run(self, function: Callable[..., None], codec: Structure, frames: Tensor, slots: Tensor, hop: int) -> Tensor:
        """`function` of `frames` [B, T, ...] of `slots` [B]: [B, T * hop]. Allocates only the samples."""
        count, rows = frames.shape[:2]
        assert rows <= self.most_frames
        assert slots.shape == (count,)
        assert slots.dtype == torch.int64
        assert slots.is_contiguous()
        frames, samples = frames.contiguous(), torch.empty(count, rows * hop)
        given = frames.data_ptr(), slots.data_ptr(), count, rows, hop, samples.data_ptr()
        function(ctypes.byref(codec), *given)
        return samples

    def rooms(self, floats: int) -> Any:
        """Rooms of `floats` numbers for intermediate results."""
        return (ctypes.c_void_p * _ROOMS)(*(self.at(torch.zeros(floats)) for _ in range(_ROOMS)))

    def conv(self, part: nn.Module) -> Structure:
        """A linear layer, a causal convolution, or a transposed one as a convolution with `stride` outputs a row."""
        key = part.key if isinstance(part, CausalLayer) and part.length else ""
        return self._weights.conv(part, self.history.columns[key] if key else None)

    def windows(self, layers: WindowLayers) -> Structure:
        config = layers.config
        made = (WindowLayer * config.layers)(*(self._window(cast(Layer, layer)) for layer in layers))
        exponents = torch.arange(0, config.head_width, 2, dtype=torch.float32) / config.head_width
        frequencies, seen = self.at(1.0 / config.rope_theta**exponents), self.at(self.history.seen)
        return Windows(
            made, frequencies, seen, config.layers, config.width, config.heads, config.kv_heads, config.head_width,
            config.window, config.norm_eps,
        )  # fmt: skip

    def window_floats(self, layers: WindowLayers, columns: int) -> int:
        """Numbers of the largest intermediate result of so many columns, with the left context before it."""
        config = layers.config
        wide = (config.heads + 2 * config.kv_heads) * config.head_width
        return (columns + config.window) * max(config.intermediate, wide, config.width)

    def _window(self, layer: Layer) -> Structure:
        attention, feed = layer.self_attn, layer.mlp
        up = feed.gate_up_proj if hasattr(feed, "gate_up_proj") else feed.up_proj
        parts = attention.qkv_proj, attention.o_proj, up, feed.down_proj
        first, second = affine(layer.input_layernorm), affine(layer.post_attention_layernorm)
        scales = layer.self_attn_layer_scale.scale, layer.mlp_layer_scale.scale
        tensors = first[0], second[0], *scales, first[1], second[1], self.history.columns[attention.key]
        return WindowLayer(*(self.conv(cast(Linear, part)) for part in parts), *map(self.at, tensors))
