"""Streaming responses: encodes the engine's audio as it arrives, sends it, and measures that.

Headers are sent with the first part of the body: a request that fails before gets an error status; one that fails
later ends with an aborted body or an error event, never like a complete response."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sonoro.audio.encoders import Encoding
from sonoro.core.errors import EngineError, SonoroError
from sonoro.core.events import Fault, Timings
from sonoro.core.types import AudioChunk, Finished, SpeechRequest
from sonoro.server.connection import BODY, RESET, Cycle
from sonoro.server.errors import Refusal, RefusalResponse, SlowReader, refusal
from sonoro.server.gate import Gate
from sonoro.server.metrics import Metrics
from sonoro.text.script import Lexicon
from sonoro.transport.fleet import Fleet
from sonoro.transport.process import cancel_tasks

if TYPE_CHECKING:
    from sonoro.server.traces import Trace

Result = TypeVar("Result")

DISCONNECTED = "disconnected"

SILENCE_S = 0.2

SEND_BYTES = 256 * 1024
"""Sent of a body at once: to write more would hold the event loop."""


class Observation:
    """Measures one request from `arrived_s`, a time of `time.perf_counter`, until `end`.
    Its audio plays at `speed`. `dialect` is the client's wire format; "native" includes OpenAI's. `trace` is told too,
    if there is one."""

    def __init__(
        self,
        metrics: Metrics,
        sample_rate: int,
        arrived_s: float,
        speed: float = 1.0,
        dialect: str = "native",
        *,
        trace: Trace | None = None,
    ) -> None:
        self.trace = trace
        self._metrics, self._rate, self._arrived_s, self._speed = metrics, sample_rate, arrived_s, speed
        self._dialect, self._bytes, self._unsent_s, self._played_until_s = dialect, 0, 0.0, float("inf")
        self.first_packet_s: float | None = None
        metrics.in_flight.inc()
        # Labels are resolved once rather than for thousands of chunks per second; this also exports underruns at 0, so
        # that the first one shows as a rise.
        self._audio, self._underruns = (each.labels(metrics.model) for each in (metrics.audio, metrics.underruns))

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._arrived_s

    @property
    def audio_s(self) -> float:
        return self._bytes / 2 / self._rate

    def add_audio(self, pcm: bytes) -> None:
        """Add `pcm` (PCM16 mono) from the engine."""
        self._bytes += len(pcm)
        self._unsent_s += len(pcm) / 2 / self._rate / self._speed
        self._audio.inc(len(pcm) / 2 / self._rate)

    def mark_sent(self) -> None:
        """Note that all audio so far was sent, except for what the encoder holds back."""
        now_s = self.elapsed_s
        if self.first_packet_s is None:
            self.first_packet_s = self._played_until_s = now_s
            self._metrics.first_packet.labels(self._metrics.model, self._dialect).observe(now_s)
            if self.trace is not None:
                self.trace.send()
        elif now_s > self._played_until_s:
            self._underruns.inc()
        self._played_until_s = max(self._played_until_s, now_s) + self._unsent_s
        self._unsent_s = 0.0

    def mark_permit(self) -> None:
        """Note that the request has got its permit."""
        if self.trace is not None:
            self.trace.enter()

    def note(self, finished: Finished) -> None:
        """Note what the engine tells at the end."""
        self.count_faults(finished.faults)
        if self.trace is not None:
            self.trace.timings = finished.timings

    def count_faults(self, faults: Sequence[Fault]) -> None:
        """Count the `faults` that the engine reported."""
        for fault in faults:
            self._metrics.faults.labels(self._metrics.model, fault.kind, fault.outcome).inc()

    def end(self, reason: str, *, is_whole: bool) -> None:
        """Count the request by `reason`; its durations count only if the client got all of it."""
        model, elapsed_s = self._metrics.model, self.elapsed_s
        self._metrics.in_flight.dec()
        self._metrics.requests.labels(model, self._dialect, reason).inc()
        if is_whole:
            self._metrics.end_to_end.labels(model).observe(elapsed_s)
            if self._bytes:
                self._metrics.rtf.labels(model).observe(elapsed_s / self.audio_s)


class AudioBody:
    """The body of one response: here the encoded audio itself. Subclasses wrap it. At most `max_bytes` of it are held
    in memory until the end; 0 if it is sent as it comes."""

    max_bytes = 0

    def content_type(self, audio: str) -> str:
        """The content type of the body, given that of the encoded audio."""
        return audio

    def note(self, chunk: AudioChunk) -> None:
        """Note the engine's `chunk`. Its audio is in the next packet, or in later ones if the encoder holds it back."""

    def packet(self, audio: bytes) -> bytes:
        """The part of the body that carries `audio`, which is encoded; empty if it comes later."""
        return audio

    def end(self, finished: Finished, usage: dict[str, int]) -> bytes | bytearray:
        """The last part of the body, after all audio."""
        return b""

    def failure(self, refused: Refusal) -> bytes:
        """The last part of the body after an error; empty if the connection is aborted instead."""
        return b""


