"""uvicorn's WebSocket protocol, changed so that sessions can finish their utterance when the server shuts down, and so
that what clients send is bounded: each message, all of them together, and the answers to pings. Long ones are sent in
fragments."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.exceptions import InvalidState
from websockets.frames import Frame
from websockets.http11 import Request

from sonoro.server.errors import SlowReader

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

SHUTTING_DOWN = "ending"
"""The key, in a connection scope's state, of the event that is set when the server shuts down."""


LIMIT_MESSAGES = "limit_messages"
"""The key, in a connection scope's state, of the function that sets the longest message in bytes."""

FIRST_MESSAGE_BYTES = 16 * 1024
"""The longest message until the session sets another limit: enough for a key."""

FRAGMENT_BYTES = 256 * 1024
"""The longest frame sent: to write it takes a millisecond of the event loop, and a message of 16 MB at once 40."""


async def pause(size: int) -> None:
    """Let the event loop run if `size` bytes are many: each step over a message of 16 MB takes it up to 15 ms."""
    if size > FRAGMENT_BYTES:
        await asyncio.sleep(0)


@dataclass
class Held:
    """The bytes that messages of all connections hold, until they were handled; at most `max_bytes`."""

    max_bytes: int
    bytes: int = 0


class WebSocketConnection(WebSocketsSansIOProtocol):
    """Notifies the application of a shutdown, where uvicorn would close the connection at once."""

    all: ClassVar[Held]
    stall_s: ClassVar[float]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._shutting_down, self._sending = asyncio.Event(), asyncio.Lock()
        self._held = self._unhandled = 0

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # sent already if the request was no handshake
            self.scope["state"][SHUTTING_DOWN] = self._shutting_down
            self.scope["state"][LIMIT_MESSAGES] = partial(setattr, self.conn, "max_message_size")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.handshake_exc is not None and not self.handshake_initiated:
            # uvicorn would leave a connection open whose handshake cannot be read.
            self.transport.write(b"".join(self.conn.data_to_send()))
            self.transport.close()
        self._count()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._count()
        self.frames = []
        self.conn.reader.buffer.clear()

    async def receive(self) -> ASGIReceiveEvent:
        self._unhandled = 0  # the application has handled what it received before
        self._count()
        event: dict[str, Any] = await super().receive()  # type: ignore[assignment]
        if (data := event.get("text")) is not None:
            try:
                event["text"] = data.decode()
            except UnicodeDecodeError:
                # uvicorn would log this client error with a traceback.
                self.conn.fail(1007, "invalid UTF-8")
                self.handle_parser_exception()
                return {"type": "websocket.disconnect", "code": 1007}
            await pause(len(data))
        return event  # type: ignore[return-value]

    def _count(self) -> None:
        held = len(self.conn.reader.buffer) + sum(map(len, self.frames)) + self._unhandled
        held = 0 if self.disconnected else held
        self.all.bytes += held - self._held
        self._held = held
        if self.all.bytes > self.all.max_bytes and held > FIRST_MESSAGE_BYTES and not self.close_sent:
            self.conn.fail(1013, "messages hold too many bytes; try again later")
            self.handle_parser_exception()

    def handle_text(self, event: Frame) -> None:
        super().handle_text(event)
        event.data = b""  # free it: the parser keeps the last frame until the next

    def handle_bytes(self, event: Frame) -> None:
        super().handle_bytes(event)
        event.data = b""

    def handle_cont(self, event: Frame) -> None:
        # In one buffer: a message may come in fragments of a byte, or of none.
        buffer = self.frames[0] if isinstance(self.frames[0], bytearray) else bytearray(self.frames[0])
        buffer += event.data
        event.data = b""
        self.frames = [buffer]  # type: ignore[list-item]
        if event.fin:
            self.send_receive_event_to_app()

    def handle_ping(self) -> None:
        if self.writable.is_set():
            super().handle_ping()
        else:
            self.conn.data_to_send()  # drop the answer, which the client does not read

    def send_receive_event_to_app(self) -> None:
        [data], self.frames = self.frames, []
        if not self.close_sent:
            self._unhandled += len(data)
            event: Any = {"type": "websocket.receive", self.curr_msg_data_type: data}
            self.queue.put_nowait(event)
            self.read_paused = True
            self.transport.pause_reading()

    async def send(self, message: ASGISendEvent) -> None:
        data: bytes | str = message.get("bytes") or message.get("text") or ""  # type: ignore[assignment]
        if message["type"] != "websocket.send":
            await super().send(message)
            # After a refusal by an HTTP response, uvicorn would otherwise log a failure of the application.
            self.handshake_complete = self.handshake_complete or self.close_sent
        elif len(data) <= FRAGMENT_BYTES:
            async with self._sending:
                await super().send(message)
        else:
            await self._sending.acquire()
            # Goes on if this call is cancelled: nothing else can be sent before the end of the message.
            sending = self.loop.create_task(self._send_in_fragments(data))
            sending.add_done_callback(lambda task: task.exception())
            await asyncio.shield(sending)

    async def _send_in_fragments(self, data: bytes | str) -> None:
        """Send a long message, then release `_sending`. Raises `SlowReader` if nothing is read for `stall_s`."""
        left = memoryview(data.encode() if isinstance(data, str) else data)
        send: Callable[..., None] = self.conn.send_text if isinstance(data, str) else self.conn.send_binary
        try:
            while left and not self.disconnected and not self.close_sent:
                part, left = left[:FRAGMENT_BYTES], left[FRAGMENT_BYTES:]
                with contextlib.suppress(InvalidState):  # the client has closed the connection
                    send(bytes(part), fin=not left)
                    self.transport.write(b"".join(self.conn.data_to_send()))
                send = self.conn.send_continuation
                await asyncio.sleep(0)
                async with asyncio.timeout(self.stall_s):
                    await self.writable.wait()
        except TimeoutError as error:
            raise SlowReader(f"the client took nothing for {self.stall_s:g} s") from error
        finally:
            self._sending.release()

    def shutdown(self) -> None:
        if self.handshake_complete and not self.close_sent:
            self._shutting_down.set()
        else:
            super().shutdown()


def websocket_connection(max_total_bytes: int, stall_s: float) -> type[asyncio.Protocol]:
    """A subclass of `WebSocketConnection` whose messages hold at most so many bytes together, and whose clients may
    read nothing of a long message for `stall_s`, for uvicorn."""
    return type("WebSocketConnection", (WebSocketConnection,), {"all": Held(max_total_bytes), "stall_s": stall_s})
