"""The layers of `nn.window` and `nn.vocoder` as chains of fused kernels: same weights, history and results, on a GPU.

A kernel writes the residual stream and the next layer's input: activated, with that layer's left context in front."""

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from sonoro.nn.causal import CausalConv1d, CausalConvTranspose1d, CausalLayer
from sonoro.nn.history import WHOLE, Context, History
from sonoro.nn.vocoder import ConvNext, ResidualUnit, Snake, UpsampleBlock, Upsampler, Vocoder
from sonoro.nn.window import WindowConfig, WindowLayer, WindowLayers
from sonoro.ops.activation import Rates
from sonoro.ops.causal import Bound, depthwise_norm, last_conv
from sonoro.ops.conv import Epilogue, LeftContext, conv
from sonoro.ops.device import card
from sonoro.ops.residual_unit import UnitWeights, residual_unit, residual_unit_in_two, unit_tile


class Past:
    """The left context of one call: `slots` [B] int64 of `history`, or zeros if both are None."""

    def __init__(self, slots: Tensor | None, history: History | None) -> None:
        self.slots = slots
        self.history = history

    def left_context(self, layer: CausalLayer | None, following: CausalLayer | None = None) -> LeftContext:
        """The `LeftContext` of a kernel that computes `layer` and writes the input of layer `following`."""
        left = 0 if following is None else following.length
        return LeftContext(self.slots, self._columns(layer), self._columns(following), left)

    def ring(self, layer: CausalLayer) -> tuple[Tensor, Tensor, Tensor] | None:
        """Ring buffer of `layer`, columns seen and slots, as `window_attention` takes them; None without history."""
        if self.history is None or self.slots is None:
            return None
        return self.history.columns[layer.key], self.history.seen, self.slots

    @property
    def context(self) -> Context:
        """The same left context for a layer that runs as a module."""
        return WHOLE if self.history is None or self.slots is None else self.history.at(self.slots)

    def advance(self, columns: int) -> None:
        """Advance the history's position by `columns`, after the last attention layer."""
        if self.history is not None and self.slots is not None:
            self.history.at(self.slots).advance(columns)

    def _columns(self, layer: CausalLayer | None) -> Tensor | None:
        if self.history is None or layer is None or not layer.length:
            return None
        return self.history.columns[layer.key]


class FoldedLayer:
    """A `WindowLayer` with norm weights and layer scales folded into its matrices, and gate and up rows interleaved."""

    def __init__(self, layer: WindowLayer, config: WindowConfig) -> None:
        self.attention, self.config = layer.self_attn, config
        self.qkv, self.out, self.gate_up, self.down = _folded(layer)

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        """Run the layer on `x` [B, T, width], float32 or wider; same shape and dtype."""
        config = self.config
        _, qkv = conv(x, self.qkv, epilogue=Epilogue(norm_eps=config.norm_eps))
        attended = config.attend(qkv, past.ring(self.attention))
        x, _ = conv(attended, self.out, epilogue=Epilogue(residual=x, plain=x.dtype))
        _, inner = conv(x, self.gate_up, epilogue=Epilogue(norm_eps=config.norm_eps, function="gate"))
        x, _ = conv(inner, self.down, epilogue=Epilogue(residual=x, plain=x.dtype))
        return x


def _folded(layer: WindowLayer) -> list[Tensor]:
    """Q/K/V, output, gate and up with alternating rows, and down projection of `layer`, as `FoldedLayer` has them."""
    if layer.folded:
        return layer.folded
    attention, feed = layer.self_attn, layer.mlp
    gate_up = scaled(feed.gate_up_proj.weight, layer.post_attention_layernorm.weight)
    return [
        scaled(attention.qkv_proj.weight, layer.input_layernorm.weight),
        scaled(attention.o_proj.weight, None, layer.self_attn_layer_scale.scale),
        torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1, 2),
        scaled(feed.down_proj.weight, None, layer.mlp_layer_scale.scale),
    ]


