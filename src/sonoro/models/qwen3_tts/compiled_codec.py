"""The codec's decoder as one call of compiled code, on a CPU: packed weights, and pointers into its history.

`decoder.py` is the reference; the C code is codec.c. Both keep the same left context, so either may decode
the next chunk of a slot."""

from __future__ import annotations

from ctypes import Structure
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from sonoro.models.shared.compiled_codec import PackedConvs, PackedLayers
from sonoro.native.structures import structures
from sonoro.nn import vocoder
from sonoro.nn.causal import CausalConvTranspose1d
from sonoro.nn.history import History

from .decoder import CodecDecoder

_STRUCTURES = structures(Path(__file__).with_name("codec.c"))
Snake, UpLayer, Unit, Block, Codec = (_STRUCTURES[name] for name in ("Snake", "UpLayer", "Unit", "Block", "Codec"))


class CompiledDecoder(PackedLayers):
    """`StreamingCodec.decode` with `history`, for at most `most_frames` frames of each slot at once."""

    def __init__(self, decoder: CodecDecoder, history: History, weights: PackedConvs, most_frames: int) -> None:
        super().__init__(history, weights, most_frames)
        self._hop, self._decode = decoder.hop, self.library.function("sonoro_decode", "pppiiip")
        folded, transformer, upsample = decoder.quantizer.folded, decoder.pre_transformer, decoder.upsample
        assert folded is not None
        first, *blocks, snake, last = decoder.decoder
        self._codec = codec = Codec()
        codec.tables, (codec.books, codec.codes, _) = self.at(folded), folded.shape
        codec.before, codec.first = self.conv(decoder.pre_conv), self.conv(first)
        codec.input, codec.output = self.conv(transformer.input_proj), self.conv(transformer.output_proj)
        codec.last = self.conv(last)
        codec.windows = self.windows(transformer.layers)
        codec.norm, codec.snake = self.at(transformer.norm.weight), self._snake(snake)
        pairs = [cast(nn.ModuleList, pair) for pair in upsample]
        codec.ups = (UpLayer * len(pairs))(*(self._up(*pair) for pair in pairs))
        codec.blocks = (Block * len(blocks))(*map(self._block, blocks))
        codec.seen = self.at(history.seen)
        codec.up_count, codec.block_count = len(pairs), len(blocks)
        codec.norm_eps = cast(vocoder.ConvNext, pairs[0][1]).norm.eps
        codec.room = self.rooms(self._room(decoder))

    def __call__(self, frames: Tensor, slots: Tensor) -> Tensor:
        """Decode `frames` [B, T, K] int64 of `slots` [B] to [B, T * hop], advancing the history."""
        assert frames.shape[2] == self._codec.books
        assert frames.dtype == torch.int64
        return self.run(self._decode, self._codec, frames, slots, self._hop)

    def _snake(self, part: nn.Module) -> Structure:
        return Snake(*(self.at(values.float()) for values in cast(vocoder.Snake, part).rates))

    def _up(self, up: Any, block: Any) -> Structure:
        conv, history = block.dwconv.conv, self.history.columns[block.dwconv.key]
        tensors = (
            conv.weight[:, 0].t().contiguous(), conv.bias, block.norm.weight, block.norm.bias, block.gamma, history,
        )  # fmt: skip
        return UpLayer(
            *map(self.conv, (up, block.pwconv1, block.pwconv2)),
            *map(self.at, tensors),
            up.conv.stride[0],
            history.shape[1],
        )

    def _block(self, part: nn.Module) -> Structure:
        snake, up, *units = cast(vocoder.UpsampleBlock, part).block
        (stride,) = cast(CausalConvTranspose1d, up).conv.stride
        return Block(self._snake(snake), self.conv(up), (Unit * 3)(*map(self._unit, units)), stride)

    def _unit(self, part: nn.Module) -> Structure:
        unit = cast(vocoder.ResidualUnit, part)
        return Unit(self._snake(unit.act1), self._snake(unit.act2), self.conv(unit.conv1), self.conv(unit.conv2))

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
