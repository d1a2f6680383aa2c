"""The codec decoder as a chain of fused operations: the weights, history and results of `CodecDecoder`.

A sequence travels twice: the residual stream as it is, and what the next layer reads of it, activated and already
preceded by that layer's left context. For inference; the modules remain what training and CPUs run.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from sonoro.nn.causal import CausalConv1d, CausalConvTranspose1d, CausalLayer
from sonoro.nn.history import History
from sonoro.ops.causal import depthwise_norm, embed_sum, last_conv
from sonoro.ops.conv import Ends, Rates, conv
from sonoro.ops.window import window_attention

from .decoder import CodecDecoder, ConvNext, ResidualUnit, Snake, TransformerLayer, UpsampleBlock

__all__ = ["FusedDecoder"]


class _Past:
    """The left context of one call: rows `slots` of `history`, or nothing before the first column."""

    def __init__(self, slots: Tensor | None, history: History | None) -> None:
        self.slots = slots
        self.history = history

    def ends(self, layer: CausalLayer | None, following: CausalLayer | None = None) -> Ends:
        """For an operation that does the work of `layer` and whose output `following` reads."""
        left = 0 if following is None else following.length
        return Ends(self.slots, self._columns(layer), self._columns(following), left)

    def _columns(self, layer: CausalLayer | None) -> Tensor | None:
        return (
            self.history.columns[layer.key] if self.history is not None and layer is not None and layer.length else None
        )


class FusedDecoder:
    """`CodecDecoder` for inference, made of a finalized one; shares its weights but for the small ones it folds.

    Keeps the residual streams in `stream_dtype`. Raises nothing of its own; capturable.
    """

    def __init__(self, decoder: CodecDecoder, stream_dtype: torch.dtype) -> None:
        assert decoder.quantizer.folded is not None
        self.decoder = decoder
        self.stream_dtype = stream_dtype
        self.tables = decoder.quantizer.folded
        transformer = decoder.pre_transformer
        self.layers = [_FoldedLayer(cast(TransformerLayer, layer)) for layer in transformer.layers]
        self.output_weight = _scaled(transformer.output_proj.weight, transformer.norm.weight)
        self.upsample = [
            (cast(CausalConvTranspose1d, pair[0]), _FoldedConvNext(cast(ConvNext, pair[1])))
            for pair in cast(list[nn.ModuleList], [*decoder.upsample])
        ]

    @torch.no_grad()
    def decode(self, frames: Tensor, slots: Tensor | None, history: History | None) -> Tensor:
        """`frames` [B, T, K] int64 to samples [B, T * hop] in [-1, 1] float32, advancing rows `slots` of `history`."""
        return self.render(self.contextualize(frames, slots, history), slots, history)

    @torch.no_grad()
    def contextualize(self, frames: Tensor, slots: Tensor | None, history: History | None) -> Tensor:
        """The long memory: `frames` through the transformer, [B, T, latent_dim]."""
        past, pre_conv, transformer = _Past(slots, history), self.decoder.pre_conv, self.decoder.pre_transformer
        x = embed_sum(frames.contiguous(), self.tables, past.ends(None, pre_conv))
        _, x = conv(x, _taps(pre_conv), pre_conv.conv.bias, 1, past.ends(pre_conv))
        project = transformer.input_proj
        x, _ = conv(x, project.weight[None], project.bias, plain=torch.promote_types(x.dtype, torch.float32))
        for layer in self.layers:
            x = layer(x, transformer.window, transformer.rope_theta, past)
        if history is not None and slots is not None:
            history.at(slots).advance(frames.shape[1])
        eps = transformer.norm.eps
        return conv(x, self.output_weight, transformer.output_proj.bias, norm_eps=eps)[1]

    @torch.no_grad()
    def render(self, x: Tensor, slots: Tensor | None, history: History | None) -> Tensor:
        """The short memory: `x` [B, T, latent_dim] to samples [B, T * hop]."""
        past = _Past(slots, history)
        first, *blocks, activation, last = self.decoder.decoder
        first, last = cast(CausalConv1d, first), cast(CausalConv1d, last)
        following: list[CausalLayer] = [*(pair[0] for pair in self.upsample[1:]), first]
        for (widen, block), after in zip(self.upsample, following, strict=True):
            ends = past.ends(widen, block.dwconv)
            stream, x = conv(x, _double_taps(widen), widen.conv.bias, -1, ends, plain=self.stream_dtype)
            x = block(x, stream, past, after)
        pairs = [cast(UpsampleBlock, block).block for block in blocks]
        activations = [cast(Snake, block[0]) for block in pairs] + [cast(Snake, activation)]
        readers = [cast(CausalLayer, block[1]) for block in pairs] + [last]
        ends = past.ends(first, readers[0])
        _, x = conv(x, _taps(first), first.conv.bias, 1, ends, rates=_rates(activations[0]))
        for parts, snake, reader in zip(pairs, activations[1:], readers[1:], strict=True):
            x = self._block(x, cast(CausalConvTranspose1d, parts[1]), [*parts][2:], (snake, reader), past)
        assert last.conv.bias is not None
        return last_conv(x, last.conv.weight[0].mT.contiguous(), last.conv.bias, past.ends(last))

    def _block(
        self,
        x: Tensor,
        widen: CausalConvTranspose1d,
        units: list[nn.Module],
        after: tuple[Snake, CausalLayer],
        past: _Past,
    ) -> Tensor:
        """What `after` reads of the block that widens `x`: more columns of half the channels, then residual units."""
        residual_units = [cast(ResidualUnit, unit) for unit in units]
        starts = [*((unit.act1, unit.conv1) for unit in residual_units), after]
        (snake, reader), *others = starts
        stream, x = conv(
            x,
            _double_taps(widen),
            widen.conv.bias,
            -1,
            past.ends(widen, reader),
            plain=self.stream_dtype,
            rates=_rates(snake),
        )
        for unit, (snake, reader) in zip(residual_units, others, strict=True):
            dilation = unit.conv1.conv.dilation[0]
            ends = past.ends(unit.conv1)
            _, x = conv(x, _taps(unit.conv1), unit.conv1.conv.bias, dilation, ends, rates=_rates(unit.act2))
            stream, x = conv(
                x,
                _taps(unit.conv2),
                unit.conv2.conv.bias,
                1,
                past.ends(None, reader),
                residual=stream,
                plain=None if unit is residual_units[-1] else self.stream_dtype,
                rates=_rates(snake),
            )
        return x


class _FoldedLayer:
    """A transformer layer whose norms' weights and scales are in its matrices; gate and up rows alternate."""

    def __init__(self, layer: TransformerLayer) -> None:
        attention, feed = layer.self_attn, layer.mlp
        self.attention = attention
        self.eps = layer.input_layernorm.eps
        self.qkv = _scaled(attention.qkv_proj.weight, layer.input_layernorm.weight)
        self.out = _scaled(attention.o_proj.weight, None, layer.self_attn_layer_scale.scale)
        gate_up = _scaled(feed.gate_up_proj.weight, layer.post_attention_layernorm.weight)
        self.gate_up = torch.stack(gate_up.chunk(2, dim=1), dim=2).flatten(1, 2)
        self.down = _scaled(feed.down_proj.weight, None, layer.mlp_layer_scale.scale)

    def __call__(self, x: Tensor, window: int, theta: float, past: _Past) -> Tensor:
        """`x` [B, T, width], float32 or wider, after this layer."""
        query_heads, kv_heads, _ = self.attention.heads
        history = past.history
        state = None
        if history is not None and past.slots is not None:
            state = (history.columns[self.attention.key], history.seen, past.slots)
        _, qkv = conv(x, self.qkv, norm_eps=self.eps)
        heads = window_attention(qkv, (query_heads, kv_heads), window, theta, state)
        x, _ = conv(heads, self.out, residual=x, plain=x.dtype)
        _, inner = conv(x, self.gate_up, norm_eps=self.eps, function="gate")
        x, _ = conv(inner, self.down, residual=x, plain=x.dtype)
        return x


