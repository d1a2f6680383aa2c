"""Shared by the dialects: routes with keys and error shapes, requests, languages, voices. Knows no dialect."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
from pydantic import JsonValue
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route, WebSocketRoute
from starlette.types import Message as ASGIMessage
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from sonoro.audio.encoders import MAX_SPEED, MIN_SPEED
from sonoro.core.errors import UnknownVoice
from sonoro.core.types import Markup, ModelSpec
from sonoro.server.contexts import Context, ContextSession
from sonoro.server.dialects.formats import PCM, AudioFormat, FormatBody
from sonoro.server.errors import REFUSAL_SHAPE, Refusal, Unauthorized
from sonoro.server.keys import ANONYMOUS, Caller
from sonoro.server.schemas import SpeechBody, WithoutNulls, parse
from sonoro.server.service import Service
from sonoro.server.stream import AudioBody, Speech
from sonoro.server.timeline import Timeline
from sonoro.server.websocket_session import WebSocketSession
from sonoro.text.script.dialogue import BETWEEN_S, Cue, dialogue

LANGUAGES = {
    **{"zh": "chinese", "en": "english", "de": "german", "it": "italian", "pt": "portuguese", "es": "spanish"},
    **{"ja": "japanese", "ko": "korean", "fr": "french", "ru": "russian"},
}
"""The models' names of languages by ISO 639-1 code."""


class Message(WithoutNulls, extra="ignore", allow_inf_nan=False):
    """A client's JSON message. Null means missing; unknown fields are ignored."""


@dataclass(frozen=True)
class Asked:
    """A client's request in terms of the native API; for live text, `text` is empty."""

    text: str
    voice: str | None = None
    language: str | None = None
    speed: float = 1.0
    seed: int | None = None
    audio: AudioFormat = PCM
    body: AudioBody | None = None
    """The response body; None for the audio itself."""
    with_words: bool = False
    markup: Markup = "auto"
    inputs: Sequence[Cue] = ()
    """A dialogue in place of the text, with `between_s` of silence between two cues."""
    between_s: float = BETWEEN_S
    lexicons: Sequence[dict[str, JsonValue]] = ()
    """The names of lexicons, in objects as of the native API."""


class Dialect:
    """One wire format. `shape` makes the response of a refusal and a request id; `id_headers` are the response headers
    that carry the request id. Markup that the model cannot honour is left out, as clients send that of other servers.
    """

    def __init__(
        self, name: str, service: Service, shape: Callable[[Refusal, str], Response], id_headers: Sequence[str] = ()
    ) -> None:
        self.name, self.service, self._shape, self._id_headers = name, service, shape, id_headers
        self.routes: list[BaseRoute] = []

    def http(self, method: str, path: str, answer: Answering, is_ours: Ours | None = None) -> None:
        """Add a route for `method` of `path`; with `is_ours`, only for requests whose headers it accepts."""
        self.routes.append(_HTTPRoute(self, method, path, answer, is_ours))

    def socket(self, path: str, session: Sessions, *, has_late_key: bool = False) -> None:
        """Add a WebSocket route for `session`s at `path`. With `has_late_key` the key may come in the first message."""
        self.routes.append(_SocketRoute(self, path, session, has_late_key))

    def enter(self, scope: Scope, send: Send) -> Send:
        """Mark the request of `scope` as one in this dialect, for refusals, log and metrics; return its `send`."""
        scope["state"] |= {"dialect": self.name, REFUSAL_SHAPE: self._shape}
        scope["state"]["facts"]["dialect"] = self.name

        async def send_named(message: ASGIMessage) -> None:
            if message["type"] in ("http.response.start", "websocket.http.response.start"):
                for name in self._id_headers:
                    MutableHeaders(scope=message)[name] = scope["state"]["request_id"]
            await send(message)

        return send_named

    async def speak(self, request: Request, read: Callable[[bytes], Asked]) -> Response:
        """Respond to `request` with speech, as asked by its body, which `read` parses."""

        async def prepare(payload: bytes) -> Speech:
            return await self.speech(read(payload), request.state.request_id, request.state.caller)

        return await self.service.speech.respond(request, prepare)

    async def speech(self, asked: Asked, name: str, caller: Caller, *, is_live: bool = False) -> Speech:
        """The validated speech of `asked`; see `SpeechFactory.make`."""
        speech = await self.service.speech.make(self.body_of(asked), name, caller, is_live=is_live, dialect=self.name)
        sent = asked.body or FormatBody(asked.audio)
        request = msgspec.structs.replace(speech.request, with_words=asked.with_words)
        return replace(speech, request=request, body=sent)

    def body_of(self, asked: Asked) -> SpeechBody:
        """`asked` as the body of a native request. Raises `InvalidRequest` and `NotReady`."""
        fields = {
            "input": dialogue(asked.inputs, asked.between_s) if asked.inputs else asked.text,
            "voice": asked.voice or None,
            "language": language_of(asked.language, self.service.speech.spec()),
            "speed": min(max(asked.speed, MIN_SPEED), MAX_SPEED),
            "seed": asked.seed,
            "response_format": asked.audio.codec,
            "sample_rate": asked.audio.rate,
            "bit_rate": asked.audio.bit_rate,
            "markup": asked.markup,
            "on_markup": "plain",
            "lexicons": [*asked.lexicons] or None,
        }
        return parse(SpeechBody, fields)

    async def voices(self, request: Request) -> list[str]:
        """The voices that `request` may name."""
        await self.service.voices.scan()
        return self.service.voices.names(request.state.caller, self.service.speech.spec())

    async def known_voice(self, request: Request) -> str:
        """The voice in the path of `request`. Raises `UnknownVoice`."""
        name = str(request.path_params["voice"])
        if name.lower() not in {*await self.voices(request), *self.service.voices.aliases}:
            raise UnknownVoice("voice", name, "the list of voices does not have it")
        return name.lower()

    def timeline(self, speed: float) -> Timeline:
        """The timeline of a text spoken at `speed`. Raises `NotReady`."""
        return Timeline(self.service.speech.spec().sample_rate, min(max(speed, MIN_SPEED), MAX_SPEED))


