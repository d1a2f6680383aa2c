"""The codec's decoder as one call of compiled code, on a CPU: packed weights, and pointers into its history.

`decoder.py` is the reference; the C code is in `sonoro.native`. Both keep the same left context, so either may decode
the next chunk of a slot."""

from __future__ import annotations

import ctypes
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.native.library import BLOCK, Block, Codec, CompiledCode, Conv, Snake, Unit, UpLayer, WindowLayer
from sonoro.nn import vocoder
from sonoro.nn.causal import CausalConv1d, CausalConvTranspose1d
from sonoro.nn.history import History
from sonoro.nn.linear import Linear
from sonoro.nn.window import WindowLayer as Window

from .decoder import CodecDecoder


class CompiledDecoder:
    """`StreamingCodec.decode` with `history`, for at most `most_frames` frames of each slot at once. Allocates only the
    samples."""

    def __init__(self, decoder: CodecDecoder, history: History, library: CompiledCode, most_frames: int) -> None:
        self.most_frames = most_frames
        self._code, self._history, self._hop = library, history, decoder.hop
        self._kept: list[Tensor] = []
        folded, transformer, upsample = decoder.quantizer.folded, decoder.pre_transformer, decoder.upsample
        assert folded is not None
        config, stack = transformer.layers.config, cast(list[Window], [*transformer.layers])
        first, *blocks, snake, last = decoder.decoder
        self._codec = codec = Codec()
        codec.tables, (codec.books, codec.codes, _) = self._at(folded), folded.shape
        codec.before, codec.first = self._conv(decoder.pre_conv), self._conv(cast(CausalConv1d, first))
        codec.input, codec.output = self._linear(transformer.input_proj), self._linear(transformer.output_proj)
        codec.last = self._conv(cast(CausalConv1d, last), is_packed=False)
        codec.layers = (WindowLayer * len(stack))(*map(self._window, stack))
        codec.norm, codec.snake = self._at(transformer.norm.weight), self._snake(snake)
        exponents = torch.arange(0, config.head_width, 2, dtype=torch.float32) / config.head_width
        codec.frequencies = self._at(1.0 / config.rope_theta**exponents)
        pairs = [cast(nn.ModuleList, pair) for pair in upsample]
        codec.ups = (UpLayer * len(pairs))(*(self._up(*pair) for pair in pairs))
        codec.blocks = (Block * len(blocks))(*map(self._block, blocks))
        codec.seen = self._at(history.seen)
        codec.layer_count, codec.up_count, codec.block_count = len(stack), len(pairs), len(blocks)
        codec.heads, codec.kv_heads = config.heads, config.kv_heads
        codec.head_width, codec.window = config.head_width, config.window
        codec.eps, codec.norm_eps = config.norm_eps, cast(vocoder.ConvNext, pairs[0][1]).norm.eps
        floats = self._room(decoder)
        codec.room = (ctypes.c_void_p * Codec.ROOMS)(*(self._at(torch.zeros(floats)) for _ in range(Codec.ROOMS)))

    def __call__(self, frames: Tensor, slots: Tensor) -> Tensor:
        """Decode `frames` [B, T, K] int64 of `slots` [B] to [B, T * hop], advancing the history."""
        (count, rows, _), samples = frames.shape, torch.empty(len(frames), frames.shape[1] * self._hop)
        assert rows <= self.most_frames
        frames = frames.contiguous()
        given = frames.data_ptr(), slots.data_ptr(), count, rows, self._hop, samples.data_ptr()
        self._code.decode(ctypes.byref(self._codec), *given)
        return samples

    def _at(self, tensor: Tensor) -> int:
        """The address of `tensor`, which is kept as long as this object."""
        assert tensor.is_contiguous()
        assert tensor.dtype in (torch.float32, torch.int64, torch.int8)
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _packed(self, weight: Tensor, bias: Tensor | None, key: str = "", dilation: int = 1) -> Conv:
        """A `Conv` of `weight` [N, C, taps] and `bias` [N], that keeps its left context under `key`; in 8 bits if the
        checkpoint has it so."""
        outputs, inputs, taps = weight.shape
        padding = (0, -outputs % BLOCK)
        by_input = weight.permute(2, 1, 0).reshape(taps * inputs, outputs).contiguous()
        bias = F.pad(torch.zeros(outputs) if bias is None else bias, padding)
        history = self._history.columns[key] if key else None
        packed = self._code.pack(by_input.t())
        if packed is None:
            blocks = F.pad(by_input, padding).unflatten(1, (-1, BLOCK)).transpose(0, 1).contiguous()
            weights: tuple[int | None, ...] = (self._at(blocks), None, None)
        else:
            weights = (None, self._at(packed[0]), self._at(F.pad(packed[1], padding)))
        return Conv(
            *weights, self._at(bias), None if history is None else self._at(history),
            inputs, outputs, taps, dilation, 0 if history is None else history.shape[1],
        )  # fmt: skip

    def _linear(self, part: Linear) -> Conv:
        return self._packed(part.weight[:, :, None], part.bias)

    def _conv(self, part: CausalConv1d, *, is_packed: bool = True) -> Conv:
        """`part`; its weight in order of taps, if not `is_packed`, for one output channel."""
        made = self._packed(part.conv.weight, part.conv.bias, part.key if part.length else "", part.conv.dilation[0])
        if not is_packed:
            made.weight = self._at(part.conv.weight[0].t().contiguous())
        return made

    def _transposed(self, part: CausalConvTranspose1d) -> Conv:
        """`part` as a convolution with `stride` outputs a row, of two taps if it has left context."""
        (stride,), taps, bias = part.conv.stride, part.conv.weight.permute(2, 1, 0), part.conv.bias
        assert bias is not None
        parts = (taps[stride:], taps[:stride]) if part.length else (taps,)
        weight = torch.stack([half.flatten(0, 1) for half in parts], dim=-1)
        return self._packed(weight, bias.repeat(stride), part.key if part.length else "")

    def _snake(self, part: nn.Module) -> Snake:
        return Snake(*(self._at(values.float()) for values in cast(vocoder.Snake, part).rates))

    def _window(self, layer: Window) -> WindowLayer:
        attention, feed = layer.self_attn, layer.mlp
        parts = attention.qkv_proj, attention.o_proj, feed.gate_up_proj, feed.down_proj
        norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        scales = layer.self_attn_layer_scale.scale, layer.mlp_layer_scale.scale
        ring = self._history.columns[attention.key]
        return WindowLayer(*map(self._linear, parts), *map(self._at, (*norms, *scales, ring)))

    def _up(self, up: Any, block: Any) -> UpLayer:
        conv, history = block.dwconv.conv, self._history.columns[block.dwconv.key]
        tensors = (
            conv.weight[:, 0].t().contiguous(), conv.bias, block.norm.weight, block.norm.bias, block.gamma, history,
        )  # fmt: skip
        products = self._transposed(up), self._linear(block.pwconv1), self._linear(block.pwconv2)
        return UpLayer(*products, *map(self._at, tensors), up.conv.stride[0], history.shape[1])

    def _block(self, part: nn.Module) -> Block:
        snake, up, *units = cast(vocoder.UpsampleBlock, part).block
        up = cast(CausalConvTranspose1d, up)
        return Block(self._snake(snake), self._transposed(up), (Unit * 3)(*map(self._unit, units)), up.conv.stride[0])

    def _unit(self, part: nn.Module) -> Unit:
        unit = cast(vocoder.ResidualUnit, part)
        return Unit(self._snake(unit.act1), self._snake(unit.act2), self._conv(unit.conv1), self._conv(unit.conv2))

    def _room(self, decoder: CodecDecoder) -> int:
        """Floats of the largest intermediate result, with the left context before it."""
        config, rows, kept = decoder.config, self.most_frames, 6 * max(vocoder.UNIT_DILATIONS)
        window = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
        widest = max(2 * config.intermediate_size, window, config.latent_dim, config.codebook_dim, config.hidden_size)
        sizes = [(rows + config.sliding_window) * widest]
        for ratio in config.upsampling_ratios:
            rows *= ratio
            sizes.append((rows + kept) * 4 * config.latent_dim)
        for index, rate in enumerate(config.upsample_rates):
            sizes.append((rows + kept) * (config.decoder_dim >> index))
            rows *= rate
            sizes.append((rows + kept) * (config.decoder_dim >> (index + 1)))
        return max(sizes)
