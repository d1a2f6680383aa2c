"""An answer on its way out: audio encoded as it is made, from the engine's stream to the client's connection.

Knows the engines' client and ASGI, not where the request came from. The headers go out with the first audio, so a
request that fails before it gets a status of its own; one that fails later ends in a broken body or an error event,
never as if it were whole.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from sonoro.core.errors import EngineError, SonoroError
from sonoro.core.types import AudioChunk, Finished, SpeechRequest, Timings
from sonoro.core.words import Word, at_speed
from sonoro.server.encode import Encoding
from sonoro.server.errors import NotReady, Refusal, SlowReader, TooManyRequests, refusal
from sonoro.server.metrics import Observation
from sonoro.server.middleware import CLIENT_GONE, RESET
from sonoro.transport.answer import RequestStream
from sonoro.transport.fleet import Fleet

__all__ = [
    "CLIENT_GONE",
    "DISCONNECTED",
    "NO_ENGINE",
    "REFUSAL_SHAPE",
    "AudioBody",
    "EventBody",
    "Gate",
    "JSONBody",
    "Permit",
    "RefusalResponse",
    "Speech",
    "SpeechResponse",
    "cancel_on_disconnect",
    "conclude",
    "encoded_audio",
    "silent_events",
    "sse_event",
]

Result = TypeVar("Result")

DISCONNECTED = "disconnected"

REFUSAL_SHAPE = "refusal_shape"
"""The name, in the state of a request's scope, of what makes an answer of a `Refusal` and the request's id."""

NO_ENGINE = "the engine process ended or hangs, and another does not run yet"

SILENCE_S = 0.2

MAX_UNREAD_BYTES = 256 * 2**20
"""How much audio may wait for clients that read slowly, beside that of the requests that hold a place."""


@dataclass(eq=False)
class _Waiter:
    """One who waits at a gate since `since_s`, on the clock of the event loop."""

    permit: asyncio.Future[None]
    since_s: float


class Permit:
    """A place inside a gate. It is given back once the engine is done with the answer that it follows, though the
    client may still have to read, or at the end of the block that it was given for if it follows none."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._answer = gate, cast(RequestStream | None, None)
        self._unread_bytes, self._is_held, self._is_over = 0, True, False

    def follow(self, answer: RequestStream) -> None:
        """The place is for the engine's work on `answer`."""
        self._answer = answer
        answer.on_done(self._end)

    def _end(self) -> None:
        """The engine is done. What its client has not read takes memory: beyond a bound it goes on taking a place."""
        unread_bytes = 0 if self._is_over or self._answer is None else self._answer.unread_bytes
        if self._gate.unread_bytes + unread_bytes <= MAX_UNREAD_BYTES:
            self._unread_bytes = unread_bytes
            self._gate.unread_bytes += unread_bytes
            self._release()

    def _close(self) -> None:
        self._is_over = True
        self._gate.unread_bytes -= self._unread_bytes
        if self._answer is None or self._answer.is_ended:
            self._release()

    def _release(self) -> None:
        if self._is_held:
            self._is_held = False
            self._gate.release()


