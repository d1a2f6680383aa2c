"""The answer to one request, between the engine client that receives it and its reader. Knows no process, no socket."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from sonoro.core.types import AudioChunk, Finished
from sonoro.transport.messages import Cancel, Pause, Resume, ToEngine

__all__ = ["RequestStream"]


class RequestStream:
    """The events of one request as they are made: `AudioChunk`s, then `Finished`. One reader takes them.

    Raises what the request failed with. Closed before its end it cancels the request. `full_bytes` of unread audio
    pause the request, less than half of that resumes it, and a reader that then takes nothing for
    `slow_reader_timeout_s` cancels it.
    """

    def __init__(
        self, request_id: str, full_bytes: int, slow_reader_timeout_s: float, send: Callable[[ToEngine], None]
    ) -> None:
        self.request_id = request_id
        self._full_bytes, self._timeout_s, self._send = full_bytes, slow_reader_timeout_s, send
        self._events: deque[AudioChunk | Finished | Exception] = deque()
        self._arrived = asyncio.Event()
        self._is_paused = self._is_finished = False
        self._timer: asyncio.TimerHandle | None = None
        self._on_end: Callable[[], None] | None = None
        self.unread_bytes = 0
        self.is_ended = False
        """Whether the engine is done with the request; its audio may be unread still."""
        self.is_closed = False
        """Whether nobody reads it any more."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AudioChunk | Finished:
        if self._is_finished or self.is_closed:
            raise StopAsyncIteration
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        event = self._events.popleft()
        self._is_finished = not isinstance(event, AudioChunk)
        if isinstance(event, Exception):
            raise event
        if isinstance(event, AudioChunk):
            self.unread_bytes -= len(event.pcm)
            self._resume()
        return event

    async def aclose(self) -> None:
        """Nobody reads it any more; done at once. The id stays taken until the engine has ended the request too."""
        self.is_closed = True
        self._events.clear()
        self._stop_timer()
        if not self.is_ended:
            self._send(Cancel(self.request_id))

    def on_done(self, call: Callable[[], None]) -> None:
        """Call `call`, the only one, once the engine is done with the request; at once if it is."""
        self._on_end = call
        if self.is_ended:
            call()

    async def wait_ended(self) -> None:
        """Wait until the engine is done with a request that nobody reads."""
        while not self.is_ended:
            self._arrived.clear()
            await self._arrived.wait()

    def put(self, chunk: AudioChunk) -> None:
        """The engine has made `chunk`."""
        if self.is_closed:
            return
        self._events.append(chunk)
        self._arrived.set()
        self.unread_bytes += len(chunk.pcm)
        if self.unread_bytes >= self._full_bytes and not self._is_paused:
            self._is_paused = True
            self._send(Pause(self.request_id))
            self._start_timer()

    def end(self, event: Finished | Exception) -> None:
        """The engine is done: nothing comes after `event`, which its reader gets after the audio before it."""
        self.is_ended = True
        self._stop_timer()
        self._events.append(event)
        self._arrived.set()
        if self._on_end is not None:
            self._on_end()

    def _resume(self) -> None:
        if not self._is_paused or self.is_ended:
            return
        if self.unread_bytes < self._full_bytes / 2:
            self._is_paused = False
            self._stop_timer()
            self._send(Resume(self.request_id))
        else:
            self._start_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._timeout_s, self._send, Cancel(self.request_id))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
