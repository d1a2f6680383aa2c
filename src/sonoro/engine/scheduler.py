"""Decides what each tick does: which requests to admit, prefill, step, decode to audio, or preempt. No torch.

It plans before the results of the previous tick are known, presuming that every stepped request made a frame. A wrong
presumption costs surplus columns, never audio.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from sonoro.core.config import EngineConfig
from sonoro.engine.pages import AHEAD, NewPages, Pager
from sonoro.engine.request import Allocation, RunningRequest
from sonoro.runtime.slots import PagePool, SlotPool
from sonoro.transport.messages import PrefixCounts

LATENCY_TICKS = 2
"""Ticks from a plan to the delivery of its audio, which is collected while the next tick runs."""

SAFETY = 2.0
"""Safety factor on the average tick duration when an underrun is predicted."""


class LateText(NamedTuple):
    """Token ids of live text to append to those of `running`, at index `start`."""

    running: RunningRequest
    start: int
    ids: list[int]


@dataclass(frozen=True)
class Plan:
    """The work of one tick, in this order.

    `preempted`: requests preempted before any of their audio was sent, each with the slot it lost; the caller queues
    them again. `admit`: requests that were given a slot and pages, to be prefilled. `pages`: new pages for requests
    that have used up theirs. `text`: late live text for requests of `frame`. `frame`: requests that decode one frame,
    the admitted included. `codec`: chunk length to the requests that decode so many frames to audio, shortest first.

    Chunk lengths count the frame of this tick as made. The last chunk of a segment is padded; the surplus is cut when
    it is collected.
    """

    preempted: list[tuple[RunningRequest, int]]
    admit: list[RunningRequest]
    pages: list[NewPages]
    text: list[LateText]
    frame: list[RunningRequest]
    codec: dict[int, list[RunningRequest]]

    @property
    def is_empty(self) -> bool:
        return not (self.admit or self.frame or self.codec)


class _Urgency(IntEnum):
    """Priority of a chunk: the first of its request, an underrun ahead, a segment that makes no more frames and only
    holds a slot, or none of these."""

    FIRST = 0
    RUNS_OUT = 1
    HOLDS_SLOT = 2
    CAN_WAIT = 3


class _Chunk(NamedTuple):
    """`frames` frames of `running` that could be decoded in this tick, and the playback lead of its listener.

    `gathers`: it can wait for other chunks of its length, to be batched with them.
    """

    urgency: _Urgency
    lead_s: float
    frames: int
    running: RunningRequest
    gathers: bool


class Scheduler:
    """Owns the waiting queue, the slots and the page pool. A request holds its slot and pages until `release`.

    Pages are allocated as positions are used. When they run short, nothing is admitted; then requests without sent
    audio are preempted; then the requests with the longest lead wait for a page. While these or the head of the queue
    wait for pages, paused requests make their frames, though no audio, so that their pages come free.

    `config` is resolved; its `codec_batches` are the sizes to pad to (empty if nothing is padded). `frame_s` is the
    duration of a frame.
    """

    def __init__(self, config: EngineConfig, pages: PagePool, frame_s: float) -> None:
        self._config, self._frame_s = config, frame_s
        self._parked: set[RunningRequest] = set()
        self._waiting: deque[RunningRequest] = deque()
        self._speaking: deque[RunningRequest] = deque()
        self._slots, self.pages = SlotPool(config.slots), pages
        self._pager = Pager(pages, config.page_positions)
        self._first: set[RunningRequest] = set()
        self._short: set[RunningRequest] = set()
        self._blocked: set[RunningRequest] = set()
        self._without_pages: set[RunningRequest] = set()
        self._is_closed = False
        # Whether somebody waited for pages when the last plan was made.
        self._is_sought = False
        self.running: list[RunningRequest] = []
        self.prefixes = PrefixCounts()
        """Hits, misses and positions of the prefix cache so far; the pool counts evictions and kept pages."""

    @property
    def has_work(self) -> bool:
        """Whether a plan made now would hold anything. Requests that are paused or wait for text are no work,
        unless others wait for their pages."""
        is_work = any(self._is_work(running) for running in self.running)
        return is_work or self._admissible() is not None or self._is_kept_out

    def is_full(self, others: int = 0) -> bool:
        """Whether `max_waiting` is reached, counting `others` that wait outside the queue."""
        return self.waiting + others >= self._config.max_waiting + self._slots.free

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return len(self._parked) + len(self._waiting) + len(self._speaking)

    @property
    def free_slots(self) -> int:
        return self._slots.free

    def park(self, running: RunningRequest) -> None:
        """Count `running`, whose text has not come yet, among the waiting until it is added."""
        assert running.allocation is None
        self._parked.add(running)

    def add(self, running: RunningRequest) -> None:
        """Queue `running`: requests with an earlier segment come before new ones, as their listeners are listening; a
        preempted request goes to the front of its queue."""
        assert running.allocation is None
        self._parked.discard(running)
        queue = self._speaking if running.index else self._waiting
        (queue.appendleft if running in self._first else queue.append)(running)
        self._first.discard(running)

    def release(self, running: RunningRequest) -> None:
        """Remove a request from the queue, or free its slot and pages; results still in flight become void."""
        self._short.clear()
        self._blocked.clear()
        self._is_sought = False
        self._first.discard(running)
        self._without_pages.discard(running)
        self._is_closed = False
        self._pager.note_change()
        if running.allocation is None:
            self._parked.discard(running)
            queue = self._speaking if running.index else self._waiting
            if running in queue:
                queue.remove(running)
            return
        self.running.remove(running)
        self._slots.release(running.allocation.slot)
        self.pages.release(running.allocation.pages)
        running.allocation = None

    def cache_prefixes(self, admitted: Iterable[RunningRequest]) -> None:
        """Add the prompt prefixes of `admitted`, whose prefill was launched, to the prefix cache and its counters."""
        for running in admitted:
            assert running.allocation is not None
            assert running.progress.prompt is not None
            self.pages.cache(running.progress.prefix, running.allocation.pages)
            self.prefixes.rows_cached += running.allocation.cached
            self.prefixes.rows_prefilled += running.progress.prompt.positions - running.allocation.cached
            if running.progress.prefix:
                self.prefixes.hits += running.allocation.cached > 0
                self.prefixes.misses += running.allocation.cached == 0

    def plan(self, now_s: float, tick_s: float) -> Plan:
        """Plan a tick at `now_s`, and count its steps and columns as launched. `tick_s`: the average tick duration."""
        self._pager.note_change()
        if self._short or self._is_kept_out:
            self._give_back()
        preempted, pages = self._grow(now_s)
        admit = self._admit()
        self._is_sought = bool(self._short) or self._is_kept_out
        if self._is_sought:
            pages += self._grow_paused()
        active = [running for running in self.running if not running.is_paused]
        lacking = self._short | self._blocked
        frame = [running for running in self._stepping() if running not in lacking]
        text = [LateText(running, running.pending_ids, ids) for running in frame if (ids := running.late_ids)]
        for running, _, ids in text:
            _held(running).appended += len(ids)
        for running in frame:
            _held(running).steps += 1
        return Plan(preempted, admit, pages, text, frame, self._plan_codec(active, now_s, tick_s))

    def _is_work(self, running: RunningRequest) -> bool:
        if running.is_paused:
            return self._is_sought and self._can_free(running)
        is_waiting = running.is_starving or running in self._short
        return not is_waiting or self._due_frames(running, running.undecoded, 0.0, 0.0) > 0

    def _stepping(self) -> list[RunningRequest]:
        """Requests that can make a frame, given a page for it; while pages are sought, paused requests too."""
        return [
            running
            for running in self.running
            if not (running.is_ending or running.is_starving) and (self._is_sought or not running.is_paused)
        ]

    def _can_free(self, running: RunningRequest) -> bool:
        """Whether paused `running` can make frames, after which its pages come free, or holds some that it could free
        now."""
        can_go_on = not (running.is_ending or running.is_starving or running in self._blocked)
        return can_go_on or self._has_spare_pages(running)

    def _has_spare_pages(self, running: RunningRequest) -> bool:
        """Whether `running` holds pages though all of its frames are made."""
        return running.progress.is_done and running not in self._without_pages

    @property
    def _holding(self) -> list[RunningRequest]:
        """Running requests that hold pages."""
        if not self._without_pages:
            return self.running
        return [running for running in self.running if running not in self._without_pages]

    def _grow(self, now_s: float) -> tuple[list[tuple[RunningRequest, int]], list[NewPages]]:
        """Give pages to requests that have used up theirs: sent audio first, then the shortest lead.

        Returns the preempted requests with the slots they had, and the pages given.
        """
        self._is_sought = False
        self._short.clear()
        self._blocked.clear()
        stepping = self._stepping()
        growing = [running for running in stepping if self._pager.lacks(running, 1)]
        if not growing:
            return [], []
        growing.sort(key=lambda running: (not running.is_heard, running.lead_s(now_s, self._frame_s)))
        preempted, spare = list[tuple[RunningRequest, int]](), self._pager.spare(self._holding)
        grown = list[NewPages]()
        for running in growing:
            if running.allocation is None:
                # Preempted for one before it.
                continue
            if self._pager.lacks(running, 1) > spare:
                preempted += self._make_room(running)
                spare = 0
            if running not in self._short:
                grown.append(self._pager.grow(running, 1))
                spare -= len(grown[-1].numbers)
        for running in stepping if spare > 0 else ():
            if 0 < self._pager.lacks(running, AHEAD) <= spare:
                grown.append(self._pager.grow(running, AHEAD))
                spare -= len(grown[-1].numbers)
        return preempted, grown

    def _grow_paused(self) -> list[NewPages]:
        """Give paused requests pages for a frame each as far as that is safe. Those without are blocked."""
        grown = list[NewPages]()
        for running in self._stepping():
            if running.is_paused and self._pager.lacks(running, 1):
                if self._pager.can_grow(running, self._holding):
                    grown.append(self._pager.grow(running, 1))
                else:
                    self._blocked.add(running)
        return grown

    def _give_back(self) -> None:
        """Free the pages of paused requests whose frames are all made: only their audio is still to come."""
        for running in self.running:
            if running.is_paused and self._has_spare_pages(running):
                self.pages.release(_held(running).pages)
                _held(running).pages.clear()
                self._without_pages.add(running)
        self._pager.note_change()

    def _make_room(self, running: RunningRequest) -> list[tuple[RunningRequest, int]]:
        """Preempt requests without sent audio until `running`, which has sent some, can have its next page.

        If it has sent none, or preemption is not enough, it is marked short instead. Returns the preempted requests
        with their slots.
        """
        preempted = []
        while running.allocation is not None and not self._pager.can_grow(running, self._holding):
            victims = [other for other in self.running if not other.is_heard] if running.is_heard else []
            if not victims:
                self._short.add(running)
                break
            preempted.append((victims[-1], _held(victims[-1]).slot))
            self.release(victims[-1])
            self._first.add(victims[-1])
            # No admissions until a request ends: pages stay short that long.
            self._is_closed = True
        return preempted

    def _admit(self) -> list[RunningRequest]:
        """Admit waiting requests in order, as far as slots, pages and `prefill_tokens` allow."""
        admit: list[RunningRequest] = []
        tokens_left = self._config.prefill_tokens
        while (running := self._admissible()) is not None:
            assert running.progress.prompt is not None
            tokens_left -= running.progress.prompt.positions - self._pager.cached_positions(running)
            if tokens_left < 0:
                break
            (self._speaking if running.index else self._waiting).remove(running)
            self._pager.admit(running, self._slots.acquire())
            self.running.append(running)
            admit.append(running)
        return admit

    def _admissible(self) -> RunningRequest | None:
        """The head of the queue if it can be admitted. Nothing overtakes a request that waits for pages, which might
        starve otherwise."""
        head = self._head
        return head if head is not None and self._pager.can_admit(head, self._holding) else None

    @property
    def _is_kept_out(self) -> bool:
        """Whether the head of the queue waits for pages that paused requests could free."""
        if self._head is None or not any(running.is_paused and self._can_free(running) for running in self.running):
            return False
        return self._admissible() is None

    @property
    def _head(self) -> RunningRequest | None:
        """The head of the queue, if there is a slot for it and those who run do not lack pages."""
        running = _first_unpaused(self._speaking) or _first_unpaused(self._waiting)
        # A short request that was paused since then blocks no admission: the next plan would not count it as short.
        is_short = _first_unpaused(self._short) is not None
        return None if not self._slots.free or self._is_closed or is_short else running

    def _plan_codec(self, active: list[RunningRequest], now_s: float, tick_s: float) -> dict[int, list[RunningRequest]]:
        """Choose the chunks of this tick by urgency, up to `codec_frames`; an underrun ahead overrides that limit."""
        due = sorted(
            (chunk for running in active if (chunk := self._due_chunk(running, now_s, tick_s)) is not None),
            key=lambda chunk: (chunk.urgency, chunk.lead_s),
        )
        left = self._config.codec_frames
        chosen: dict[int, list[_Chunk]] = {}
        for chunk in due:
            if chunk.frames <= left or chunk.urgency is _Urgency.RUNS_OUT or not chosen:
                chosen.setdefault(chunk.frames, []).append(chunk)
                left -= chunk.frames
        # Do not gather for a single request, nor beyond the largest batch.
        most = 1 if len(active) == 1 else max(self._config.codec_batches, default=len(self.running) + 1)
        codec = {
            frames: self._batch(chunks)
            for frames, chunks in sorted(chosen.items())
            if len(chunks) >= most or not all(chunk.gathers for chunk in chunks)
        }
        for frames, batch in codec.items():
            for running in batch:
                _held(running).columns += frames
        return codec

    def _batch(self, chunks: list[_Chunk]) -> list[RunningRequest]:
        """The urgent `chunks`, and as many others as fill a captured size: padding costs as much as audio."""
        sizes, count = self._config.codec_batches, len(chunks)
        size = max((size for size in sizes if size <= count), default=count)
        filled = count // size * size if size in sizes[-1:] else size
        pressing = sum(chunk.urgency is not _Urgency.CAN_WAIT for chunk in chunks)
        padded = next((size for size in sizes if size >= pressing), pressing)
        return [chunk.running for chunk in chunks[: max(padded if pressing else 0, filled)]]

    def _due_chunk(self, running: RunningRequest, now_s: float, tick_s: float) -> _Chunk | None:
        if (ready := running.undecoded) <= 0:
            return None
        by_rule = running.request.is_reproducible
        lead_s = running.launched * self._frame_s if by_rule else running.lead_s(now_s, self._frame_s)
        frames = self._due_frames(running, ready, lead_s, tick_s)
        if not frames:
            return None
        if running.is_silent:
            urgency = _Urgency.FIRST
        elif not by_rule and lead_s < _wait_s(1, tick_s):
            urgency = _Urgency.RUNS_OUT
        else:
            urgency = _Urgency.HOLDS_SLOT if running.is_ending else _Urgency.CAN_WAIT
        is_stuck = by_rule or running.is_starving or running in self._short
        has_waited = ready - frames >= self._config.codec_wait
        gathers = urgency is _Urgency.CAN_WAIT and not (is_stuck or has_waited)
        return _Chunk(urgency, lead_s, frames, running, gathers)

    def _due_frames(self, running: RunningRequest, ready: int, lead_s: float, tick_s: float) -> int:
        """The chunk length that `running`, with `ready` undecoded frames, decodes in this tick; 0 to wait for a longer
        chunk."""
        sizes = self._config.chunk_frames
        if ready <= 0:
            return 0
        if running.is_silent:
            return sizes[0] if ready >= sizes[0] or running.is_ending else 0
        # By rule, a chunk is at most as long as all audio before it, which plays while the chunk is made.
        is_by_rule = running.request.is_reproducible
        ruled = max((size for size in sizes if size <= running.launched), default=sizes[0]) if is_by_rule else sizes[-1]
        if running.is_ending:
            return next((size for size in sizes if ready <= size <= ruled), ruled)
        if running.is_starving or (running in self._short and not is_by_rule):
            # No frame follows until text or a page comes; a padded chunk would corrupt the codec's history.
            return max((size for size in sizes if size <= ready), default=0)
        if is_by_rule:
            return ruled if ruled <= ready else 0
        # If ticks are slower than playback, underruns are certain: then few long chunks cost the least.
        is_too_slow = tick_s >= self._frame_s
        for size in reversed(sizes):
            if size <= ready:
                return size
            if is_too_slow or _wait_s(size - ready, tick_s) <= lead_s:
                break
        return 0


def _held(running: RunningRequest) -> Allocation:
    assert running.allocation is not None
    return running.allocation


def _wait_s(ticks: int, tick_s: float) -> float:
    """Upper estimate of the time until audio planned `ticks` ticks from now is delivered."""
    return (ticks + LATENCY_TICKS) * tick_s * SAFETY


def _first_unpaused(queue: Iterable[RunningRequest]) -> RunningRequest | None:
    return next((running for running in queue if not running.is_paused), None)
