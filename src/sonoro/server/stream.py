"""Streaming responses: encodes the engine's audio as it arrives and sends it, with concurrency limited by a `Gate`.

Headers are sent with the first part of the body: a request that fails before gets an error status; one that fails
later ends with an aborted body or an error event, never like a complete response.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sonoro.audio.encoders import Encoding
from sonoro.core.errors import EngineError, SonoroError
from sonoro.core.events import Word, at_speed
from sonoro.core.types import AudioChunk, Finished, SpeechRequest, Timings
from sonoro.server.errors import (
    AnswerTooLarge,
    NotReady,
    Refusal,
    RefusalResponse,
    SlowReader,
    TooManyRequests,
    refusal,
)
from sonoro.server.metrics import Observation
from sonoro.server.middleware import RESET
from sonoro.transport.client import RequestStream
from sonoro.transport.fleet import Fleet
from sonoro.transport.launch import cancel_tasks

Result = TypeVar("Result")

DISCONNECTED = "disconnected"

NO_ENGINE = "the engine process ended or hangs, and another does not run yet"

SILENCE_S = 0.2

MAX_UNREAD_BYTES = 256 * 2**20
"""Bound of the unread audio of finished requests whose permits were released; requests with a permit are not counted.
"""

_FACTS_BYTES, _WORD_BYTES = 1024, 176
"""Upper bounds in JSON of a result without its audio and words, and of a word, whose characters may be escaped."""


@dataclass(eq=False)
class _Waiter:
    """A request that has waited for a permit since `since_s`, a time of the event loop."""

    permit: asyncio.Future[None]
    since_s: float


class Permit:
    """The right to run a request. Released when the engine has finished the stream that it follows, even while the
    client still reads; without a stream, at the end of the block that acquired it."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._stream = gate, cast(RequestStream | None, None)
        self._unread_bytes, self._is_held, self._is_over = 0, True, False

    def follow(self, stream: RequestStream) -> None:
        """Hold the permit until the engine has finished `stream`."""
        self._stream = stream
        stream.on_done(self._end)

    def _end(self) -> None:
        """Release the permit, unless the unread audio would exceed the gate's `MAX_UNREAD_BYTES`."""
        unread_bytes = 0 if self._is_over or self._stream is None else self._stream.unread_bytes
        if self._gate.unread_bytes + unread_bytes <= MAX_UNREAD_BYTES:
            self._unread_bytes = unread_bytes
            self._gate.unread_bytes += unread_bytes
            self._release()

    def _close(self) -> None:
        self._is_over = True
        self._gate.unread_bytes -= self._unread_bytes
        if self._stream is None or self._stream.is_ended:
            self._release()

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._gate.release()


class Gate:
    """Admits at most `max_concurrency` requests at once; at most `max_waiting` others wait, each for `wait_s` at most.

    `share` returns the fraction of `max_concurrency` that can run now: below 1 while one of several engines is down, 0
    without any; running requests are not affected. Waiters are admitted FIFO until the oldest has waited for half of
    `wait_s`, then LIFO: under overload some requests are then served soon, where FIFO would serve each just before its
    timeout.
    """

    def __init__(
        self, max_concurrency: int, max_waiting: int, wait_s: float, share: Callable[[], float] = lambda: 1.0
    ) -> None:
        self._max_concurrency, self._max_waiting, self._wait_s = max_concurrency, max_waiting, wait_s
        self._share, self._running = share, 0
        self._waiting: deque[_Waiter] = deque()
        self.unread_bytes = 0
        """Unread audio of finished requests whose permits were released."""

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return len(self._waiting)

    @property
    def longest_wait_s(self) -> float:
        """How long the oldest waiting request has waited; 0 if none waits."""
        return asyncio.get_running_loop().time() - self._waiting[0].since_s if self._waiting else 0.0

    @contextlib.asynccontextmanager
    async def acquire(self) -> AsyncIterator[Permit]:
        """Acquire a permit for the block. Raises `TooManyRequests` if none is free in time or too many wait, `NotReady`
        if no engine runs."""
        await self._wait()
        permit = Permit(self)
        try:
            yield permit
        finally:
            permit._close()

    async def _wait(self) -> None:
        self.wake_waiters()
        if self._has_room:
            self._running += 1
            return
        if len(self._waiting) >= self._max_waiting:
            raise TooManyRequests(f"{self.waiting} requests are waiting already; try again later")
        loop = asyncio.get_running_loop()
        waiter = _Waiter(loop.create_future(), loop.time())
        self._waiting.append(waiter)
        try:
            async with asyncio.timeout(self._wait_s):
                await waiter.permit
        except (TimeoutError, asyncio.CancelledError) as error:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            elif not waiter.permit.cancelled():
                # The permit was granted just as the waiter gave up.
                self.release()
            if isinstance(error, asyncio.CancelledError):
                raise
            if not self._share():
                raise NotReady(f"{NO_ENGINE}; the request waited for {self._wait_s:g} s") from error
            raise TooManyRequests(f"no request ended within {self._wait_s:g} s; try again later") from error

    def release(self) -> None:
        """Release a permit."""
        self._running -= 1
        self.wake_waiters()

    @property
    def _has_room(self) -> bool:
        share = self._share()
        return share > 0 and self._running < max(1, round(self._max_concurrency * share))

    def wake_waiters(self) -> None:
        """Admit as many waiters as may run. Call it when `share` may have risen."""
        now_s = asyncio.get_running_loop().time()
        while self._waiting and self._has_room:
            is_overloaded = now_s - self._waiting[0].since_s > self._wait_s / 2
            waiter = self._waiting.pop() if is_overloaded else self._waiting.popleft()
            if not waiter.permit.done():
                waiter.permit.set_result(None)
                self._running += 1


