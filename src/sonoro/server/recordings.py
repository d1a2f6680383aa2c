"""Reads reference recordings from data: URLs and, if configured, from http(s): URLs or files in a folder.

Connects only to hosts on the public internet, and opens only files in that folder, whatever a client sends."""

import asyncio
import base64
import binascii
import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

import h11
import httpcore2

from sonoro.audio.references import read_reference
from sonoro.core.errors import InvalidReference, SonoroError
from sonoro.core.types import Reference, ReferenceUse
from sonoro.server.errors import drop_frames
from sonoro.server.middleware import Budget

Result = TypeVar("Result")

FETCH_TIMEOUT_S = 10.0
FETCH_START_S = 3.0
FETCH_BYTES_PER_S = 16 * 1024
"""The least rate of a recording after `FETCH_START_S`, so that slow servers do not hold all `MAX_FETCHES`."""
MAX_FETCHES = 8
MAX_URL_CHARACTERS = 8192
"""The longest http(s): or file: URL: Python's parser caches the last ones that it has parsed."""

MAX_PENDING = 32
"""Recordings being decoded or waiting for it, at some .2 s each: the wait is a few seconds at most."""
MAX_CAST_S = 240.0
"""Of all recordings of a body's `voices`: 46 MB at 48 kHz."""

_RESERVED = ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "2001:db8::/32", "3fff::/20")
_NO_HOSTS = tuple(map(ipaddress.ip_network, _RESERVED))
"""Networks that the standard library may count as global: for protocols and documentation, and those that embed an IPv4
address (6to4, Teredo)."""


def is_public(address: str) -> bool:
    """Whether `address` is of a host on the public internet: not private, local, shared, multicast or reserved, and
    without an embedded IPv4 address (mapped, 6to4, Teredo, NAT64)."""
    host = ipaddress.ip_address(address.partition("%")[0])
    is_unicast = not host.is_multicast if host.version == 4 else host in ipaddress.ip_network("2000::/3")
    is_hosts = not host.is_reserved and not any(host in network for network in _NO_HOSTS)
    return is_unicast and host.is_global and is_hosts


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class _Connection(httpcore2.AsyncHTTP11Connection):
    """An HTTP connection to a server that may be hostile: it lets the event loop run between two events, and takes no
    long head and no more small parts than a slow network makes."""

    READ_NUM_BYTES = 8192
    MAX_INCOMPLETE_EVENT_SIZE = 16 * 1024
    _events = _bytes = 0

    async def _receive_event(self, timeout: float | None = None) -> h11.Event | type[h11.PAUSED]:
        await asyncio.sleep(0)
        event = await super()._receive_event(timeout)
        self._events += 1
        self._bytes += len(event.data) if isinstance(event, h11.Data) else 0
        if self._events > 1000 + self._bytes / 100:
            raise httpcore2.RemoteProtocolError("too many small parts")
        return event


