"""uvicorn's HTTP protocol over a parser in C, with limits on heads, on idle connections, and on what a client may send
behind its request. Knows no path and no key."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from typing import TYPE_CHECKING, Any, ClassVar, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from sonoro.core.logs import log_event
from sonoro.server.errors import plain_refusal

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application, ASGISendEvent, HTTPResponseStartEvent

logger = logging.getLogger(__name__)

BODY = "body"
"""The key, in a request scope's state, of the `Cycle`, for parts of the body."""

RESET = "reset"
"""The key, in a request scope's state, of the function that resets the connection."""

READ_BYTES = 8192
"""Read at once of a connection: the thousand frames or requests that fit are handled without a pause, in some 10 ms."""

MAX_HEAD_BYTES = 16 * 1024

MAX_IDLE = 512
"""Connections without a request; beyond them the one that has idled longest is closed."""


class _HeadHeld:
    """A transport that sends the head of a response with the first part of its body, as ASGI asks for."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport, self._head = transport, b""
        self.is_head = False
        """Whether what is written now is the head."""

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def write(self, data: bytes) -> None:
        if self.is_head:
            self._head = data
            return
        if self._head:
            data, self._head = self._head + data, b""
        self._transport.write(data)

    def flush(self) -> None:
        """Send the head without a body."""
        if self._head:
            self.write(b"")

    def close(self) -> None:
        self.flush()
        self._transport.close()


class Cycle(RequestResponseCycle):
    """A request and its response, which in HTTP/1.0 ends with the connection unless it has a length: uvicorn would send
    it in chunks, which that version does not know."""

    _ends_with_connection = False

    def __init__(self, transport: asyncio.Transport, **facts: Any) -> None:
        self._out = _HeadHeld(transport)
        super().__init__(transport=cast(Any, self._out), **facts)

    async def run_asgi(self, app: ASGI3Application) -> None:
        self.scope["state"][BODY] = self
        try:
            await super().run_asgi(app)
        finally:
            # A cycle, which would stay until a garbage collection.
            self.scope["state"].pop(BODY, None)

    async def send(self, message: ASGISendEvent) -> None:
        if message["type"] == "http.response.start" and not self.response_started:
            await self._start(message)
            return
        if message["type"] == "http.response.body":
            body = message.get("body", b"")
            if not body or self.scope["method"] == "HEAD":
                self._out.flush()  # no part of the body follows the head
            if self._ends_with_connection:
                self.expected_content_length = len(body)
        await super().send(message)

    async def _start(self, message: HTTPResponseStartEvent) -> None:
        if self.scope["http_version"] == "1.0" and all(
            name.lower() != b"content-length" for name, _ in message["headers"]
        ):
            self._ends_with_connection, self.chunked_encoding = True, False
        self._out.is_head = self.scope["method"] != "HEAD"  # which no part of a body follows
        try:
            await super().send(message)
        finally:
            self._out.is_head = False

    def write(self, part: bytes | bytearray) -> bool:
        """Send `part`, which is not empty, of a body without a length, as `send` does but past the application's
        middleware, which has seen the head. Returns False if the client does not take it yet: wait for `drain`."""
        if not self.disconnected:
            self._out.write(b"%x\r\n%b\r\n" % (len(part), bytes(part)) if self.chunked_encoding else bytes(part))
        return not self.flow.write_paused or self.disconnected

    async def drain(self) -> None:
        """Wait until the client takes more, or is gone."""
        await self.flow.drain()


class Connection(HttpToolsProtocol):
    """uvicorn's HTTP protocol with at most `MAX_IDLE` idle connections, heads of at most `MAX_HEAD_BYTES`, and
    `head_timeout_s` for each request head and for the rest of a refused body.
    uvicorn itself has a timeout only after a response: none for the first request, or for a head that trickles in. It
    neither bounds a head, nor parses the body of a request that offers another protocol, nor tells a request of its
    client's end once another is behind it."""

    head_timeout_s = 10.0
    idle: ClassVar[dict[Connection, None]]
    """Connections without a request, the longest idle first."""
    _deadline: asyncio.TimerHandle | None = None
    _active: RequestResponseCycle | None = None
    _received_bytes = _head_bytes = 0
    """Read last, and read since the request began or the last part of its body came."""
    _is_in_head = _is_upgrading = _is_broken = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        transport.max_size = READ_BYTES  # type: ignore[attr-defined]
        self.app_state = {**self.app_state, RESET: self.reset}
        self._watch()

    def data_received(self, data: bytes) -> None:
        if self._is_broken or self.parser is None:
            return
        self._received_bytes = len(data)
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self.transport.get_protocol() is not self:  # a WebSocket has a protocol of its own
            self._unwatch()
            self.idle.pop(self, None)
            self._forget()
            return
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse("the head, or what is around the parts of the body, is too long")
        self._watch()

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offered:
            if self._should_upgrade():
                # A client waits for the answer: what it sent behind the handshake is dropped.
                self.handle_websocket_upgrade()
            else:
                self._parse_again(data[offered.args[0] :])
        except httptools.HttpParserError:
            self._refuse("Invalid HTTP request received.")

    def _parse_again(self, rest: bytes) -> None:
        """Parse a request that offers a protocol which is not spoken here, as one that offers none."""
        if (method := self.parser.get_method()) == b"CONNECT":
            self._refuse("CONNECT is not for this server")
            return
        version = self.parser.get_http_version().encode()
        fields = b"".join(b"%s: %s\r\n" % field for field in self.headers if field[0] != b"upgrade")
        self.parser = httptools.HttpRequestParser(self)
        self._is_upgrading = False
        self._parse(b"%s %s HTTP/%s\r\n%s\r\n" % (method, self.url, version, fields) + rest)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, min(self._received_bytes, READ_BYTES)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._is_in_head:  # else a trailer
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        version, scope = self.parser.get_http_version(), self.scope
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and version == "1.1"):
            raise httptools.HttpParserError("a request names one host")
        self._is_upgrading = bool(self.parser.should_upgrade())
        if self._is_upgrading and not self._should_upgrade():
            return
        scope["method"], scope["http_version"] = self.parser.get_method().decode("ascii"), version
        if self._is_upgrading:
            return
        target, _, query = self.url.partition(b"#")[0].partition(b"?")
        scope["raw_path"], scope["path"] = target, unquote(target.decode("ascii"))
        scope["query_string"] = query
        running, self.cycle = (
            self.cycle,
            Cycle(
                scope=scope,
                transport=self.transport,
                flow=self.flow,
                logger=self.logger,
                access_logger=self.access_logger,
                access_log=self.access_log,
                default_headers=self.server_state.default_headers,
                message_event=asyncio.Event(),
                expect_100_continue=self.expect_100_continue and version != "1.0",  # which knows no such answer
                keep_alive=version != "1.0" and self.parser.should_keep_alive(),
                on_response=self.on_response_complete,
            ),
        )
        if running is None or running.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if not self._is_upgrading:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._is_upgrading:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_broken and self._active is not None and self._active.response_complete:
            self._answer_400("Invalid HTTP request received.")
        self._note_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self.idle.pop(self, None)
        self.pipeline.clear()
        if self._active is not None and not self._active.response_complete:
            self._active.disconnected = True
            self._active.message_event.set()
        super().connection_lost(exc)
        self._forget()

    def _forget(self) -> None:
        """Break cycles, in which a thousand lost connections would hold 10 MB until a garbage collection."""
        self.app_state, self.scope, self.cycle, self._active = {}, cast(Any, None), cast(Any, None), None
        self.parser = cast(Any, None)

    def _refuse(self, message: str) -> None:
        """Answer what is no HTTP: at once, or once the requests before it are answered."""
        self._is_broken = True
        active = self._active
        if active is None or active.response_complete:
            if active is not None and active is self.cycle and active.more_body:
                self.transport.close()  # the rest of a body that was refused
            else:
                self._answer_400(message)
        elif active is self.cycle and active.more_body:
            # The body itself is broken. The application must send nothing after this.
            active.disconnected = True
            active.message_event.set()
            if active.response_started:
                self.transport.close()
            else:
                self._answer_400(message)
        else:
            self.flow.pause_reading()

    def _answer_400(self, message: str) -> None:
        """Answer invalid HTTP with the API's error body, and close."""
        refused = plain_refusal(400, message, "http")
        facts = {"id": None, "key": None, "method": None, "path": None, "status": 400, "code": "http"}
        log_event(logger, logging.INFO, "request", facts)
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        length = b"content-length: %d\r\n\r\n" % len(refused.payload)
        if self.transport.is_closing():
            return
        self.transport.write(head + length + refused.payload)
        self.transport.close()

    def reset(self) -> None:
        """Reset the connection. In HTTP/1.0 a normal close would mark the body as complete."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    @property
    def _has_request(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _note_idle(self) -> None:
        self.idle.pop(self, None)
        if not self._has_request and self.transport.get_protocol() is self:
            self.idle[self] = None
            if len(self.idle) > MAX_IDLE:
                oldest = next(iter(self.idle))
                del self.idle[oldest]
                oldest.transport.close()

    def _watch(self) -> None:
        self._note_idle()
        if self._has_request or self.transport.is_closing():
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def connection(head_timeout_s: float) -> type[asyncio.Protocol]:
    """A subclass of `Connection` with that limit, for uvicorn."""
    return type("Connection", (Connection,), {"head_timeout_s": head_timeout_s, "idle": {}})
