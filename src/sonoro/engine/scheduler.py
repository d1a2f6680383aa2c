"""Decides what each tick does: which requests to admit, prefill, step, decode to audio, or preempt. No torch.

A plan is made before the results of the previous tick are known. It presumes that every stepped request output a frame;
if one did not, the codec decodes a surplus column, and no audio is lost."""

import heapq
from collections import deque
from collections.abc import Iterable, Set
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from sonoro.core.config import EngineConfig
from sonoro.engine.pages import NewPages, PageGrowth, PagePool, Pager
from sonoro.engine.request import Request, allocation_of
from sonoro.transport.messages import PrefixCounts

LATENCY_TICKS = 2
"""Ticks from a plan to the delivery of its audio, while the next tick runs; of large steps 3, which `SAFETY` covers."""

SAFETY = 2.0
"""Safety factor on the average tick duration when an underrun is predicted."""

IDLE_SLOT_S = 2.0
"""How long a request may hold a slot without text for its next frame while others wait."""


class LateText(NamedTuple):
    """Token ids of live text to append to those of `request`, at index `start`."""

    request: Request
    start: int
    ids: list[int]


@dataclass(frozen=True)
class Plan:
    """The work of one tick, in this order.

    `preempted`: requests preempted before any of their audio was sent, each with the slot it lost; the caller queues
    them again. `admit`: requests that were given a slot and pages, to be prefilled. `pages`: new pages for requests
    that have used up theirs. `text`: late live text for requests of `frame`. `frame`: requests that decode one frame,
    the admitted included. `codec`: chunk length to the requests that decode so many frames to audio, shortest first.

    Chunk lengths count the frame of this tick as output. The last chunk of a segment is padded; the surplus is cut when
    it is collected."""

    preempted: list[tuple[Request, int]]
    admit: list[Request]
    pages: list[NewPages]
    text: list[LateText]
    frame: list[Request]
    codec: dict[int, list[Request]]

    @property
    def is_empty(self) -> bool:
        return not (self.admit or self.frame or self.codec)


class _Urgency(IntEnum):
    """Priority of a chunk."""

    FIRST = 0
    """It is the first of its request."""
    RUNS_OUT = 1
    """Playback would run out without it."""
    HOLDS_SLOT = 2
    """Its segment outputs no more frames and only holds a slot."""
    CAN_WAIT = 3


class _Chunk(NamedTuple):
    """`frames` frames of `request` that could be decoded in this tick, and the playback lead of its listener.
    `can_wait`: it may be delayed to share a launch with chunks of the same length."""

    urgency: _Urgency
    lead_s: float
    frames: int
    request: Request
    can_wait: bool


