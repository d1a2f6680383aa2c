"""One request to a speech server over HTTP, and when each part of its answer came. Knows no load."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from sonoro.bench.metrics import Exchange
from sonoro.core.errors import ConfigError, EngineError

__all__ = ["SpeechClient", "Target"]

_SPEECH, _MODELS = "/audio/speech", "/models"
_KEEP_ALIVE_S = 2.0
"""Below the five seconds of common servers, so that none closes a connection just as it is used again."""
_LAST_PORT = 65535
_COMPRESSED = ("audio/mpeg", "audio/mp3", "audio/ogg", "audio/opus", "audio/aac", "audio/flac")
_CONTAINED = ("audio/wav", "audio/x-wav", "audio/wave")


@dataclass(frozen=True)
class Target:
    """The server and how it is asked.

    `url`: of the server, of its API (ending in a version as `/v1`) or of its speech endpoint itself. `model`: if None,
    the first that the server lists. `extra`: fields of the body over ours; null leaves one out. `sample_rate`: of
    answers that name none. `timeout_s`: for a whole answer. Raises `ConfigError` naming the field.
    """

    url: str
    model: str | None = None
    voice: str = "alloy"
    api_key: str | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    sample_rate: int = 24000
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        try:
            url = httpx.URL(self.url)
        except httpx.InvalidURL as error:
            raise ConfigError("url", self.url, f"it must be an address ({error})") from error
        if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > _LAST_PORT:
            raise ConfigError("url", self.url, 'it must begin with http:// or https://, as "http://localhost:8000"')
        if self.sample_rate < 1:
            raise ConfigError("sample_rate", self.sample_rate, "it must be at least 1")
        if not self.timeout_s > 0:
            raise ConfigError("timeout_s", self.timeout_s, "it must be above 0")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            raise ConfigError("api_key", "(not shown)", "it must be printable ASCII")

    @property
    def api(self) -> str:
        """The address that both endpoints follow."""
        base = self.url.rstrip("/").removesuffix(_SPEECH)
        return base if httpx.URL(base).path != "/" else f"{base}/v1"


class SpeechClient:
    """Connections to the server of `target`, kept for the requests after. An asynchronous context manager."""

    def __init__(self, target: Target) -> None:
        self._target, self._speech = target, target.api + _SPEECH
        self._headers = {"Accept-Encoding": "identity"}
        if target.api_key is not None:
            self._headers["Authorization"] = f"Bearer {target.api_key}"
        self._tls = ssl.create_default_context()
        self._all: list[httpx.AsyncClient] = []
        self._idle: list[httpx.AsyncClient] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        for http in self._all:
            await http.aclose()

    @contextlib.contextmanager
    def _connection(self) -> Iterator[httpx.AsyncClient]:
        """A client that nobody else uses now, the one that was used last if any.

        Each has one connection: the library's own pool looks at all of them for every request, which at 256 delayed
        requests by seconds.
        """
        http = self._idle.pop() if self._idle else self._connect()
        try:
            yield http
        finally:
            self._idle.append(http)

    def _connect(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=_KEEP_ALIVE_S)
        # Proxies of the environment are left alone: they would be measured too. Each request has its own time limit.
        http = httpx.AsyncClient(headers=self._headers, verify=self._tls, limits=limits, timeout=None, trust_env=False)
        self._all.append(http)
        return http

    async def model(self) -> str:
        """The model that is asked for. Raises `EngineError` if it is the server's to say and it does not."""
        if self._target.model is not None:
            return self._target.model
        url = self._target.api + _MODELS
        try:
            async with asyncio.timeout(self._target.timeout_s):
                with self._connection() as http:
                    answer = await http.get(url)
            listed = answer.raise_for_status().json()
            return str(listed["data"][0]["id"])
        except (httpx.HTTPError, TimeoutError) as error:
            raise EngineError(f"GET {url}: {error or 'no answer in time'}") from error
        except (ValueError, LookupError, TypeError) as error:
            raise EngineError(f"GET {url} lists no model; give one") from error

    async def speak(self, body: Mapping[str, Any], due_s: float) -> Exchange:
        """Send a request and hear its answer to the end. A failure is in the exchange's `error`, none is raised."""
        exchange = Exchange(due_s)

        async def note(event: str, info: Mapping[str, Any]) -> None:
            if event.endswith("send_request_body.started"):
                exchange.sent_s = time.perf_counter()

        try:
            with self._connection() as http:
                async with (
                    asyncio.timeout(self._target.timeout_s),
                    http.stream("POST", self._speech, json=body, extensions={"trace": note}) as response,
                ):
                    exchange.error = await self._listen(response, exchange)
        except TimeoutError:
            exchange.error = "timeout"
        except httpx.HTTPError as error:
            exchange.error = "broken stream" if exchange.arrivals else type(error).__name__
        exchange.ended_s = time.perf_counter()
        return exchange

    async def _listen(self, response: httpx.Response, exchange: Exchange) -> str | None:
        """Note the body as it comes; what is wrong with it, if anything."""
        if response.status_code != httpx.codes.OK:
            await response.aread()
            return f"status {response.status_code}"
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind in _COMPRESSED or kind in _CONTAINED or kind == "application/json" or kind.startswith("text/"):
            return f"{kind} instead of pcm"
        rate = response.headers.get("X-Sample-Rate", str(self._target.sample_rate))
        exchange.sample_rate = int(rate) if rate.isdecimal() else 0
        if exchange.sample_rate < 1:
            return "X-Sample-Rate is not a rate"
        async for data in response.aiter_raw():
            exchange.take(data, time.perf_counter())
        if not exchange.samples:
            return "no audio"
        return "ended inside a sample" if exchange.has_part_of_a_sample else None
