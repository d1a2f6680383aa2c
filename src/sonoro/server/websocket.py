"""uvicorn's WebSocket protocol, changed so that sessions can finish their utterance when the server shuts down, and so
that what clients send is bounded: each message, all of them together, and the answers to pings."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.frames import Frame
from websockets.http11 import Request

if TYPE_CHECKING:
    from uvicorn._types import ASGIReceiveEvent, ASGISendEvent

SHUTTING_DOWN = "ending"
"""The key, in a connection scope's state, of the event that is set when the server shuts down."""


LIMIT_MESSAGES = "limit_messages"
"""The key, in a connection scope's state, of the function that sets the longest message in bytes."""

FIRST_MESSAGE_BYTES = 16 * 1024
"""The longest message until the session sets another limit: enough for a key."""


@dataclass
class Held:
    """The bytes that messages of all connections hold, until they were handled; at most `max_bytes`."""

    max_bytes: int
    bytes: int = 0


class WebSocketConnection(WebSocketsSansIOProtocol):
    """Notifies the application of a shutdown, where uvicorn would close the connection at once."""

    all: ClassVar[Held]

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._shutting_down = asyncio.Event()
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

    async def receive(self) -> ASGIReceiveEvent:
        self._unhandled = 0  # the application has handled what it received before
        self._count()
        return await super().receive()

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
        try:
            if self.curr_msg_data_type == "text":
                b"".join(self.frames).decode()
        except UnicodeDecodeError:
            # uvicorn would log this client error with a traceback.
            self.conn.fail(1007, "invalid UTF-8")
            self.handle_parser_exception()
        else:
            self._unhandled += sum(map(len, self.frames))
            super().send_receive_event_to_app()

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        # After a refusal by an HTTP response, uvicorn would otherwise log a failure of the application.
        self.handshake_complete = self.handshake_complete or self.close_sent

    def shutdown(self) -> None:
        if self.handshake_complete and not self.close_sent:
            self._shutting_down.set()
        else:
            super().shutdown()


def websocket_connection(max_total_bytes: int) -> type[asyncio.Protocol]:
    """A subclass of `WebSocketConnection` whose messages hold at most so many bytes together, for uvicorn."""
    return type("WebSocketConnection", (WebSocketConnection,), {"all": Held(max_total_bytes)})