def json_bytes(audio_bytes: int) -> int:
    """An upper bound of a JSON object with so much encoded audio in base64, without words."""
    return math.ceil(audio_bytes / 3) * 4 + _FACTS_BYTES


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

    def end(self, finished: Finished, usage: dict[str, int]) -> bytes:
        """The last part of the body, after all audio."""
        return b""

    def failure(self, refused: Refusal) -> bytes:
        """The last part of the body after an error; empty if the connection is aborted instead."""
        return b""


class _WordsBody(AudioBody):
    """A body with word times at `speed`. `told` holds the words not sent yet; None if the model gives none so far."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self.told: list[dict[str, Any]] | None = None

    def note(self, chunk: AudioChunk) -> None:
        self._tell(chunk.words)

    def _tell(self, words: tuple[Word, ...] | None) -> None:
        if words is not None:
            made = [msgspec.to_builtins(word) for word in at_speed(words, self._speed)]
            self.told = [*(self.told or []), *made]


class EventBody(_WordsBody):
    """OpenAI's server-sent events with audio, and events with the words whose times are final."""

    def content_type(self, audio: str) -> str:
        return "text/event-stream"

    def packet(self, audio: bytes) -> bytes:
        delta = sse_event({"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode()})
        return delta + self._words()

    def end(self, finished: Finished, usage: dict[str, int]) -> bytes:
        self._tell(finished.words)
        done = {"type": "speech.audio.done", "usage": usage, "finish_reason": finished.reason, **told_faults(finished)}
        return self._words() + sse_event(done)

    def _words(self) -> bytes:
        told, self.told = self.told, None
        return sse_event({"type": "speech.words", "words": told}) if told else b""

    def failure(self, refused: Refusal) -> bytes:
        return sse_event({"type": "error", **refused.body})


def told_faults(finished: Finished) -> dict[str, object]:
    """The field `faults` of a body; {} without faults."""
    return {"faults": msgspec.to_builtins(finished.faults)} if finished.faults else {}


class JSONBody(_WordsBody):
    """One JSON object with the audio, in `format`, and the words of a text of `characters`, or of
    none by default. The audio may have `audio_bytes`; `packet` raises `AnswerTooLarge` beyond that."""

    def __init__(self, speed: float, format: str, audio_bytes: int, characters: int = 0) -> None:
        super().__init__(speed)
        self._format, self._audio, self._audio_bytes = format, bytearray(), audio_bytes
        self.max_bytes = json_bytes(audio_bytes) + _WORD_BYTES * characters

    def content_type(self, audio: str) -> str:
        return "application/json"

    def packet(self, audio: bytes) -> bytes:
        if len(self._audio) + len(audio) > self._audio_bytes:
            # For example numbers: few letters, many words.
            raise AnswerTooLarge(
                f"input: its audio takes more than {self._audio_bytes} bytes; ask for stream_format sse or audio"
            )
        self._audio += audio
        return b""

    def end(self, finished: Finished, usage: dict[str, int]) -> bytes:
        self._tell(finished.words)
        audio = base64.b64encode(self._audio).decode()
        facts = {"finish_reason": finished.reason, "usage": usage, "words": self.told, **told_faults(finished)}
        return json.dumps({"audio": audio, "format": self._format, **facts}).encode()


@dataclass(frozen=True)
class Speech:
    """A request and how its audio is sent. `name` is the client's id of it. It `is_silent` if its text has nothing to
    speak, such as a lone full stop. `held` is closed with it."""

    name: str
    request: SpeechRequest
    encoding: Encoding
    body: AudioBody = field(default_factory=AudioBody)
    is_silent: bool = False
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @property
    def headers(self) -> dict[str, str]:
        kind = self.body.content_type(self.encoding.encoder.content_type)
        return {"content-type": kind, "x-sample-rate": str(self.encoding.encoder.rate), "cache-control": "no-store"}

    def usage(self, finished: Finished) -> dict[str, int]:
        """Characters in and frames out, as OpenAI's token counts."""
        characters = len(self.request.text)
        total = characters + finished.frames
        return {"input_tokens": characters, "output_tokens": finished.frames, "total_tokens": total}


async def encoded_audio(
    speech: Speech, client: Fleet, gate: Gate, observation: Observation
) -> AsyncGenerator[bytes | Finished, None]:
    """Yield the encoded audio of `speech` as it arrives, then `Finished`. Holds a permit while the engine works.

    Raises `TooManyRequests`, `NotReady`, and what `Fleet.open` and its stream raise.
    """
    async with contextlib.aclosing(_engine_events(speech, client, gate)) as events:
        async for event in events:
            if isinstance(event, AudioChunk):
                observation.made(event.pcm)
                speech.body.note(event)
                if audio := await speech.encoding.feed(event.pcm):
                    yield audio
                continue
            if event.reason in ("cancelled", "error"):
                raise EngineError(f"the speech was cut off: {event.reason}")
            observation.caught(event.faults)
            if audio := await speech.encoding.finish():
                yield audio
            yield event
            return


async def _engine_events(speech: Speech, client: Fleet, gate: Gate) -> AsyncGenerator[AudioChunk | Finished, None]:
    """The events of `speech` from the engine, or of silence if it `is_silent`."""
    if speech.is_silent:
        for event in silent_events(speech.request.id, speech.request.text, client.spec.sample_rate):
            yield event
        return
    async with gate.acquire() as permit, contextlib.aclosing(await client.open(speech.request)) as stream:
        permit.follow(stream)
        async for event in stream:
            yield event


def silent_events(request_id: str, text: str, sample_rate: int) -> tuple[AudioChunk, Finished]:
    """The events of a `text` with nothing to speak: `SILENCE_S` of silence, then `Finished`."""
    pcm = bytes(2 * round(SILENCE_S * sample_rate))
    chunk = AudioChunk(request_id=request_id, index=0, pcm=pcm, characters=len(text))
    end = Finished(
        request_id=request_id,
        reason="stop",
        frames=0,
        characters=len(text),
        timings=Timings(first_audio_s=0.0, total_s=0.0),
    )
    return chunk, end


def conclude(speech: Speech, observation: Observation, reason: str, *, is_whole: bool) -> dict[str, object]:
    """Count the end of `speech` and free its encoder and what it held; return the facts for the log."""
    speech.encoding.close()
    speech.held.close()
    observation.end(reason, is_whole=is_whole)
    first_s = observation.first_packet_s
    return {
        "reason": reason,
        "characters": len(speech.request.text),
        "audio_s": round(observation.audio_s, 2),
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

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason, is_whole = "error", False
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
                            self._observation.sent()
                        return part.reason, True
                    if packet := self._speech.body.packet(part):
                        await self._send(send, packet)
                        self._observation.sent()
            raise AssertionError("a stream ends with its `Finished`")
        except SonoroError as error:
            refused = refusal(error)
            if not self._has_begun:
                await RefusalResponse(refused)(scope, receive, send)
            elif not isinstance(error, SlowReader) and (last := self._speech.body.failure(refused)):
                await self._send(send, last, is_last=True)
            # Any other body stays incomplete: uvicorn closes the connection.
            return error.code, False

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        """Send the headers, if they were not, and a part of the body. Raises `SlowReader` if it is not read in time."""
        async with taken_within(self._timeout_s):
            if not self._has_begun:
                self._has_begun = True
                raw = [(name.encode(), value.encode()) for name, value in self._speech.headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": raw})
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})
            self._has_ended = is_last


@contextlib.asynccontextmanager
async def taken_within(limit_s: float) -> AsyncIterator[None]:
    """A context for sending. Raises `SlowReader` if the client does not take the data within `limit_s`."""
    try:
        async with asyncio.timeout(limit_s):
            yield
    except TimeoutError as error:
        raise SlowReader(f"the client took nothing for {limit_s:g} s") from error


def sse_event(data: dict[str, Any]) -> bytes:
    """Encode `data` as a server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


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
