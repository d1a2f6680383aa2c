"""Speech whose text still arrives: sessions over a WebSocket, with one utterance after the other.

docs/live.md is the protocol. Knows the service, not how speech is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Depends, WebSocket
from pydantic import BaseModel, ConfigDict
from starlette.types import Message
from starlette.websockets import WebSocketDisconnect

from sonoro.core.errors import EngineError, InvalidRequest, SonoroError
from sonoro.core.logs import log_event
from sonoro.core.text import is_speakable
from sonoro.core.types import AudioChunk, Finished, SpeechRequest
from sonoro.server.errors import IdleSession, NotReady, SlowReader, refusal
from sonoro.server.schemas import SpeechBody, parse
from sonoro.server.service import KEY_PROTOCOL, Caller, Service
from sonoro.server.stream import Speech, conclude, silent_events
from sonoro.server.websocket import SHUTTING_DOWN
from sonoro.transport.answer import RequestStream

__all__ = ["session_routes"]

logger = logging.getLogger(__name__)

CANCELLED = "cancelled"

_CLOSE_CODES = {"closed": 1000, "idle": 1001, "ending": 1012}
"""Of RFC 6455 and its registry: a normal end, going away, the service restarts."""


def session_routes(service: Service) -> APIRouter:
    """The sessions, with a key if there are keys."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(service.authorise)])

    @router.websocket("/audio/speech/stream")
    async def stream(socket: WebSocket) -> None:
        with service.session():
            await Session(socket, service).run()

    return router


