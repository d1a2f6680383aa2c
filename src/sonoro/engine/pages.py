"""The pool of KV cache pages, and their allocation to running requests as positions are used, without deadlock.

All running requests share a `PagePool`. A page is given only if the state stays *safe* (Dijkstra's banker's algorithm):
in some order every request could run to its limit once those before it have ended and returned their pages. So requests
never all wait for pages, however long each turns out to be. Pure Python; knows no queue and no model."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import NamedTuple

from sonoro.engine.request import Allocation, Request, allocation_of

AHEAD = 8
"""Steps for which pages are given in advance, so that one update of the page tables serves several ticks."""


class PagePool:
    """Pages 0 to `count` - 1, reference-counted, with a prefix cache.
    A page with a key, given by `cache`, keeps its contents after its last owner has released it, until pages run
    short: then the least recently released is evicted first. At most `max_cached` pages have a key."""

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
        demand = self._most(waiting) - own, own - len(waiting.progress.prefix)
        if to_come + self._expected(waiting) - own > free:
            return False
        return max(needed, demand[0]) <= free or _is_safe(free, [demand, *map(self._demand, running)])

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
        progress, allocation = request.progress, allocation_of(request)
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
        demands = [self._demand(other, self.lacks(grown, 1) if other is grown else 0) for other in running]
        return _is_safe(free, demands)

    def grow(self, request: Request, frames: int = 1) -> NewPages:
        """Give `request` the pages that it lacks for its next `frames` frames, and return them. They must be free."""
        start, numbers = _count(request), self._pool.acquire(self.lacks(request, frames))
        allocation_of(request).pages.extend(numbers)
        self._load = None
        return NewPages(request, start, numbers)

    def spare(self, running: Iterable[Request]) -> int:
        """How many pages may be given to any of `running` without a check of safety: enough stay free for the request
        that may still need the most."""
        return self._pool.free - max((self._demand(other)[0] for other in running), default=0)

    def _pages_for(self, request: Request, frames: int) -> int:
        """Pages for the prompt and `frames` frames. Frame n is output at the last position before it, hence the - 1."""
        assert request.progress.prompt is not None
        positions = request.progress.prompt.positions - 1 + min(frames, request.progress.limit)
        return max(-(-positions // self._page_positions), _count(request))

    def _expected(self, request: Request) -> int:
        """Pages that `request` is expected to hold at its end; beyond the expected length, one page more."""
        return self._pages_for(request, max(request.progress.expected, request.steps + self._page_positions))

    def _most(self, request: Request) -> int:
        return self._pages_for(request, request.progress.limit)

    def _demand(self, request: Request, more: int = 0) -> tuple[int, int]:
        """Pages that `request` may still need after `more`, and those it returns for sure: no shareable ones."""
        held = _count(request) + more
        return self._most(request) - held, held - len(request.progress.prefix)


class PageGrowth:
    """Gives `running` requests pages as their steps use them up, and decides who waits when pages run short.
    Requests without sent audio are preempted first, by `preempt`; then the requests with the longest lead wait for a
    page. While these or the head of the queue wait for pages, paused requests make their frames, though no audio, so
    that their pages come free."""

    def __init__(
        self, pager: Pager, pool: PagePool, running: list[Request], frame_s: float, preempt: Callable[[Request], None]
    ) -> None:
        self._pager, self._pool, self._running, self._frame_s = pager, pool, running, frame_s
        self._preempt = preempt
        self.out_of_pages: set[Request] = set()
        """Requests that wait for a page, since the last plan."""
        self.pages_wanted = False
        """Whether anybody waited for pages when the last plan was made: paused requests then make frames."""
        self._paused_out_of_pages: set[Request] = set()
        self._without_pages: set[Request] = set()
        """Paused requests whose pages were freed, as all of their frames are output."""

    def forget(self, request: Request) -> None:
        """Note that `request` is released. The next plan finds anew which requests wait for pages."""
        self._clear()
        self._without_pages.discard(request)
        self._pager.note_change()

    def stepping(self) -> list[Request]:
        """Requests that make a frame in this tick: those with text and pages for it. While pages are wanted, paused
        requests too."""
        lacking = self.out_of_pages | self._paused_out_of_pages
        return [request for request in self._with_text() if request not in lacking]

    def can_free(self, request: Request) -> bool:
        """Whether paused `request` can make frames, after which its pages come free, or holds pages that it no longer
        needs."""
        can_go_on = not (request.is_ending or request.is_starving or request in self._paused_out_of_pages)
        return can_go_on or self._has_spare_pages(request)

    @property
    def holding(self) -> list[Request]:
        """Running requests that hold pages."""
        if not self._without_pages:
            return self._running
        return [request for request in self._running if request not in self._without_pages]

    def grow(self, now_s: float) -> list[NewPages]:
        """Give pages to requests that have used up theirs: those with sent audio first, then the shortest lead."""
        self._clear()
        stepping = self._with_text()
        growing = [request for request in stepping if self._pager.lacks(request, 1)]
        if not growing:
            return []
        growing.sort(key=lambda request: (not request.playback.has_begun, request.lead_s(now_s, self._frame_s)))
        spare, grown = self._pager.spare(self.holding), list[NewPages]()
        for request in growing:
            if request.allocation is None:
                # Preempted for one before it.
                continue
            if self._pager.lacks(request, 1) > spare:
                self._make_room(request)
                spare = 0
            if request not in self.out_of_pages:
                grown.append(self._pager.grow(request, 1))
                spare -= len(grown[-1].numbers)
        for request in stepping if spare > 0 else ():
            if 0 < self._pager.lacks(request, AHEAD) <= spare:
                grown.append(self._pager.grow(request, AHEAD))
                spare -= len(grown[-1].numbers)
        return grown

    def grow_paused(self) -> list[NewPages]:
        """Give paused requests pages for a frame each as far as that is safe. Those without wait."""
        grown = list[NewPages]()
        for request in self._with_text():
            if request.is_paused and self._pager.lacks(request, 1):
                if self._pager.can_grow(request, self.holding):
                    grown.append(self._pager.grow(request, 1))
                else:
                    self._paused_out_of_pages.add(request)
        return grown

    def give_back(self) -> None:
        """Free the pages of paused requests whose frames are all output: only their audio is still to come."""
        for request in self._running:
            if request.is_paused and self._has_spare_pages(request):
                allocation = allocation_of(request)
                self._pool.release(allocation.pages)
                allocation.pages.clear()
                self._without_pages.add(request)
        self._pager.note_change()

    def _clear(self) -> None:
        self.out_of_pages.clear()
        self._paused_out_of_pages.clear()
        self.pages_wanted = False

    def _with_text(self) -> list[Request]:
        """Requests that can make a frame, given a page for it."""
        return [
            request
            for request in self._running
            if not (request.is_ending or request.is_starving) and (self.pages_wanted or not request.is_paused)
        ]

    def _has_spare_pages(self, request: Request) -> bool:
        """Whether `request` holds pages though all of its frames are output."""
        return request.progress.is_done and request not in self._without_pages

    def _make_room(self, request: Request) -> None:
        """Preempt requests without sent audio until `request`, which has sent some, can have its next page. If it has
        sent none, or preemption is not enough, it is marked as out of pages."""
        while not self._pager.can_grow(request, self.holding):
            others = self._running if request.playback.has_begun else []
            victims = [other for other in others if not other.playback.has_begun]
            if not victims:
                self.out_of_pages.add(request)
                break
            self._preempt(victims[-1])


def _count(request: Request) -> int:
    return 0 if request.allocation is None else len(request.allocation.pages)


def _is_safe(free: int, demands: Iterable[tuple[int, int]]) -> bool:
    """Whether all requests can end in some order, given (pages still needed, pages returned at the end) of each.
    If any order works, the one by least pages needed does."""
    for needed, returned in sorted(demands):
        if needed > free:
            return False
        free += returned
    return True