class Recordings:
    """Reads recordings of at most `max_bytes`: data: URLs, http(s): URLs if `allows_urls`, file: URLs in `folder` if
    one is given. `resolve` looks up a host, `is_allowed` decides about its addresses."""

    def __init__(
        self,
        *,
        max_bytes: int,
        allows_urls: bool = False,
        folder: str = "",
        resolve: Callable[[str, int], Awaitable[list[str]]] = _resolve,
        is_allowed: Callable[[str], bool] = is_public,
        is_shared: bool = False,
    ) -> None:
        self._max_bytes, self._allows_urls = max_bytes, allows_urls
        self._folder = Path(folder).resolve() if folder else None
        self._resolve, self._is_allowed = resolve, is_allowed
        self._tls = httpcore2.default_ssl_context() if allows_urls else None
        # Two at a time: decoding a minute of audio takes megabytes.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="recording")
        self.pending = Budget(MAX_PENDING, "{} recordings are being decoded", is_shared=is_shared)
        """Recordings being decoded or waiting for it."""
        self._fetches = asyncio.Semaphore(MAX_FETCHES)

    async def read(
        self, url: str, text: str | None, use: ReferenceUse, field: str = "ref_audio", owner: str = ""
    ) -> Reference:
        """Read and decode the recording at `url` for `owner`. Raises `InvalidReference` naming `field`, or
        `TooManyRequests` if `MAX_PENDING` are being decoded."""
        scheme = url[:16].partition(":")[0].lower()
        with naming(field):
            if scheme != "data" and len(url) > MAX_URL_CHARACTERS:
                limit = f"a URL must have at most {MAX_URL_CHARACTERS} characters"
                raise InvalidReference("ref_audio", f"{len(url)} characters", limit)
            if scheme in ("http", "https") and self._allows_urls:
                return await self._fetch(url, text, use, owner)
            # Opened in the thread too, so that a queued recording holds a name rather than the bytes of a file.
            return await self._aside(lambda: self._decode(self._bytes_at(url, scheme), text, use), owner)

    async def read_cast(self, given: Mapping[str, tuple[str, str | None]], owner: str = "") -> dict[str, Reference]:
        """Read the recordings of `given` names, one by one, each with its transcript, if it has one. Raises as `read`
        does, and `InvalidReference` for more than `MAX_CAST_S` seconds."""
        cast, total_s = dict[str, Reference](), 0.0
        for name, (url, text) in given.items():
            cast[name] = await self.read(url, text, "prompt" if text else "reference", "voices", owner)
            total_s += cast[name].duration_s
            if total_s > MAX_CAST_S:
                raise InvalidReference("voices", f"{total_s:.1f} s", f"together at most {MAX_CAST_S:g} s")
        return cast

    async def decode(self, data: bytes, text: str | None, use: ReferenceUse, owner: str = "") -> Reference:
        """Decode `data`, an audio file, for `owner`. Raises `InvalidReference` or `TooManyRequests`, as `read` does."""
        return await self._aside(lambda: self._decode(data, text, use), owner)

    def close(self) -> None:
        """Drop queued work; running work is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _aside(self, work: Callable[[], Result], owner: str) -> Result:
        """Run `work` in a thread; cancelling the call drops it unless it has begun. Raises `TooManyRequests`."""
        counted = contextlib.ExitStack()
        counted.enter_context(self.pending.take(owner=owner))
        loop, future = asyncio.get_running_loop(), self._threads.submit(_without_frames, work)
        # Counted until the thread is done: work that has begun goes on when its caller is cancelled.
        future.add_done_callback(lambda _: _call_in(loop, counted.close))
        return await asyncio.wrap_future(future)

    def _decode(self, data: bytes, text: str | None, use: ReferenceUse) -> Reference:
        if len(data) > self._max_bytes:
            raise _too_large(f"{len(data)} bytes", self._max_bytes)
        return read_reference(data, text=text, use=use)

    def _bytes_at(self, url: str, scheme: str) -> bytes:
        if scheme == "data":
            return _inline(url)
        if scheme == "file" and self._folder is not None:
            return _open(url, self._folder, self._max_bytes)
        ways = ["a data: URL, data:audio/wav;base64,..."]
        ways += ["an http(s): URL"] * self._allows_urls + ["a file: URL"] * (self._folder is not None)
        raise InvalidReference("ref_audio", url, f"it must be {' or '.join(ways)}")

    async def _fetch(self, url: str, text: str | None, use: ReferenceUse, owner: str) -> Reference:
        target = _target(url)
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S) as limit, self._fetches:
                data = await self._download(url, target)
                limit.reschedule(None)
                return await self.decode(data, text, use, owner)
        except TimeoutError as error:
            wanted = f"it must arrive within {FETCH_TIMEOUT_S:g} s, without a pause"
            raise InvalidReference("ref_audio", url, wanted) from error
        except (OSError, UnicodeError, httpcore2.NetworkError, httpcore2.ProtocolError) as error:
            # Without the network's own error, which could reveal facts about internal hosts.
            raise InvalidReference("ref_audio", url, "it must be there to be fetched") from error

    async def _connect(self, target: httpcore2.URL) -> _Connection:
        """Connect to the host of `target`. Its name is looked up once: a second time may give another address."""
        origin = target.origin
        host, port = origin.host.decode(), origin.port
        addresses = await self._resolve(host, port)
        if not addresses or not all(map(self._is_allowed, addresses)):
            raise InvalidReference("ref_audio", host, "it must be the name of a host with public addresses alone")
        stream = await httpcore2.AnyIOBackend().connect_tcp(addresses[0], port)
        if origin.scheme == b"https":
            assert self._tls is not None
            stream = await stream.start_tls(self._tls, host)
        return _Connection(origin, stream)

    async def _download(self, url: str, target: httpcore2.URL) -> bytes:
        headers = [("Accept", "audio/*, */*;q=0.1"), ("User-Agent", "sonoro")]
        begun_s = asyncio.get_running_loop().time()
        async with (
            asyncio.timeout(FETCH_START_S) as limit,
            await self._connect(target) as connection,
            connection.stream("GET", target, headers=headers) as answer,
        ):
            if answer.status != 200:
                raise InvalidReference("ref_audio", url, "it must answer with status 200; redirects are not followed")
            data = bytearray()
            async for part in answer.aiter_stream():
                data += part
                if len(data) > self._max_bytes:
                    raise _too_large(url, self._max_bytes)
                limit.reschedule(begun_s + FETCH_START_S + len(data) / FETCH_BYTES_PER_S)
            return bytes(data)


@contextlib.contextmanager
def naming(field: str) -> Iterator[None]:
    """A context in which errors about a recording name `field`, in which it was given."""
    try:
        yield
    except InvalidReference as error:
        if error.field != "ref_audio":
            raise
        raise InvalidReference(field, error.value, error.limit) from error


def _without_frames(work: Callable[[], Result]) -> Result:
    """Run `work`; its error keeps no frame: they hold the recording's bytes, some in a cycle."""
    try:
        return work()
    except SonoroError as error:
        drop_frames(error)
        del work
        raise


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """Schedule `call` in `loop` from any thread; ignored if the loop is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _too_large(value: str, max_bytes: int) -> InvalidReference:
    return InvalidReference("ref_audio", value, f"it must have at most {max_bytes} bytes")


def _inline(url: str) -> bytes:
    """Decode a base64 data: URL."""
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InvalidReference("ref_audio", url, "it must be a data: URL, data:audio/wav;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidReference("ref_audio", url, f"it must be valid base64 ({error})") from error


def _target(url: str) -> httpcore2.URL:
    """Parse `url` once, so that the URL that is checked is the one requested."""
    limit = "it must be an http(s): URL of a host, without a user, in ASCII"
    if not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise InvalidReference("ref_audio", url, limit)
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidReference("ref_audio", url, limit) from error
    if not host or parts.username is not None or parts.password is not None:
        raise InvalidReference("ref_audio", url, limit)
    query = f"?{parts.query}" if parts.query else ""
    return httpcore2.URL(scheme=parts.scheme, host=host, port=port, target=(parts.path or "/") + query)


def _open(url: str, folder: Path, max_bytes: int) -> bytes:
    """Read the file of `url`, which must be inside `folder` after symbolic links are resolved."""
    limit = "it must be a file in the folder of recordings"
    try:
        parts = urlsplit(url)
        path = (folder / unquote(parts.path, errors="strict")).resolve(strict=True)
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(folder):
            raise InvalidReference("ref_audio", url, limit)
        # NONBLOCK: does not hang on a pipe. NOFOLLOW: the file may have been replaced by a link since the check.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise InvalidReference("ref_audio", url, limit)
            data = file.read(max_bytes + 1)
    except (OSError, ValueError, RuntimeError) as error:
        raise InvalidReference("ref_audio", url, limit) from error
    if len(data) > max_bytes:
        raise _too_large(url, max_bytes)
    return data
