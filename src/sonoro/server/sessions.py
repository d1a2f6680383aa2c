"""Live text over a WebSocket: sessions of one utterance after the other. docs/live.md is the protocol.

Other servers have WebSockets on the same path. The first message tells which protocol a client speaks."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, WebSocket
from pydantic import BaseModel

from sonoro.core.errors import InvalidRequest, SonoroError
from sonoro.core.events import at_speed, marks_at_speed
from sonoro.core.types import AudioChunk, Finished, SpeechRequest
from sonoro.server.errors import refusal
from sonoro.server.schemas import SpeechBody, parse
from sonoro.server.service import Service
from sonoro.server.utterance import CANCELLED, Utterance
from sonoro.server.websocket_session import End, WebSocketSession, encoded
from sonoro.text.script import Lexicon


def session_routes(service: Service, dialects: Sequence[type[OtherSession]] = ()) -> APIRouter:
    """The route of live sessions, native ones and those of `dialects`; it needs a key if the server has keys."""
    router = APIRouter(prefix="/v1")

    @router.websocket("/audio/speech/stream")
    async def stream(socket: WebSocket) -> None:
        service.keys.check(socket, ("bearer", *(kind.key_scheme for kind in dialects)))
        await LiveSession(socket, service, dialects).run()

    return router


class _Message(BaseModel, strict=True, extra="allow"):
    """A client's message; those of `session.config` have further fields."""

    type: Literal["session.config", "input.text", "input.done", "response.cancel", "session.close"]
    text: str | None = None


class LiveSession(WebSocketSession):
    """One connection. Errors are sent to the client; an error of an utterance does not end the session."""

    def __init__(self, socket: WebSocket, service: Service, dialects: Sequence[type[OtherSession]] = ()) -> None:
        super().__init__(socket, service)
        self._dialects = dialects  # of which one may take over at the first message
        self._count = self.facts["utterances"] = 0
        self._settings: tuple[SpeechBody, SpeechRequest] | None = None
        self._lexicons: Sequence[Lexicon] = ()
        self._utterance: Utterance | None = None
        self._is_skipping = False  # drops the rest of the text of an utterance that has ended

    @property
    def speaking(self) -> list[asyncio.Task[str]]:
        return [self._utterance.speaking] if self._utterance else []

    @property
    def idle_timeout_s(self) -> float | None:
        """No timeout while an utterance with its whole text is being spoken."""
        is_listening = self._utterance is not None and self._utterance.is_text_whole
        return None if is_listening else self.service.config.session_idle_timeout_s

    async def on_open(self) -> None:
        spec = self.service.speech.spec()
        await self.send_event("session.created", session_id=self.id, model=spec.name, sample_rate=spec.sample_rate)

    async def on_close(self, end: End, error: SonoroError | None) -> None:
        if error is not None:
            await self.refuse(error, None if self._utterance is None else self._utterance.id)
        await self.send_event("session.done", reason=end)

    async def send_event(self, event: str, **fields: Any) -> None:
        """Send an event; raises as `send` does."""
        await self.send(msgspec.json.encode({"type": event, **fields}).decode())

    async def send_audio(self, audio: bytes, source: AudioChunk | Finished) -> None:
        if audio:
            await self.send(audio)
        if source.words and self._settings is not None:
            words = at_speed(source.words, self._settings[0].speed)
            await self.send_event("audio.words", words=words)
        if source.marks and self._settings is not None:
            await self.send_event("audio.marks", marks=marks_at_speed(source.marks, self._settings[0].speed))

    async def refuse(self, error: SonoroError, request_id: str | None = None) -> None:
        await self.send_event("error", request_id=request_id, error=refusal(error).error)

    async def on_done(self, task: asyncio.Task[Any]) -> None:
        """Forget the utterance that has ended, and skip the rest of its text, which may still arrive."""
        assert self._utterance is not None
        utterance, self._utterance = self._utterance, None
        task.result()
        self._is_skipping = not utterance.is_text_whole

    async def handle(self, message: str) -> None:
        dialects, self._dialects = self._dialects, ()
        if other := next((kind for kind in dialects if kind.recognises(message)), None):
            await self.hand_over(other(self._socket, self.service), message)
            return
        said = parse(_Message, await encoded(message))
        match said.type:
            case "session.config":
                await self._configure(said.model_extra or {})
            case "input.text":
                await self._append(said.text)
            case "input.done":
                self._end_text()
            case "response.cancel":
                self._is_skipping = False
                # The utterance may have ended while the message was in transit.
                if self._utterance is None or await self._utterance.cancel() != CANCELLED:
                    await self.send_event("response.cancelled", request_id=None, samples_sent=0, text_position=0)
            case "session.close":
                self.end = "closed"
                if self._utterance is not None:
                    self._utterance.end_text()

    def _end_text(self) -> None:
        self._is_skipping = False
        if self._utterance is not None:
            self._utterance.end_text()

    async def _configure(self, fields: dict[str, Any]) -> None:
        if self._utterance is not None:
            raise InvalidRequest("session.config", "given", "an utterance is running; wait until it has ended")
        for name in ("input", "inputs", "voices", "stream_format"):
            if name in fields:
                raise InvalidRequest(name, fields[name], "not allowed in a session; leave it out")
        await asyncio.sleep(0)  # the message may have been long
        body, request = self._settings = await self._settings_from(fields)
        voice = request.voice and request.voice.partition(".")[0]  # without the owner's id
        facts = {"voice": voice, "language": request.language, "format": body.response_format}
        await self.send_event("session.configured", **facts)

    async def _settings_from(self, fields: dict[str, Any]) -> tuple[SpeechBody, SpeechRequest]:
        """The body, as far as its audio goes, and the resolved request, both without text, of a session configured by
        `fields`. Raises `TooManyRequests` if the recordings held in memory have too many bytes."""
        body = parse(SpeechBody, {"response_format": "pcm", **fields, "input": ""})
        speech = await self.service.speech.make(body, self.id, self.caller, is_live=True, dialect=self.dialect)
        speech.encoding.close()
        self._kept.close()
        self._kept, self._lexicons = speech.held, speech.lexicons  # for as long as the session lasts
        audio = {name: getattr(body, name) for name in ("response_format", "speed", "sample_rate", "bit_rate")}
        return parse(SpeechBody, {**audio, "input": ""}), speech.request

    async def _append(self, text: str | None) -> None:
        if text is None:
            raise InvalidRequest("text", None, "input.text must have it")
        if self._is_skipping:
            return
        if self._utterance is None:
            self._is_skipping = True  # if `_begin` raises
            self._utterance = await self._begin()
            self._is_skipping = False
        self._utterance.append(text)

    async def _begin(self) -> Utterance:
        self.check_open()
        if self._settings is None:
            self._settings = await self._settings_from({})
        body, request = self._settings
        self._count = self.facts["utterances"] = self._count + 1
        named = msgspec.structs.replace(request, id=f"{self.id}.{self._count}")
        return Utterance(self, self.service, body, named, self._lexicons)


class OtherSession(LiveSession):
    """A session in the protocol of another server on the same path."""

    key_scheme = "bearer"
    """A scheme of the header `Authorization` that may carry the key."""

    @classmethod
    @abstractmethod
    def recognises(cls, message: str) -> bool:
        """Whether a connection whose first message this is speaks this protocol."""
