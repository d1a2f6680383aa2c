"""Computes how many KV cache pages fit into a fraction of a GPU's memory, and reports its use; returns that of a CPU.
Knows no model."""

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sonoro.core.config import is_allocator_set
from sonoro.core.errors import ConfigError

_MMAP_THRESHOLD = -3
"""Of glibc's mallopt."""

_FULL_SLOTS = 4
"""This many slots always get all the pages they can use: with few requests, one that waits would be noticed."""


@dataclass(frozen=True)
class MemoryBudget:
    """A GPU's memory in bytes, of which `fraction` of `total_bytes` may be used.
    `in_use` is allocated already, `reserved` will be; both by a readable name (weights, rows, histories, graphs)."""

    total_bytes: int
    fraction: float
    in_use: Mapping[str, int]
    reserved: Mapping[str, int]

    @property
    def left_bytes(self) -> int:
        """Bytes left for pages; negative if the rest alone does not fit."""
        return int(self.total_bytes * self.fraction) - sum(self.in_use.values()) - sum(self.reserved.values())

    def check_room(self, more_bytes: int, device: str) -> str:
        """A report line of what `more_bytes` leave on the GPU `device`. Raises `ConfigError` if they do not fit."""
        left_bytes = self.left_bytes - more_bytes
        if left_bytes < 0:
            raise ConfigError("memory_fraction", self.fraction, f"{_mib(-left_bytes)} more are needed on {device}")
        return f"{_mib(left_bytes)} are left of {self.fraction:g} of {_mib(self.total_bytes)}"


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """Total bytes of a GPU and the bytes used by all processes; None for a CPU, which is not planned. Synchronises."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes, total_bytes - free_bytes


def peak_bytes(launch: Callable[[], object], device: torch.device) -> int:
    """Peak memory that `launch` allocates on a GPU besides what is allocated already."""
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    launch()
    return torch.cuda.max_memory_allocated(device) - before_bytes


def reserved_mib(device: torch.device) -> float:
    """Peak memory that this process has reserved on all GPUs, if `device` is one; else 0."""
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    return sum(torch.cuda.max_memory_reserved(index) for index in range(count)) / 2**20


def map_in_pieces() -> None:
    """Enable torch's `expandable_segments`, unless the user has configured the allocator or CUDA is already in use.
    Freed memory can then be returned although its neighbours are in use; without it, a start with four slots takes 3 to
    10% more."""
    if not (is_allocator_set() or torch.cuda.is_initialized()):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def plan_pages(
    budget: MemoryBudget | None, page_bytes: int, slots: int, pages_per_slot: int, wanted_pages: int = 0
) -> int:
    """How many pages to allocate, besides the scratch page: `wanted_pages`, or as many as fit and are useful.
    Useful are the pages of a third of the slots at full length: few requests get that long; with more of them, some
    wait. No limit if `budget` is None. Raises `ConfigError` naming `memory_fraction` if a request of maximum length
    does not fit, or `pages` if `wanted_pages` do not fit or are too few for such a request."""
    if wanted_pages and wanted_pages < pages_per_slot:
        raise ConfigError("pages", wanted_pages, f"at least {pages_per_slot}: one request of max_positions must fit")
    useful = max(min(slots, _FULL_SLOTS), -(-slots // 3)) * pages_per_slot
    if budget is None:
        return wanted_pages or useful
    fitting = budget.left_bytes // page_bytes - 1
    if wanted_pages > fitting >= pages_per_slot:
        raise ConfigError(
            "pages", wanted_pages, f"at most {fitting} of {page_bytes} bytes fit into memory_fraction {budget.fraction}"
        )
    if fitting < pages_per_slot:
        missing = (pages_per_slot + 1) * page_bytes - budget.left_bytes
        raise ConfigError(
            "memory_fraction",
            budget.fraction,
            f"{_mib(missing)} more are needed for one request of max_positions ({pages_per_slot} pages); "
            f"of {_mib(budget.total_bytes)}, {_shares(budget)}",
        )
    return wanted_pages or min(useful, fitting)


def report(budget: MemoryBudget | None, page_bytes: int, pages: int) -> Iterator[str]:
    """Report lines of memory by part, with `pages` pages and a scratch page."""
    taken = (pages + 1) * page_bytes
    if budget is None:
        yield f"{pages} pages of {page_bytes} bytes: {_mib(taken)}"
        return
    for kinds, suffix in ((budget.in_use, ""), (budget.reserved, ", reserved")):
        for name, count in kinds.items():
            yield f"{name}{suffix}: {_mib(count)}"
    yield f"{pages} pages of {page_bytes} bytes: {_mib(taken)}"
    yield f"left of {budget.fraction:g} of {_mib(budget.total_bytes)}: {_mib(budget.left_bytes - taken)}"


def _shares(budget: MemoryBudget) -> str:
    kinds = {**budget.in_use, **budget.reserved}
    return ", ".join(f"{name} {_mib(count)}" for name, count in kinds.items()) or "nothing else is used"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"


@contextmanager
def compact_heap() -> Iterator[None]:
    """A block whose large allocations are returned to the system once they are freed, where glibc is the C library: by
    default it keeps freed blocks of up to 32 MiB, 70 MB after loading the built-in voice."""
    names = ("mallopt", "malloc_trim")
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not all(hasattr(library, name) for name in names):
        yield
        return
    library.mallopt(_MMAP_THRESHOLD, 1 << 18)
    try:
        yield
    finally:
        library.mallopt(_MMAP_THRESHOLD, 1 << 25)
        library.malloc_trim(0)
