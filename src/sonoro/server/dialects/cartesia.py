"""Cartesia's API, as used by its SDK, LiveKit and Pipecat, at the root path; any API version is accepted.

Where its documentation is silent: after a cancelled context no `done` is sent, which the SDK would take for that of the
next one; text is spoken as it arrives, without buffering; the speeds slow and fast are .8 and 1.25."""

import base64
import dataclasses
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute

from sonoro.core.errors import InvalidRequest, SonoroError
from sonoro.server.contexts import Context
from sonoro.server.dialects.dictionaries import add_cartesia_dictionaries
from sonoro.server.dialects.formats import AudioFormat, sample_format
from sonoro.server.dialects.shared import Asked, Dialect, DialectSession, Message, languages_of
from sonoro.server.errors import Refusal, refusal
from sonoro.server.schemas import parse
from sonoro.server.service import Service
from sonoro.server.stream import AudioBody
from sonoro.server.timeline import Timed, TimedBody, Timeline, WordTimes

_SPEEDS = {"slow": 0.8, "normal": 1.0, "fast": 1.25}


class _Voice(Message):
    id: str | None = None


class Output(Message):
    container: Literal["raw", "wav", "mp3"] = "raw"
    encoding: str = "pcm_s16le"
    sample_rate: int | None = None
    bit_rate: int | None = None

    @property
    def audio(self) -> AudioFormat:
        if self.container == "mp3":
            return AudioFormat("mp3", self.sample_rate, bit_rate=self.bit_rate)
        return sample_format(self.encoding, self.sample_rate, is_wav=self.container == "wav")


class _Generation(Message):
    speed: float | None = None


class _Said(Message):
    """The body of an HTTP request or a WebSocket message."""

    transcript: str | None = None
    voice: str | _Voice | None = None
    output_format: Output = Field(default_factory=Output)
    language: str | None = None
    locale: str | None = None
    generation_config: _Generation = Field(default_factory=_Generation)
    speed: float | Literal["slow", "normal", "fast"] | None = None
    context_id: str | None = None
    more: bool | None = Field(None, alias="continue")
    cancel: bool | None = None
    flush: bool | None = None
    add_timestamps: bool | None = None
    max_buffer_delay_ms: float | None = None
    pronunciation_dict_id: str | None = None

    @property
    def rate(self) -> float:
        """Playback speed; 1 is normal."""
        given = self.generation_config.speed if self.speed is None else self.speed
        return (_SPEEDS[given] if isinstance(given, str) else given) or 1.0

    def asked(self, text: str, body: AudioBody | None = None) -> Asked:
        voice = self.voice.id if isinstance(self.voice, _Voice) else self.voice
        audio, language = self.output_format.audio, self.language or self.locale
        is_timed = bool(self.add_timestamps)
        asked = Asked(text, voice, language, self.rate, None, audio, body, with_words=is_timed, markup="tags")
        if self.pronunciation_dict_id is None:
            return asked
        return dataclasses.replace(asked, lexicons=[{"name": self.pronunciation_dict_id}])

    def check_raw(self) -> None:
        if self.output_format.container != "raw":
            raise InvalidRequest("output_format.container", self.output_format.container, "it must be raw here")


def _error(refused: Refusal, request_id: str) -> dict[str, Any]:
    code, message = refused.error["code"], refused.error["message"]
    facts = {"title": str(code).replace("_", " ").capitalize(), "message": message, "error_code": code}
    return {"type": "error", "done": True, "status_code": refused.status, **facts, "request_id": request_id}


def _refusal(refused: Refusal, request_id: str) -> Response:
    return JSONResponse(_error(refused, request_id), refused.status, refused.headers)


class _Messages:
    """Makes the messages about one text: audio, completed words if asked for, and its end."""

    def __init__(self, name: str, *, has_words: bool) -> None:
        self._name, self._words, self._last_s = name, WordTimes() if has_words else None, time.perf_counter()

    def audio(self, audio: bytes) -> list[dict[str, Any]]:
        now_s = time.perf_counter()
        step_ms, self._last_s = round(1000 * (now_s - self._last_s), 1), now_s
        data = base64.b64encode(audio).decode()
        return [self.message("chunk", 206, data=data, step_time=step_ms)] if audio else []

    def times(self, times: list[Timed], *, is_last: bool) -> list[dict[str, Any]]:
        words = self._words.add(times, is_last=is_last) if self._words else []
        columns = dict(zip(("words", "start", "end"), zip(*words, strict=True), strict=False))
        return [self.message("timestamps", 206, word_timestamps=columns)] if words else []

    def error(self, refused: Refusal, request_id: str) -> dict[str, Any]:
        return {**_error(refused, request_id), "context_id": self._name}

    def message(self, kind: str, status: int, **fields: Any) -> dict[str, Any]:
        return {"type": kind, "context_id": self._name, "done": kind == "done", "status_code": status, **fields}


