"""Who holds which slot and which page: pools of row numbers. Pure Python: knows no tensor, no model and no request."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["PagePool", "SlotPool"]


class SlotPool:
    """Slots 0 to `count` - 1, each held by one owner at most; the lowest free one is taken first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._is_held = [False] * count

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self) -> int:
        """A free slot; there must be one."""
        assert self._free, "no slot is free"
        slot = heapq.heappop(self._free)
        self._is_held[slot] = True
        return slot

    def give(self, slot: int) -> None:
        """Return a slot that is held."""
        assert self._is_held[slot], f"slot {slot} is free already"
        self._is_held[slot] = False
        heapq.heappush(self._free, slot)


class PagePool:
    """Pages 0 to `count` - 1, each held by any number of owners; it is free again when the last one gives it back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._owners = [0] * count

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` free pages, for one owner; there must be as many."""
        assert 0 <= count <= len(self._free), f"{count} pages are wanted, {len(self._free)} are free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._owners[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add an owner to each of `pages`, which must be held."""
        assert all(self._owners[page] for page in pages), f"pages {pages} are not all held"
        for page in pages:
            self._owners[page] += 1

    def give(self, pages: Sequence[int]) -> None:
        """Take an owner from each of `pages`, which must be held."""
        for page in pages:
            assert self._owners[page], f"page {page} is free already"
            self._owners[page] -= 1
            if not self._owners[page]:
                self._free.append(page)