def keep_folded(module: nn.Module) -> None:
    """Keep only the folded matrices of every `WindowLayer` in `module`, which can then only run fused.
    Shapes and first rows of its own matrices stay, for `fingerprint`."""
    for layer in [part for part in module.modules() if isinstance(part, WindowLayer)]:
        attention, feed = layer.self_attn, layer.mlp
        layer.folded_qkv, layer.folded_out, layer.folded_gate_up, layer.folded_down = _folded(layer)
        for projection in (attention.qkv_proj, attention.o_proj, feed.gate_up_proj, feed.down_proj):
            weight = projection.weight.data
            projection.weight.data = weight[:1].clone().expand(weight.shape)


def fold_layers(layers: WindowLayers) -> list[FoldedLayer]:
    """Each of `layers` folded, in order."""
    return [FoldedLayer(cast(WindowLayer, layer), layers.config) for layer in layers]


class FusedVocoder:
    """An `Upsampler` and a `Vocoder`, both finalized, as fused kernels; residual streams are in `stream_dtype`.
    Shares their weights, except for small ones that are folded. Capturable."""

    def __init__(self, upsampler: Upsampler, vocoder: Vocoder, stream_dtype: torch.dtype) -> None:
        self.stream_dtype, self.blocks = stream_dtype, FusedBlocks(vocoder, vocoder.bound, stream_dtype)
        self.upsample = [
            (cast(CausalConvTranspose1d, pair[0]), _FoldedConvNext(cast(ConvNext, pair[1])))
            for pair in cast(list[nn.ModuleList], [*upsampler])
        ]

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        """Decode columns [B, T, width] to samples [B, T * hop], float32 or wider."""
        following: list[CausalLayer] = [*(pair[0] for pair in self.upsample[1:]), self.blocks.first]
        for (widen, block), after in zip(self.upsample, following, strict=True):
            context = past.left_context(widen, block.dwconv)
            stream, x = conv(x, _double_taps(widen), widen.conv.bias, -1, context, Epilogue(plain=self.stream_dtype))
            x = block(x, stream, past, after)
        return self.blocks(x, past)


class _Reader(NamedTuple):
    """A layer and how its input is made from a stream: scaled and shifted by `affine`, then Snake with `rates`."""

    layer: CausalLayer
    rates: Rates
    affine: tuple[Tensor, Tensor] | None = None


class FusedBlocks:
    """The layers of a finalized `Vocoder` as fused kernels: a convolution, upsampling blocks, an activation, and a
    last convolution whose samples are limited to [-1, 1] by `bound` (clamp or tanh)."""

    def __init__(self, layers: Iterable[nn.Module], bound: Bound, stream_dtype: torch.dtype) -> None:
        first, *blocks, activation, last = layers
        self.first, self.last = cast(CausalConv1d, first), cast(CausalConv1d, last)
        self.blocks = [cast(UpsampleBlock, block) for block in blocks]
        self.activation, self.bound, self.stream_dtype = cast(Snake, activation), bound, stream_dtype

    def __call__(self, x: Tensor, past: Past) -> Tensor:
        """Decode the first convolution's input, with its left context, to samples [B, T * hop], float32 or wider."""
        first, last = self.first, self.last
        readers = [_Reader(_widening(block), cast(Snake, block.block[0]).rates, block.affine) for block in self.blocks]
        readers.append(_Reader(last, self.activation.rates))
        context, (_, rates, affine) = past.left_context(first, readers[0].layer), readers[0]
        _, x = conv(x, taps(first), first.conv.bias, 1, context, Epilogue(affine=affine, rates=rates))
        for block, reader in zip(self.blocks, readers[1:], strict=True):
            x = self._block(x, block, reader, past)
        return last_conv(
            x, last.conv.weight[0].mT.contiguous(), last.conv.bias, past.left_context(last), bound=self.bound
        )

    def _block(self, x: Tensor, block: UpsampleBlock, after: _Reader, past: Past) -> Tensor:
        """Upsample `x` and run the residual units of `block`; returns the input of the layer `after`."""
        widen, units = _widening(block), [cast(ResidualUnit, unit) for unit in [*block.block][2:]]
        reader, *others = [*(_Reader(unit.conv1, unit.act1.rates) for unit in units), after]
        context, dtype = past.left_context(widen, reader.layer), self.stream_dtype
        epilogue = Epilogue(plain=dtype, rates=reader.rates)
        stream, x = conv(x, _double_taps(widen), widen.conv.bias, -1, context, epilogue)
        for unit, (layer, rates, affine) in zip(units, others, strict=True):
            plain = None if unit is units[-1] else dtype
            stream, x = _unit(x, unit, layer, Epilogue(residual=stream, plain=plain, affine=affine, rates=rates), past)
        return x


