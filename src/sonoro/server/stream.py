"""An answer on its way out: audio encoded as it is made, from the engine's stream to the client's connection.

Knows the engine's client and ASGI, not where the request came from. The headers go out with the first audio, so a
request that fails before it gets a status of its own; one that fails later ends in a broken body or an error event,
never as if it were whole.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sonoro.core.errors import EngineError, SonoroError
from sonoro.core.types import AudioChunk, Finished, SpeechRequest
from sonoro.server.encode import Encoder
from sonoro.server.errors import NotReady, Refusal, SlowReader, TooManyRequests, refusal
from sonoro.server.metrics import Observation
from sonoro.transport.client import EngineClient

__all__ = ["NO_ENGINE", "Gate", "Speech", "SpeechResponse", "error_response"]

logger = logging.getLogger(__name__)

DISCONNECTED = "disconnected"

NO_ENGINE = "the engine process ended, and another does not run yet"


class Gate:
    """At most `places` requests inside at once, at most `max_waiting` before it, each for `wait_s` at most."""

    def __init__(self, places: int, max_waiting: int, wait_s: float) -> None:
        self._free = asyncio.Semaphore(places)
        self._max_waiting, self._wait_s = max_waiting, wait_s
        self._waiting = 0

    @contextlib.asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """A place until the block ends. Raises `TooManyRequests` when none comes free in time."""
        await self._enter()
        try:
            yield
        finally:
            self._free.release()

    async def _enter(self) -> None:
        if self._free.locked() and self._waiting >= self._max_waiting:
            raise TooManyRequests(f"{self._waiting} requests are waiting already; try again later")
        self._waiting += 1
        try:
            async with asyncio.timeout(self._wait_s if self._free.locked() else None):
                await self._free.acquire()
        except TimeoutError as error:
            raise TooManyRequests(f"no place came free in {self._wait_s:g} s; try again later") from error
        finally:
            self._waiting -= 1


@dataclass(frozen=True)
class Speech:
    """What is to be spoken and how it is sent."""

    request: SpeechRequest
    encoder: Encoder
    is_events: bool

    @property
    def headers(self) -> dict[str, str]:
        kind = "text/event-stream" if self.is_events else self.encoder.content_type
        rate, name = str(self.encoder.rate), self.request.id
        return {"content-type": kind, "x-sample-rate": rate, "x-request-id": name, "cache-control": "no-store"}

    def packet(self, audio: bytes) -> bytes:
        """`audio` as it goes into the body."""
        if not self.is_events:
            return audio
        return _event({"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode()})

    def end(self, finished: Finished) -> bytes:
        """What the body says after the last audio. Its usage counts characters in and frames out."""
        if not self.is_events:
            return b""
        characters = len(self.request.text)
        usage = {
            "input_tokens": characters,
            "output_tokens": finished.frames,
            "total_tokens": characters + finished.frames,
        }
        return _event({"type": "speech.audio.done", "usage": usage, "finish_reason": finished.reason})


class SpeechResponse(Response):
    """Speaks into the connection, and stops as soon as the client is gone."""

    def __init__(
        self, speech: Speech, client: EngineClient, gate: Gate, observation: Observation, slow_reader_timeout_s: float
    ) -> None:
        super().__init__()
        self._speech, self._client, self._gate = speech, client, gate
        self._observation, self._timeout_s = observation, slow_reader_timeout_s
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        speaking = asyncio.create_task(self._answer(scope, receive, send))
        leaving = asyncio.create_task(_until_gone(receive))
        reason, is_whole = DISCONNECTED, False
        try:
            await asyncio.wait({speaking, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if speaking.done():
                reason, is_whole = speaking.result()
        except Exception:
            reason = "error"
            raise
        finally:
            await _drop(speaking, leaving)
            self._speech.encoder.close()
            self._note(reason, is_whole=is_whole)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> tuple[str, bool]:
        """Send everything; how it ended, and whether the client got the whole of it."""
        try:
            async with self._gate.place():
                # The engine may have ended while this one waited.
                if not self._client.is_ready:
                    raise NotReady(NO_ENGINE)
                async with contextlib.aclosing(self._client.stream(self._speech.request)) as stream:
                    return (await self._speak(stream, send)).reason, True
        except SonoroError as error:
            refused = refusal(error)
            if not self._has_begun:
                await error_response(refused, self._speech.request.id)(scope, receive, send)
            elif self._speech.is_events:
                await self._send(send, _event({"type": "error", **refused.body}), is_last=True)
            # A body of audio is left without its end: the connection is closed on it.
            return error.code, False

    async def _speak(self, stream: AsyncGenerator[AudioChunk | Finished, None], send: Send) -> Finished:
        encoder, speech = self._speech.encoder, self._speech
        async for event in stream:
            if isinstance(event, AudioChunk):
                self._observation.made(event.pcm)
                await self._send_audio(send, encoder.feed(event.pcm))
                continue
            if event.reason in ("cancelled", "error"):
                raise EngineError(f"the speech was cut off: {event.reason}")
            await self._send_audio(send, encoder.finish())
            await self._send(send, speech.end(event), is_last=True)
            return event
        raise AssertionError("a stream ends with its `Finished`")

    async def _send_audio(self, send: Send, audio: bytes) -> None:
        if audio:
            await self._send(send, self._speech.packet(audio))
            self._observation.sent()

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body, the headers before the first. Raises `SlowReader` if it is not taken in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self._has_begun:
                    self._has_begun = True
                    raw = [(name.encode(), value.encode()) for name, value in self._speech.headers.items()]
                    await send({"type": "http.response.start", "status": 200, "headers": raw})
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
        except TimeoutError as error:
            raise SlowReader(f"the client took nothing for {self._timeout_s:g} s") from error

    def _note(self, reason: str, *, is_whole: bool) -> None:
        seen, request = self._observation, self._speech.request
        seen.end(reason, is_whole=is_whole)
        logger.info(
            "event=request_ended id=%s reason=%s characters=%d audio_s=%.2f first_packet_ms=%s total_ms=%.0f",
            request.id,
            reason,
            len(request.text),
            seen.audio_s,
            "none" if seen.first_packet_s is None else f"{seen.first_packet_s * 1000:.0f}",
            seen.elapsed_s * 1000,
        )


def error_response(refused: Refusal, request_id: str | None = None) -> Response:
    """`refused` as an answer."""
    headers = refused.headers if request_id is None else {**refused.headers, "X-Request-Id": request_id}
    return Response(refused.payload, refused.status, headers, "application/json")


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def _until_gone(receive: Receive) -> None:
    """Wait until the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _drop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
