"""Causal layer state per slot: the finite left context of convolutions and window attention, in static tensors.

A layout gives, for each layer's key, how many columns are kept and how wide they are. Sequences are [B, T, C]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.chunk import advance_counts
from sonoro.ops.clear import clear_rows

Layout = Mapping[str, tuple[int, int]]
"""By key: the number of columns kept, and their width C."""


class Context(Protocol):
    """The left context of one call: the columns that came before those a layer is given."""

    def positions(self, columns: int, device: torch.device) -> Tensor:
        """Absolute positions of the next `columns` columns, int64 [B or 1, columns]."""

    def extend(self, key: str, x: Tensor, length: int) -> Tensor:
        """`x` [B, T, C] preceded by the `length` columns before it (zeros before the start): [B, length + T, C]."""

    def recall(self, key: str, x: Tensor) -> Tensor:
        """`x` [B, T, C] preceded by the L columns of the ring buffer of `key`, in ring order: [B, L + T, C]."""

    def recalled(self, key: str, columns: int, device: torch.device) -> Tensor:
        """Positions of what `recall` returns for T = `columns`, int64 [B or 1, L + T]; negative if never written."""

    def advance(self, columns: int) -> None:
        """Advance the position by `columns`. Once per call of the whole model, after its last `recall`."""


class WholeContext:
    """Zeros as left context, for decoding a whole sequence. Stateless and differentiable."""

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


def in_pieces(run: Callable[[Tensor, Context], Tensor], audio: Tensor, samples: int, layout: Layout) -> Tensor:
    """`run`, of [1, S, ...] to [1, T, ...], over pieces of `audio` of so many `samples`, with the left context that
    `layout` describes: at once, a minute takes gigabytes and occupies the GPU for long."""
    context, made = History.stream(layout, audio), dict[int, Tensor]()
    pieces = audio.split(samples, dim=1)
    # On the meta device, where launches are listed, pieces of one length launch the same.
    keys = [piece.shape[1] if piece.is_meta else number for number, piece in enumerate(pieces)]
    for key, piece in zip(keys, pieces, strict=True):
        if key not in made:
            made[key] = run(piece, context)
    return torch.cat([made[key] for key in keys], dim=1)


@dataclass(frozen=True)
class SavedRow:
    """One slot of a `History`, copied by `History.save`: `columns` [1, L, C] by key, and `seen` [1] int64, a count."""

    columns: Mapping[str, Tensor]
    seen: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of its tensors."""
        return *self.columns.values(), self.seen


class History:
    """Left context of `slots` slots and a scratch slot, zeroed: `columns` [slots + 1, L, C] by key, and `seen`
    [slots + 1] int64, how many columns each slot has been given.
    Every tensor is allocated here, once; changed only through `reset`, `load` and the contexts of `at`."""

    def __init__(self, layout: Layout, slots: int, *, device: torch.device | str, dtype: torch.dtype) -> None:
        self.columns = {
            key: torch.zeros(slots + 1, length, width, device=device, dtype=dtype)
            for key, (length, width) in layout.items()
        }
        self.seen = torch.zeros(slots + 1, device=device, dtype=torch.int64)

    def reset(self, slots: Tensor) -> None:
        """Zero the state of `slots` [B] int64. Capturable."""
        clear_rows(slots, (*self.columns.values(), self.seen))

    def at(self, slots: Tensor) -> SlotContext:
        """The left context of one call for the batch `slots` [B] int64; only the scratch slot may repeat."""
        return SlotContext(self, slots)

    @classmethod
    def stream(cls, layout: Layout, weight: Tensor) -> SlotContext:
        """The left context of one stream from its start, with device and dtype of `weight`."""
        history = cls(layout, 1, device=weight.device, dtype=weight.dtype)
        return history.at(torch.zeros(1, dtype=torch.int64, device=weight.device))

    def save(self, slot: Tensor) -> SavedRow:
        """A copy of the state of `slot` [1] int64, for `load`. No sync."""
        columns = {key: tensor.index_select(0, slot) for key, tensor in self.columns.items()}
        return SavedRow(columns, self.seen.index_select(0, slot))

    def load(self, slots: Tensor, saved: SavedRow) -> None:
        """Set the state of `slots` [B] int64 to `saved`, from a history of the same layout. No sync."""
        for key, tensor in self.columns.items():
            tensor.index_copy_(0, slots, saved.columns[key].expand(slots.shape[0], -1, -1))
        self.seen.index_copy_(0, slots, saved.seen.expand(slots.shape[0]))


class SlotContext:
    """The left context of `slots` of a `History` during one call; updates it in place. Capturable; no sync."""

    def __init__(self, history: History, slots: Tensor) -> None:
        self._history = history
        self._slots = slots
        self._rings: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    @cached_property
    def _seen(self) -> Tensor:
        return self._history.seen.index_select(0, self._slots)

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
        # A ring buffer: column p is stored at p % L, so a call writes its own columns only, not the whole window.
        ring = self._history.columns[key]
        length, columns = ring.shape[1], min(ring.shape[1], x.shape[1])
        rows, places = self._places(length, columns, x)
        joined = torch.cat([ring.index_select(0, self._slots), x], dim=1)
        ring.index_put_((rows, places), x[:, x.shape[1] - columns :].detach())
        return joined

    def recalled(self, key: str, columns: int, device: torch.device) -> Tensor:
        # Entry j of the ring holds the newest position below `seen` that is j modulo L: seen - 1 - age.
        length = self._history.columns[key].shape[1]
        newest = self._seen[:, None] - 1
        age = torch.remainder(newest - torch.arange(length, device=device), length)
        return torch.cat([newest - age, self.positions(columns, device)], dim=1)

    def advance(self, columns: int) -> None:
        advance_counts(self._history.seen, self._slots, columns)
        vars(self).pop("_seen", None)
        self._rings.clear()

    def _places(self, length: int, columns: int, x: Tensor) -> tuple[Tensor, Tensor]:
        """Slot and ring index of the last `columns` columns of `x`, cached: they are equal for all layers of a call."""
        key = (length, columns)
        if key not in self._rings:
            last = self.positions(x.shape[1], x.device)[:, x.shape[1] - columns :]
            self._rings[key] = (self._slots[:, None], torch.remainder(last, length))
        return self._rings[key]