class Scheduler:
    """Owns the waiting queue, the slots and the page pool. A request holds its slot and pages until `release`.
    When pages run short, nothing is admitted, and `PageGrowth` decides who is preempted and who waits.
    `config` is resolved; its `codec_batches` are the sizes to pad to (empty if nothing is padded). `frame_s` is the
    duration of a frame."""

    def __init__(self, config: EngineConfig, pages: PagePool, frame_s: float) -> None:
        self._config = config
        self._parked: set[Request] = set()
        self._waiting: deque[Request] = deque()
        self._speaking: deque[Request] = deque()
        self._free_slots = list(range(config.slots))
        """A heap, so that the lowest slot is given first."""
        self.pages = pages
        self._pager = Pager(pages, config.page_positions)
        self._preempted: dict[Request, int] = {}
        """Requests preempted by the plan being made, with the slots they had."""
        self._goes_first: set[Request] = set()
        """Preempted requests that have not been queued again."""
        self._admissions_closed = False
        self._starving: dict[Request, float] = {}
        """Running requests that lack text while others wait, and since when."""
        self.running: list[Request] = []
        self._growth = PageGrowth(self._pager, pages, self.running, frame_s, self._preempt)
        self._chunks = ChunkPlanner(config, frame_s, self._growth.out_of_pages)
        self.prefixes = PrefixCounts()
        """Hits, misses and positions of the prefix cache so far; the pool counts evictions and kept pages."""

    @property
    def has_work(self) -> bool:
        """Whether a plan made now would not be empty. Paused requests count only while others wait for their pages."""
        is_work = any(self._is_work(request) for request in self.running)
        return is_work or self._admissible() is not None or self._is_kept_out

    def is_full(self, others: int = 0) -> bool:
        """Whether `max_queued` is reached, counting `others` that wait outside the queue."""
        return self.waiting + others >= self._config.tuning.max_queued + self.free_slots

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._parked) + len(self._waiting) + len(self._speaking)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def idle_slots(self) -> int:
        """Free slots, if nobody waits for a slot or for pages; else 0."""
        is_awaited = _first_unpaused(self._speaking) or _first_unpaused(self._waiting) or self._growth.out_of_pages
        return 0 if is_awaited or self._admissions_closed else len(self._free_slots)

    def overdue(self, now_s: float) -> list[Request]:
        """Requests whose text has not gone on for `IDLE_SLOT_S`, in which others have waited for slots or pages."""
        is_awaited = _first_unpaused(self._speaking) or _first_unpaused(self._waiting)
        starving = [request for request in self.running if request.is_starving] if is_awaited else []
        if starving and self._admissible() is not None:
            starving = []
        self._starving = {request: self._starving.get(request, now_s) for request in starving}
        return [request for request, since_s in self._starving.items() if now_s - since_s >= IDLE_SLOT_S]

    def park(self, request: Request) -> None:
        """Count `request`, whose text has not come yet, among the waiting until it is added."""
        assert request.allocation is None
        self._parked.add(request)

    def add(self, request: Request) -> None:
        """Queue `request`. Requests with an earlier segment, whose listeners are listening, come before new ones, but
        not after one that was cut off. A preempted request goes to the front of its queue."""
        assert request.allocation is None
        self._parked.discard(request)
        queue = self._queue_of(request)
        (queue.appendleft if request in self._goes_first else queue.append)(request)
        self._goes_first.discard(request)

    def release(self, request: Request) -> None:
        """Remove a request from the queue, or free its slot and pages; results still in flight become void."""
        self._growth.forget(request)
        self._goes_first.discard(request)
        self._admissions_closed = False
        if request.allocation is None:
            self._parked.discard(request)
            queue = self._queue_of(request)
            if request in queue:
                queue.remove(request)
            return
        self.running.remove(request)
        heapq.heappush(self._free_slots, request.allocation.slot)
        self.pages.release(request.allocation.pages)
        request.allocation = None

    def cache_prefixes(self, admitted: Iterable[Request]) -> None:
        """Add the prompt prefixes of `admitted`, whose prefill was launched, to the prefix cache and its counters."""
        for request in admitted:
            allocation, progress = allocation_of(request), request.progress
            assert progress.prompt is not None
            self.pages.cache(progress.prefix, allocation.pages)
            self.prefixes.tokens_cached += allocation.cached
            self.prefixes.tokens_prefilled += progress.prompt.positions - allocation.cached
            if progress.prefix:
                self.prefixes.hits += allocation.cached > 0
                self.prefixes.misses += allocation.cached == 0

    def plan(self, now_s: float, tick_s: float) -> Plan:
        """Plan a tick at `now_s`, and count its steps and columns as launched. `tick_s`: the average tick duration."""
        growth = self._growth
        self._pager.note_change()
        if growth.out_of_pages or self._is_kept_out:
            growth.give_back()
        self._preempted = {}
        pages = growth.grow(now_s)
        admit = self._admit()
        growth.pages_wanted = bool(growth.out_of_pages) or self._is_kept_out
        if growth.pages_wanted:
            pages += growth.grow_paused()
        frame = growth.stepping()
        text = [LateText(request, request.pending_ids, ids) for request in frame if (ids := request.late_ids)]
        for request, _, ids in text:
            allocation_of(request).appended += len(ids)
        for request in frame:
            allocation_of(request).steps += 1
        active = [request for request in self.running if not request.is_paused]
        return Plan([*self._preempted.items()], admit, pages, text, frame, self._chunks.plan(active, now_s, tick_s))

    def _is_work(self, request: Request) -> bool:
        if request.is_paused:
            return self._growth.pages_wanted and self._growth.can_free(request)
        is_waiting = request.is_starving or request in self._growth.out_of_pages
        return not is_waiting or self._chunks.due_frames(request, request.undecoded, 0.0, 0.0) > 0

    def _preempt(self, request: Request) -> None:
        """Take the slot and pages of running `request`, none of whose audio was sent."""
        self._preempted[request] = allocation_of(request).slot
        self.release(request)
        self._goes_first.add(request)
        # No admissions until a request ends: pages stay short that long.
        self._admissions_closed = True

    def _admit(self) -> list[Request]:
        """Admit waiting requests in order, as far as slots, pages and `prefill_tokens` allow."""
        admit: list[Request] = []
        tokens_left = self._config.prefill_tokens
        while (request := self._admissible()) is not None:
            assert request.progress.prompt is not None
            tokens_left -= request.progress.prompt.positions - self._pager.cached_positions(request)
            if tokens_left < 0:
                break
            self._queue_of(request).remove(request)
            self._pager.admit(request, heapq.heappop(self._free_slots))
            self.running.append(request)
            admit.append(request)
        return admit

    def _queue_of(self, request: Request) -> deque[Request]:
        return self._speaking if request.first + request.index > request.cut_off + 1 else self._waiting

    def _admissible(self) -> Request | None:
        """The head of the queue if it can be admitted. Nothing overtakes a request that waits for pages, which might
        starve otherwise."""
        head = self._head
        return head if head is not None and self._pager.can_admit(head, self._growth.holding) else None

    @property
    def _is_kept_out(self) -> bool:
        """Whether the head of the queue waits for pages that paused requests could free."""
        can_free = self._growth.can_free
        if self._head is None or not any(request.is_paused and can_free(request) for request in self.running):
            return False
        return self._admissible() is None

    @property
    def _head(self) -> Request | None:
        """The head of the queue, if there is a slot for it and those who run do not lack pages."""
        request = _first_unpaused(self._speaking) or _first_unpaused(self._waiting)
        # A request out of pages that was paused since then blocks no admission: the next plan would not count it.
        is_out_of_pages = _first_unpaused(self._growth.out_of_pages) is not None
        return None if not self._free_slots or self._admissions_closed or is_out_of_pages else request


