"""Where a decoder stack's keys and values live between steps: rows by slot. Makes the `attend` functions of a stack.

Knows no model. A row's positions past its live length may hold anything, NaN included: no result depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.nn.transformer import Attend, DecoderConfig, causal_attention

__all__ = ["KVCache", "LoopCache"]


@dataclass(frozen=True)
class KVCache:
    """Keys and values [layers, slots + 1, S, kv heads, D] of S positions per slot; the last slot is scratch.

    Whoever holds it knows how many positions of a slot are live; it keeps no length and needs no reset.
    """

    keys: Tensor
    values: Tensor

    @classmethod
    def allocate(
        cls, config: DecoderConfig, slots: int, positions: int, *, device: torch.device, dtype: torch.dtype
    ) -> KVCache:
        """A zeroed cache for `slots` rows and the scratch row."""
        shape = (config.layers, slots + 1, positions, config.kv_heads, config.head_width)
        return cls(*(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)))

    def fill(self, slots: Tensor) -> Attend:
        """Attend causally within T new rows per slot and keep them at positions 0 .. T-1 of `slots` [B] int64.

        Rows of different lengths are padded on the right; what the padding leaves here lies past the live length.
        """

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self.keys[layer][slots, : keys.shape[1]] = keys
            self.values[layer][slots, : values.shape[1]] = values
            return causal_attention(layer, queries, keys, values)

        return attend

    def decode(self, slots: Tensor, positions: Tensor) -> Attend:
        """Keep one new row per slot at `positions` [B] int64 of `slots` [B] int64 and attend to it and all before it.

        On a CPU it reads live positions only; elsewhere full length: it may be captured and does not synchronise.
        """
        is_cpu = self.keys.device.type == "cpu"
        return self.decode_rows(slots, positions) if is_cpu else self.decode_masked(slots, positions)

    def decode_masked(self, slots: Tensor, positions: Tensor) -> Attend:
        """`decode` at fixed shapes: all S positions, those past the live length masked. Capturable; no sync."""
        is_dead = torch.arange(self.keys.shape[2], device=slots.device) > positions[:, None]

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            self.keys[layer][slots, positions] = keys[:, 0]
            self.values[layer][slots, positions] = values[:, 0]
            # The copies are cleared too: the mask alone would let NaN through (NaN - inf, 0 * NaN).
            all_keys = self.keys[layer][slots].masked_fill_(is_dead[..., None, None], 0.0)
            all_values = self.values[layer][slots].masked_fill_(is_dead[..., None, None], 0.0)
            out = F.scaled_dot_product_attention(
                queries.transpose(1, 2),
                all_keys.transpose(1, 2),
                all_values.transpose(1, 2),
                attn_mask=~is_dead[:, None, None, :],
                enable_gqa=True,
            )
            return out.transpose(1, 2)

        return attend

    def decode_rows(self, slots: Tensor, positions: Tensor) -> Attend:
        """`decode` row by row over live positions only: no copy and no mask. Reads `slots` and `positions` now."""
        rows = list(zip(slots.tolist(), positions.tolist(), strict=True))

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            outs = []
            for row, (slot, position) in enumerate(rows):
                slot_keys, slot_values = self.keys[layer, slot], self.values[layer, slot]
                slot_keys[position] = keys[row, 0]
                slot_values[position] = values[row, 0]
                live = slice(position + 1)
                outs.append(causal_attention(layer, queries[row, None], slot_keys[None, live], slot_values[None, live]))
            return outs[0] if len(outs) == 1 else torch.cat(outs)

        return attend


class LoopCache:
    """Keys and values of a short loop inside one step, at fixed shapes: it starts empty and nothing outlives it.

    The position is a Python int, so exactly the rows written so far are read. Capturable; no sync.
    """

    def __init__(self, config: DecoderConfig, rows: int, length: int, *, device: torch.device, dtype: torch.dtype):
        shape = (config.layers, rows, length, config.kv_heads, config.head_width)
        self._keys, self._values = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))

    def at(self, position: int) -> Attend:
        """Keep T new rows from `position` on and attend causally to all so far; T is 1 unless `position` is 0."""

        def attend(layer: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            end = position + keys.shape[1]
            assert position == 0 or keys.shape[1] == 1
            self._keys[layer, :, position:end] = keys
            self._values[layer, :, position:end] = values
            return causal_attention(layer, queries, self._keys[layer, :, :end], self._values[layer, :, :end])

        return attend
