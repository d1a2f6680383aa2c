"""Heads of a decoder stack whose attention to a stretch of positions is kept, frame by frame, for whoever asks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sonoro.ops.pointer import point

__all__ = ["HeadWatch"]


@dataclass(frozen=True)
class HeadWatch:
    """`attention` [N+1, H, W] float32 of the last step, by slot: of H heads to the stretch of each slot's `spans`
    [N+1, 2] int64, start and count. `heads` are those by layer, int64 [h], in the order of `attention`. Where it
    `is_whole` the stretch is all positions.
    """

    heads: dict[int, Tensor]
    spans: Tensor
    attention: Tensor
    is_whole: bool = False

    @classmethod
    def allocate(
        cls,
        places: Sequence[tuple[int, int]],
        slots: int,
        columns: int,
        device: torch.device,
        *,
        is_whole: bool = False,
    ) -> HeadWatch:
        """Of the heads at `places` (layer, head; ascending) for `slots` slots, the scratch slot among them."""
        heads = {
            layer: torch.tensor([head for _, head in group], device=device)
            for layer, group in itertools.groupby(places, key=lambda place: place[0])
        }
        attention = torch.zeros(slots, len(places), columns, device=device)
        return cls(heads, torch.zeros(slots, 2, dtype=torch.int64, device=device), attention, is_whole)

    def keep(self, layer: int, *given: Any) -> None:
        """Keep what heads of `layer`, if any are watched, look at, after its `decode_attention` of what is `given`.
        Capturable; no sync."""
        if layer in self.heads:
            first = sum(len(heads) for at, heads in self.heads.items() if at < layer)
            rows = self.attention[:, first : first + len(self.heads[layer])]
            point(*given, self.heads[layer], self.spans, rows)
