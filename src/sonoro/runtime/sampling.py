"""How each slot's ids are drawn: sampling parameters as rows of static tensors. Knows no model.

Nothing about them is known on the host: a step that was captured once must serve whatever the rows come to hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sonoro.runtime.ring import upload

__all__ = ["RowControls", "SamplingRow", "SamplingRows"]


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

    def set(self, slots: Sequence[int], controls: Sequence[RowControls]) -> None:
        """Give `slots` these parameters, behind the work of the current stream. No sync; not capturable."""
        floats, ints = [], []
        for row in controls:
            # A greedy row divides by nothing, and nothing that is filtered out could change its choice.
            is_greedy = row.temperature == 0
            temperature, top_k, top_p = (1.0, 0, 1.0) if is_greedy else (row.temperature, row.top_k, row.top_p)
            floats.append((temperature, top_p, row.repetition_penalty))
            ints.append((top_k, is_greedy, row.ignore_eos, row.seed, row.segment, row.max_frames))
        device = self._ints.device
        index = upload(slots, torch.int64, device)
        self._floats.index_copy_(0, index, upload(floats, torch.float32, device))
        self._ints.index_copy_(0, index, upload(ints, torch.int64, device))

    def clear(self, slots: Sequence[int]) -> None:
        """Forget the parameters of `slots`. No sync."""
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
