"""Which hosts this server answers as, and which pages a browser may let call it. Knows no path and no key.

Any name can be made to point at a loopback address (DNS rebinding): the page that it came from is then of the same
origin as this server, as far as the browser is concerned, and only the `Host` that it sends tells them apart.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sonoro.server.config import ServerConfig
from sonoro.server.errors import ForeignHost, ForeignOrigin, refusal
from sonoro.server.stream import RefusalResponse

__all__ = ["HostCheck"]

_AUTHORITY = re.compile(r"(?P<name>\[[0-9a-f:.]+\]|[^\[\]:/?#@\s]+)(:(?P<port>\d*))?", re.IGNORECASE)
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_ANY = "*"
_DEFAULT_PORTS = {"http": "80", "https": "443"}


class HostCheck:
    """An application that is asked by its own names alone, and by no page of another origin.

    A `Host` must be one of `allowed_hosts` or what the server is bound to; bound to every address, with no names given,
    it may be any. An `Origin` must be the `Host`'s, or of `allowed_hosts` (a proxy may have changed the `Host`), or one
    of `cors_origins`. Who sends neither is no browser.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app, self._origins = app, config.cors_origins
        self._given = {host.lower() for host in config.allowed_hosts}
        self._hosts = self._given | _bound_to(config.host, is_named=bool(self._given))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._check(Headers(scope=scope)) if scope["type"] in ("http", "websocket") else None
        if error is None:
            await self._app(scope, receive, send)
            return
        scope.get("state", {}).get("facts", {})["code"] = error.code
        await RefusalResponse(refusal(error))(scope, receive, send)

    def _check(self, headers: Headers) -> ForeignHost | ForeignOrigin | None:
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and _ANY not in self._hosts and _name(host) not in self._hosts:
            return ForeignHost("this server does not go by that name; allowed_hosts says by which it does")
        if origin is None or origin in self._origins or _ANY in self._origins:
            return None
        scheme, _, authority = origin.partition("://")
        is_own = host is not None and _with_port(authority, scheme) == _with_port(host, scheme) != ""
        if is_own or _name(authority) in self._given - {_ANY, ""}:
            return None
        return ForeignOrigin("pages of this origin may not call; cors_origins says which may")


def _name(authority: str) -> str:
    """The host of "host:port", in lower case; empty if it is none."""
    found = _AUTHORITY.fullmatch(authority)
    return found["name"].strip("[]").rstrip(".").lower() if found else ""


def _with_port(authority: str, scheme: str) -> str:
    found = _AUTHORITY.fullmatch(authority)
    return f"{found['name'].lower()}:{found['port'] or _DEFAULT_PORTS.get(scheme)}" if found else ""


def _bound_to(host: str, *, is_named: bool) -> set[str]:
    """The names of a server that listens at `host`; of one that listens everywhere any name, unless it has some."""
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