def ignored_header(fields: Sequence[str]) -> dict[str, str]:
    """The header that tells of `fields` of a body that nothing knows."""
    return {"x-sonoro-ignored": ", ".join(quote(name[:64]) for name in fields[:16])} if fields else {}


@dataclass(frozen=True)
class Speech:
    """A request and how its audio is sent. `name` is the client's id of it. It `is_silent` if its text has nothing to
    speak, such as a lone full stop. `lexicons` are those of a live text. `held` is closed with it. `owner` is the
    caller's. `ignored` are the fields of the body that nothing knows."""

    name: str
    request: SpeechRequest
    encoding: Encoding
    body: AudioBody = field(default_factory=AudioBody)
    is_silent: bool = False
    lexicons: Sequence[Lexicon] = ()
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    owner: str = ""
    ignored: Sequence[str] = ()

    @property
    def headers(self) -> dict[str, str]:
        kind, rate = self.body.content_type(self.encoding.encoder.content_type), self.encoding.encoder.rate
        # With this header nginx passes every part on at once, instead of waiting until a buffer is full.
        streamed = {"cache-control": "no-store", "x-accel-buffering": "no"}
        streamed |= ignored_header(self.ignored)
        if self.request.script is not None and (warnings := self.request.script.warnings):
            streamed["x-sonoro-warnings"] = str(len(warnings))
        return {"content-type": kind, "x-sample-rate": str(rate), **streamed}

    def usage(self, finished: Finished) -> dict[str, int]:
        """Characters in and frames out, as OpenAI's token counts."""
        characters = len(self.request.text)
        total = characters + finished.frames
        return {"input_tokens": characters, "output_tokens": finished.frames, "total_tokens": total}


async def encoded_audio(
    speech: Speech, client: Fleet, gate: Gate, observation: Observation
) -> AsyncGenerator[bytes | Finished, None]:
    """Yield the encoded audio of `speech` as it arrives, then `Finished`. Holds a permit while the engine works.
    Raises `TooManyRequests`, `NotReady`, and what `Fleet.open` and its stream raise."""
    async with _engine_events(speech, client, gate) as events:
        observation.mark_permit()
        async for event in events:
            if isinstance(event, AudioChunk):
                observation.add_audio(event.pcm)
                speech.body.note(event)
                if audio := await speech.encoding.feed(event.pcm, event.pause_s, event.voice):
                    yield audio
                continue
            if event.reason in ("cancelled", "error"):
                raise EngineError(f"the speech was cut off: {event.reason}")
            observation.note(event)
            if audio := await speech.encoding.finish():
                yield audio
            yield event
            return


@contextlib.asynccontextmanager
async def _engine_events(
    speech: Speech, client: Fleet, gate: Gate
) -> AsyncIterator[AsyncIterator[AudioChunk | Finished]]:
    """The events of `speech` from the engine, or of silence if it `is_silent`."""
    if speech.is_silent:
        script = speech.request.script
        pause_s = 0.0 if script is None else script.lead_s
        yield _listed(*silent_events(speech.request.id, speech.request.text, client.spec.sample_rate, pause_s))
        return
    async with (
        gate.acquire(speech.owner, len(speech.request.text)) as permit,
        contextlib.aclosing(await client.open(speech.request)) as stream,
    ):
        permit.follow(stream)
        yield stream


async def _listed(*events: AudioChunk | Finished) -> AsyncIterator[AudioChunk | Finished]:
    for event in events:
        yield event


def silent_events(request_id: str, text: str, sample_rate: int, pause_s: float = 0.0) -> tuple[AudioChunk, Finished]:
    """The events of a `text` with nothing to speak: its pause, or else `SILENCE_S` of silence; then `Finished`."""
    pcm = bytes(2 * round((pause_s or SILENCE_S) * sample_rate))
    chunk = AudioChunk(request_id=request_id, index=0, pcm=pcm, characters=len(text), pause_s=pause_s)
    timings = Timings(first_audio_s=0.0, total_s=0.0)
    return chunk, Finished(request_id=request_id, reason="stop", frames=0, characters=len(text), timings=timings)


