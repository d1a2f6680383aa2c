"""Who holds which slot and which page: pools of row numbers. Pure Python: knows no tensor, no model and no request."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

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
    """Pages 0 to `count` - 1, each held by any number of owners, kept by what it holds, or free.

    A page that `keep` gave a key stays as it is when its last owner gives it back, for whoever will `find` it, until
    pages are short: then those left longest ago go first. `most_kept` pages can have a key at once.
    """

    def __init__(self, count: int, most_kept: int = 0) -> None:
        self.count, self.most_kept = count, most_kept
        self.evictions = 0
        """Kept pages that were given up for others so far."""
        self._free = list(range(count - 1, -1, -1))
        self._owners = [0] * count
        self._page_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}
        # Those with a key that nobody holds, in the order in which they were left.
        self._left: dict[int, None] = {}

    @property
    def free(self) -> int:
        """How many can be taken: kept or not, nobody holds them."""
        return len(self._free) + len(self._left)

    @property
    def kept(self) -> int:
        """How many have a key, whether held or not."""
        return len(self._page_of)

    def find(self, keys: Sequence[Hashable]) -> list[int]:
        """The pages of the first of `keys`, up to one that no page has. They can be taken until anything else is."""
        pages = []
        for key in keys:
            if key not in self._page_of:
                break
            pages.append(self._page_of[key])
        return pages

    def has(self, count: int, found: Sequence[int] = ()) -> bool:
        """Whether `count` pages can be taken of which `found` are some."""
        return count - len(found) <= self.free - sum(page in self._left for page in found)

    def take(self, count: int, found: Sequence[int] = ()) -> list[int]:
        """`count` pages for one owner: `found`, shared with whoever else holds them, and others that are its own."""
        assert len(found) <= count
        assert self.has(count, found), f"{count - len(found)} pages are wanted, {self.free} are free"
        for page in found:
            self._left.pop(page, None)
            self._owners[page] += 1
        own = [self._free.pop() if self._free else self._evict() for _ in range(count - len(found))]
        for page in own:
            self._owners[page] = 1
        return [*found, *own]

    def keep(self, keys: Sequence[Hashable], pages: Sequence[int]) -> None:
        """Let the first of `pages`, which are held, be found by `keys`, one each: their owners write no more into them.

        A key that another page has stays with it. Where no more may be kept, and all that are kept are held, it ends.
        """
        for key, page in zip(keys, pages, strict=False):
            assert self._owners[page], f"page {page} is not held"
            if key in self._page_of:
                continue
            assert page not in self._key_of, f"page {page} has a key already"
            if self.kept >= self.most_kept:
                if not self._left:
                    return
                self._free.append(self._evict())
            self._page_of[key], self._key_of[page] = page, key

    def give(self, pages: Sequence[int]) -> None:
        """Take an owner from each of `pages`, which must be held."""
        # The last first: what is kept is found from its beginning on, so its end must be the first to go.
        for page in reversed(pages):
            assert self._owners[page], f"page {page} is free already"
            self._owners[page] -= 1
            if self._owners[page]:
                continue
            if page in self._key_of:
                self._left[page] = None
            else:
                self._free.append(page)

    def forget(self) -> None:
        """Keep none of the pages that are kept now; whoever holds them goes on."""
        self._free += self._left
        for known in (self._left, self._page_of, self._key_of):
            known.clear()

    def _evict(self) -> int:
        """The page that was left longest ago, without its key, neither held nor free."""
        page = next(iter(self._left))
        del self._left[page], self._page_of[self._key_of.pop(page)]
        self.evictions += 1
        return page
