"""The gate that requests pass before an engine works for them: bounds how many run, how many wait, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from sonoro.core.errors import SonoroError
from sonoro.server.errors import NotReady, TooManyRequests
from sonoro.server.quotas.counts import Quotas
from sonoro.server.turns import Turns, turn_columns
from sonoro.transport.client import RequestStream
from sonoro.transport.table import Count, Table

NO_ENGINE = "the engine process ended or hangs, and another does not run yet"

MAX_UNREAD_BYTES = 256 * 2**20
"""Bound of a gate's `unread_bytes`."""

IDLE_PERMIT_S = 2.0
"""How long a request may hold a permit while it waits for its client's text."""


@dataclass(eq=False)
class _Waiter:
    """A request of `owner` that has waited for a permit since `since_s`, a time of the event loop."""

    permit: asyncio.Future[None]
    since_s: float
    owner: str


class Permit:
    """The right to run a request. Released when the engine has finished the stream that it follows, even while the
    client still reads; without a stream, at the end of the block that acquired it."""

    def __init__(self, gate: Gate, owner: str, characters: int) -> None:
        self._gate, self._owner, self._stream = gate, owner, cast(RequestStream | None, None)
        self.characters = characters
        """How many of the request's text were counted."""
        self._unread_bytes, self._is_held, self._is_over = 0, True, False
        self._idle_timer: asyncio.TimerHandle | None = None

    def follow(self, stream: RequestStream) -> None:
        """Hold the permit until the engine has finished `stream`."""
        self._stream = stream
        stream.on_done(self._end)

    def append(self, characters: int) -> None:
        """Count more text of the request. Raises `OverQuota`."""
        self.characters += self._gate.append(self._owner, characters)

    def await_text(self) -> None:
        """Note that the engine has nothing to do until text comes. After `IDLE_PERMIT_S` the permit is lent to others:
        the engine takes the slot if they need it."""
        self.go_on()
        if self._is_held:
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_PERMIT_S, self._release)

    @property
    def has_audio(self) -> bool:
        """Whether the engine has sent audio."""
        return self._stream is not None and self._stream.has_audio

    @property
    def is_awaiting_text(self) -> bool:
        return self._idle_timer is not None

    def go_on(self) -> None:
        """Note that the engine works again. A lent permit counts at once: if others have it, the engine queues them."""
        if self._stop_timer() and not self._is_held:
            self._is_held = True
            self._gate.run(self._owner)

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
        if self._gate.unread_bytes.take(unread_bytes, MAX_UNREAD_BYTES):
            self._unread_bytes = unread_bytes
            self._release()

    def _close(self) -> None:
        self._is_over = True
        self._stop_timer()
        self._gate.unread_bytes.add(-self._unread_bytes)
        if self._stream is None or self._stream.is_ended:
            self._release()

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._gate.release(self._owner)