class DialectSession(ContextSession):
    """A WebSocket session of `dialect`."""

    def __init__(self, socket: WebSocket, service: Service, dialect: Dialect) -> None:
        super().__init__(socket, service, dialect.name)
        self._dialect = dialect

    async def open(self, name: str | None, asked: Asked) -> Context:
        """Open a context with the parameters of `asked`. Raises as `Dialect.speech` and `begin` do."""
        self.check_open()
        speech = await self._dialect.speech(asked, self.id, self.caller, is_live=True)
        speech.encoding.close()
        return self.begin(name, self._dialect.body_of(asked), speech, asked.audio)


Answering = Callable[[Request], Awaitable[Response]]
Sessions = Callable[[WebSocket, Service], WebSocketSession]
Ours = Callable[[Headers], bool]


class _OfDialect(BaseRoute):
    """A route of `dialect`; with `is_ours`, it matches only requests whose headers that accepts."""

    dialect: Dialect
    is_ours: Ours | None = None

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        if match is Match.NONE or (self.is_ours is not None and not self.is_ours(Headers(scope=scope))):
            return Match.NONE, {}
        return match, {**child, "route": self}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await super().handle(scope, receive, self.dialect.enter(scope, send))


class _HTTPRoute(_OfDialect, Route):
    def __init__(self, dialect: Dialect, method: str, path: str, answer: Answering, is_ours: Ours | None) -> None:
        async def authorised(request: Request) -> Response:
            dialect.service.keys.admit(request, key_of(request))
            return await answer(request)

        super().__init__(path, authorised, methods=[method], include_in_schema=False)
        self.dialect, self.is_ours = dialect, is_ours


class _SocketRoute(_OfDialect, WebSocketRoute):
    def __init__(self, dialect: Dialect, path: str, session: Sessions, has_late_key: bool) -> None:
        async def hold(socket: WebSocket) -> None:
            try:
                dialect.service.keys.admit(socket, key_of(socket))
            except Unauthorized:
                if not has_late_key or key_of(socket):
                    raise
                socket.state.caller = ANONYMOUS
            await session(socket, dialect.service).run()

        super().__init__(path, hold)
        self.dialect = dialect


def key_of(connection: HTTPConnection) -> str:
    """The API key of a client of any dialect; "" if none."""
    for name in ("xi-api-key", "x-api-key"):
        if name in connection.headers:
            return connection.headers[name]
    scheme, _, given = connection.headers.get("authorization", "").partition(" ")
    if scheme.lower() in ("bearer", "token", "api-key"):
        return given
    # Browsers cannot set headers of a WebSocket: Deepgram's clients offer the subprotocols "token" and the key.
    offered = connection.scope.get("subprotocols", [])
    return offered[1] if len(offered) == 2 and offered[0] in ("token", "bearer") else ""


def language_of(code: str | None, spec: ModelSpec) -> str | None:
    """The model's name of a language given as a code ("en", "pt-BR") or a name; None if it does not speak it."""
    first = (code or "").replace("_", "-").partition("-")[0].lower()
    name = LANGUAGES.get(first, first)
    return name if name in spec.languages else None


def languages_of(spec: ModelSpec) -> list[str]:
    """The codes of the model's languages; English if it names none, as clients expect one."""
    return [code for code, name in LANGUAGES.items() if name in spec.languages] or ["en"]