class ChunkPlanner:
    """Chooses the chunks of frames to decode to audio in a tick, as few and as long as the playback leads allow.
    `config` and `frame_s` are those of the scheduler; `out_of_pages` is its set of requests that wait for a page."""

    def __init__(self, config: EngineConfig, frame_s: float, out_of_pages: Set[Request]) -> None:
        self._config, self._frame_s, self._out_of_pages = config, frame_s, out_of_pages
        self._codec_frames = config.codec_frames

    def plan(self, active: list[Request], now_s: float, tick_s: float) -> dict[int, list[Request]]:
        """Choose the chunks of this tick by urgency, up to `codec_frames`; an underrun ahead overrides that limit."""
        due = sorted(
            (chunk for request in active if (chunk := self._due_chunk(request, now_s, tick_s)) is not None),
            key=lambda chunk: (chunk.urgency, chunk.lead_s),
        )
        left = self._codec_frames
        chosen: dict[int, list[_Chunk]] = {}
        for chunk in due:
            if chunk.frames <= left or chunk.urgency is _Urgency.RUNS_OUT or not chosen:
                chosen.setdefault(chunk.frames, []).append(chunk)
                left -= chunk.frames
        # Do not wait for a single request, nor beyond the largest batch.
        most = 1 if len(active) == 1 else max(self._config.codec_batches, default=len(active) + 1)
        codec = {
            frames: self._batch(chunks)
            for frames, chunks in sorted(chosen.items())
            if len(chunks) >= most or not all(chunk.can_wait for chunk in chunks)
        }
        for frames, batch in codec.items():
            for request in batch:
                allocation_of(request).columns += frames
        return codec

    def _batch(self, chunks: list[_Chunk]) -> list[Request]:
        """The urgent `chunks`, and as many others as fill a captured size: padding costs as much as audio."""
        sizes, count = self._config.codec_batches, len(chunks)
        size = max((size for size in sizes if size <= count), default=count)
        filled = count // size * size if size in sizes[-1:] else size
        pressing = sum(chunk.urgency is not _Urgency.CAN_WAIT for chunk in chunks)
        padded = next((size for size in sizes if size >= pressing), pressing)
        return [chunk.request for chunk in chunks[: max(padded if pressing else 0, filled)]]

    def _due_chunk(self, request: Request, now_s: float, tick_s: float) -> _Chunk | None:
        if (ready := request.undecoded) <= 0:
            return None
        is_timed = not request.params.is_reproducible
        lead_s = request.lead_s(now_s, self._frame_s) if is_timed else request.launched * self._frame_s
        frames = self.due_frames(request, ready, lead_s, tick_s)
        if not frames:
            return None
        if not request.launched:
            urgency = _Urgency.FIRST
        elif is_timed and lead_s < _wait_s(1, tick_s):
            urgency = _Urgency.RUNS_OUT
        else:
            urgency = _Urgency.HOLDS_SLOT if request.is_ending else _Urgency.CAN_WAIT
        is_stuck = request.is_starving or request in self._out_of_pages
        has_waited = ready - frames >= self._config.tuning.codec_wait
        can_wait = urgency is _Urgency.CAN_WAIT and is_timed and not (is_stuck or has_waited)
        return _Chunk(urgency, lead_s, frames, request, can_wait)

    def due_frames(self, request: Request, ready: int, lead_s: float, tick_s: float) -> int:
        """The chunk length that `request`, with `ready` undecoded frames, decodes in this tick; 0 to wait for a longer
        chunk."""
        sizes = self._config.chunk_frames
        if ready <= 0:
            return 0
        if not request.launched:
            return sizes[0] if ready >= sizes[0] or request.is_ending else 0
        # Chunks of a reproducible request do not depend on time: each is at most as long as all audio before it, which
        # plays while the chunk is decoded.
        is_timed, longest = not request.params.is_reproducible, sizes[-1]
        if not is_timed:
            longest = max((size for size in sizes if size <= request.launched), default=sizes[0])
        if request.is_ending:
            return next((size for size in sizes if ready <= size <= longest), longest)
        if request.is_starving or (request in self._out_of_pages and is_timed):
            # No frame follows until text or a page comes; a padded chunk would corrupt the codec's history.
            return max((size for size in sizes if size <= ready), default=0)
        if not is_timed:
            return longest if longest <= ready else 0
        # If ticks are slower than playback, underruns are certain: then few long chunks cost the least.
        is_too_slow = tick_s >= self._frame_s
        for size in reversed(sizes):
            if size <= ready:
                return size
            if is_too_slow or _wait_s(size - ready, tick_s) <= lead_s:
                break
        return 0


def _wait_s(ticks: int, tick_s: float) -> float:
    """Upper estimate of the time until audio planned `ticks` ticks from now is delivered."""
    return (ticks + LATENCY_TICKS) * tick_s * SAFETY


def _first_unpaused(queue: Iterable[Request]) -> Request | None:
    return next((request for request in queue if not request.is_paused), None)
