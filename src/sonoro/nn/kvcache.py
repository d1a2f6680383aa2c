"""Paged KV cache of a decoder stack.

A slot's page table says where its positions are; positions past its live length may hold anything, NaN included: no
result depends on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sonoro.nn.transformer import Attend, DecoderConfig, PackedTokens
from sonoro.ops.attention import PagedKV
from sonoro.ops.varlen import varlen_attention

__all__ = ["PackedTokens", "PagedKVCache"]


def _zeros(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """As `torch.zeros`; on a CPU not resident before it is written, for most slots never hold as much as they might."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True)
class PagedKVCache:
    """Keys and values [layers, pages + 1, page positions, kv heads, D]; the pages of each slot [slots, pages per slot].

    The last page is scratch. Whoever holds it knows how many positions of a slot are live; it keeps no length. Stacks
    whose heads are alike may share the pages, their layers one behind the other: each is given its `part`.
    """

    keys: Tensor
    values: Tensor
    page_table: Tensor

    @classmethod
    def allocate(
        cls, config: DecoderConfig, table: Tensor, page_positions: int, pages: int, dtype: torch.dtype
    ) -> PagedKVCache:
        """A zeroed cache of `pages` pages and a scratch page for the slots of `table` [slots, pages per slot] int32."""
        shape = (config.layers, pages + 1, page_positions, config.kv_heads, config.head_width)
        keys, values = (_zeros(shape, table.device, dtype) for _ in range(2))
        return cls(keys, values, table)

    @property
    def page_positions(self) -> int:
        return self.keys.shape[2]

    def part(self, layers: slice) -> PagedKVCache:
        """The cache of the stack that has these `layers` of it: the same memory."""
        return PagedKVCache(self.keys[layers], self.values[layers], self.page_table)

    def fill(self, rows: PackedTokens) -> Attend:
        """Keep the keys and values of packed prompts and attend within each of them. Capturable; no sync.

        For a stack that is given [1, T, width]. Pages that hold positions before a prompt's first token are only read.
        """
        page, place = rows.positions // self.page_positions, rows.positions % self.page_positions
        pages = self.page_table[rows.slots, page].long()
        shared, slots = rows.cached_lengths, rows.slots.contiguous()

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self.keys[layer][pages, place] = keys[0]
            self.values[layer][pages, place] = values[0]
            kv = PagedKV(self.keys[layer], self.values[layer], self.page_table, slots)
            return varlen_attention(queries[0], keys[0], values[0], rows.starts, shared, kv)[None]

        return attend
