"""Record the attention of chosen heads of a decoder stack to a span of positions, at each decode step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sonoro.ops.pointer import Watched, point


@dataclass(frozen=True)
class HeadWatch:
    """Attention weights of H watched heads in the last decode step: `attention` [slots + 1, H, W] float32, by slot.
    Column w is position start + w of the slot's row of `spans` [slots + 1, 2] int64 (start, count); with `is_whole`
    the span is all positions. `heads`: watched heads by layer, int64 [h] each, in the order of `attention`'s axis H."""

    heads: dict[int, Tensor]
    spans: Tensor
    attention: Tensor
    is_whole: bool = False

    @classmethod
    def allocate(
        cls, places: Sequence[tuple[int, int]], spans: Tensor, columns: int, *, is_whole: bool = False
    ) -> HeadWatch:
        """Zeroed buffers for the heads `places`, ascending pairs (layer, head), and spans of up to `columns` positions.
        `spans` are those of all slots, the scratch slot included."""
        heads = {
            layer: torch.tensor([head for _, head in group], device=spans.device)
            for layer, group in itertools.groupby(places, key=lambda place: place[0])
        }
        attention = torch.zeros(len(spans), len(places), columns, device=spans.device)
        return cls(heads, spans, attention, is_whole)

    def keep(self, layer: int, *given: Any) -> None:
        """Write the attention of the watched heads of `layer`, if it has any, to `attention`.
        Call it after `decode_attention` of this layer, with the same arguments. Capturable; no sync."""
        if layer in self.heads:
            first = sum(len(heads) for at, heads in self.heads.items() if at < layer)
            rows = self.attention[:, first : first + len(self.heads[layer])]
            point(*given, Watched(self.heads[layer], self.spans, rows))
