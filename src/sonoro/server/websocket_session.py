"""The life of one WebSocket session, from accept to close: messages, timeouts, shutdown. Knows no message format."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any, Literal, cast

from fastapi import WebSocket
from starlette.types import Message
from starlette.websockets import WebSocketDisconnect, WebSocketState

from sonoro.core.errors import InvalidRequest, SonoroError
from sonoro.server.errors import IdleSession, NotReady, SlowReader, TooManyRequests, refusal
from sonoro.server.half_characters import HalfCharacters
from sonoro.server.keys import ANONYMOUS, KEY_PROTOCOL, Caller
from sonoro.server.service import Service
from sonoro.server.stream import taken_within
from sonoro.server.websocket import FRAGMENT_BYTES, LIMIT_MESSAGES, SHUTTING_DOWN, pause
from sonoro.transport.process import cancel_tasks

End = Literal["closed", "idle", "ending"]
"""Why a session ended: at the client's request, after its idle timeout, or because the server shuts down."""

_CLOSE_CODES: dict[End, int] = {"closed": 1000, "idle": 1001, "ending": 1012}
"""Close codes of RFC 6455 and its registry: normal closure, going away, service restart."""

CUT_OFF_S = 1.0
"""How long it may take, at the end of a shutdown, to tell clients that they are cut off."""


async def encoded(message: str) -> bytes:
    """`message` in UTF-8; lets the event loop run if it is long."""
    payload = message.encode()
    await pause(len(payload))
    return payload


