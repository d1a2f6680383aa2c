"""Pools of slots and of KV cache pages, with a prefix cache. Pure Python: index bookkeeping alone."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence


class SlotPool:
    """Slots 0 to `count` - 1; the lowest free one is acquired first."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count))
        self._is_taken = [False] * count

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def acquire(self) -> int:
        """Take the lowest free slot; there must be one."""
        assert self._free, "no slot is free"
        slot = heapq.heappop(self._free)
        self._is_taken[slot] = True
        return slot

    def release(self, slot: int) -> None:
        """Free `slot`, which must be taken."""
        assert self._is_taken[slot], f"slot {slot} is free already"
        self._is_taken[slot] = False
        heapq.heappush(self._free, slot)


class PagePool:
    """Pages 0 to `count` - 1, reference-counted, with a prefix cache.

    A page with a key, given by `cache`, keeps its contents after its last owner has released it, until pages run
    short: then the least recently released is evicted first. At most `max_cached` pages have a key.
    """

    def __init__(self, count: int, max_cached: int = 0) -> None:
        self.count, self.max_cached = count, max_cached
        self.evictions = 0
        """Cached pages evicted so far."""
        self._free = list(range(count - 1, -1, -1))
        self._owners = [0] * count
        self._page_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}
        # Pages with a key and no owner, in order of release.
        self._idle: dict[int, None] = {}

    @property
    def free(self) -> int:
        """How many pages can be acquired, cached ones without an owner included."""
        return len(self._free) + len(self._idle)

    @property
    def cached(self) -> int:
        """How many pages have a key, with an owner or without."""
        return len(self._page_of)

    def is_idle(self, page: int) -> bool:
        """Whether `page` is cached and has no owner."""
        return page in self._idle

    def find(self, keys: Sequence[Hashable]) -> list[int]:
        """The pages of `keys` up to the first unknown key. Valid until the pool changes."""
        pages = []
        for key in keys:
            if key not in self._page_of:
                break
            pages.append(self._page_of[key])
        return pages

    def can_acquire(self, count: int, found: Sequence[int] = ()) -> bool:
        """Whether `count` pages, `found` among them, can be acquired."""
        return count - len(found) <= self.free - sum(page in self._idle for page in found)

    def acquire(self, count: int, found: Sequence[int] = ()) -> list[int]:
        """Take `count` pages for one owner: the cached pages `found`, which may be shared, then pages of its own."""
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
        """Give `keys`, one each, to the first of `pages`; they have owners and must not be written to again.

        A key that another page has stays there. Stops if `max_cached` is reached and no cached page is without owner.
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
        """Drop one owner of each of `pages`, which must have one."""
        # Last page first, so that it is evicted first: a prefix is only found from its beginning.
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
        """Drop the key of the least recently released page without an owner, and return the page."""
        page = next(iter(self._idle))
        del self._idle[page], self._page_of[self._key_of.pop(page)]
        self.evictions += 1
        return page
