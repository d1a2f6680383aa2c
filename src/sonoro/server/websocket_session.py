"""One WebSocket on which speech is asked for, from its acceptance to its close. Knows no message of any client."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, Literal

from fastapi import WebSocket
from starlette.types import Message
from starlette.websockets import WebSocketDisconnect, WebSocketState

from sonoro.core.errors import InvalidRequest, SonoroError
from sonoro.server.errors import IdleSession, NotReady, SlowReader, refusal
from sonoro.server.service import KEY_PROTOCOL, Caller, Service
from sonoro.server.stream import taken_within
from sonoro.server.websocket import SHUTTING_DOWN
from sonoro.transport.launch import cancel_tasks

__all__ = ["End", "WebSocketSession"]

End = Literal["closed", "idle", "ending"]
"""Why a session ended: its client said so, it said nothing for too long, the server is being ended."""

_CLOSE_CODES: dict[End, int] = {"closed": 1000, "idle": 1001, "ending": 1012}
"""Of RFC 6455 and its registry: a normal end, going away, the service restarts."""


class WebSocketSession(ABC):
    """One connection; who derives from it knows what is said on it.

    `speaking` are the tasks of what is being spoken: the session does not end before them, and drops them when its
    client is gone. `end` asks it to end.
    """

    dialect = "native"

    def __init__(self, socket: WebSocket, service: Service) -> None:
        self.service, self.id = service, uuid.uuid4().hex
        self.end: End | None = None
        self.facts: dict[str, Any] = socket.state.facts
        self._socket = socket
        self._shutting_down: asyncio.Event = socket.scope["state"].get(SHUTTING_DOWN, asyncio.Event())

    @property
    def caller(self) -> Caller:
        """Who it is with."""
        caller: Caller = self._socket.state.caller
        return caller

    @property
    @abstractmethod
    def speaking(self) -> Collection[asyncio.Task[Any]]:
        """What is being spoken."""

    @property
    @abstractmethod
    def idle_timeout_s(self) -> float | None:
        """How long the client may say nothing now; None for ever."""

    async def on_open(self) -> None:  # noqa: B027
        """Say what a client expects before it says anything; nothing unless overridden."""

    @abstractmethod
    async def handle(self, message: str) -> None:
        """Do what a message asks. Raises what is wrong with it."""

    @abstractmethod
    async def refuse(self, error: SonoroError, request_id: str | None = None) -> None:
        """Tell what was wrong, with what is spoken under `request_id` if it is given."""

    @abstractmethod
    async def on_done(self, task: asyncio.Task[Any]) -> None:
        """One of `speaking` is done, and is to be none of them any more. Raises what its connection did."""

    async def on_close(self, end: End) -> None:  # noqa: B027
        """Say what a client expects at the end; nothing unless overridden."""

    async def run(self) -> None:
        """Accept the connection and serve it to its end. Raises `NotReady` before."""
        self.service.spec()
        # A browser that offered protocols closes the connection unless one is chosen; the key is no choice.
        offered = (name for name in self._socket.scope["subprotocols"] if not name.startswith(KEY_PROTOCOL))
        await self._socket.accept(next(offered, None))
        try:
            await self.on_open()
            end = await self._exchange()
            await self.on_close(end)
            await self._socket.close(_CLOSE_CODES[end])
        except (WebSocketDisconnect, SlowReader):
            pass
        finally:
            await cancel_tasks(*self.speaking)

    async def send(self, message: str | bytes) -> None:
        """Raises `SlowReader` if it is not taken in time, `WebSocketDisconnect` if nobody is there."""
        if self._socket.application_state is not WebSocketState.CONNECTED:
            # Another task has found out that nobody is there.
            raise WebSocketDisconnect(1006)
        is_text = isinstance(message, str)
        async with taken_within(self.service.config.slow_reader_timeout_s):
            await self._socket.send({"type": "websocket.send", "text" if is_text else "bytes": message})

    async def _exchange(self) -> End:
        """Handle messages until the session has ended; why it did."""
        receiving = asyncio.create_task(self._socket.receive())
        ending = asyncio.create_task(self._shutting_down.wait())
        try:
            while self.end is None or self.speaking:
                tasks = {receiving} if self.end else {receiving, ending}
                speaking = set(self.speaking)
                done, _ = await asyncio.wait(
                    tasks | speaking, timeout=self.idle_timeout_s, return_when=asyncio.FIRST_COMPLETED
                )
                if not done:
                    await self.refuse(IdleSession(f"nothing was said for {self.idle_timeout_s:g} s"))
                    return "idle"
                for task in speaking & done:
                    await self.on_done(task)
                if ending in done:
                    self.end = self.end or "ending"
                if receiving in done:
                    await self._receive(receiving.result())
                    receiving = asyncio.create_task(self._socket.receive())
            return self.end
        finally:
            await cancel_tasks(receiving, ending)

    async def _receive(self, received: Message) -> None:
        if received["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(received["code"])
        try:
            if received.get("text") is None:
                raise InvalidRequest("message", "bytes", "it must be text that is JSON")
            await self.handle(received["text"])
        except SlowReader:
            raise
        except SonoroError as error:
            self.service.count_refusal(refusal(error), self.id, self.dialect)
            await self.refuse(error)

    def check_open(self) -> None:
        """Raises `NotReady` if nothing new may begin."""
        if self.end is not None:
            raise NotReady("the session is being closed")
