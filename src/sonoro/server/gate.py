"""The gate that requests pass before an engine works for them: bounds how many run, how many wait, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import cast

from sonoro.server.errors import NotReady, TooManyRequests
from sonoro.transport.client import RequestStream

NO_ENGINE = "the engine process ended or hangs, and another does not run yet"

MAX_UNREAD_BYTES = 256 * 2**20
"""Bound of a gate's `unread_bytes`."""

IDLE_PERMIT_S = 2.0
"""How long a request may hold a permit while it waits for its client's text."""


@dataclass(eq=False)
class _Waiter:
    """A request that has waited for a permit since `since_s`, a time of the event loop."""

    permit: asyncio.Future[None]
    since_s: float


class Permit:
    """The right to run a request. Released when the engine has finished the stream that it follows, even while the
    client still reads; without a stream, at the end of the block that acquired it."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._stream = gate, cast(RequestStream | None, None)
        self._unread_bytes, self._is_held, self._is_over = 0, True, False
        self._idle_timer: asyncio.TimerHandle | None = None

    def follow(self, stream: RequestStream) -> None:
        """Hold the permit until the engine has finished `stream`."""
        self._stream = stream
        stream.on_done(self._end)

    def await_text(self) -> None:
        """Note that the engine has nothing to do until text comes. After `IDLE_PERMIT_S` the permit is lent to others:
        the engine takes the slot if they need it."""
        self.go_on()
        if self._is_held:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_PERMIT_S, self._release)

    @property
    def is_awaiting_text(self) -> bool:
        return self._idle_timer is not None

    def go_on(self) -> None:
        """Note that the engine works again. A lent permit counts at once: if others have it, the engine queues them."""
        if self._stop_timer() and not self._is_held:
            self._is_held = True
            self._gate._running += 1

    def _stop_timer(self) -> bool:
        """Stop the timer of `await_text`. Returns whether there was one."""
        timer, self._idle_timer = self._idle_timer, None
        if timer is not None:
            timer.cancel()
        return timer is not None

    def _end(self) -> None:
        """Release the permit, unless the unread audio would exceed the gate's `MAX_UNREAD_BYTES`."""
        self._stop_timer()
        unread_bytes = 0 if self._is_over or self._stream is None else self._stream.unread_bytes
        if self._gate.unread_bytes + unread_bytes <= MAX_UNREAD_BYTES:
            self._unread_bytes = unread_bytes
            self._gate.unread_bytes += unread_bytes
            self._release()

    def _close(self) -> None:
        self._is_over = True
        self._stop_timer()
        self._gate.unread_bytes -= self._unread_bytes
        if self._stream is None or self._stream.is_ended:
            self._release()

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._gate.release()


class Gate:
    """Admits at most `max_concurrency` requests at once; at most `max_waiting` others wait, each for `wait_s` at most.

    `share` returns the fraction of `max_concurrency` that can run now: below 1 while one of several engines is down, 0
    without any; running requests are not affected. Waiters are admitted FIFO until the oldest has waited for half of
    `wait_s`, then LIFO: under overload some requests are then served soon, where FIFO would serve each just before its
    timeout."""

    def __init__(
        self, max_concurrency: int, max_waiting: int, wait_s: float, share: Callable[[], float] = lambda: 1.0
    ) -> None:
        self._max_concurrency, self._max_waiting, self._wait_s = max_concurrency, max_waiting, wait_s
        self._share, self._running = share, 0
        self._waiting: deque[_Waiter] = deque()
        self.unread_bytes = 0
        """Unread audio of finished requests whose permits were released."""

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def longest_wait_s(self) -> float:
        """How long the oldest waiting request has waited; 0 if none waits."""
        return asyncio.get_running_loop().time() - self._waiting[0].since_s if self._waiting else 0.0

    @contextlib.asynccontextmanager
    async def acquire(self) -> AsyncIterator[Permit]:
        """Acquire a permit for the block. Raises `TooManyRequests` if none is free in time or too many wait, `NotReady`
        if no engine runs."""
        await self._wait()
        permit = Permit(self)
        try:
            yield permit
        finally:
            permit._close()

    async def _wait(self) -> None:
        self.wake_waiters()
        if self._has_room:
            self._running += 1
            return
        if len(self._waiting) >= self._max_waiting:
            raise TooManyRequests(f"{self.waiting} requests are waiting already; try again later")
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop.create_future(), loop.time())
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self._wait_s):
                await waiter.permit
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.permit.cancelled():
                # The permit was granted just as the waiter gave up.
                self.release()
            if isinstance(error, asyncio.CancelledError):
                raise
            if not self._share():
                raise NotReady(f"{NO_ENGINE}; the request waited for {self._wait_s:g} s") from error
            raise TooManyRequests(f"no request ended within {self._wait_s:g} s; try again later") from error

    def release(self) -> None:
        """Release a permit."""
        self._running -= 1
        self.wake_waiters()

    @property
    def _has_room(self) -> bool:
        share = self._share()
        return share > 0 and self._running < max(1, round(self._max_concurrency * share))

    def wake_waiters(self) -> None:
        """Admit as many waiters as may run. Call it when `share` may have risen."""
        now_s = asyncio.get_running_loop().time()
        while self._waiting and self._has_room:
            is_overloaded = now_s - self._waiting[0].since_s > self._wait_s / 2
            waiter = self._waiting.pop() if is_overloaded else self._waiting.popleft()
            if not waiter.permit.done():
                waiter.permit.set_result(None)
                self._running += 1