class Gate:
    """At most `places` requests inside at once, at most `max_waiting` before it, each for `wait_s` at most.

    `share` tells how much of the places there is now, as while one engine of several is down, or none while there is no
    engine; nobody inside is put out. The first to come is the next to enter, until it has waited for half of `wait_s`.
    Then more come than can be served, and the last to come is the next: who is served is served soon, instead of
    everybody just before being refused.
    """

    def __init__(self, places: int, max_waiting: int, wait_s: float, share: Callable[[], float] = lambda: 1.0) -> None:
        self._places, self._max_waiting, self._wait_s, self._share = places, max_waiting, wait_s, share
        self._inside = 0
        self._waiting: deque[_Waiter] = deque()
        self.unread_bytes = 0
        """Audio of answers that the engine is done with and whose clients have not read it."""

    @property
    def waiting(self) -> int:
        """How many are before the gate."""
        return len(self._waiting)

    @property
    def longest_wait_s(self) -> float:
        """How long the first of them has waited; 0 if there is none."""
        return asyncio.get_running_loop().time() - self._waiting[0].since_s if self._waiting else 0.0

    @contextlib.asynccontextmanager
    async def acquire(self) -> AsyncIterator[Permit]:
        """A place for what is done in the block. Raises `TooManyRequests` when none comes free in time, `NotReady` if
        there is no engine by then."""
        await self._enter()
        permit = Permit(self)
        try:
            yield permit
        finally:
            permit._close()

    async def _enter(self) -> None:
        self.wake_waiters()
        if self._has_room:
            self._inside += 1
            return
        if len(self._waiting) >= self._max_waiting:
            raise TooManyRequests(f"{self.waiting} requests are waiting already; try again later")
        loop = asyncio.get_running_loop()
        waiting = _Waiter(loop.create_future(), loop.time())
        self._waiting.append(waiting)
        try:
            async with asyncio.timeout(self._wait_s):
                await waiting.permit
        except BaseException as error:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif not waiting.permit.cancelled():
                # Its place came in the moment it gave up.
                self.release()
            if isinstance(error, TimeoutError):
                if not self._share():
                    raise NotReady(f"{NO_ENGINE}; it was waited for {self._wait_s:g} s") from error
                raise TooManyRequests(f"no place came free in {self._wait_s:g} s; try again later") from error
            raise

    def release(self) -> None:
        """A place is free again."""
        self._inside -= 1
        self.wake_waiters()

    @property
    def _has_room(self) -> bool:
        share = self._share()
        return share > 0 and self._inside < max(1, round(self._places * share))

    def wake_waiters(self) -> None:
        """Let in those for whom there is room; to be called when `share` may tell of more."""
        now_s = asyncio.get_running_loop().time()
        while self._waiting and self._has_room:
            is_overloaded = now_s - self._waiting[0].since_s > self._wait_s / 2
            waiting = self._waiting.pop() if is_overloaded else self._waiting.popleft()
            if not waiting.permit.done():
                waiting.permit.set_result(None)
                self._inside += 1


class AudioBody:
    """How an answer is put together: here it is the audio itself. Belongs to one answer."""

    def content_type(self, audio: str) -> str:
        """Of the body, whose audio has the type `audio`."""
        return audio

    def note(self, chunk: AudioChunk) -> None:
        """`chunk` has been made: its audio is in this packet or, where an encoder holds it back, in later ones."""

    def packet(self, audio: bytes) -> bytes:
        """`audio`, encoded, as it goes into the body."""
        return audio

    def end(self, finished: Finished, usage: dict[str, int]) -> bytes:
        """What the body says after the last audio."""
        return b""

    def failure(self, refused: Refusal) -> bytes:
        """What it says in place of the rest; nothing where the connection is closed on it instead."""
        return b""


