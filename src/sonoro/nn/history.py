"""The finite left context that causal layers keep per slot: rows of static tensors, read and advanced by slot.

Knows no layer and no model: a layout says how many columns of what width each key keeps. Sequences are [B, T, C].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["WHOLE", "Context", "History", "Layout", "SavedRow", "SlotContext", "WholeContext"]

Layout = Mapping[str, tuple[int, int]]
"""Per key: how many columns are kept, and their width C."""


class Context(Protocol):
    """What came before the columns a layer is given."""

    def positions(self, columns: int, device: torch.device) -> Tensor:
        """Absolute positions of the next `columns` columns, int64 [B or 1, columns]."""

    def extend(self, key: str, x: Tensor, length: int) -> Tensor:
        """`x` [B, T, C] preceded by the `length` columns before it (zeros before the start): [B, length + T, C]."""

    def recall(self, key: str, x: Tensor) -> Tensor:
        """`x` [B, T, C] preceded by the columns kept for `key`, those in no particular order: [B, L + T, C]."""

    def recalled(self, key: str, columns: int, device: torch.device) -> Tensor:
        """Absolute positions of what `recall` returns for `columns` columns, int64 [B or 1, L + T]; negative: none."""

    def advance(self, columns: int) -> None:
        """Count `columns` columns as seen. Once per call of the whole model, after its last `recall`."""


class WholeContext:
    """No past: zeros on the left, so a layer decodes a whole sequence. Stateless and differentiable."""

    def positions(self, columns: int, device: torch.device) -> Tensor:
        return torch.arange(columns, device=device)[None]

    def extend(self, key: str, x: Tensor, length: int) -> Tensor:
        return F.pad(x, (0, 0, length, 0)) if length else x

    def recall(self, key: str, x: Tensor) -> Tensor:
        return x

    def recalled(self, key: str, columns: int, device: torch.device) -> Tensor:
        return self.positions(columns, device)

    def advance(self, columns: int) -> None:
        pass


WHOLE = WholeContext()


@dataclass(frozen=True)
class SavedRow:
    """What one slot saw, as `History.save` copied it: [1, L, C] by key, and the columns seen [1]."""

    columns: Mapping[str, Tensor]
    seen: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it holds."""
        return *self.columns.values(), self.seen


class History:
    """Left context of `slots` slots and a last one, scratch, zeroed; every tensor is allocated here, once.

    Owned by the caller; changed only through `reset`, `load` and the contexts that `at` gives.
    """

    def __init__(self, layout: Layout, slots: int, *, device: torch.device | str, dtype: torch.dtype) -> None:
        self.columns = {
            key: torch.zeros(slots + 1, length, width, device=device, dtype=dtype)
            for key, (length, width) in layout.items()
        }
        self.seen = torch.zeros(slots + 1, device=device, dtype=torch.int64)

    @property
    def bytes(self) -> int:
        """Memory held by all slots."""
        return sum(tensor.nbytes for tensor in (*self.columns.values(), self.seen))

    def reset(self, slots: Tensor) -> None:
        """Make `slots` int64 [B] as new. Capturable."""
        for tensor in (*self.columns.values(), self.seen):
            tensor.index_fill_(0, slots, 0)

    def at(self, slots: Tensor) -> SlotContext:
        """`slots` int64 [B] as the left context of one call; only the scratch slot may repeat."""
        return SlotContext(self, slots)

    def save(self, slot: Tensor) -> SavedRow:
        """A copy of `slot` int64 [1], for `load`. No sync."""
        columns = {key: tensor.index_select(0, slot) for key, tensor in self.columns.items()}
        return SavedRow(columns, self.seen.index_select(0, slot))

    def load(self, slots: Tensor, saved: SavedRow) -> None:
        """Make `slots` int64 [B] what another slot of the same layout was when it was saved. No sync."""
        for key, tensor in self.columns.items():
            tensor.index_copy_(0, slots, saved.columns[key].expand(slots.shape[0], -1, -1))
        self.seen.index_copy_(0, slots, saved.seen.expand(slots.shape[0]))


class SlotContext:
    """The left context of `slots` of a `History` during one call; advances them. Capturable; no sync."""

    def __init__(self, history: History, slots: Tensor) -> None:
        self._history = history
        self._slots = slots
        self._seen = history.seen.index_select(0, slots)
        self._rings: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def positions(self, columns: int, device: torch.device) -> Tensor:
        return self._seen[:, None] + torch.arange(columns, device=device)

    def extend(self, key: str, x: Tensor, length: int) -> Tensor:
        if not length:
            return x
        kept = self._history.columns[key]
        joined = torch.cat([kept.index_select(0, self._slots), x], dim=1)
        kept.index_copy_(0, self._slots, joined[:, -length:].detach())
        return joined

    def recall(self, key: str, x: Tensor) -> Tensor:
        # Column p of a stream lives at p % L, so a call writes its own columns only, not the whole window.
        ring = self._history.columns[key]
        length, columns = ring.shape[1], min(ring.shape[1], x.shape[1])
        rows, places = self._places(length, columns, x)
        joined = torch.cat([ring.index_select(0, self._slots), x], dim=1)
        ring.index_put_((rows, places), x[:, x.shape[1] - columns :].detach())
        return joined

    def recalled(self, key: str, columns: int, device: torch.device) -> Tensor:
        # Of the positions below `seen`, place j holds the newest that is j modulo L: it is seen - 1 - age.
        length = self._history.columns[key].shape[1]
        newest = self._seen[:, None] - 1
        age = torch.remainder(newest - torch.arange(length, device=device), length)
        return torch.cat([newest - age, self.positions(columns, device)], dim=1)

    def advance(self, columns: int) -> None:
        self._seen = self._seen + columns
        self._history.seen.index_copy_(0, self._slots, self._seen)
        self._rings.clear()

    def _places(self, length: int, columns: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Where the last `columns` columns of `x` go in a ring of `length`; the same for every layer of a call."""
        key = (length, columns)
        if key not in self._rings:
            last = self.positions(x.shape[1], x.device)[:, x.shape[1] - columns :]
            self._rings[key] = (self._slots[:, None], torch.remainder(last, length))
        return self._rings[key]
