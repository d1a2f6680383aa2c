"""Allocates KV cache pages to running requests as their positions are used, without deadlock.

All running requests share a `PagePool`. A page is given only if the state stays *safe* (Dijkstra's banker's algorithm):
in some order every request could run to its limit once those before it have ended and returned their pages. So requests
never all wait for pages, however long each turns out to be. Pure Python; knows no queue and no model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sonoro.engine.request import Allocation, Request
from sonoro.runtime.slots import PagePool

AHEAD = 8
"""Steps for which pages are given in advance, so that one update of the page tables serves several ticks."""


class NewPages(NamedTuple):
    """Pages `numbers` that extend the page table of `request` from index `start` on."""

    request: Request
    start: int
    numbers: list[int]


class Pager:
    """Allocates the pages of `pool`, of `page_positions` positions each, to running requests."""

    def __init__(self, pool: PagePool, page_positions: int) -> None:
        self._pool, self._page_positions = pool, page_positions
        self._load: tuple[int, int] | None = None

    def cached_positions(self, waiting: Request) -> int:
        """Positions of the prompt of `waiting` that the prefix cache holds now."""
        return len(self._pool.find(waiting.progress.prefix)) * self._page_positions

    def can_admit(self, waiting: Request, running: Iterable[Request]) -> bool:
        """Whether `waiting` fits beside `running`: all at their expected lengths together, and safely up to their
        limits."""
        found, own = self._pool.find(waiting.progress.prefix), self._pages_for(waiting, 1)
        if not self._pool.can_acquire(own, found):
            return False
        free = self._pool.free - (own - len(found)) - sum(self._pool.is_idle(page) for page in found)
        if self._load is None:
            self._load = self._load_of(running)
        to_come, needed = self._load
        taken = self._most(waiting) - own, own - self._shareable(waiting)
        if to_come + self._expected(waiting) - own > free:
            return False
        return max(needed, taken[0]) <= free or _is_safe(free, [taken, *map(self._taken, running)])

    def note_change(self) -> None:
        """Drop the cached page counts. Call it when the set of running requests or their steps have changed."""
        self._load = None

    def _load_of(self, running: Iterable[Request]) -> tuple[int, int]:
        """The sum of pages that `running` are still expected to take, and the most that one of them may still need."""
        # `_expected` and `_most` inlined: this runs over hundreds of requests in every tick that could admit.
        to_come = needed = 0
        size = self._page_positions
        for other in running:
            progress, allocation = other.progress, other.allocation
            assert allocation is not None
            assert progress.prompt is not None
            held, limit = len(allocation.pages), progress.limit
            before = progress.prompt.positions - 1
            wanted = min(max(progress.expected, allocation.steps + size), limit)
            to_come += max(0, -(-(before + wanted) // size) - held)
            needed = max(needed, -(-(before + limit) // size) - held)
        return to_come, needed

    def admit(self, waiting: Request, slot: int) -> None:
        """Give `waiting`, which `can_admit`, an allocation: `slot`, and pages for its prompt and a frame."""
        found, cached = self._pool.find(waiting.progress.prefix), self.cached_positions(waiting)
        waiting.allocation = Allocation(slot, self._pool.acquire(self._pages_for(waiting, 1), found), cached)
        if self._load is not None:
            to_come, needed = self._load
            held = _count(waiting)
            self._load = to_come + self._expected(waiting) - held, max(needed, self._most(waiting) - held)

    def lacks(self, request: Request, frames: int) -> int:
        """How many pages `request` lacks for its next `frames` frames."""
        progress, allocation = request.progress, request.allocation
        assert allocation is not None
        assert progress.prompt is not None
        positions = progress.prompt.positions - 1 + min(allocation.steps + frames, progress.limit)
        # Called for every request in every tick; mostly there is room.
        if positions <= (held := len(allocation.pages)) * self._page_positions:
            return 0
        return -(-positions // self._page_positions) - held

    def can_grow(self, grown: Request, running: Iterable[Request]) -> bool:
        """Whether the pages for the next frame of `grown`, one of `running`, are free and safe to give."""
        free = self._pool.free - self.lacks(grown, 1)
        if free < 0:
            return False
        more = [self._taken(other, self.lacks(grown, 1) if other is grown else 0) for other in running]
        return _is_safe(free, more)

    def grow(self, request: Request, frames: int = 1) -> NewPages:
        """Give `request` the pages that it lacks for its next `frames` frames, and return them. They must be free."""
        assert request.allocation is not None
        start, numbers = _count(request), self._pool.acquire(self.lacks(request, frames))
        request.allocation.pages.extend(numbers)
        self._load = None
        return NewPages(request, start, numbers)

    def spare(self, running: Iterable[Request]) -> int:
        """How many pages may be given to any of `running` without a check of safety: enough stay free for the request
        that may still need the most."""
        return self._pool.free - max((self._taken(other)[0] for other in running), default=0)

    def _pages_for(self, request: Request, frames: int) -> int:
        """Pages for the prompt and `frames` frames. Frame n is made at the last position before it, hence the - 1."""
        assert request.progress.prompt is not None
        positions = request.progress.prompt.positions - 1 + min(frames, request.progress.limit)
        return max(-(-positions // self._page_positions), _count(request))

    def _expected(self, request: Request) -> int:
        """Pages that `request` is expected to hold at its end; beyond the expected length, one page more."""
        return self._pages_for(request, max(request.progress.expected, request.steps + self._page_positions))

    def _most(self, request: Request) -> int:
        return self._pages_for(request, request.progress.limit)

    def _taken(self, request: Request, more: int = 0) -> tuple[int, int]:
        """With `more` pages given: how many `request` may still need, and how many of its pages are not shareable."""
        held = _count(request) + more
        return self._most(request) - held, held - self._shareable(request)

    def _shareable(self, request: Request) -> int:
        return len(request.progress.prefix)


def _count(request: Request) -> int:
    return 0 if request.allocation is None else len(request.allocation.pages)


def _is_safe(free: int, taken: Iterable[tuple[int, int]]) -> bool:
    """Whether all requests can end in some order, given (pages still needed, pages returned at the end) of each.

    If any order works, the one by least pages needed does.
    """
    for needed, returned in sorted(taken):
        if needed > free:
            return False
        free += returned
    return True
