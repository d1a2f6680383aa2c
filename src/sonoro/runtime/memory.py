"""How many pages fit into a fraction of the card, and a report of what takes what. Arithmetic: knows no model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from sonoro.core.config import is_allocator_set
from sonoro.core.errors import ConfigError

__all__ = ["MemoryBudget", "device_memory", "map_in_pieces", "plan_pages", "report"]


_FULL_SLOTS = 4
"""As many slots always have all the pages that they can use: a few listeners would notice a wait."""


@dataclass(frozen=True)
class MemoryBudget:
    """What a card holds and what is spoken for, in bytes.

    `in_use` is taken already, `reserved` will be: both by what takes it (weights, rows, histories, graphs). Of
    `total_bytes`, `fraction` may be used in all.
    """

    total_bytes: int
    fraction: float
    in_use: Mapping[str, int]
    reserved: Mapping[str, int]

    @property
    def left_bytes(self) -> int:
        """What is left for pages; negative if not even the rest fits."""
        return int(self.total_bytes * self.fraction) - sum(self.in_use.values()) - sum(self.reserved.values())


def device_memory(device: torch.device) -> tuple[int, int] | None:
    """Total and used bytes of a GPU, whoever uses them; None for a CPU, whose memory is not planned. Synchronises."""
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return total_bytes, total_bytes - free_bytes


def map_in_pieces() -> None:
    """Take a GPU's memory in pieces, unless the user has told torch otherwise or this process uses a GPU already.

    What is freed can then be given back though its neighbours are kept. In whole blocks a start of four slots takes 3
    to 10% more.
    """
    if not (is_allocator_set() or torch.cuda.is_initialized()):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def plan_pages(
    budget: MemoryBudget | None, page_bytes: int, slots: int, pages_per_slot: int, wanted_pages: int = 0
) -> int:
    """How many pages to allocate, besides the scratch page: `wanted_pages`, or as many as fit, but no more than let a
    third of the slots go to their last position: few do, and where more do, others wait.

    None for `budget` sets no limit. Raises `ConfigError` naming `memory_fraction` if the longest request does not fit
    into the memory, and `pages` if `wanted_pages` do not, or are too few for that request.
    """
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
    """Lines that say what takes how much, once `pages` pages and a scratch page are allocated."""
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