class _WordsBody(AudioBody):
    """One with room for words, whose audio is played at `speed`: `told` are those that no packet has held yet, None as
    long as there were none to tell."""

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
    """Events of OpenAI's API that hold the audio, and events that hold the words whose times have become certain."""

    def content_type(self, audio: str) -> str:
        return "text/event-stream"

    def packet(self, audio: bytes) -> bytes:
        delta = sse_event({"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode()})
        return delta + self._words()

    def end(self, finished: Finished, usage: dict[str, int]) -> bytes:
        self._tell(finished.words)
        done = {"type": "speech.audio.done", "usage": usage, "finish_reason": finished.reason}
        return self._words() + sse_event(done)

    def _words(self) -> bytes:
        told, self.told = self.told, None
        return sse_event({"type": "speech.words", "words": told}) if told else b""

    def failure(self, refused: Refusal) -> bytes:
        return sse_event({"type": "error", **refused.body})


class JSONBody(_WordsBody):
    """All of it as one object: the audio, of `format`, and its words."""

    def __init__(self, speed: float, format: str) -> None:
        super().__init__(speed)
        self._format, self._audio = format, bytearray()

    def content_type(self, audio: str) -> str:
        return "application/json"

    def packet(self, audio: bytes) -> bytes:
        self._audio += audio
        return b""

    def end(self, finished: Finished, usage: dict[str, int]) -> bytes:
        self._tell(finished.words)
        audio = base64.b64encode(self._audio).decode()
        facts = {"finish_reason": finished.reason, "usage": usage, "words": self.told}
        return json.dumps({"audio": audio, "format": self._format, **facts}).encode()


@dataclass(frozen=True)
class Speech:
    """What is to be spoken and how it is sent. `name` is the request's id as its client knows it. Of a text in which
    there is nothing to speak, as of a full stop alone, a moment of silence `is_silent`."""

    name: str
    request: SpeechRequest
    encoding: Encoding
    body: AudioBody = field(default_factory=AudioBody)
    is_silent: bool = False

    @property
    def headers(self) -> dict[str, str]:
        kind = self.body.content_type(self.encoding.content_type)
        return {"content-type": kind, "x-sample-rate": str(self.encoding.rate), "cache-control": "no-store"}

    def usage(self, finished: Finished) -> dict[str, int]:
        """Characters in and frames out."""
        characters = len(self.request.text)
        total = characters + finished.frames
        return {"input_tokens": characters, "output_tokens": finished.frames, "total_tokens": total}


async def encoded_audio(
    speech: Speech, client: Fleet, gate: Gate, observation: Observation
) -> AsyncGenerator[bytes | Finished, None]:
    """The encoded audio of `speech` as it is made, then its end. A place is held while the engine works.

    Raises `TooManyRequests`, `NotReady` and what `Fleet.open` and its answer raise.
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
            if audio := await speech.encoding.finish():
                yield audio
            yield event
            return


async def _engine_events(speech: Speech, client: Fleet, gate: Gate) -> AsyncGenerator[AudioChunk | Finished, None]:
    """What the engine says of `speech`; of a silent one what it would say, without it."""
    if speech.is_silent:
        for event in silent_events(speech.request.id, speech.request.text, client.spec.sample_rate):
            yield event
        return
    async with gate.acquire() as permit, contextlib.aclosing(await client.open(speech.request)) as answer:
        permit.follow(answer)
        async for event in answer:
            yield event


def silent_events(request_id: str, text: str, sample_rate: int) -> tuple[AudioChunk, Finished]:
    """What is said of a `text` in which there is nothing to speak: `SILENCE_S` of nothing, then its end."""
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
    """Count the end of `speech`, and free its encoder; what the log says of it."""
    speech.encoding.close()
    observation.end(reason, is_whole=is_whole)
    first_s = observation.first_packet_s
    return {
        "reason": reason,
        "characters": len(speech.request.text),
        "audio_s": round(observation.audio_s, 2),
        "first_packet_ms": None if first_s is None else round(1000 * first_s),
    }


class SpeechResponse(Response):
    """Speaks into the connection, and stops as soon as the client is gone."""

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
                # There, where many proxies still are, a closed connection is the clean end of a body.
                scope["state"][RESET]()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> tuple[str, bool]:
        """Send everything; how it ended, and whether the client got the whole of it."""
        try:
            arguments = self._speech, self._client, self._gate, self._observation
            async with contextlib.aclosing(encoded_audio(*arguments)) as parts:
                async for part in parts:
                    if isinstance(part, Finished):
                        last = self._speech.body.end(part, self._speech.usage(part))
                        await self._send(send, last, is_last=True)
                        return part.reason, True
                    await self._send(send, self._speech.body.packet(part))
                    self._observation.sent()
            raise AssertionError("a stream ends with its `Finished`")
        except SonoroError as error:
            refused = refusal(error)
            if not self._has_begun:
                await RefusalResponse(refused)(scope, receive, send)
            elif not isinstance(error, SlowReader) and (last := self._speech.body.failure(refused)):
                await self._send(send, last, is_last=True)
            # Any other body is left without its end: the connection is closed on it.
            return error.code, False

    async def _send(self, send: Send, body: bytes, *, is_last: bool = False) -> None:
        """Send a part of the body, the headers before the first. Raises `SlowReader` if it is not taken in time."""
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self._has_begun:
                    self._has_begun = True
                    raw = [(name.encode(), value.encode()) for name, value in self._speech.headers.items()]
                    await send({"type": "http.response.start", "status": 200, "headers": raw})
                await send({"type": "http.response.body", "body": body, "more_body": not is_last})
                self._has_ended = is_last
        except TimeoutError as error:
            raise SlowReader(f"the client took nothing for {self._timeout_s:g} s") from error


class RefusalResponse(Response):
    """`refused` as an answer, in the words of the dialect that is spoken where it is sent."""

    def __init__(self, refused: Refusal) -> None:
        super().__init__(refused.payload, refused.status, refused.headers, "application/json")
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shape: Callable[[Refusal, str], Response] | None = scope.get("state", {}).get(REFUSAL_SHAPE)
        if shape is None:
            await super().__call__(scope, receive, send)
        else:
            await shape(self._refused, scope["state"]["request_id"])(scope, receive, send)


def sse_event(data: dict[str, Any]) -> bytes:
    """A server-sent event that holds `data`."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """The result of `work`; None, the work cancelled, if the client closes its connection before."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
