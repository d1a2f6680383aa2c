"""Deepgram's text-to-speech API, as used by its SDK, LiveKit and Pipecat. The model that clients name is the voice.

Where its documentation is silent: text is spoken as it arrives, not only after a flush."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.websockets import WebSocket

from sonoro.core.errors import InvalidRequest, SonoroError
from sonoro.server.contexts import Context
from sonoro.server.dialects.formats import AudioFormat, sample_format
from sonoro.server.dialects.shared import Asked, Dialect, DialectSession, Message, languages_of
from sonoro.server.errors import Refusal, refusal
from sonoro.server.schemas import parse
from sonoro.server.service import Service
from sonoro.server.timeline import Timed


class _Body(Message):
    text: str


class _Said(Message):
    """A client's WebSocket message."""

    type: Literal["Speak", "Flush", "Clear", "Close"]
    text: str | None = None


class Query(Message):
    """The query parameters of a request."""

    model: str | None = None
    encoding: str | None = None
    container: Literal["none", "wav", "ogg"] | None = None
    sample_rate: int | None = None
    bit_rate: int | None = None
    speed: float = 1.0

    def asked(self, text: str, audio: AudioFormat) -> Asked:
        return Asked(text, self.model, None, self.speed, audio=audio, markup="deepgram")

    @property
    def streamed(self) -> AudioFormat:
        """The audio format of a WebSocket: raw samples without a header."""
        return sample_format(self.encoding or "linear16", self._rate)

    @property
    def _rate(self) -> int:
        """Of samples, in Hz."""
        return 24000 if self.sample_rate is None else self.sample_rate

    @property
    def whole(self) -> AudioFormat:
        """The audio format of an HTTP response."""
        encoding = self.encoding or "mp3"
        if encoding in ("mp3", "opus", "flac", "aac"):
            return AudioFormat(encoding, self.sample_rate, bit_rate=self.bit_rate)
        return sample_format(encoding, self._rate, is_wav=self.container != "none")


def _refusal(refused: Refusal, request_id: str) -> Response:
    code, message = str(refused.error["code"]), str(refused.error["message"])
    shown = " ".join(message.encode("ascii", "backslashreplace").decode().split())[:200]
    body = {"err_code": code.upper(), "err_msg": message, "request_id": request_id}
    return JSONResponse(body, refused.status, {**refused.headers, "dg-error": shown})


class _Session(DialectSession):
    """A WebSocket with one context at a time: `Clear` ends it, and the next text begins another."""

    def __init__(self, socket: WebSocket, service: Service, dialect: Dialect) -> None:
        super().__init__(socket, service, dialect)
        self._query = parse(Query, dict(socket.query_params))
        self._audio, self._sequence = self._query.streamed, itertools.count()
        self._context: Context | None = None

    async def on_open(self) -> None:
        spec = self.service.speech.spec()
        model = {"model_name": self._query.model or spec.name, "model_version": spec.name, "model_uuid": self.id}
        await self.say({"type": "Metadata", "request_id": self.id, **model})

    async def handle(self, message: str) -> None:
        said = parse(_Said, message.encode())
        context = self._context if self._context is not None and not self._context.is_ended else None
        match said.type:
            case "Speak":
                if said.text is None:
                    raise InvalidRequest("text", None, "Speak must have it")
                if context is None:
                    asked = self._query.asked("", self._audio)
                    context = self._context = await self.open(str(next(self._numbers)), asked)
                context.say(said.text)
            case "Flush":
                if context is None:
                    await self._count("Flushed")
                else:
                    context.flush()
            case "Clear":
                await self._clear(context)
            case "Close":
                self.end = "closed"
                if context is not None:
                    context.end()

    async def _clear(self, context: Context | None) -> None:
        if context is not None:
            context.cancel()
            await context.until_ended()  # no audio may follow
        await self._count("Cleared")

    async def _count(self, kind: Literal["Flushed", "Cleared"]) -> None:
        await self.say({"type": kind, "sequence_id": next(self._sequence)})

    async def on_audio(self, context: Context, audio: bytes, times: list[Timed], *, is_last: bool) -> None:
        if audio:
            await self.send(audio)

    async def on_flushed(self, context: Context, mark: int) -> None:
        await self._count("Flushed")

    async def refuse(self, error: SonoroError, request_id: str | None = None) -> None:
        code, message = refusal(error).error["code"], refusal(error).error["message"]
        await self.say({"type": "Error", "description": message, "code": str(code).upper()})


def routes(service: Service) -> Sequence[BaseRoute]:
    """The routes of this dialect."""
    dialect = Dialect("deepgram", service, _refusal, ("dg-request-id",))

    async def speak(request: Request) -> Response:
        query = parse(Query, dict(request.query_params))
        return await dialect.speak(request, lambda payload: query.asked(parse(_Body, payload).text, query.whole))

    async def models(request: Request) -> Response:
        def shown(name: str) -> dict[str, Any]:
            about = {"architecture": spec.name, "languages": languages_of(spec), "version": "1", "uuid": name}
            return {"name": name, "canonical_name": name, **about}

        spec = service.speech.spec()
        return JSONResponse({"stt": [], "tts": [shown(name) for name in await dialect.voices(request)]})

    dialect.http("POST", "/v1/speak", speak)
    dialect.socket("/v1/speak", partial(_Session, dialect=dialect))
    dialect.http(
        "GET", "/v1/models", models, lambda headers: headers.get("authorization", "").lower().startswith("token ")
    )
    return dialect.routes
