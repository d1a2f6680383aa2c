"""HTTP/1.1 client with keep-alive and a small cost per chunk of the response.

A load generator must not measure itself. With 256 streams of a chunk every 80 ms, aiohttp takes 51 us of CPU per chunk
and this 47, notes chunks 7.3 and 3.0 ms late (p95), and lags 6.3 and 5.9 ms (p95; `benchmarks/http_clients.py`, two
cores, medians of four turns each)."""

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import h11

_KEEP_ALIVE_S = 2.0
"""Less than the 5 s of common servers, so that none closes a connection just as it is reused."""


class HttpError(Exception):
    """The connection ended before the response, or the response is not HTTP/1.1."""


@dataclass(frozen=True)
class ResponseHead:
    """Status and headers of a response; header names are in lower case."""

    status: int
    headers: Mapping[str, str]


OnPart = Callable[[ResponseHead, bytes], None]
OnSent = Callable[[], None]


class _Connection(asyncio.Protocol):
    """One connection, which carries one request at a time."""

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self._http, self._free_since_s = h11.Connection(h11.CLIENT), time.perf_counter()
        self._done: asyncio.Future[ResponseHead] | None = None
        self._answer: ResponseHead | None = None

    @property
    def is_usable(self) -> bool:
        """Whether another request may use it."""
        is_fresh = time.perf_counter() - self._free_since_s < _KEEP_ALIVE_S
        return is_fresh and not self._transport.is_closing()

    async def exchange(self, head: h11.Request, body: bytes, on_sent: OnSent, on_part: OnPart) -> ResponseHead:
        """Send a request and read its response to the end. Raises `HttpError`."""
        self._on_part, self._answer = on_part, None
        self._done = asyncio.get_running_loop().create_future()
        parts = [self._http.send(event) or b"" for event in (head, h11.Data(data=body), h11.EndOfMessage())]
        on_sent()
        self._transport.write(b"".join(parts))
        try:
            return await self._done
        finally:
            self._done, self._free_since_s = None, time.perf_counter()
            # Data after the end of a response belongs to no request.
            if self._http.their_state is h11.DONE and not self._http.trailing_data[0]:
                self._http.start_next_cycle()
            else:
                self.cut()

    def cut(self) -> None:
        """Abort the connection."""
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        if error is None:
            self.data_received(b"")
        self._end(HttpError("connection closed"))

    def data_received(self, data: bytes) -> None:
        """Parse `data`; empty data is the end of the connection, which may end the response."""
        if self._done is None:
            self.cut()
            return
        try:
            self._http.receive_data(data)
            while not self._done.done() and (event := self._http.next_event()) is not h11.NEED_DATA:
                if isinstance(event, h11.Response):
                    headers = {name.decode("ascii"): value.decode("latin-1") for name, value in event.headers}
                    self._answer = ResponseHead(event.status_code, headers)
                elif isinstance(event, h11.Data) and self._answer is not None:
                    self._on_part(self._answer, bytes(event.data))
                elif isinstance(event, h11.EndOfMessage) and self._answer is not None:
                    self._done.set_result(self._answer)
        except h11.RemoteProtocolError as error:
            self._end(HttpError("connection closed" if not data else f"no HTTP/1.1: {error}"))

    def _end(self, error: HttpError) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


class Connections:
    """A pool of connections to one server, most recently used first. Must be closed."""

    def __init__(self, host: str, port: int, *, is_tls: bool) -> None:
        self._host, self._port = host, port
        self._tls = ssl.create_default_context() if is_tls else None
        self._idle: list[_Connection] = []

    def close(self) -> None:
        """Close idle connections; those in use close with their request."""
        for connection in self._idle:
            connection.cut()

    async def exchange(
        self, request: str, headers: Mapping[str, str], body: bytes, *, on_part: OnPart, on_sent: OnSent = lambda: None
    ) -> ResponseHead:
        """Send a `request` ("GET /path") and read its response to the end.
        `on_part` gets the response's head and each chunk of its body; `on_sent` is called when the request is written
        to the open connection. Raises `HttpError`, or `OSError` if it cannot connect. Cancelling aborts the connection.
        """
        method, _, path = request.partition(" ")
        host = f"[{self._host}]" if ":" in self._host else self._host
        fields = {"Host": f"{host}:{self._port}", "Content-Length": str(len(body)), **headers}
        head = h11.Request(method=method, target=path, headers=list(fields.items()))
        connection = await self._connection()
        answer = await connection.exchange(head, body, on_sent, on_part)
        self._idle.append(connection)
        return answer

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable:
                return connection
            connection.cut()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port, ssl=self._tls)
        return connection
