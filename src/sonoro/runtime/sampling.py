"""Sampling parameters by slot, as a static tensor that captured graphs read.

The host knows none of them: a step that was captured once serves whatever parameters the slots come to have. Floats and
flags are kept as the bits of int64, so that all of a slot is staged in one copy and read without a cast, which would be
a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sonoro.ops.sample import Sampling
from sonoro.runtime.ring import upload

__all__ = [
    "CLEARED",
    "BatchSampling",
    "SamplingControls",
    "SamplingState",
    "pack",
    "pack_floats",
    "unpack_flags",
    "unpack_floats",
]


@dataclass(frozen=True)
class SamplingControls:
    """One slot's parameters. Temperature 0 is greedy; `top_k` 0 and `top_p` 1 keep every id."""

    temperature: float
    top_k: int
    top_p: float
    seed: int
    segment: int
    max_frames: int
    repetition_penalty: float = 1.0
    ignore_eos: bool = False


class BatchSampling(NamedTuple):
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

    @property
    def sampling(self) -> Sampling:
        """What an id is sampled with."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.is_greedy)


class SamplingState:
    """Parameters of `slots` slots and the scratch slot, greedy and ended at once until they are set."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._packed = torch.empty((slots + 1, len(CLEARED)), device=device, dtype=torch.int64)
        self.clear(range(slots + 1))

    def set(self, slots: Sequence[int], controls: Sequence[SamplingControls]) -> None:
        """Give `slots` these parameters, behind the work of the current stream. No sync; not capturable."""
        device = self._packed.device
        rows = upload([pack(row) for row in controls], torch.int64, device)
        self.put(upload(slots, torch.int64, device), rows)

    def put(self, slots: Tensor, packed: Tensor) -> None:
        """Give `slots` [B] int64 what `pack` made of parameters, [B, 8] int64. Capturable; no sync."""
        self._packed.index_copy_(0, slots, packed)

    def clear(self, slots: Sequence[int]) -> None:
        """Forget the parameters of `slots`. No sync."""
        self.set(slots, [_FREE] * len(slots))

    def read(self, slots: Tensor) -> BatchSampling:
        """The parameters of `slots` [B] int64. Capturable; no sync."""
        rows = self._packed[slots]
        seed, segment, max_frames = rows[:, :3].unbind(1)
        temperature, top_p, repetition_penalty, _ = unpack_floats(rows[:, 6:]).split(1, dim=1)
        is_greedy, ignore_eos = unpack_flags(rows[:, 4:6]).split(1, dim=1)
        return BatchSampling(
            temperature,
            top_p,
            repetition_penalty,
            rows[:, 3:4],
            is_greedy,
            ignore_eos,
            seed,
            segment,
            max_frames,
        )


def pack_floats(values: ArrayLike) -> NDArray[np.int64]:
    """The bits of `values` [..., 2 N], rounded to float32, in pairs: [..., N]."""
    return np.ascontiguousarray(values, np.float32).view(np.int64)


def unpack_floats(numbers: Tensor) -> Tensor:
    """What `pack_floats` was given, of `numbers` [..., N] int64 with dense rows: a view [..., 2 N]. Capturable."""
    return numbers.view(torch.float32)


def unpack_flags(numbers: Tensor) -> Tensor:
    """Whether each of `numbers` [..., N] int64, 0 or 1 with dense rows, is 1: a view. Capturable."""
    return numbers.view(torch.bool)[..., ::8]  # the lowest byte comes first


def pack(row: SamplingControls) -> tuple[int, ...]:
    """The parameters of one slot as eight int64: four integers, two flags, and float32 in pairs."""
    # A greedy slot divides by nothing, and nothing that is filtered out could change its choice.
    is_greedy = row.temperature == 0
    temperature, top_k, top_p = (1.0, 0, 1.0) if is_greedy else (row.temperature, row.top_k, row.top_p)
    floats = pack_floats([temperature, top_p, row.repetition_penalty, 0.0]).tolist()
    return (row.seed, row.segment, row.max_frames, top_k, is_greedy, row.ignore_eos, *floats)


_FREE = SamplingControls(temperature=0, top_k=0, top_p=1, seed=0, segment=0, max_frames=0)

CLEARED = pack(_FREE)
"""The parameters of a free slot, packed."""