class _Events(TimedBody):
    """The messages as server-sent events."""

    kind = "text/event-stream"

    def __init__(self, said: _Said, timeline: Timeline) -> None:
        super().__init__(said.transcript or "", timeline, said.output_format.audio)
        self._messages = _Messages(said.context_id or "", has_words=bool(said.add_timestamps))

    def line(self, audio: bytes, times: list[Timed], *, is_last: bool) -> bytes:
        messages = [*self._messages.audio(audio), *self._messages.times(times, is_last=is_last)]
        return b"".join(map(self._event, [*messages, self._messages.message("done", 200)] if is_last else messages))

    def failure(self, refused: Refusal) -> bytes:
        return self._event(self._messages.error(refused, ""))

    def _event(self, message: dict[str, Any]) -> bytes:
        return b"event: %s\ndata: %s\n\n" % (message["type"].encode(), msgspec.json.encode(message))


class _Session(DialectSession):
    """A WebSocket with many contexts."""

    async def handle(self, message: str) -> None:
        said = parse(_Said, message.encode())
        name = self._name = said.context_id or ""
        if said.cancel:
            if name in self.contexts:
                self.contexts[name].cancel()
            return
        await self.free(name)
        context = self.contexts.get(name)
        is_new = context is None
        if context is None:
            said.check_raw()
            context = await self.open(name, said.asked(""))
            context.wire = _Messages(name, has_words=bool(said.add_timestamps))
        elif context.is_ended:
            raise InvalidRequest("context_id", name, "its last message was sent; wait for done, or use another")
        try:
            if said.transcript:
                context.say(said.transcript, is_phrase=said.max_buffer_delay_ms == 0)
            if said.flush:
                context.flush()
        except InvalidRequest:
            if is_new:
                context.cancel()
            raise
        finally:
            if not said.more:
                context.end()

    async def on_audio(self, context: Context, audio: bytes, times: list[Timed], *, is_last: bool) -> None:
        for message in [*context.wire.audio(audio), *context.wire.times(times, is_last=is_last)]:
            await self.say(message)

    async def on_flushed(self, context: Context, mark: int) -> None:
        if not context.has_failed:
            await self.say(context.wire.message("flush_done", 206, flush_done=True, flush_id=mark))

    async def on_failure(self, context: Context, error: SonoroError) -> None:
        await self.say(context.wire.error(refusal(error), self.id))

    async def on_end(self, context: Context) -> None:
        if not context.has_failed and not context.is_cancelled:
            await self.say(context.wire.message("done", 200))

    async def refuse(self, error: SonoroError, request_id: str | None = None) -> None:
        """Send `error`. A context that is open goes on without the message, so this is not its last."""
        message = _Messages(self._name or "", has_words=False).error(refusal(error), self.id)
        context = self.contexts.get(self._name)
        await self.say({**message, "done": context is None or context.is_cancelled})


def routes(service: Service) -> Sequence[BaseRoute]:
    """The routes of this dialect."""
    dialect = Dialect("cartesia", service, _refusal, ("cartesia-request-id",))

    async def convert(request: Request) -> Response:
        def read(payload: bytes) -> Asked:
            said = parse(_Said, payload)
            if said.transcript is None:
                raise InvalidRequest("transcript", None, "it is the text to speak")
            if not request.url.path.endswith("/sse"):
                return said.asked(said.transcript)
            said.check_raw()
            return said.asked(said.transcript, _Events(said, dialect.timeline(said.rate)))

        return await dialect.speak(request, read)

    def shown(name: str) -> dict[str, Any]:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(service.created_s))
        about = {"id": name, "name": name, "description": "", "tagline": "", "created_at": created, "locales": []}
        rights = {"access": "public", "visibility": "all", "is_owner": False}
        return {**about, **rights, "language": languages_of(service.speech.spec())[0]}

    async def voices(request: Request) -> Response:
        names, after = await dialect.voices(request), request.query_params.get("starting_after")
        left = names[names.index(after) + 1 :] if after in names else names if after is None else []
        wanted = [name for name in left if request.query_params.get("q", "").lower() in name]
        return JSONResponse({"data": [shown(name) for name in wanted], "has_more": False})

    async def voice(request: Request) -> Response:
        return JSONResponse(shown(await dialect.known_voice(request)))

    dialect.http("POST", "/tts/bytes", convert)
    dialect.http("POST", "/tts/sse", convert)
    add_cartesia_dictionaries(dialect)
    dialect.socket("/tts/websocket", partial(_Session, dialect=dialect))
    dialect.http("GET", "/voices", voices)
    dialect.http("GET", "/voices/{voice}", voice)
    return dialect.routes
