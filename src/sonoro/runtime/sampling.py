"""Sampling parameters by slot, in a static tensor that captured graphs read, so one graph serves any parameters.

Floats and flags are stored as the bits of int64: a slot's parameters are uploaded in one copy and read as views,
without a kernel for a cast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sonoro.core.options import OptionValue
from sonoro.core.types import SamplingParams, SpeechRequest
from sonoro.ops.sample import Sampling
from sonoro.runtime.ring import upload

MIN_TEMPERATURE = 1e-5
"""Lower temperatures above 0 count as this one: logits divided by them could be infinite."""


@dataclass(frozen=True)
class Controls:
    """How one segment is sampled, and when it must end.
    Random numbers are addressed by (seed, segment, frame, codebook), so they do not depend on the batch. A segment of
    `doubtful_frames` or more counts as a runaway even if it ends by itself, if it may be spoken again."""

    sampling: SamplingParams
    seed: int
    segment: int
    max_frames: int
    ignore_eos: bool = False
    options: dict[str, OptionValue] = field(default_factory=dict)
    doubtful_frames: int | None = None

    @classmethod
    def of(cls, request: SpeechRequest, segment: int) -> Controls:
        """The controls of segment number `segment` of a resolved request; `request.max_frames` limits this segment."""
        assert request.max_frames is not None
        given = (request.sampling, request.seed, segment, request.max_frames)
        return cls(*given, ignore_eos=request.ignore_eos, options=request.options)

    def pack(self, sampling: SamplingParams | None = None) -> tuple[int, ...]:
        """These controls, with `sampling` (by default that of each frame's first code), as a row of `SamplingState`.
        The row has eight int64: four integers, two flags, and float32 in pairs. Every field of `sampling` must be set.
        """
        temperature, top_k, top_p, penalty = msgspec.structs.astuple(sampling or self.sampling)
        # Greedy: no division by the temperature, and no filter, which could not change the argmax.
        is_greedy = temperature == 0
        if is_greedy:
            temperature, top_k, top_p = 1.0, 0, 1.0
        floats = pack_floats([max(temperature, MIN_TEMPERATURE), top_p, penalty, 0.0]).tolist()
        return (self.seed, self.segment, self.max_frames, top_k, is_greedy, self.ignore_eos, *floats)


class BatchSampling(NamedTuple):
    """The parameters of a batch, read once per step: `sampling` for the kernels, `repetition_penalty` and `ignore_eos`
    [B, 1], to broadcast over ids, the rest [B]."""

    sampling: Sampling
    repetition_penalty: Tensor
    ignore_eos: Tensor
    seed: Tensor
    segment: Tensor
    max_frames: Tensor


class SamplingState:
    """Parameters of `slots` slots and the scratch slot. A slot without parameters is greedy and has 0 `max_frames`."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self.packed = torch.empty((slots + 1, len(CLEARED)), device=device, dtype=torch.int64)
        self.clear(range(slots + 1))

    def set(self, slots: Sequence[int], packed: Sequence[tuple[int, ...]]) -> None:
        """Set the parameters of `slots` to rows of `Controls.pack`, in stream order. No sync; not capturable."""
        device = self.packed.device
        self.put(upload(slots, torch.int64, device), upload(packed, torch.int64, device))

    def put(self, slots: Tensor, packed: Tensor) -> None:
        """`set` for `slots` [B] int64 and `packed` [B, 8] int64 on the device. Capturable; no sync."""
        self.packed.index_copy_(0, slots, packed)

    def clear(self, slots: Sequence[int]) -> None:
        """Reset the parameters of `slots`. No sync."""
        self.set(slots, [CLEARED] * len(slots))

    def read(self, slots: Tensor) -> BatchSampling:
        """The parameters of `slots` [B] int64. Capturable; no sync."""
        rows = self.packed[slots]
        seed, segment, max_frames = rows[:, :3].unbind(1)
        temperature, top_p, repetition_penalty, _ = unpack_floats(rows[:, 6:]).split(1, dim=1)
        is_greedy, ignore_eos = unpack_flags(rows[:, 4:6]).split(1, dim=1)
        sampling = Sampling(temperature, rows[:, 3:4], top_p, is_greedy)
        return BatchSampling(sampling, repetition_penalty, ignore_eos, seed, segment, max_frames)


def pack_floats(values: ArrayLike) -> NDArray[np.int64]:
    """`values` [..., 2 N] as float32, two in the bits of each int64: [..., N]."""
    return np.ascontiguousarray(values, np.float32).view(np.int64)


def unpack_floats(numbers: Tensor) -> Tensor:
    """Inverse of `pack_floats`: a float32 view [..., 2 N] of `numbers` [..., N] int64, contiguous in the last
    dimension. Capturable."""
    return numbers.view(torch.float32)


def unpack_flags(numbers: Tensor) -> Tensor:
    """A bool view [..., N] of `numbers` [..., N] int64, 0 or 1, contiguous in the last dimension. Capturable."""
    return numbers.view(torch.bool)[..., ::8]  # the lowest byte comes first


CLEARED = Controls(SamplingParams(temperature=0.0, top_k=0, top_p=1.0, repetition_penalty=1.0), 0, 0, 0).pack()
"""The parameters of a free slot, packed."""