class _FoldedConvNext:
    """A ConvNeXt block whose last scale is in its last matrix."""

    def __init__(self, block: ConvNext) -> None:
        self.dwconv, self.norm, self.pwconv1 = block.dwconv, block.norm, block.pwconv1
        self.depthwise = block.dwconv.conv.weight[:, 0].mT.contiguous()
        self.weight = _scaled(block.pwconv2.weight, None, block.gamma)
        self.bias = block.pwconv2.bias * block.gamma

    def __call__(self, x: Tensor, stream: Tensor, past: _Past, after: CausalLayer) -> Tensor:
        """What `after` reads of `stream` plus the block of `x`, which is `stream` after its left context."""
        assert self.dwconv.conv.bias is not None
        norm = self.norm
        ends = past.ends(self.dwconv)
        y = depthwise_norm(x, self.depthwise, self.dwconv.conv.bias, (norm.weight, norm.bias, norm.eps), ends)
        _, y = conv(y, self.pwconv1.weight[None], self.pwconv1.bias, function="gelu")
        return conv(y, self.weight, self.bias, 1, past.ends(None, after), residual=stream)[1]


def _scaled(weight: Tensor, columns: Tensor | None, rows: Tensor | None = None) -> Tensor:
    """`weight` [N, C] with its columns and rows scaled, rounded once: [1, N, C]."""
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if columns is not None:
        wide = wide * columns
    if rows is not None:
        wide = wide * rows[:, None]
    return wide.to(weight.dtype)[None]


def _taps(layer: CausalConv1d) -> Tensor:
    """The weight as [taps, C_out, C_in], a view."""
    return layer.conv.weight.permute(2, 0, 1)


def _double_taps(layer: CausalConvTranspose1d) -> Tensor:
    """The weight as [1 or 2 taps, stride * C_out, C_in], a view; the first tap is the present column's."""
    taps = layer.conv.weight.permute(2, 1, 0)
    return taps.unflatten(0, (layer.length + 1, -1)).flatten(1, 2)


def _rates(snake: Snake) -> Rates:
    assert snake.exp_alpha is not None
    assert snake.inverse_beta is not None
    return snake.exp_alpha, snake.inverse_beta
