"""Who is given pages of the KV cache, and when: as positions are used, so that all could end at their limits.

Pure Python, no torch; knows no queue, no slot and no model. All requests that run share a `PagePool`. A step is let go
on only if the pages stay *safe* (Dijkstra's banker): in some order each request could take all that its limit allows
once those before it have ended. So pages never run out for all at once, however long each one turns out to be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sonoro.engine.request import Allocation, RunningRequest
from sonoro.runtime.slots import PagePool

__all__ = ["AHEAD", "NewPages", "Pager"]

AHEAD = 8
"""Steps ahead for which pages are given along with those of the step at hand: a launch serves several ticks."""


class NewPages(NamedTuple):
    """The pages `numbers` of `running`, which come behind the first `start` that it has."""

    running: RunningRequest
    start: int
    numbers: list[int]


class Pager:
    """The pages of `pool`, `page_positions` positions each, of those requests that run."""

    def __init__(self, pool: PagePool, page_positions: int) -> None:
        self._pool, self._page_positions = pool, page_positions
        self._load: tuple[int, int] | None = None

    def cached_positions(self, waiting: RunningRequest) -> int:
        """Positions of its prompt that `waiting` would find filled."""
        return len(self._pool.find(waiting.progress.prefix)) * self._page_positions

    def can_admit(self, waiting: RunningRequest, running: Iterable[RunningRequest]) -> bool:
        """Whether `waiting` fits beside those `running`, if each speaks as long as its text lets one expect, and in
        any case if one after the other speaks up to its limit."""
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
        """To be called when those that run, or their steps, are others: what all of them need is counted anew."""
        self._load = None

    def _load_of(self, running: Iterable[RunningRequest]) -> tuple[int, int]:
        """Pages that those `running` are expected to take yet, all together, and the most that one may still need."""
        # Of hundreds, in every tick that could admit: what `_expected` and `_most` say, in one look at each.
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

    def admit(self, waiting: RunningRequest, slot: int) -> None:
        """Give `waiting`, which `can_admit`, an allocation: `slot`, and pages for its prompt and a frame."""
        found, cached = self._pool.find(waiting.progress.prefix), self.cached_positions(waiting)
        waiting.allocation = Allocation(slot, self._pool.acquire(self._pages_for(waiting, 1), found), cached)
        if self._load is not None:
            to_come, needed = self._load
            held = _count(waiting)
            self._load = to_come + self._expected(waiting) - held, max(needed, self._most(waiting) - held)

    def lacks(self, running: RunningRequest, frames: int) -> int:
        """How many pages `running` lacks for its next `frames` frames."""
        progress, allocation = running.progress, running.allocation
        assert allocation is not None
        assert progress.prompt is not None
        positions = progress.prompt.positions - 1 + min(allocation.steps + frames, progress.limit)
        # Asked of everybody in every tick, and mostly there is room.
        if positions <= (held := len(allocation.pages)) * self._page_positions:
            return 0
        return -(-positions // self._page_positions) - held

    def can_grow(self, grown: RunningRequest, running: Iterable[RunningRequest]) -> bool:
        """Whether the next frame of `grown`, one of those `running`, may have its page."""
        free = self._pool.free - self.lacks(grown, 1)
        if free < 0:
            return False
        more = [self._taken(other, self.lacks(grown, 1) if other is grown else 0) for other in running]
        return _is_safe(free, more)

    def grow(self, running: RunningRequest, frames: int = 1) -> NewPages:
        """The pages that `running` lacks for its next `frames` frames, now its own. They must be free."""
        assert running.allocation is not None
        start, numbers = _count(running), self._pool.acquire(self.lacks(running, frames))
        running.allocation.pages.extend(numbers)
        self._load = None
        return NewPages(running, start, numbers)

    def spare(self, running: Iterable[RunningRequest]) -> int:
        """How many pages may be given to any of those `running` without a look at the others: the most that one of them
        may still need stays free."""
        return self._pool.free - max((self._taken(other)[0] for other in running), default=0)

    def _pages_for(self, running: RunningRequest, frames: int) -> int:
        """Pages that hold the prompt and `frames` frames: frame n is made at the last position of what came before."""
        assert running.progress.prompt is not None
        positions = running.progress.prompt.positions - 1 + min(frames, running.progress.limit)
        return max(-(-positions // self._page_positions), _count(running))

    def _expected(self, running: RunningRequest) -> int:
        """Pages that `running` is expected to have at its end; one that speaks on may fill another page."""
        return self._pages_for(running, max(running.progress.expected, running.steps + self._page_positions))

    def _most(self, running: RunningRequest) -> int:
        return self._pages_for(running, running.progress.limit)

    def _taken(self, running: RunningRequest, more: int = 0) -> tuple[int, int]:
        """Once it has `more` pages: how many `running` may still need, and how many it has that no other can hold."""
        held = _count(running) + more
        return self._most(running) - held, held - self._shareable(running)

    def _shareable(self, running: RunningRequest) -> int:
        return len(running.progress.prefix)


def _count(running: RunningRequest) -> int:
    return 0 if running.allocation is None else len(running.allocation.pages)


def _is_safe(free: int, taken: Iterable[tuple[int, int]]) -> bool:
    """Whether there is an order in which each could take what it may still need and then return all it has: `taken`
    says both of each, the least needed first being as good an order as any."""
    for needed, returned in sorted(taken):
        if needed > free:
            return False
        free += returned
    return True