def _widening(block: UpsampleBlock) -> CausalConvTranspose1d:
    return cast(CausalConvTranspose1d, block.block[1])


def _unit(
    x: Tensor, unit: ResidualUnit, after: CausalLayer, epilogue: Epilogue, past: Past
) -> tuple[Tensor | None, Tensor]:
    """Run the convolutions of `unit`, then `epilogue`; returns the residual stream and the input of layer `after`."""
    first, weights = unit.conv1, _unit_weights(unit)
    rows = x.shape[0] * (x.shape[1] - first.length)
    run = residual_unit_in_two if unit_tile(rows, weights, card(x.device)) is None else residual_unit
    return run(x, weights, first.conv.dilation[0], past.left_context(first, after), epilogue)


def _unit_weights(unit: ResidualUnit) -> UnitWeights:
    first, pointwise = unit.conv1, unit.conv2.conv
    assert first.conv.bias is not None
    assert pointwise.bias is not None
    dilated = first.conv.weight[:, 0].mT.contiguous() if first.is_depthwise else taps(first)
    return UnitWeights(dilated, first.conv.bias, unit.act2.rates, taps(unit.conv2)[0], pointwise.bias)


class _FoldedConvNext:
    """A `ConvNext` block with its scale `gamma` folded into the last linear layer."""

    def __init__(self, block: ConvNext) -> None:
        self.dwconv, self.norm, self.pwconv1 = block.dwconv, block.norm, block.pwconv1
        self.depthwise = block.dwconv.conv.weight[:, 0].mT.contiguous()
        self.weight = scaled(block.pwconv2.weight, None, block.gamma)
        self.bias = block.pwconv2.bias * block.gamma

    def __call__(self, x: Tensor, stream: Tensor, past: Past, after: CausalLayer) -> Tensor:
        """The input of layer `after`, from `stream` plus the block's output; `x` is `stream` with left context."""
        assert self.dwconv.conv.bias is not None
        norm = self.norm
        context = past.left_context(self.dwconv)
        y = depthwise_norm(x, self.depthwise, self.dwconv.conv.bias, (norm.weight, norm.bias, norm.eps), context)
        _, y = conv(y, self.pwconv1.weight[None], self.pwconv1.bias, epilogue=Epilogue(function="gelu"))
        return conv(y, self.weight, self.bias, 1, past.left_context(None, after), Epilogue(residual=stream))[1]


def scaled(weight: Tensor, columns: Tensor | None, rows: Tensor | None = None) -> Tensor:
    """`weight` [N, C] times `columns` [C] and `rows` [N], rounded once to its dtype: [1, N, C]."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if columns is not None:
        wide = wide * columns
    if rows is not None:
        wide = wide * rows[:, None]
    return wide.to(weight.dtype)[None]


def taps(layer: CausalConv1d) -> Tensor:
    """A view of the weight as [taps, C_out, C_in]."""
    return layer.conv.weight.permute(2, 0, 1)


def _double_taps(layer: CausalConvTranspose1d) -> Tensor:
    """A view of the weight as [1 or 2 taps, stride * C_out, C_in]; tap 0 multiplies the current column."""
    weight = layer.conv.weight.permute(2, 1, 0)
    return weight.unflatten(0, (layer.length + 1, -1)).flatten(1, 2)