def conclude(speech: Speech, observation: Observation, reason: str, *, is_whole: bool) -> dict[str, object]:
    """Count the end of `speech` and free its encoder and what it held; return the facts for the log."""
    speech.encoding.close()
    speech.held.close()
    observation.end(reason, is_whole=is_whole)
    first_s = observation.first_packet_s
    size = {"characters": len(speech.request.text), "audio_s": round(observation.audio_s, 2)}
    if observation.trace is not None:
        observation.trace.end(reason, {"id": speech.name, **size})
    return {
        "reason": reason,
        **size,
        "first_packet_ms": None if first_s is None else round(1000 * first_s),
    }


class SpeechResponse(Response):
    """Streams speech; stops as soon as the client disconnects."""

    def __init__(
        self, speech: Speech, client: Fleet, gate: Gate, observation: Observation, slow_reader_timeout_s: float
    ) -> None:
        super().__init__()
        self._speech, self._client, self._gate = speech, client, gate
        self._observation, self._timeout_s = observation, slow_reader_timeout_s
        self._has_begun = self._has_ended = False
        self._body: Cycle | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason, is_whole = "error", False
        self._body = scope["state"].pop(BODY, None)
        try:
            ended = await cancel_on_disconnect(receive, self._answer(scope, receive, send))
            reason, is_whole = ended or (DISCONNECTED, False)
        finally:
            scope["state"]["facts"] |= conclude(self._speech, self._observation, reason, is_whole=is_whole)
            if self._has_begun and not self._has_ended and scope["http_version"] == "1.0" and RESET in scope["state"]:
                # In HTTP/1.0, which many proxies still use, a normal close would mark the body as complete.
                scope["state"][RESET]()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> tuple[str, bool]:
        """Send the response; return the reason of its end, and whether the client got all of it."""
        try:
            arguments = self._speech, self._client, self._gate, self._observation
            async with contextlib.aclosing(encoded_audio(*arguments)) as parts:
                async for part in parts:
                    if isinstance(part, Finished):
                        last = self._speech.body.end(part, self._speech.usage(part))
                        await self._send(send, last, is_last=True)
                        if self._observation.first_packet_s is None:
                            self._observation.mark_sent()
                        return part.reason, True
                    if packet := self._speech.body.packet(part):
                        await self._send(send, packet)
                        self._observation.mark_sent()
            raise AssertionError("a stream ends with its `Finished`")
        except SonoroError as error:
            refused = refusal(error)
            if not self._has_begun:
                await RefusalResponse(refused)(scope, receive, send)
            elif not isinstance(error, SlowReader) and (last := self._speech.body.failure(refused)):
                await self._send(send, last, is_last=True)
            # Any other body stays incomplete: uvicorn closes the connection.
            return error.code, False

    async def _send(self, send: Send, body: bytes | bytearray, *, is_last: bool = False) -> None:
        """Send the headers, if they were not, and a part of the body. Raises `SlowReader` if it is not read in time."""
        if not self._has_begun:
            self._has_begun = True
            headers = self._speech.headers | self._gate.headers(self._speech.owner)
            if self._observation.trace is not None:
                headers |= self._observation.trace.headers
            raw = [(name.encode(), value.encode()) for name, value in headers.items()]
            async with taken_within(self._timeout_s):
                await send({"type": "http.response.start", "status": 200, "headers": raw})
        if self._body is not None and body and len(body) <= SEND_BYTES:
            if not self._body.write(body):
                async with taken_within(self._timeout_s):
                    await self._body.drain()
            body = b""
        await send_body(send, body, self._timeout_s, is_last=is_last)
        self._has_ended = is_last


async def send_body(send: Send, part: bytes | bytearray | memoryview, limit_s: float, *, is_last: bool = False) -> None:
    """Send `part` of a body, `SEND_BYTES` at once. Raises `SlowReader` if the client takes nothing for `limit_s`."""
    view = memoryview(part)
    for start in range(0, len(view), SEND_BYTES):
        async with taken_within(limit_s):
            piece = bytes(view[start : start + SEND_BYTES])
            await send({"type": "http.response.body", "body": piece, "more_body": True})
    if is_last:
        async with taken_within(limit_s):
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.asynccontextmanager
async def taken_within(limit_s: float, parts: int = 1) -> AsyncIterator[None]:
    """A context for sending. Raises `SlowReader` if the client does not take each of the `parts` within `limit_s`."""
    try:
        async with asyncio.timeout(limit_s * parts):
            yield
    except TimeoutError as error:
        raise SlowReader(f"the client took nothing for {limit_s:g} s") from error


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`, or None if the client disconnects first, which cancels the work."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        await cancel_tasks(working, leaving)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