class Gate:
    """Admits at most `max_concurrency` requests at once; at most `max_waiting` others wait, each for `wait_s` at most.

    `share` returns the fraction of `max_concurrency` that can run now: below 1 while one of several engines is down, 0
    without any; running requests are not affected. Owners that wait have `Turns` by their `weights`. Waiters of one
    owner are admitted FIFO until the oldest has waited for half of `wait_s`, then LIFO: under overload some requests
    are then served soon, where FIFO would serve each just before its timeout.

    The counts are in a `table`: over all front processes of a server they hold as in one. A front that releases a
    permit gives it to whoever is next, in whichever front, and wakes that front.

    With `quotas` a request is counted when it enters or begins to wait, unless they refuse it. It is counted no more if
    it gets no permit, or ends by an error before its first audio."""

    def __init__(
        self,
        max_concurrency: int,
        max_waiting: int,
        wait_s: float,
        share: Callable[[], float] = lambda: 1.0,
        *,
        weights: Mapping[str, float] = MappingProxyType({"": 1.0}),
        table: Table | None = None,
        quotas: Quotas | None = None,
    ) -> None:
        self._quotas = quotas
        self._max_concurrency, self._max_waiting, self._wait_s = max_concurrency, max_waiting, wait_s
        self._share, self._table = share, table or Table(gate_columns([*weights]))
        self._turns = Turns(self._table, weights)
        self._waiting: dict[str, deque[_Waiter]] = {owner: deque() for owner in weights}
        self.unread_bytes = Count(self._table, "unread_bytes")
        """Unread audio of finished requests whose permits were released."""

    def listen(self) -> None:
        """Take permits that other front processes give. Needs a running event loop."""
        self._table.listen(self.wake_waiters)

    @property
    def running(self) -> int:
        """How many permits are held, in all fronts."""
        return self._table.total("running")

    @property
    def waiting(self) -> int:
        """How many requests wait, in all fronts."""
        return self._table.total("waiting")

    @contextlib.asynccontextmanager
    async def acquire(self, owner: str = "", characters: int = 0) -> AsyncIterator[Permit]:
        """Acquire a permit for a request of `owner`, of a text of so many `characters`, for the block. Raises
        `TooManyRequests` if none is free in time, too many wait, or by quota; `NotReady` if no engine runs."""
        permit = Permit(self, owner, characters)
        await self._wait(owner, characters)
        try:
            yield permit
        except SonoroError:
            if not permit.has_audio:
                self._take_back(owner, permit.characters)
            raise
        finally:
            permit._close()

    def held(self, owner: str) -> int:
        """How many requests of `owner` run or wait, in all fronts."""
        return self._table.total(f"running-{owner}") + self._table.total(f"waiting-{owner}")

    def most(self, owner: str) -> int:
        """How many requests of `owner` may run at once."""
        own = self._quotas.limits[owner].concurrent_requests if self._quotas is not None else 0
        return min(own or self._max_concurrency, self._max_concurrency)

    def headers(self, owner: str) -> dict[str, str]:
        """The headers that tell what the quota of `owner` leaves."""
        return {} if self._quotas is None else self._quotas.headers(owner)

    def append(self, owner: str, characters: int) -> int:
        """Count more text of a request; return how much of it. Raises `OverQuota`."""
        if self._quotas is not None and characters:
            self._quotas.append(owner, characters)
        return characters

    def _take_back(self, owner: str, characters: int) -> None:
        """Count a request no more."""
        if self._quotas is not None:
            self._quotas.take_back(owner, characters)

    async def _wait(self, owner: str, characters: int) -> None:
        loop, table = asyncio.get_running_loop(), self._table
        self.wake_waiters()
        with table.lock():
            is_free = not table.total("waiting") and self._room > 0
            if not is_free and table.total("waiting") >= self._max_waiting:
                raise TooManyRequests(f"{self.waiting} requests are waiting already; try again later")
            if self._quotas is not None:
                self._quotas.admit(owner, characters, self.held(owner))
            if is_free:
                self.run(owner)
                return
            waiter = _Waiter(loop.create_future(), loop.time(), owner)
            self._waiting[owner].append(waiter)
            self._turns.wait(owner, characters)
        try:
            async with asyncio.timeout(self._wait_s):
                await waiter.permit
        except (TimeoutError, asyncio.CancelledError) as error:
            self._give_up(waiter)
            self._take_back(owner, characters)
            if isinstance(error, asyncio.CancelledError):
                raise
            if not self._share():
                raise NotReady(f"{NO_ENGINE}; the request waited for {self._wait_s:g} s") from error
            raise TooManyRequests(f"no request ended within {self._wait_s:g} s; try again later") from error

    def _give_up(self, waiter: _Waiter) -> None:
        """Forget `waiter`. It may just have got a permit, here or on the way from another front."""
        mine, owner, table = self._waiting[waiter.owner], waiter.owner, self._table
        if waiter not in mine:
            if waiter.permit.done() and not waiter.permit.cancelled():
                self.release(owner)
            return
        mine.remove(waiter)
        with table.lock():
            if table.get(f"waiting-{owner}") > 0:
                self._turns.leave(owner, table.front)
                return
            table.add(f"given-{owner}", -1)
            for column in ("running", f"running-{owner}"):
                table.add(column, -1)
        self.wake_waiters()

    def run(self, owner: str) -> None:
        """Count a request of `owner` as running."""
        with self._table.lock():
            for column in ("running", f"running-{owner}"):
                self._table.add(column, 1)

    def release(self, owner: str = "") -> None:
        """Release a permit."""
        with self._table.lock():
            for column in ("running", f"running-{owner}"):
                self._table.add(column, -1)
        self.wake_waiters()

    @property
    def _room(self) -> int:
        """How many more requests may run."""
        share = self._share()
        return max(1, round(self._max_concurrency * share)) - self._table.total("running") if share > 0 else 0

    def wake_waiters(self) -> None:
        """Give permits to as many waiters as may run. Call it when `share` may have risen."""
        table = self._table
        # Whoever begins to wait after a release has found that room: both take the lock.
        if not table.total("waiting") and not any(self._waiting.values()):
            return
        with table.lock():
            self._grant()
            given = {owner: table.get(f"given-{owner}") for owner, waiters in self._waiting.items() if waiters}
            for owner, count in given.items():
                table.add(f"given-{owner}", -count)
        for owner, count in given.items():
            for _ in range(count):
                self._admit(owner)

    def _grant(self) -> None:
        """Give the free permits to those who wait, under the lock."""
        table, awake = self._table, set[int]()
        room = self._room if table.total("waiting") else 0
        while room > 0 and table.total("waiting") > 0:
            owner, front = self._turns.take()
            for column in ("running", f"running-{owner}", f"given-{owner}"):
                table.add(column, 1, front)
            awake.add(front)
            room -= 1
        for front in awake - {table.front}:
            table.wake(front)

    def _admit(self, owner: str) -> None:
        """Give a permit of `owner` to one who waits here."""
        waiters = [one for one in self._waiting[owner] if not one.permit.done()]
        if not waiters:
            # Those who waited have just been cancelled, and will give it back.
            self._table.add(f"given-{owner}", 1)
            return
        now_s = asyncio.get_running_loop().time()
        is_overloaded = now_s - waiters[0].since_s > self._wait_s / 2
        chosen = waiters[-1 if is_overloaded else 0]
        self._waiting[owner].remove(chosen)
        chosen.permit.set_result(None)


def gate_columns(owners: Sequence[str]) -> list[str]:
    """The columns of a gate in a table."""
    by_owner = [f"{name}-{owner}" for name in ("running", "given") for owner in owners]
    return ["running", "unread_bytes", *by_owner, *turn_columns(owners)]
