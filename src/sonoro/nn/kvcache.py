"""Paged KV cache of a decoder stack.

The page table maps a slot's positions to pages. Past its live length they may hold anything, even NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sonoro.ops.attention import PagedKV
from sonoro.ops.varlen import varlen_attention

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""Attention of a layer: its index, and queries, keys and values to outputs, [B, T, heads, D] each."""


class PackedTokens(NamedTuple):
    """Prompt tokens packed back to back: for each token its slot, its position, and the index in the packed sequence
    where its prompt starts; [T] int64 each.
    If a prompt's first token has a position above 0, the positions before it are on the pages of its slot."""

    slots: Tensor
    positions: Tensor
    starts: Tensor

    @property
    def cached_lengths(self) -> Tensor:
        """Length of the cached prefix of each token's prompt, [T] int64."""
        return self.positions - torch.arange(len(self.starts), device=self.starts.device) + self.starts

    def laid_out(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Slots, positions, starts and cached lengths, contiguous."""
        slots, positions, starts = (rows.contiguous() for rows in self)
        return slots, positions, starts, self.cached_lengths


class PackedPrompts(NamedTuple):
    """Inputs `rows` [T, width] of packed prompts, and the places of their `tokens`. Without `is_output_used` only their
    keys and values are wanted."""

    rows: Tensor
    tokens: PackedTokens
    is_output_used: bool = False


@dataclass(frozen=True)
class PagedKVCache:
    """`keys` and `values` [layers, pages + 1, page positions, kv heads, D], and `page_table` [slots, pages per slot].
    The last page is scratch. The cache stores no lengths: the caller knows how many positions of a slot are live.
    Stacks with equal heads may share one cache, their layers concatenated: each gets its `part`."""

    keys: Tensor
    values: Tensor
    page_table: Tensor

    @classmethod
    def allocate(cls, shape: tuple[int, ...], table: Tensor, dtype: torch.dtype) -> PagedKVCache:
        """Zeroed keys and values of `shape`, for `table`. On a CPU, pages take memory only once they are written."""
        if table.is_cpu:
            empty = (np.zeros(math.prod(shape) * dtype.itemsize, np.uint8) for _ in range(2))
            keys, values = (torch.from_numpy(zeros).view(dtype).view(shape) for zeros in empty)
        else:
            keys, values = (torch.zeros(shape, device=table.device, dtype=dtype) for _ in range(2))
        return cls(keys, values, table)

    @property
    def page_positions(self) -> int:
        return self.keys.shape[2]

    def part(self, layers: slice) -> PagedKVCache:
        """A view of `layers`, for the stack that they belong to; shares memory."""
        return PagedKVCache(self.keys[layers], self.values[layers], self.page_table)

    def fill(self, rows: PackedTokens) -> Attend:
        """An `Attend` for `DecoderStack.forward` over packed prompts [1, T, width]: it writes their keys and values to
        the pages, then runs varlen attention. Pages of a cached prefix are only read. Capturable; no sync."""
        page, place = rows.positions // self.page_positions, rows.positions % self.page_positions
        pages = self.page_table[rows.slots, page].long()
        shared, slots = rows.cached_lengths, rows.slots.contiguous()

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self.keys[layer][pages, place] = keys[0]
            self.values[layer][pages, place] = values[0]
            kv = PagedKV(self.keys[layer], self.values[layer], self.page_table, slots)
            return varlen_attention(queries[0], keys[0], values[0], rows.starts, shared, kv)[None]

        return attend
