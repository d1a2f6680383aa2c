"""A transformer stack with bidirectional attention over many short sequences of equal length, such as patches."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from sonoro.nn.linear import NormedRows, random_like
from sonoro.nn.transformer import DecoderConfig, DecoderLayer, DecoderStack
from sonoro.ops.bidirectional import bidirectional_attention


class BidirectionalStack(DecoderStack):
    """A stack without q/k norms over sequences of `tokens` positions; its output is the K positions of `kept`.
    Call `finalize` once after loading."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: DecoderConfig, tokens: int, kept: slice) -> None:
        super().__init__(config)
        self.tokens, self.kept = tokens, kept
        for name in ("cos", "sin"):
            self.register_buffer(name, None, persistent=False)

    def finalize(self) -> None:
        """Compute the rotary tables of `tokens` positions."""
        weight = self.norm.weight
        self.cos, self.sin = self.config.rotary(torch.arange(self.tokens, device=weight.device), weight.dtype)

    def see(self, x: Tensor) -> Tensor:
        """Run `x` [N, tokens, width] through all layers but not the final norm: [N * K, width]. The last layer computes
        the kept positions only. Capturable; no sync; no autograd."""
        hidden, last = NormedRows(x.flatten(0, 1)), len(self.layers) - 1
        for index, layer in enumerate(cast(Sequence[DecoderLayer], self.layers)):
            kept = self.kept if index == last else slice(self.tokens)
            heads = bidirectional_attention(layer.project(hidden), (self.cos, self.sin), self.config.kv_heads, kept)
            rows = hidden.rows
            if index == last:
                rows = rows.view_as(x)[:, kept].reshape(len(heads), -1)
            hidden = layer.complete(rows, heads, self.norm_after(index))
        return hidden.rows

    def check_bidirectional(self, count: int) -> None:
        """Compare every kernel of `see` with its reference at `count` sequences; disable any that disagrees.
        Uses random inputs and the weights of the first layer. Synchronises; does nothing on a CPU."""
        layer = cast(DecoderLayer, self.layers[0])
        random, tolerance = random_like(self.norm.weight)
        given = (random(count * self.tokens, layer.self_attn.qkv_proj.out_features), (self.cos, self.sin))
        for tokens in (self.tokens, len(range(*self.kept.indices(self.tokens)))):
            layer.check_kernels(count * tokens)
        bidirectional_attention.check(lambda: (*given, self.config.kv_heads, slice(self.tokens)), tolerance)
        bidirectional_attention.check(lambda: (*given, self.config.kv_heads, self.kept), tolerance)
