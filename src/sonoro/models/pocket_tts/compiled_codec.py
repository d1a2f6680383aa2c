"""The codec's decoder as one call of compiled code, on a CPU: packed weights, and pointers into its history.

`decoder.py` is the reference, and keeps the same left context; the C code is codec.c."""

from __future__ import annotations

from torch import Tensor

from sonoro.models.shared.compiled_codec import PackedConvs, PackedLayers
from sonoro.native.library import LatentCodec
from sonoro.nn.history import History

from .decoder import CodecDecoder


class CompiledDecoder(PackedLayers):
    """`StreamingCodec.decode` with `history`, for at most `most_frames` frames of each slot at once."""

    def __init__(self, decoder: CodecDecoder, history: History, weights: PackedConvs, most_frames: int) -> None:
        super().__init__(history, weights, most_frames)
        self._hop = decoder.hop
        self._codec = codec = LatentCodec()
        first, last = decoder.model.ends
        codec.input, codec.first = self.conv(decoder.output_proj), self.conv(first)
        codec.last = self.conv(last)
        codec.taps = self.at(decoder.upsample.conv.weight[:, 0].t().contiguous())
        for name, layer in (("before", decoder.upsample), ("began", decoder.fade)):
            setattr(codec, name, self.at(history.columns[layer.key]))
        codec.windows, codec.seen = self.windows(decoder.layers), self.at(history.seen)
        blocks = self.elu_blocks(decoder.model)
        codec.blocks, codec.block_count = blocks, len(blocks)
        codec.rate, codec.fade = decoder.columns, decoder.fade.count
        columns = most_frames * decoder.columns
        floats = max(self.window_floats(decoder.layers, columns), self.elu_floats(decoder.model, columns))
        codec.room = self.rooms(LatentCodec.ROOMS, floats)

    def __call__(self, frames: Tensor, slots: Tensor) -> Tensor:
        """Decode `frames` [B, T, 1, D] of `slots` [B] to [B, T * hop], advancing the history."""
        return self.run(self.library.decode_latents, self._codec, frames.float(), slots, self._hop)
