"""Middleware before any endpoint: limits on hosts and bodies; request ids and the access log.

`RequestIds` assigns ids and logs, `HostCheck` refuses foreign hosts and origins, `HeadAsGet` answers HEAD,
`RequestBodies` bounds bodies, `Budget` any other count. Knows no path and no key."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import ipaddress
import logging
import re
import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any, cast
from urllib.parse import unquote

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sonoro.core.logs import log_event
from sonoro.server.config import ServerConfig
from sonoro.server.connection import READ_BYTES
from sonoro.server.errors import (
    BodyTooLarge,
    BodyTooSlow,
    NotReady,
    Refusal,
    RefusalResponse,
    TooManyRequests,
    plain_refusal,
    refusal,
)
from sonoro.server.keys import Caller
from sonoro.transport.table import Count

logger = logging.getLogger(__name__)

CLIENT_GONE = 499
"""The logged status of a client that disconnected before its response, as in nginx."""

_PROBES = ("/", "/playground/{name}", "/health", "/ready", "/metrics")
_SANE_ID = re.compile(r"[A-Za-z0-9._:-]{1,64}")
_AUTHORITY = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\[\]:/?#@\s]+)(:(?P<port>\d*))?", re.IGNORECASE)
_BY_ADDRESS = ("/health", "/ready", "/metrics")
"""Paths that may be asked for by any address: orchestrators do so, while a page whose name was made to point at this
server can send that name alone."""
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_ANY = "*"
_DEFAULT_PORTS = {"http": "80", "https": "443"}


class RequestIds:
    """Gives each request an id (the client's `X-Request-Id` if it is well-formed) and one log line.
    The line holds the `facts` of the request's state, and the path as declared by its route, not as written by the
    client. Operators' probes are logged at debug level. The state's `caller` is the given one until a key is shown."""

    def __init__(self, app: ASGIApp, caller: Caller) -> None:
        self._app, self._caller = app, caller

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _SANE_ID.fullmatch(given) else uuid.uuid4().hex
        facts: dict[str, object] = {"key": None}
        state = {"request_id": request_id, "facts": facts, "dialect": "native", "caller": self._caller}
        cast(dict[str, Any], scope.setdefault("state", {})).update(state)
        started_s, status, answered = time.perf_counter(), 500, CLIENT_GONE

        async def send_named(message: Message) -> None:
            nonlocal answered
            if message["type"].endswith("http.response.start"):  # also of a refused WebSocket
                MutableHeaders(scope=message)["x-request-id"] = request_id
            answered = 101 if message["type"] == "websocket.accept" else message.get("status", answered)
            await send(message)

        try:
            await self._app(scope, receive, send_named)
            status = answered
        except asyncio.CancelledError:
            status = answered
            if scope["type"] != "http" or answered != CLIENT_GONE:
                raise
            # At the end of a shutdown.
            refused = refusal(NotReady("the server is shutting down"))
            await RefusalResponse(refused)(scope, receive, send_named)
            status = refused.status
        finally:
            route, method = scope.get("route"), scope.get("method", "WS")
            path = None if route is None else route.path
            first = {"id": request_id, "key": facts.pop("key"), "method": method, "path": path, "status": status}
            total = {"total_ms": round(1000 * (time.perf_counter() - started_s))}
            log_event(
                logger, logging.DEBUG if path in _PROBES else logging.INFO, "request", {**first, **facts, **total}
            )


class HeadAsGet:
    """Answers HEAD as GET, without the body (RFC 9110, 9.3.2)."""

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


class HostCheck:
    """Refuses requests for a foreign host, from pages of a foreign origin, and with ambiguous framing of the body.

    Against DNS rebinding: an attacker's name can resolve to a loopback address, and to the browser its page then has
    the same origin as this server; only the `Host` header tells them apart.

    A `Host` must be one of `allowed_hosts`, or what the server is bound to; it may be any if the server is bound to all
    addresses and no names are given. Probes may name any address. An `Origin` must match the `Host`, `allowed_hosts`
    (a proxy may have changed the `Host`) or `cors_origins`. Browsers always send one of the two; requests without them
    pass."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._origins = app, config.cors_origins
        self._given = {host.lower() for host in config.allowed_hosts}
        self._hosts = self._given | _bound_to(config.host, is_named=bool(self._given))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = None
        if scope["type"] in ("http", "websocket"):
            _take_host_of_target(scope)
            refused = self._refusal(scope, Headers(scope=scope))
        if refused is None:
            await self._app(scope, receive, send)
            return
        scope.get("state", {}).get("facts", {})["code"] = refused.error["code"]
        await RefusalResponse(refused)(scope, receive, send)

    def _refusal(self, scope: Scope, headers: Headers) -> Refusal | None:
        if "transfer-encoding" in headers and (scope["http_version"] < "1.1" or "content-length" in headers):
            # Request smuggling: a proxy may see another end of the body (RFC 9112, 6.1). Close, and read no more.
            refused = plain_refusal(400, "Transfer-Encoding with Content-Length, or in HTTP/1.0", "http")
            return dataclasses.replace(refused, headers={"Connection": "close"})
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_own(_name(host), scope.get("path")):
            return plain_refusal(403, "the Host is not a name of this server; allowed_hosts lists them", "foreign_host")
        if origin is None or origin in self._origins or _ANY in self._origins:
            return None
        scheme, _, authority = origin.partition("://")
        is_own = host is not None and _with_port(authority, scheme) == _with_port(host, scheme) != ""
        if is_own or _name(authority) in self._given - {_ANY, ""}:
            return None
        return plain_refusal(403, "pages of this origin may not call this server; see cors_origins", "foreign_origin")

    def _is_own(self, name: str, path: str | None) -> bool:
        return _ANY in self._hosts or name in self._hosts or (path in _BY_ADDRESS and _is_address(name))


class Budget:
    """A counting limit of `most`. `shown` formats the count in the error, such as "{} sessions are open". If it
    `is_shared`, an owner with some gets no more, in one front process, than leaves as much to the others: nobody can
    take it all. The limit itself holds for all fronts that share `count`."""

    def __init__(self, most: int, shown: str, *, is_shared: bool = False, count: Count | None = None) -> None:
        self._most, self._shown, self._is_shared = most, shown, is_shared
        self._count, self._by_owner = count or Count(), collections.Counter[str]()

    @property
    def taken(self) -> int:
        """How much is taken, in all front processes."""
        return self._count.total

    @contextlib.contextmanager
    def take(self, count: int = 1, owner: str = "") -> Iterator[None]:
        """Take `count` for the duration of the block. Raises `TooManyRequests` if less than that is left."""
        own = self._by_owner[owner]
        if count and not self._count.take(count, self._most - (own + count if self._is_shared and own else 0)):
            raise TooManyRequests(f"{self._shown.format(self.taken)} already; try again later")
        self._by_owner[owner] += count
        try:
            yield
        finally:
            self._count.add(-count)
            self._by_owner[owner] -= count


class Newcomers:
    """At most `most` places for connections that have shown no key yet, the oldest of which makes room for another:
    those who show one do so at once, and nobody keeps them out by being silent."""

    def __init__(self, most: int) -> None:
        self._most, self._entries = most, dict[asyncio.Future[None], None]()

    @property
    def taken(self) -> int:
        """How many places are taken."""
        return len(self._entries)

    @contextlib.contextmanager
    def take(self) -> Iterator[asyncio.Future[None]]:
        """Take a place for the duration of the block; the future is done once another needs it."""
        entry = asyncio.get_running_loop().create_future()
        if self.taken >= self._most:
            oldest = next(iter(self._entries))
            del self._entries[oldest]
            oldest.set_result(None)
        self._entries[entry] = None
        try:
            yield entry
        finally:
            self._entries.pop(entry, None)


class RequestBodies:
    """Reads request bodies, at most `max_total_bytes` in memory at once, each within `timeout_s`."""

    def __init__(self, max_total_bytes: int, timeout_s: float, count: Count | None = None) -> None:
        self._max_total_bytes, self._timeout_s = max_total_bytes, timeout_s
        self._bytes = count or Count()

    @contextlib.asynccontextmanager
    async def body(self, request: Request, max_bytes: int) -> AsyncIterator[bytes]:
        """Read the body of `request`; its bytes count as in use until the block ends.
        Raises `BodyTooLarge` as soon as it exceeds `max_bytes`, `BodyTooSlow` after the timeout or if the client
        disconnects, `TooManyRequests` if all bodies together exceed `max_total_bytes`."""
        too_large = BodyTooLarge(f"the body must have at most {max_bytes} bytes")
        if (length := request.headers.get("content-length", "")).isdecimal() and int(length) > max_bytes:
            raise too_large
        payload, taken = bytearray(), 0
        try:
            async with self._in_time():
                async for part in request.stream():
                    if len(payload) + len(part) > max_bytes:
                        raise too_large
                    if not self._bytes.take(len(part), self._max_total_bytes):
                        raise TooManyRequests(f"request bodies hold {self._bytes.total} bytes already; try again later")
                    payload += part
                    taken += len(part)
            whole = bytes(payload)
            payload.clear()
            if taken > READ_BYTES:
                await asyncio.sleep(0)  # the copy and the parse of 16 MiB may take 15 ms each
            yield whole
        finally:
            self._bytes.add(-taken)

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except ClientDisconnect as error:
            raise BodyTooSlow("the connection was closed before the end of the body") from error
        except TimeoutError as error:
            raise BodyTooSlow(f"the body must arrive within {self._timeout_s:g} s") from error


def _name(authority: str) -> str:
    """The host of "host:port" in lower case; "" if it is malformed."""
    found = _AUTHORITY.fullmatch(authority)
    return found["name"].strip("[]").rstrip(".").lower() if found else ""


def _is_address(name: str) -> bool:
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _take_host_of_target(scope: Scope) -> None:
    """Take host and path from a request target that is a URL, which counts before the `Host` (RFC 9112, 3.2.2)."""
    scheme, slashes, rest = scope.get("raw_path", b"").partition(b"://")
    if slashes and scheme.lower() in (b"http", b"https"):
        host, _, path = rest.partition(b"/")
        others = [header for header in scope["headers"] if header[0] != b"host"]
        origin_form = {"raw_path": b"/" + path, "path": "/" + unquote(path.decode("ascii"))}
        scope.update(origin_form, headers=[(b"host", host), *others])


def _with_port(authority: str, scheme: str) -> str:
    found = _AUTHORITY.fullmatch(authority)
    return f"{found['name'].lower()}:{found['port'] or _DEFAULT_PORTS.get(scheme)}" if found else ""


def _bound_to(host: str, *, is_named: bool) -> set[str]:
    """The names of a server bound to `host`; any name if it is bound to all addresses and not `is_named`."""
    names = {host.lower()}
    with contextlib.suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        names |= {str(address[0]).partition("%")[0] for *_, address in found}
    for name in list(names):
        with contextlib.suppress(ValueError):
            address = ipaddress.ip_address(name)
            if address.is_unspecified and not is_named:
                names.add(_ANY)
            if address.is_loopback or address.is_unspecified:
                names |= _LOOPBACK
    return names
