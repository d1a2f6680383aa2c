"""Requests to a speech server over HTTP, with the arrival times of each chunk of the response."""

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

from sonoro.bench.http1 import Connections, HttpError, ResponseHead
from sonoro.bench.metrics import Exchange
from sonoro.core.errors import ConfigError, EngineError

_SPEECH, _MODELS = "/audio/speech", "/models"
_OK = 200
_OTHERS = (
    *("audio/mpeg", "audio/mp3", "audio/ogg", "audio/opus", "audio/aac", "audio/flac"),
    *("audio/wav", "audio/x-wav", "audio/wave", "application/json"),
)
"""Content types of responses that are not raw PCM."""


@dataclass(frozen=True)
class Target:
    """The server, and how requests to it are made: options of `sonoro bench serve`. Raises `ConfigError`.
    `url` is that of the server, of its API (ending in a version such as `/v1`) or of its speech endpoint."""

    url: str
    model: str | None = None
    voice: str = "alloy"
    api_key: str | None = field(default=None, repr=False)
    extra: Mapping[str, Any] = field(default_factory=dict)
    sample_rate: int = 24000
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        try:
            url = urlsplit(self.url)
            is_web = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
        except ValueError as error:
            raise ConfigError("url", self.url, f"it must be an address ({error})") from error
        limit = 'it must begin with http:// or https://, as "http://localhost:8000"'
        ConfigError.unless(is_web, "url", self.url, limit)
        is_plain = not (url.username or url.query or url.fragment) and all("!" <= letter <= "~" for letter in self.url)
        ConfigError.unless(is_plain, "url", self.url, "it must be ASCII, with no space, user, query or fragment")
        ConfigError.unless(self.sample_rate >= 1, "sample_rate", self.sample_rate, "it must be at least 1")
        ConfigError.unless(self.timeout_s > 0, "timeout_s", self.timeout_s, "it must be above 0")
        key = self.api_key or ""
        ConfigError.unless(key.isascii() and key.isprintable(), "api_key", "(not shown)", "it must be printable ASCII")

    @property
    def api(self) -> str:
        """The API's base URL."""
        base = self.url.rstrip("/").removesuffix(_SPEECH)
        return base if urlsplit(base).path else f"{base}/v1"


class SpeechClient:
    """A client of `target` with kept-alive connections. An asynchronous context manager."""

    name = "raw"

    def __init__(self, target: Target) -> None:
        self.target = target
        url = urlsplit(target.api)
        assert url.hostname is not None
        port = url.port or (443 if url.scheme == "https" else 80)
        self._connections = Connections(url.hostname, port, is_tls=url.scheme == "https")
        self._path = url.path
        self._headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
        if target.api_key is not None:
            self._headers["Authorization"] = f"Bearer {target.api_key}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._connections.close()

    async def listed(self) -> dict[str, Any]:
        """The server's entry for `target.model`, or for its first model. Raises `EngineError`."""
        url, listing = self.target.api + _MODELS, bytearray()
        try:
            async with asyncio.timeout(self.target.timeout_s):
                answer = await self._connections.exchange(
                    f"GET {self._path}{_MODELS}", self._headers, b"", on_part=lambda _, data: listing.extend(data)
                )
        except (HttpError, OSError) as error:
            raise EngineError(f"GET {url}: {str(error) or 'no answer in time'}") from error
        if answer.status != _OK:
            raise EngineError(f"GET {url}: status {answer.status}")
        try:
            return next(dict(one) for one in json.loads(listing)["data"] if self.target.model in (None, one["id"]))
        except (ValueError, LookupError, TypeError, StopIteration) as error:
            raise EngineError(f"GET {url} lists no model{'; give one' * (self.target.model is None)}") from error

    async def speak(self, body: Mapping[str, Any], due_s: float) -> Exchange:
        """Send a request and read its response to the end. Failures are not raised but noted in the exchange's
        `error`."""
        exchange, payload = Exchange(due_s), json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": "application/json"}

        def note_sent() -> None:
            exchange.sent_s = time.perf_counter()

        def note_part(answer: ResponseHead, data: bytes) -> None:
            if not exchange.has_head:
                self._note_head(exchange, answer.status, answer.headers)
            exchange.take(data, time.perf_counter())

        try:
            async with asyncio.timeout(self.target.timeout_s):
                request = f"POST {self._path}{_SPEECH}"
                call = self._connections.exchange(request, headers, payload, on_sent=note_sent, on_part=note_part)
                answer = await call
            if not exchange.has_head:
                self._note_head(exchange, answer.status, answer.headers)
        except TimeoutError:
            exchange.fail("timeout")
        except HttpError as error:
            exchange.fail("broken stream" if exchange.arrivals else str(error))
        except OSError as error:
            exchange.fail(type(error).__name__)
        exchange.end(time.perf_counter())
        return exchange

    def _note_head(self, exchange: Exchange, status: int, headers: Mapping[str, str]) -> None:
        """Note the sample rate of the audio that follows, or the failure."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        rate = headers.get("x-sample-rate", str(self.target.sample_rate))
        if status != _OK:
            exchange.fail(f"status {status}")
        elif kind in _OTHERS or kind.startswith("text/"):
            exchange.fail(f"{kind} instead of pcm")
        elif not rate.isdecimal() or int(rate) < 1:
            exchange.fail("X-Sample-Rate is not a rate")
        else:
            exchange.sample_rate = int(rate)
