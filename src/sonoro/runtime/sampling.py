"""How each slot's ids are drawn: sampling parameters as rows of static tensors. Knows no model.

The host keeps a mirror of what decides whether a costly processor is needed at all, so that the caller can leave it out
without asking the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Filters", "RowControls", "SamplingRow", "SamplingRows"]

_SMALLEST_LIMIT = 64


@dataclass(frozen=True)
class RowControls:
    """One slot's parameters. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 keep every id."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    segment: int
    max_frames: int
    repetition_penalty: float = 1.0
    ignore_eos: bool = False


class Filters(NamedTuple):
    """Which processors some slot needs.

    `top_k_limit` is at least the largest `top_k`, and 0 if none is set; a power of two, so that few values occur.
    """

    top_k_limit: int
    needs_top_p: bool


class SamplingRow(NamedTuple):
    """The parameters of a batch, read once per step. The first six are [B, 1], to broadcast over ids; the rest [B]."""

    temperature: Tensor
    top_p: Tensor
    repetition_penalty: Tensor
    top_k: Tensor
    is_greedy: Tensor
    ignore_eos: Tensor
    seed: Tensor
    segment: Tensor
    max_frames: Tensor


class SamplingRows:
    """Parameters of `slots` slots and the scratch row, greedy and ended at once until they are set."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._floats = torch.ones((slots + 1, 3), device=device)
        self._ints = torch.zeros((slots + 1, 6), device=device, dtype=torch.int64)
        self._ints[:, 1] = 1
        self._top_k = [0] * (slots + 1)
        self._top_p = [1.0] * (slots + 1)
        self.filters = Filters(0, False)
        """What the slots set now need, known on the host."""

    def set(self, slots: Sequence[int], controls: Sequence[RowControls]) -> None:
        """Give `slots` these parameters. Copies to the device; not capturable."""
        floats, ints = [], []
        for slot, row in zip(slots, controls, strict=True):
            is_greedy = row.temperature == 0
            # Filters cannot change a greedy choice, so a greedy row asks for none.
            self._top_k[slot] = 0 if is_greedy else row.top_k
            self._top_p[slot] = 1.0 if is_greedy else row.top_p
            floats.append((1.0 if is_greedy else row.temperature, self._top_p[slot], row.repetition_penalty))
            ints.append((self._top_k[slot], is_greedy, row.ignore_eos, row.seed, row.segment, row.max_frames))
        self.filters = self._filters(self._top_k, self._top_p)
        device = self._ints.device
        index = torch.tensor(slots, dtype=torch.int64).to(device)
        self._floats[index] = torch.tensor(floats, dtype=torch.float32).to(device)
        self._ints[index] = torch.tensor(ints, dtype=torch.int64).to(device)

    def clear(self, slots: Sequence[int]) -> None:
        """Forget the parameters of `slots`."""
        greedy = RowControls(temperature=0, top_k=0, top_p=1, seed=0, segment=0, max_frames=0)
        self.set(slots, [greedy] * len(slots))

    def read(self, slots: Tensor) -> SamplingRow:
        """The parameters of `slots` [B] int64. Capturable; no sync."""
        temperature, top_p, repetition_penalty = self._floats[slots].split(1, dim=1)
        ints = self._ints[slots]
        top_k, is_greedy, ignore_eos = ints[:, :3].split(1, dim=1)
        seed, segment, max_frames = ints[:, 3:].unbind(1)
        return SamplingRow(
            temperature,
            top_p,
            repetition_penalty,
            top_k,
            is_greedy.bool(),
            ignore_eos.bool(),
            seed,
            segment,
            max_frames,
        )

    @staticmethod
    def _filters(top_k: Sequence[int], top_p: Sequence[float]) -> Filters:
        largest = max(top_k)
        limit = max(_SMALLEST_LIMIT, 1 << (largest - 1).bit_length()) if largest else 0
        return Filters(limit, min(top_p) < 1)