class _Message(BaseModel):
    """What a client says; the fields of a configuration are beside these."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Literal["session.config", "input.text", "input.done", "response.cancel", "session.close"]
    text: str | None = None


class Session:
    """One connection. Its errors are told to the client, and those of an utterance leave the session as it was."""

    def __init__(self, socket: WebSocket, service: Service) -> None:
        self._socket, self._service = socket, service
        self._id, self._count = uuid.uuid4().hex, 0
        self._shutting_down: asyncio.Event = socket.scope["state"].get(SHUTTING_DOWN, asyncio.Event())
        self._settings: tuple[SpeechBody, SpeechRequest] | None = None
        self._utterance: Utterance | None = None
        self._end: Literal["closed", "ending"] | None = None
        self._is_skipping = False  # the rest of the text of an utterance that has ended

    @property
    def caller(self) -> Caller:
        """Who it is with."""
        caller: Caller = self._socket.state.caller
        return caller

    async def run(self) -> None:
        """Accept the connection and serve it to its end. Raises `NotReady` before."""
        spec = self._service.spec()
        # A browser that offered protocols closes the connection unless one is chosen; the key is no choice.
        offered = (name for name in self._socket.scope["subprotocols"] if not name.startswith(KEY_PROTOCOL))
        await self._socket.accept(next(offered, None))
        try:
            await self.send_event("session.created", session_id=self._id, model=spec.name, sample_rate=spec.sample_rate)
            end = await self._exchange()
            await self.send_event("session.done", reason=end)
            await self._socket.close(_CLOSE_CODES[end])
        except (WebSocketDisconnect, SlowReader):
            pass
        finally:
            if self._utterance is not None:
                await _drop(self._utterance.speaking)
            self._socket.state.facts["utterances"] = self._count

    async def send_event(self, event: str, **fields: Any) -> None:
        """Send an event. Raises `SlowReader` if it is not taken in time, `WebSocketDisconnect` if nobody is there."""
        payload = msgspec.json.encode({"type": event, **fields}).decode()
        await self._send(self._socket.send_text(payload))

    async def send(self, audio: bytes) -> None:
        """Send audio; raises as `send_event` does."""
        await self._send(self._socket.send_bytes(audio))

    async def refuse(self, error: SonoroError, request_id: str | None = None) -> None:
        """Tell what was wrong, with an utterance if it is named."""
        await self.send_event("error", request_id=request_id, error=refusal(error).error)

    async def _send(self, sending: Awaitable[None]) -> None:
        limit_s = self._service.config.slow_reader_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await sending
        except TimeoutError as error:
            raise SlowReader(f"the client took nothing for {limit_s:g} s") from error

    async def _exchange(self) -> Literal["closed", "idle", "ending"]:
        """Obey until the session has ended; why it did."""
        receiving = asyncio.create_task(self._socket.receive())
        ending = asyncio.create_task(self._shutting_down.wait())
        try:
            while self._end is None or self._utterance is not None:
                tasks = {receiving} if self._end else {receiving, ending}
                speaking = self._utterance.speaking if self._utterance else None
                done, _ = await asyncio.wait(
                    tasks | ({speaking} if speaking else set()),
                    timeout=self._idle_timeout_s,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    await self.refuse(IdleSession(f"nothing was said for {self._idle_timeout_s:g} s"))
                    return "idle"
                if speaking in done:
                    self._conclude()
                if ending in done:
                    self._end = self._end or "ending"
                if receiving in done:
                    await self._take(receiving.result())
                    receiving = asyncio.create_task(self._socket.receive())
            return self._end
        finally:
            await _drop(receiving, ending)

    @property
    def _idle_timeout_s(self) -> float | None:
        """How long the client may say nothing: for ever while it listens to an utterance whose text is whole."""
        is_listening = self._utterance is not None and self._utterance.is_text_whole
        return None if is_listening else self._service.config.session_idle_timeout_s

    def _conclude(self) -> None:
        """The utterance has ended. What is still on its way of its text is not the beginning of another."""
        assert self._utterance is not None
        utterance, self._utterance = self._utterance, None
        utterance.speaking.result()
        self._is_skipping = not utterance.is_text_whole

    async def _take(self, received: Message) -> None:
        if received["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(received["code"])
        try:
            if received.get("text") is None:
                raise InvalidRequest("message", "bytes", "it must be text that is JSON")
            await self._handle(parse(_Message, received["text"].encode()))
        except SlowReader:
            raise
        except SonoroError as error:
            self._service.count_refusal(refusal(error), self._id)
            await self.refuse(error)

    async def _handle(self, message: _Message) -> None:
        match message.type:
            case "session.config":
                await self._configure(message.model_extra or {})
            case "input.text":
                await self._add_text(message.text)
            case "input.done":
                self._is_skipping = False
                if self._utterance is not None:
                    self._utterance.end_text()
            case "response.cancel":
                self._is_skipping = False
                # It may have ended while this was on its way.
                if self._utterance is None or await self._utterance.cancel() != CANCELLED:
                    await self.send_event("response.cancelled", request_id=None, samples_sent=0, text_position=0)
            case "session.close":
                self._end = "closed"
                if self._utterance is not None:
                    self._utterance.end_text()

    async def _configure(self, fields: dict[str, Any]) -> None:
        if self._utterance is not None:
            raise InvalidRequest("session.config", "given", "an utterance is under way; wait until it has ended")
        for name in ("input", "stream_format"):
            if name in fields:
                raise InvalidRequest(name, fields[name], "it has no place in a session; leave it out")
        body, request = self._settings = await self._settings_from(fields)
        voice = request.voice and request.voice.partition(".")[0]  # not whose it is
        facts = {"voice": voice, "language": request.language, "format": body.response_format}
        await self.send_event("session.configured", **facts)

    async def _settings_from(self, fields: dict[str, Any]) -> tuple[SpeechBody, SpeechRequest]:
        """How `fields` ask to be spoken to: the body of a request whose text is missing, and what it means."""
        body = parse(SpeechBody, {"response_format": "pcm", **fields, "input": ""})
        speech = await self._service.speech(body, self._id, self.caller, is_live=True)
        speech.encoding.close()
        return body, speech.request

    async def _add_text(self, text: str | None) -> None:
        if text is None:
            raise InvalidRequest("text", None, "input.text must have it")
        if self._is_skipping:
            return
        if self._utterance is None:
            self._is_skipping = True  # unless there is an utterance in the end
            self._utterance = await self._begin()
            self._is_skipping = False
        self._utterance.append(text)

    async def _begin(self) -> Utterance:
        if self._end is not None:
            raise NotReady("the session is being closed")
        if self._settings is None:
            self._settings = await self._settings_from({})
        body, request = self._settings
        self._count += 1
        named = msgspec.structs.replace(request, id=f"{self._id}.{self._count}")
        return Utterance(self, self._service, body, named)


class Utterance:
    """One text being spoken. Ends by itself: with the client told, or with what its connection raised."""

    def __init__(self, session: Session, service: Service, body: SpeechBody, request: SpeechRequest) -> None:
        self._session, self._service, self._body, self._request = session, service, body, request
        self._id, self._text = request.id, ""
        self._encoding = service.encoding(body)
        self._observation = service.observe(body.speed, time.perf_counter())
        self._sent_samples = 0  # of the model
        self._is_waiting = self._is_open = self._has_begun = self._is_aborted = False
        self._failure: SonoroError | None = None
        self.is_text_whole = False
        self.speaking = asyncio.create_task(self._run())

    def append(self, text: str) -> None:
        """More text. Raises `InvalidRequest` if it had all; too much ends the utterance."""
        if self.is_text_whole:
            raise InvalidRequest("input.text", "given", "input.done was said; wait until the utterance has ended")
        if self._is_aborted:
            return
        self._text += text
        most = self._service.config.max_characters
        if len(self._text) > most:
            self._abort(InvalidRequest("input", f"{len(self._text)} characters", f"it must have at most {most}"))
        elif self._is_open:
            self._service.client.append_text(self._id, text)

    def end_text(self) -> None:
        """The text is whole."""
        if self._is_open and not self.is_text_whole:
            self._service.client.end_text(self._id)
        self.is_text_whole = True

    async def cancel(self) -> str:
        """Say no more, and tell what was said; how it ended, which it may have done before."""
        self.is_text_whole = True
        if not self._is_aborted:
            self._abort(None)
        await asyncio.wait({self.speaking})
        return self.speaking.result()

    def _abort(self, failure: SonoroError | None) -> None:
        self._is_aborted, self._failure = True, failure
        if self._is_open:
            self._service.client.cancel(self._id)
        elif self._is_waiting:
            self.speaking.cancel()

    async def _run(self) -> str:
        """Speak; how it ended."""
        reason = "disconnected"
        try:
            reason = await self._speak_unless_aborted()
        except SlowReader as error:
            reason = error.code
            raise
        except SonoroError as error:
            reason = error.code
            await self._session.refuse(error, self._id)
        finally:
            # The pace of its text is the client's: no time but that of its first packet says anything of the server.
            speech = Speech(self._id, msgspec.structs.replace(self._request, text=self._text), self._encoding)
            facts = conclude(speech, self._observation, reason, is_whole=False)
            named = {"id": self._id, "key": self._session.caller.name}
            log_event(logger, logging.INFO, "utterance", {**named, **facts})
        return reason

    async def _speak_unless_aborted(self) -> str:
        if self._is_aborted:
            return await self._report_cancelled(0)
        self._is_waiting = True
        try:
            return await self._speak()
        except asyncio.CancelledError:
            if not self._is_aborted or self._is_open:
                raise
            return await self._report_cancelled(0)

    async def _speak(self) -> str:
        client = self._service.client
        async with (
            self._service.gate.acquire() as permit,
            contextlib.aclosing(await client.open(self._request)) as answer,
        ):
            permit.follow(answer)
            self._is_open = True
            client.append_text(self._id, self._text)
            if self.is_text_whole:
                client.end_text(self._id)
            async with contextlib.aclosing(self._engine_events(answer)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        return await self._finish(event)
                    await self._send(event)
        raise AssertionError("a stream ends with its `Finished`")

    async def _engine_events(self, answer: RequestStream) -> AsyncGenerator[AudioChunk | Finished, None]:
        """What the engine says; silence, where it says that there is nothing to speak, as in an emoji alone."""
        try:
            async for event in answer:
                yield event
        except InvalidRequest:
            if not self.is_text_whole or is_speakable(self._text) or not self._text.strip():
                raise
            for event in silent_events(self._id, self._text, self._service.client.spec.sample_rate):
                yield event

    async def _send(self, chunk: AudioChunk) -> None:
        self._observation.made(chunk.pcm)
        audio = await self._encoding.feed(chunk.pcm)
        if not self._is_aborted:
            self._sent_samples += len(chunk.pcm) // 2
            await self._send_audio(audio)

    async def _send_audio(self, audio: bytes) -> None:
        if not audio:
            return
        if not self._has_begun:
            self._has_begun = True
            kind, rate = self._body.response_format, self._encoding.rate
            await self._session.send_event("audio.start", request_id=self._id, format=kind, sample_rate=rate)
            self._observation.sent()
        await self._session.send(audio)

    async def _finish(self, finished: Finished) -> str:
        if self._is_aborted:
            made = finished.frames * self._service.client.spec.hop
            return await self._report_cancelled(finished.characters * self._sent_samples // max(made, 1))
        if finished.reason in ("cancelled", "error"):
            raise EngineError(f"the speech was cut off: {finished.reason}")
        await self._send_audio(await self._encoding.finish())
        samples = self._samples
        await self._session.send_event(
            "audio.done",
            request_id=self._id,
            finish_reason=finished.reason,
            samples=samples,
            duration_s=samples / self._encoding.rate,
            characters=finished.characters,
        )
        return finished.reason

    async def _report_cancelled(self, position: int) -> str:
        """Tell of a cut at `position` of the text; how it ended."""
        if self._failure is not None:
            raise self._failure
        facts = {"samples_sent": self._samples, "text_position": position}
        await self._session.send_event("response.cancelled", request_id=self._id, **facts)
        return CANCELLED

    @property
    def _samples(self) -> int:
        """Those sent, at the rate they are heard at."""
        own_rate = self._service.client.spec.sample_rate
        return round(self._sent_samples * self._encoding.rate / own_rate / self._body.speed)


async def _drop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
