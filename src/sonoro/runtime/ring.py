"""Asynchronous copies between host and device through pinned memory. Knows neither what is copied nor who reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT = 64


def upload(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy `values`, numbers or nested sequences of them, to a new tensor on `device`. No sync.
    The pinned staging memory is safe: torch's caching host allocator reuses a block only after the last copy from it.
    """
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def overwrite(target: Tensor, values: Tensor) -> None:
    """Copy `values`, on the host, over `target`, in order on the current stream. No sync."""
    target.copy_(values.pin_memory() if target.is_cuda else values, non_blocking=True)


class Entry:
    """Host memory for the results of one launch: `copy` tensors, `close` it; later `wait`, read, `release` it.
    `wait_until_split` is for what was copied before `split` alone."""

    def __init__(self, ring: PinnedRing, memory: Tensor) -> None:
        self._ring, self._memory = ring, memory
        self._events: list[torch.cuda.Event] = []
        self._split: list[torch.cuda.Event] = []
        self._used_bytes = 0
        self._is_closed = False
        self.is_taken = False

    def copy(self, tensor: Tensor) -> npt.NDArray[Any]:
        """Copy `tensor` to this entry, in order on its device's current stream; it must fit into the entry.
        The array is valid from `wait` until `release`. A tensor on the CPU is copied at once."""
        assert self.is_taken
        assert not self._is_closed
        start = -(-self._used_bytes // _ALIGNMENT) * _ALIGNMENT
        end = start + tensor.nbytes
        assert end <= len(self._memory), f"{end} bytes do not fit an entry of {len(self._memory)}"
        self._used_bytes = end
        host = self._memory[start:end].view(tensor.dtype).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        return host.numpy()

    def split(self) -> None:
        """End the first part of the copies: record events on the current streams, for `wait_until_split`."""
        assert self.is_taken
        assert not self._is_closed
        self._split = [stream.record_event() for stream in self._ring.current]

    def close(self) -> None:
        """End the copies: record events on the current streams, and those `beside`, for `wait`."""
        assert self.is_taken
        assert not self._is_closed
        self._is_closed = True
        self._events = [stream.record_event() for stream in (*self._ring.current, *self._ring.beside)]

    @property
    def is_ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._is_closed and all(event.query() for event in self._events)

    def wait_until_split(self) -> None:
        """Wait until the copies before `split` are complete."""
        for event in self._split:
            event.synchronize()

    def wait(self) -> None:
        """Wait until all copies are complete, but for nothing launched after `close`."""
        assert self._is_closed
        for event in self._events:
            event.synchronize()

    def release(self) -> None:
        """Return the entry to its ring; its arrays become invalid. Waits for copies in flight."""
        if not self._is_closed:
            self.close()
        self.wait()
        assert self.is_taken, "the entry is free already"
        self.is_taken = False
        self._ring._free.append(self)

    def _begin(self) -> None:
        assert not self.is_taken
        self.is_taken, self._is_closed, self._used_bytes, self._split = True, False, 0, []


class PinnedRing:
    """`depth` entries of `bytes_per_entry` bytes, pinned if `devices` are GPUs. Each tensor takes a multiple of 64
    bytes. Copies on streams `beside` the current ones are waited for as well."""

    def __init__(
        self, depth: int, bytes_per_entry: int, *devices: torch.device, beside: Sequence[torch.cuda.Stream] = ()
    ) -> None:
        self.depth, self.devices, self.beside = depth, devices, tuple(beside)
        room = -(-bytes_per_entry // _ALIGNMENT) * _ALIGNMENT
        with torch.inference_mode(False):  # so that it may be written in any mode
            memory = torch.empty((depth, room), dtype=torch.uint8, pin_memory=devices[0].type == "cuda")
        self._free = [Entry(self, row) for row in memory]

    @property
    def current(self) -> list[torch.cuda.Stream]:
        """The current streams of `devices`; none on a CPU."""
        return [torch.cuda.current_stream(device) for device in self.devices if device.type == "cuda"]

    @property
    def free(self) -> int:
        """How many entries can be taken."""
        return len(self._free)

    def acquire(self) -> Entry:
        """A free entry; there must be one."""
        assert self._free, f"all {self.depth} entries are taken"
        entry = self._free.pop(0)
        entry._begin()
        return entry
