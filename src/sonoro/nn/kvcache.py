"""Paged KV cache of a decoder stack.

The page table maps the positions of a slot to pages. Positions past a slot's live length may hold anything, NaN
included: no result depends on them.
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
    """`torch.zeros`, but on a CPU without resident memory until written: most slots never use all of their pages."""
    if device.type != "cpu":
        return torch.zeros(shape, device=device, dtype=dtype)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)


@dataclass(frozen=True)
class PagedKVCache:
    """`keys` and `values` [layers, pages + 1, page positions, kv heads, D], and `page_table` [slots, pages per slot].

    The last page is scratch. The cache stores no lengths: the caller knows how many positions of a slot are live.
    Stacks with equal heads may share one cache, their layers concatenated: each gets its `part`.
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
        """A view of `layers`, for the stack that they belong to; shares memory."""
        return PagedKVCache(self.keys[layers], self.values[layers], self.page_table)

    def fill(self, rows: PackedTokens) -> Attend:
        """An `Attend` for `DecoderStack.forward` over packed prompts [1, T, width]: it writes their keys and values to
        the pages, then runs varlen attention. Pages of a cached prefix are only read. Capturable; no sync.
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
