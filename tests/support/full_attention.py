"""All that the heads of a decoder stack look at, from its own forward over a whole sequence."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sonoro.nn.transformer import DecoderStack


def full_attention(stack: DecoderStack, rows: Tensor) -> dict[tuple[int, int], Tensor]:
    """By layer and head the attention matrix [T, T] of `stack` over `rows` [T, H]."""
    made: dict[tuple[int, int], Tensor] = {}

    def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        group = queries.shape[2] // keys.shape[2]
        query, key, value = queries[0], keys[0].repeat_interleave(group, 1), values[0].repeat_interleave(group, 1)
        scores = torch.einsum("thd,shd->hts", query, key) / math.sqrt(query.shape[-1])
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        made.update({(layer, head): one for head, one in enumerate(weights)})
        return torch.einsum("hts,shd->thd", weights, value)[None]

    stack(rows[None], stack.config.rotary(torch.arange(len(rows)), rows.dtype), attend)
    return made


def assert_shares_of(
    whole: dict[tuple[int, int], Tensor],
    seen: Sequence[Tensor],
    places: Sequence[tuple[int, int]],
    first: int,
    text: tuple[int, int],
) -> None:
    """That `seen` [H, W], frame by frame from position `first` on, are what the heads at `places` of `whole` look at in
    `text` (start, count), as shares of that."""
    start, count = text
    for position, attention in enumerate(seen, start=first):
        for row, place in zip(attention, places, strict=True):
            wanted = whole[place][position, start : min(start + count, position + 1)]
            # What is kept is float32.
            torch.testing.assert_close(row[: len(wanted)].double(), wanted / wanted.sum(), atol=1e-6, rtol=0)
            assert not row[len(wanted) :].any()