class WebSocketSession(ABC):
    """One connection; subclasses handle its messages.
    `speaking` are the tasks of running utterances: the session ends after them, and cancels them if the client is gone.
    Set `end` to end the session."""

    dialect = "native"

    is_newcomer = False
    """Whether the client has still to show a key, or, in a protocol without keys, a valid message. A newcomer takes no
    place of a session, has `head_timeout_s` for it, and may send one small message."""

    def __init__(self, socket: WebSocket, service: Service) -> None:
        self.service, self.id = service, uuid.uuid4().hex
        self.end: End | None = None
        self.facts: dict[str, Any] = socket.state.facts
        self._socket, self._successor = socket, cast(WebSocketSession | None, None)
        self._counted, self._kept, self._halves = contextlib.ExitStack(), contextlib.ExitStack(), HalfCharacters()
        self._entry: asyncio.Future[None] | None = None  # of a newcomer
        self._shutting_down: asyncio.Event = socket.scope["state"].get(SHUTTING_DOWN, asyncio.Event())

    @property
    def caller(self) -> Caller:
        """The client's `Caller`."""
        caller: Caller = self._socket.state.caller
        return caller

    @property
    @abstractmethod
    def speaking(self) -> Collection[asyncio.Task[Any]]:
        """Tasks of the running utterances."""

    @property
    @abstractmethod
    def idle_timeout_s(self) -> float | None:
        """How long the session may now be without a message; None for no limit."""

    @property
    def max_message_bytes(self) -> int:
        """The longest message, here one with recordings."""
        return self.service.config.max_body_bytes

    async def on_open(self) -> None:  # noqa: B027
        """Send a greeting. Does nothing unless overridden."""

    @abstractmethod
    async def handle(self, message: str) -> None:
        """Handle a message of the client. Raises `SonoroError` for an invalid one."""

    @abstractmethod
    async def refuse(self, error: SonoroError, request_id: str | None = None) -> None:
        """Send `error`, about the utterance `request_id` if given."""

    @abstractmethod
    async def on_done(self, task: asyncio.Task[Any]) -> None:
        """Remove `task`, which is done, from `speaking`. Raises the connection's error if it ended with one."""

    async def on_close(self, end: End, error: SonoroError | None) -> None:
        """Send a farewell before the close, of which there is none unless overridden; and before it the `error`, if
        any, that cuts off what is being spoken."""
        if error is not None:
            await self.refuse(error)

    async def run(self) -> None:
        """Accept the connection and serve it to its end, or raise `NotReady` or `TooManyRequests`."""
        self.service.speech.spec()
        with self._counted:
            if self.is_newcomer or self.caller is ANONYMOUS:
                self.is_newcomer = True
                self._entry = self._counted.enter_context(self.service.newcomers.take())
            else:
                self._count_in()
            await self._serve()

    def settle(self) -> None:
        """Count a newcomer, who is known now, among the sessions. Raises `TooManyRequests`, and ends the session."""
        if self.is_newcomer:
            self._count_in()
            self.is_newcomer = False

    def _count_in(self) -> None:
        self._counted.close()
        self._counted.enter_context(self.service.count_session(self.caller))
        self._socket.scope["state"].get(LIMIT_MESSAGES, int)(self.max_message_bytes)

    async def _serve(self) -> None:
        # A browser that offers subprotocols needs one to be chosen, but not the one that carries the key.
        offered = (name for name in self._socket.scope["subprotocols"] if not name.startswith(KEY_PROTOCOL))
        await self._socket.accept(next(offered, None))
        try:
            await self.on_open()
            end = await self._exchange()
            await (self._successor or self).on_close(end, None)
            await self._socket.close(_CLOSE_CODES[end])
        except (WebSocketDisconnect, SlowReader):
            pass
        except asyncio.CancelledError:  # at the end of a shutdown
            session = self._successor or self
            with contextlib.suppress(WebSocketDisconnect, SlowReader, TimeoutError, asyncio.CancelledError):
                async with asyncio.timeout(CUT_OFF_S):
                    await cancel_tasks(*session.speaking)
                    await session.on_close("ending", NotReady("the server is shutting down"))
                    await self._socket.close(_CLOSE_CODES["ending"])
        finally:
            await cancel_tasks(*self.speaking)
            self.release()

    async def hand_over(self, successor: WebSocketSession, message: str) -> None:
        """Let `successor` serve the connection to its end, from `message` on."""
        self._successor, successor.id = successor, self.id
        try:
            await successor._receive({"type": "websocket.receive", "text": message})
            self.end = await successor._exchange()
        finally:
            await cancel_tasks(*successor.speaking)
            successor.release()

    def release(self) -> None:
        """Free what the session holds, at its end."""
        self._kept.close()

    async def send(self, message: str | bytes | bytearray) -> None:
        """Send `message`. Raises `SlowReader` if it is not read in time, `WebSocketDisconnect` without a client."""
        if self._socket.application_state is not WebSocketState.CONNECTED:
            # Another task has noticed the disconnect.
            raise WebSocketDisconnect(1006)
        is_text = isinstance(message, str)
        fragments = 1 + len(message) // FRAGMENT_BYTES
        async with taken_within(self.service.config.slow_reader_timeout_s, fragments):
            await self._socket.send({"type": "websocket.send", "text" if is_text else "bytes": message})

    async def _exchange(self) -> End:
        """Handle messages until the session has ended; return the reason."""
        deadline_s = asyncio.get_running_loop().time() + self.service.config.head_timeout_s
        receiving = asyncio.create_task(self._socket.receive())
        ending = asyncio.create_task(self._shutting_down.wait())
        try:
            while self.end is None or self.speaking:
                tasks: set[asyncio.Future[Any]] = {receiving} if self.end else {receiving, ending}
                if self.is_newcomer and self._entry is not None:
                    tasks.add(self._entry)
                speaking = set(self.speaking)
                left_s = deadline_s - asyncio.get_running_loop().time()
                timeout_s = max(0.0, left_s) if self.is_newcomer else self.idle_timeout_s
                done, _ = await asyncio.wait(tasks | speaking, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    limit_s = self.service.config.head_timeout_s if self.is_newcomer else timeout_s
                    await self.refuse(IdleSession(f"no message for {limit_s:g} s"))
                    return "idle"
                if self._entry in done and receiving not in done:
                    await self.refuse(TooManyRequests("others came, and no key was shown; try again"))
                    return "closed"
                for task in speaking & done:
                    await self.on_done(task)
                if ending in done:
                    self.end = self.end or "ending"
                if receiving in done:
                    await self._receive(receiving.result())
                    receiving = asyncio.create_task(self._socket.receive())
                done.clear()  # it holds the last message
            return self.end
        finally:
            await cancel_tasks(receiving, ending)

    async def _receive(self, received: Message) -> None:
        if received["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(received["code"])
        try:
            if received.get("text") is None:
                raise InvalidRequest("message", "bytes", "it must be text that is JSON")
            message: str | None = received["text"]
            if len(received["text"]) <= self.service.config.max_message_bytes:  # longer ones hold recordings
                message = self._halves.join(received["text"])
            if message is not None:
                await self.handle(message)
                if self._halves.has_lost:
                    self._halves.has_lost = False
                    raise InvalidRequest("text", "half a character", "its other half must come with the next text")
        except SlowReader:
            raise
        except SonoroError as error:
            self.service.metrics.count_refusal(refusal(error), self.id, self.dialect)
            await self.refuse(error)
            if self.is_newcomer:
                self.end = "closed"

    def check_open(self) -> None:
        """Raise `NotReady` if the session is ending."""
        if self.end is not None:
            raise NotReady("the session is being closed")
