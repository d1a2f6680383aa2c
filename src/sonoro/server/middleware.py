"""One connection of a client, under uvicorn: who opens it and then says nothing, or never ends, is let go.

Knows HTTP as bytes, not what is asked. `RequestIds` gives each request the id that its log lines and its answer carry,
`HeadAsGet` answers HEAD wherever GET is answered, `RequestBodies` reads bodies within limits of size, time and memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import struct
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, cast

import h11
from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from sonoro.core.errors import ConfigError
from sonoro.core.logs import log_event
from sonoro.server.config import ServerConfig
from sonoro.server.errors import BodyTooLarge, BodyTooSlow, TooManyRequests, plain_refusal

logger = logging.getLogger(__name__)

__all__ = ["CLIENT_GONE", "RESET", "Connection", "HeadAsGet", "RequestBodies", "RequestIds", "connection", "listen"]

SEND_BUFFER_BYTES = 65536
"""What the system keeps of an answer: about a second of audio, so that a client that takes nothing is felt soon."""

RESET = "cut"
"""The name, in the state of a request's scope, of what resets its connection."""

CLIENT_GONE = 499
"""The status of an answer that nobody is there to see, as others log it."""

_PROBES = ("/", "/playground/{name}", "/health", "/ready", "/metrics")
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")


class _OneFraming(h11.Connection):
    """Refuses a request that says twice, or in a version that cannot say it, where its body ends.

    A proxy in front may have read it the other way, and what it took for a body would be the next request here
    (RFC 9112, 6.1). The refusal closes the connection.
    """

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            is_old = event.http_version < b"1.1"
            if b"transfer-encoding" in names and (is_old or b"content-length" in names):
                raise h11.RemoteProtocolError("Transfer-Encoding with Content-Length, or in HTTP/1.0")
        return event


class Connection(H11Protocol):
    """Between two answers a head must arrive in `head_timeout_s`, and so must what is left of a refused body.

    uvicorn bounds the silence after an answer alone, not that before the first request nor a head that trickles in.
    """

    head_timeout_s = 10.0
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = _OneFraming(h11.SERVER)
        self.app_state = {**self.app_state, RESET: self.cut}
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.transport.get_protocol() is self:  # a WebSocket has a protocol of its own
            self._watch()
        else:
            self._unwatch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, in the words of every other refusal, unless an answer is under way or over."""
        if self.cycle is not None:
            # What it would still say has no place after this.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            refused = plain_refusal(400, msg, "http")
            facts = {"id": None, "key": None, "method": None, "path": None, "status": 400, "code": "http"}
            log_event(logger, logging.INFO, "request", facts)
            headers = [("content-type", "application/json"), ("connection", "close")]
            for event in (
                h11.Response(status_code=refused.status, headers=headers, reason="Bad Request"),
                h11.Data(data=refused.payload),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def cut(self) -> None:
        """Reset the connection, so that nobody takes its end for that of a body, as HTTP/1.0 has it."""
        sock = self.transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def _watch(self) -> None:
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering or self.transport.is_closing():
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.head_timeout_s, self.transport.abort)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def connection(head_timeout_s: float) -> type[asyncio.Protocol]:
    """`Connection` with its limit, as uvicorn wants it."""
    return type("Connection", (Connection,), {"head_timeout_s": head_timeout_s})


class RequestIds:
    """An application whose requests have an id: the client's `X-Request-Id` if it is sane, else a new one.

    Each leaves one line in the log, with what of it was put into the `facts` of its state. A path is named as the
    router has it: what a client wrote into it is in no log. What operators ask every few seconds is for debugging.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        facts: dict[str, object] = {"key": None}
        cast(dict[str, Any], scope.setdefault("state", {})).update(request_id=request_id, facts=facts, dialect="native")
        started_s, status = time.perf_counter(), CLIENT_GONE

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            status = 101 if message["type"] == "websocket.accept" else message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, send_named)
        except Exception:
            status = 500
            raise
        finally:
            route, method = scope.get("route"), scope.get("method", "WS")
            path = None if route is None else route.path
            first = {"id": request_id, "key": facts.pop("key"), "method": method, "path": path, "status": status}
            total = {"total_ms": round(1000 * (time.perf_counter() - started_s))}
            log_event(
                logger, logging.DEBUG if path in _PROBES else logging.INFO, "request", {**first, **facts, **total}
            )


class HeadAsGet:
    """An application that answers HEAD as it would GET, without the body (RFC 9110, 9.3.2)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        asked = {**scope, "method": "GET"}
        await self._app(asked, receive, send_head)
        scope["route"] = asked.get("route")


class RequestBodies:
    """The bodies being received or worked on: `max_total_bytes` of them at once, each in `timeout_s` at most."""

    def __init__(self, max_total_bytes: int, timeout_s: float) -> None:
        self._max_total_bytes, self._timeout_s = max_total_bytes, timeout_s
        self._bytes = 0

    @contextlib.asynccontextmanager
    async def body(self, request: Request, max_bytes: int) -> AsyncIterator[bytes]:
        """The body of `request`, which counts until the block ends.

        Raises `BodyTooLarge` as soon as it is, `BodyTooSlow` if it does not come, `TooManyRequests` if others leave it
        no room.
        """
        too_large = BodyTooLarge(f"the body must have at most {max_bytes} bytes")
        if (length := request.headers.get("content-length", "")).isdecimal() and int(length) > max_bytes:
            raise too_large
        payload = bytearray()
        try:
            async with self._in_time():
                async for part in request.stream():
                    if len(payload) + len(part) > max_bytes:
                        raise too_large
                    if self._bytes + len(part) > self._max_total_bytes:
                        raise TooManyRequests(f"bodies of {self._bytes} bytes are at work already; try again later")
                    payload += part
                    self._bytes += len(part)
            yield bytes(payload)
        finally:
            self._bytes -= len(payload)

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except ClientDisconnect as error:
            raise BodyTooSlow("the body ended before its end") from error
        except TimeoutError as error:
            raise BodyTooSlow(f"the body must arrive within {self._timeout_s:g} s") from error


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens where `config` says. Raises `ConfigError` naming host or port if it cannot.

    What is accepted inherits its options: small packets leave at once, and what a client does not take in time is lost.
    """
    try:
        family, *_, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError("host", config.host, f"it must be a name or an address of this machine ({error})") from error
    try:
        sock = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ConfigError("port", config.port, f"cannot listen there: {error.strerror}") from error
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    # The event loop does so for sockets that name their protocol alone, which those of `create_server` do not.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        # A connection that is closed still waits for its last bytes to be taken, and without this for ever. Twice what
        # a reader gets, so that whoever is slow is given up by the server, which says so, before the system does.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(2000 * config.slow_reader_timeout_s))
    return sock
