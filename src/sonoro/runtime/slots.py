"""Pools of slots and of KV cache pages, with a prefix cache. Pure Python: index bookkeeping alone."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

__all__ = ["PagePool", "SlotPool"]


class SlotPool:
    """Slots 0 to `count` - 1; the lowest free one is acquired first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._is_taken = [False] * count

    @property
    def free(self) -> int:
        """How many can be taken."""
        return len(self._free)

    def acquire(self) -> int:
        """A free slot; there must be one."""
        assert self._free, "no slot is free"
        slot = heapq.heappop(self._free)
        self._is_taken[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Return a slot."""
        assert self._is_taken[slot], f"slot {slot} is free already"
        self._is_taken[slot] = False
        heapq.heappush(self._free, slot)


class PagePool:
    """Pages 0 to `count` - 1, reference-counted, with a prefix cache.

    A page that `cache` gave a key keeps its contents when its last owner releases it, until pages are short: then the
    least recently released is evicted first. `max_cached` pages can have a key at once.
    """

    def __init__(self, count: int, max_cached: int = 0) -> None:
        self.count, self.max_cached = count, max_cached
        self.evictions = 0
        """Cached pages evicted so far."""
        self._free = list(range(count - 1, -1, -1))
        self._owners = [0] * count
        self._page_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}
        # Those with a key that nobody holds, in the order in which they were left.
        self._idle: dict[int, None] = {}

    @property
    def free(self) -> int:
        """How many can be acquired, cached ones without an owner included."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """How many have a key, with an owner or not."""
        return len(self._page_of)

    def is_idle(self, page: int) -> bool:
        """Whether `page` is kept for its key alone."""
        return page in self._idle

    def find(self, keys: Sequence[Hashable]) -> list[int]:
        """The pages of the first of `keys`, up to one that no page has. They can be taken until anything else is."""
        pages = []
        for key in keys:
            if key not in self._page_of:
                break
            pages.append(self._page_of[key])
        return pages

    def can_acquire(self, count: int, found: Sequence[int] = ()) -> bool:
        """Whether `count` pages can be taken of which `found` are some."""
        return count - len(found) <= self.free - sum(page in self._idle for page in found)

    def acquire(self, count: int, found: Sequence[int] = ()) -> list[int]:
        """`count` pages for one owner: `found`, shared with whoever else holds them, and others that are its own."""
        assert len(found) <= count
        assert self.can_acquire(count, found), f"{count - len(found)} pages are wanted, {self.free} are free"
        for page in found:
            self._idle.pop(page, None)
            self._owners[page] += 1
        own = [self._free.pop() if self._free else self._evict() for _ in range(count - len(found))]
        for page in own:
            self._owners[page] = 1
        return [*found, *own]

    def cache(self, keys: Sequence[Hashable], pages: Sequence[int]) -> None:
        """Make the first of `pages`, which have owners, findable by `keys`, one each; nobody writes into them again.

        A key that another page has stays with it. Stops if `max_cached` is reached and all have owners.
        """
        for key, page in zip(keys, pages, strict=False):
            assert self._owners[page], f"page {page} is not held"
            if key in self._page_of:
                continue
            assert page not in self._key_of, f"page {page} has a key already"
            if self.cached >= self.max_cached:
                if not self._idle:
                    return
                self._free.append(self._evict())
            self._page_of[key], self._key_of[page] = page, key

    def release(self, pages: Sequence[int]) -> None:
        """Take an owner from each of `pages`, which must be held."""
        # The last first: what is kept is found from its beginning on, so its end must be the first to go.
        for page in reversed(pages):
            assert self._owners[page], f"page {page} is free already"
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            if page in self._key_of:
                self._idle[page] = None
            else:
                self._free.append(page)

    def clear_cache(self) -> None:
        """Drop all keys; owners keep their pages."""
        self._free += self._idle
        for known in (self._idle, self._page_of, self._key_of):
            known.clear()

    def _evict(self) -> int:
        """The page that was left longest ago, without its key, neither held nor free."""
        page = next(iter(self._idle))
        del self._idle[page], self._page_of[self._key_of.pop(page)]
        self.evictions += 1
        return page
