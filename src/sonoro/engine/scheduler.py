"""Whom to prefill, whom to step and whose frames to turn into audio. Pure Python: knows no model and no tensor."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from sonoro.core.config import EngineConfig
from sonoro.engine.request import RunningRequest

__all__ = ["Plan", "Scheduler"]


@dataclass(frozen=True)
class Plan:
    """The work of one tick, in this order.

    `admit` have just been given a slot and are to be prefilled; `frame` are to make one frame each (the admitted ones
    too); `codec` maps a chunk length to those that decode so many frames, shortest first. Chunk lengths count the frame
    of this very tick as made: when a request turns out to have ended instead, its last chunk holds one frame too many.
    """

    admit: list[RunningRequest]
    frame: list[RunningRequest]
    codec: dict[int, list[RunningRequest]]


class Scheduler:
    """The waiting queue and the slots. A request holds its slot from the plan that admits it until `release`."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._waiting: deque[RunningRequest] = deque()
        self._free = list(range(config.slots))
        self.running: list[RunningRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self.running)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    def add(self, row: RunningRequest) -> None:
        """Queue `row`. One that has begun to speak goes first: its listener is already listening."""
        assert row.slot is None
        if row.index:
            self._waiting.appendleft(row)
        else:
            self._waiting.append(row)

    def release(self, row: RunningRequest) -> None:
        """Forget `row`, waiting or running, and free its slot."""
        if row.slot is None:
            self._waiting.remove(row)
            return
        self.running.remove(row)
        heapq.heappush(self._free, row.slot)
        row.slot = None

    def plan(self) -> Plan:
        """Give free slots to the longest waiting and say what everyone does in this tick."""
        admit: list[RunningRequest] = []
        while self._waiting and self._free and len(admit) < self._config.max_prefills:
            row = self._waiting.popleft()
            row.slot = heapq.heappop(self._free)
            admit.append(row)
        self.running += admit
        codec: dict[int, list[RunningRequest]] = {}
        for row in self.running:
            if frames := self._due_frames(row):
                codec.setdefault(frames, []).append(row)
        return Plan(admit, [row for row in self.running if not row.is_done], dict(sorted(codec.items())))

    def _due_frames(self, row: RunningRequest) -> int:
        """Frames of `row` to decode in this tick; 0 while its chunk is not full."""
        made = row.length + (not row.is_done)
        ready = made - row.decoded
        is_ending = row.is_done or made == row.limit
        chunk = self._chunk_frames(row.audio_frames)
        return min(ready, chunk) if is_ending or ready >= chunk else 0

    def _chunk_frames(self, audio_frames: int) -> int:
        """The chunk length after `audio_frames`.

        Chunks f, f g, f g^2 ... of first length f and growth g sum to f (g^n - 1) / (g - 1), so the next is
        f + (g - 1) times the sum: audio already sent pays for the wait.
        """
        config = self._config
        grown = config.first_chunk_frames + (config.chunk_growth - 1) * audio_frames
        return int(min(grown, config.max_chunk_frames))
