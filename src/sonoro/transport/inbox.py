"""The answer to one request, between the engine that makes it and its reader. Knows no process and no socket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from sonoro.core.types import AudioChunk, Finished
from sonoro.transport.messages import Cancel, Pause, Resume, ToEngine

__all__ = ["Inbox"]


class Inbox:
    """The answer to one request between the engine and its reader.

    `full_bytes` of unread audio pause the request, and less than half of that resumes it.
    """

    def __init__(
        self, request_id: str, full_bytes: int, slow_reader_timeout_s: float, send: Callable[[ToEngine], None]
    ) -> None:
        self.request_id = request_id
        self._full_bytes, self._timeout_s, self._send = full_bytes, slow_reader_timeout_s, send
        self._events: deque[AudioChunk | Finished | Exception] = deque()
        self._arrived = asyncio.Event()
        self._unread_bytes = 0
        self._is_ended = self._is_paused = self.is_abandoned = False
        self._patience: asyncio.TimerHandle | None = None

    def put(self, event: AudioChunk | Finished) -> None:
        if isinstance(event, Finished):
            self._end(event)
            return
        if self.is_abandoned:
            return
        self._events.append(event)
        self._arrived.set()
        self._unread_bytes += len(event.pcm)
        if self._unread_bytes >= self._full_bytes and not self._is_paused:
            self._is_paused = True
            self._send(Pause(self.request_id))
            self._wait_for_reader()

    def fail(self, error: Exception) -> None:
        """The answer ends with `error`, after the audio that came before it."""
        self._end(error)

    async def take(self) -> AudioChunk | Finished:
        """The next event. Raises what the answer failed with."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        if isinstance(event, Exception):
            raise event
        if isinstance(event, AudioChunk):
            self._unread_bytes -= len(event.pcm)
            self._go_on()
        return event

    async def until_ended(self) -> None:
        """Wait for the end of an answer that nobody reads."""
        while not self._is_ended:
            self._arrived.clear()
            await self._arrived.wait()

    def abandon(self) -> None:
        """Nobody reads it any more."""
        self.is_abandoned = True
        self._events.clear()
        self._lose_patience()

    def _go_on(self) -> None:
        if not self._is_paused or self._is_ended:
            return
        if self._unread_bytes < self._full_bytes / 2:
            self._is_paused = False
            self._lose_patience()
            self._send(Resume(self.request_id))
        else:
            self._wait_for_reader()

    def _wait_for_reader(self) -> None:
        self._lose_patience()
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(self._timeout_s, self._send, Cancel(self.request_id))

    def _end(self, event: Finished | Exception) -> None:
        self._is_ended = True
        self._lose_patience()
        self._events.append(event)
        self._arrived.set()

    def _lose_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
