"""The codec's decoder as one call of compiled code, on a CPU: packed weights, and pointers into its history.

`decoder.py` is the reference, and keeps the same left context; the C code is codec.c."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from sonoro.models.shared.compiled_codec import PackedConvs, PackedLayers
from sonoro.native.structures import structures
from sonoro.nn.history import History

from .decoder import CodecDecoder

_STRUCTURES = structures(Path(__file__).with_name("codec.c"))
EluBlock, LatentCodec = _STRUCTURES["EluBlock"], _STRUCTURES["LatentCodec"]


class CompiledDecoder(PackedLayers):
    """`StreamingCodec.decode` with `history`, for at most `most_frames` frames of each slot at once."""

    def __init__(self, decoder: CodecDecoder, history: History, weights: PackedConvs, most_frames: int) -> None:
        super().__init__(history, weights, most_frames)
        self._hop, self._decode = decoder.hop, self.library.function("sonoro_decode_latents", "pppiiip")
        self._codec = codec = LatentCodec()
        first, *layers, last = cast(Iterable[Any], decoder.model.values())
        blocks = [*zip(layers[::2], layers[1::2], strict=True)]
        codec.input, codec.first, codec.last = map(self.conv, (decoder.output_proj, first, last))
        codec.taps = self.at(decoder.upsample.conv.weight[:, 0].t().contiguous())
        for name, layer in (("before", decoder.upsample), ("began", decoder.fade)):
            setattr(codec, name, self.at(history.columns[layer.key]))
        codec.windows, codec.seen = self.windows(decoder.layers), self.at(history.seen)
        codec.rate, codec.fade = decoder.columns, decoder.fade.count
        columns = most_frames * decoder.columns
        made, sizes = list[Any](), [self.window_floats(decoder.layers, columns)]
        kept = max(layer.length for layer in (first, last, *(unit.conv1 for _, unit in blocks)))
        for up, unit in blocks:
            (rate,) = up.conv.stride
            made.append(EluBlock(self.conv(up), self.conv(unit.conv1), self.conv(unit.conv2), rate))
            sizes.append((columns + kept) * max(up.conv.in_channels, first.width))
            columns *= rate
            sizes.append((columns + kept) * up.conv.out_channels)
        codec.blocks, codec.block_count = (EluBlock * len(made))(*made), len(made)
        codec.room = self.rooms(max(sizes))

    def __call__(self, frames: Tensor, slots: Tensor) -> Tensor:
        """Decode `frames` [B, T, 1, D] of `slots` [B] to [B, T * hop], advancing the history."""
        return self.run(self._decode, self._codec, frames.float(), slots, self._hop)
