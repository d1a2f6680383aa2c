"""ElevenLabs' API, as used by its SDK, LiveKit, Pipecat and Open WebUI, at the root path.

Where its documentation is silent: a second `close_context` cancels; alignment times count from the end of the last
character sent before, or with `sync_alignment` from the start of the context; a flush ends with a space, for clients
that time a word only when a space follows."""

import base64
import dataclasses
import itertools
import re
from collections.abc import Collection, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
from pydantic import AliasChoices, Field
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.websockets import WebSocket

from sonoro.core.errors import InvalidRequest, SonoroError
from sonoro.core.types import Markup
from sonoro.server.contexts import Context
from sonoro.server.dialects.dictionaries import Locator, add_elevenlabs_dictionaries
from sonoro.server.dialects.formats import AudioFormat, sample_format
from sonoro.server.dialects.shared import Asked, Dialect, DialectSession, Message, languages_of
from sonoro.server.errors import Refusal, refusal
from sonoro.server.schemas import parse
from sonoro.server.service import Service
from sonoro.server.timeline import Timed, TimedBody
from sonoro.text.script.dialogue import MAX_CUES, Cue, dialogue, owners


def _refusal(refused: Refusal, request_id: str) -> Response:
    detail = {"status": refused.error["code"], "message": refused.error["message"]}
    return JSONResponse({"detail": detail}, refused.status, refused.headers)


def _is_ours(headers: Headers) -> bool:
    return "xi-api-key" in headers or headers.get("user-agent", "").lower().startswith("elevenlabs")


class _Settings(Message):
    speed: float | None = None


class _Said(Message):
    """A client's WebSocket message."""

    text: str | None = None
    context_id: str | None = None
    flush: bool | None = None
    close_context: bool | None = None
    close_socket: bool | None = None
    voice_settings: _Settings = Field(default_factory=_Settings)
    seed: int | None = None
    pronunciation_dictionary_locators: list[Locator] = Field(default_factory=list, max_length=3)
    xi_api_key: str | None = Field(None, validation_alias=AliasChoices("xi_api_key", "xi-api-key"))
    authorization: str | None = None


class _Body(_Said):
    text: str
    language_code: str | None = None


def audio_format(name: str) -> AudioFormat:
    """The audio format of a name such as "mp3_44100_128" or "ulaw_8000". Raises `InvalidRequest`."""
    found = re.fullmatch(r"(?:(mp3|opus)|pcm|ulaw|alaw)_(\d{4,5})(?(1)_(\d{1,4}))", name, re.ASCII)
    if found is None:
        raise InvalidRequest("output_format", name, "it must be as mp3_44100_128, pcm_24000, ulaw_8000, opus_48000_64")
    if found[1]:
        return AudioFormat(found[1], int(found[2]), bit_rate=1000 * int(found[3]))
    return sample_format(name.partition("_")[0], int(found[2]))


def _alignment(times: list[Timed]) -> dict[str, Any]:
    """Both alignments of an HTTP response."""
    names = ("characters", "character_start_times_seconds", "character_end_times_seconds")
    shown = dict(zip(names, zip(*times, strict=True), strict=True)) if times else None
    return {"alignment": shown, "normalized_alignment": shown}


class _Cast:
    """Who says each character of a dialogue: `owners` has the number of its input, `voices` those of the inputs."""

    def __init__(self, owners: Sequence[int | None], voices: Sequence[str | None]) -> None:
        self._owners, self._voices = iter(owners), voices

    def told(self, times: Sequence[Timed]) -> dict[str, Any]:
        """The alignments of the next characters, without tags, and who says which of them."""
        kept, segments = list[Timed](), dict[int, dict[str, Any]]()
        for one, owner in zip(times, self._owners, strict=False):
            if owner is None:
                continue
            begun = {"voice_id": self._voices[owner] or "", "dialogue_input_index": owner}
            begun |= {"start_time_seconds": one.start_s, "character_start_index": len(kept)}
            kept.append(one)
            ended = {"end_time_seconds": one.end_s, "character_end_index": len(kept)}
            segments[owner] = segments.get(owner, begun) | ended
        return {**_alignment(kept), "voice_segments": [*segments.values()]}


class _Aligned(TimedBody):
    """A body with alignments, and with who speaks if there is a `cast`."""

    cast: _Cast | None = None

    def told(self, times: list[Timed]) -> dict[str, Any]:
        return _alignment(times) if self.cast is None else self.cast.told(times)


class _Lines(_Aligned):
    """A line of JSON for each chunk: its audio, and the character times that became final."""

    def line(self, audio: bytes, times: list[Timed], *, is_last: bool) -> bytes:
        if not audio and not times:
            return b""
        return msgspec.json.encode({"audio_base64": base64.b64encode(audio).decode(), **self.told(times)}) + b"\n"

    def failure(self, refused: Refusal) -> bytes:
        return bytes(_refusal(refused, "").body) + b"\n"


class _Whole(_Aligned):
    """One JSON object, streamed as the audio arrives (base64 can be cut after any three bytes); its times come last."""

    _left, _before = b"", b'{"audio_base64":"'

    def line(self, audio: bytes, times: list[Timed], *, is_last: bool) -> bytes:
        audio = self._left + audio
        cut = len(audio) if is_last else len(audio) // 3 * 3
        before, self._before, self._left = self._before, b"", audio[cut:]
        encoded = before + base64.b64encode(audio[:cut])
        if is_last:
            return encoded + b'",' + msgspec.json.encode(self.told(times))[1:]
        self._times = times
        return encoded


class _Session(DialectSession):
    """A WebSocket with one context without an id, or with many."""

    def __init__(self, socket: WebSocket, service: Service, dialect: Dialect, *, is_multi: bool) -> None:
        super().__init__(socket, service, dialect)
        self._is_multi, self._voice, query = is_multi, socket.path_params["voice"], socket.query_params
        self._is_phrases = query.get("auto_mode") == "true"
        self._is_synchronised = query.get("sync_alignment") == "true"
        self._audio = audio_format(query.get("output_format", "mp3_44100_128"))
        self._language = query.get("language_code")
        self._is_tagged = query.get("enable_ssml_parsing") == "true"
        self._refused: dict[str, Any] = {}

    async def handle(self, message: str) -> None:
        said = parse(_Said, message.encode())
        self.check_key(said.xi_api_key or (said.authorization or "").removeprefix("Bearer "))
        if said.close_socket:
            for each in self.contexts.values():
                each.end(drops_unflushed=True)
            self.end = "closed"
            return
        name = self._name = said.context_id if self._is_multi else None
        if said.text:
            await self.free(name)
        context = self.contexts.get(name)
        if said.text and self._is_multi and context is not None and context.is_ended and not context.has_failed:
            raise InvalidRequest("context_id", name, "it was closed; wait for isFinal, or use another")
        if said.close_context:
            if context is not None and context.is_ended:
                context.cancel()
            elif context is not None:
                context.end(drops_unflushed=True)
        is_new = context is None and bool(said.text) and not said.close_context
        try:
            if is_new:
                context = await self._open(name, said)
            if context is not None and not context.is_ended:
                if said.text:
                    context.say(said.text, is_phrase=self._is_phrases)
                if said.flush:
                    context.flush()
        except SonoroError:
            if is_new:
                self._abandon(context)
            raise
        # With many contexts, an empty text is a keep-alive.
        if said.text == "" and not self._is_multi:
            self.end = "closed"
            if context is not None:
                context.end()

    async def _open(self, name: str | None, said: _Said) -> Context:
        speed = said.voice_settings.speed or 1.0
        markup: Markup = "tags" if self._is_tagged else "auto"
        asked = Asked("", self._voice, self._language, speed, said.seed, self._audio, with_words=True, markup=markup)
        lexicons = [locator.named for locator in said.pronunciation_dictionary_locators]
        context = await self.open(name, dataclasses.replace(asked, lexicons=lexicons))
        context.wire = 0.0, " "  # end time and value of the last character sent
        return context

    def _abandon(self, context: Context | None) -> None:
        """End a context, or a session without others, whose first message was refused."""
        if context is not None:
            context.has_failed = True
            context.cancel()
        if not self._is_multi:
            self.end = "closed"  # so that the client reads the error last

    async def on_audio(self, context: Context, audio: bytes, times: list[Timed], *, is_last: bool) -> None:
        told_s, last = context.wire
        if is_last and not (times[-1].text if times else last).isspace():
            end_s = times[-1].end_s if times else told_s
            times = [*times, Timed(" ", end_s, end_s)]
        shown = None
        if times:
            characters, starts, ends = zip(*times, strict=True)
            from_s = 0.0 if self._is_synchronised else told_s
            at = [round(1000 * (start - from_s)) for start in (*starts, ends[-1])]
            context.wire = from_s + at[-1] / 1000, characters[-1]
            durations = [until - since for since, until in pairwise(at)]
            shown = {"chars": characters, "charStartTimesMs": at[:-1], "charDurationsMs": durations}
        fields = {"audio": base64.b64encode(audio).decode(), "alignment": shown, "normalizedAlignment": shown}
        await self._say(context.name, isFinal=None, **fields)

    async def on_failure(self, context: Context, error: SonoroError) -> None:
        await self._send_error(context.name, error)
        if not self._is_multi:
            self.end = "closed"  # so that the client reads the error last

    async def on_end(self, context: Context) -> None:
        if self._is_multi or not context.has_failed:
            # Without contexts, ElevenLabs' client reads only the last message for an error.
            refused = {} if self._is_multi else self._refused
            await self._say(context.name, isFinal=True, audio=None, **refused)

    async def refuse(self, error: SonoroError, request_id: str | None = None) -> None:
        """Send `error`. A context that is open goes on without the message."""
        await self._send_error(self._name, error)
        if self._is_multi and self._name is not None and self._name not in self.contexts:
            await self._say(self._name, isFinal=True, audio=None)

    async def _send_error(self, name: str | None, error: SonoroError) -> None:
        message = refusal(error).error["message"]
        self._refused = {"error": message, "message": message}
        await self._say(name, **self._refused)

    async def _say(self, name: str | None, **fields: Any) -> None:
        await self.say({**fields, "contextId": name} if self._is_multi else fields)


def _asked(dialect: Dialect, request: Request, payload: bytes) -> Asked:
    """What the body, path and query of `request` ask for."""
    body = parse(_Body, payload)
    audio = audio_format(request.query_params.get("output_format", "mp3_44100_128"))
    speed = body.voice_settings.speed or 1.0
    is_timed = request.url.path.endswith("/with-timestamps")
    kind = _Lines if "/stream/" in request.url.path else _Whole
    sent = kind(body.text, dialect.timeline(speed), audio) if is_timed else None
    voice = request.path_params["voice"]
    lexicons = [locator.named for locator in body.pronunciation_dictionary_locators]
    asked = Asked(body.text, voice, body.language_code, speed, body.seed, audio, sent, with_words=is_timed)
    return dataclasses.replace(asked, markup="tags", lexicons=lexicons)


class _Turn(Message):
    text: str
    voice_id: str | None = None


class _Dialogue(Message):
    inputs: list[_Turn] = Field(min_length=1, max_length=MAX_CUES)
    language_code: str | None = None
    seed: int | None = None
    pronunciation_dictionary_locators: list[Locator] = Field(default_factory=list, max_length=3)


def _asked_dialogue(
    dialect: Dialect, known: Collection[str], own: Sequence[str], request: Request, payload: bytes
) -> Asked:
    """The dialogue in the body of `request`. Voices that are not `known` are the model's `own` in turn: clients name
    those of another server."""
    body = parse(_Dialogue, payload)
    audio = audio_format(request.query_params.get("output_format", "mp3_44100_128"))
    others = dict.fromkeys(turn.voice_id for turn in body.inputs if (turn.voice_id or "").lower() not in known)
    cast = dict(zip(others, itertools.cycle(own), strict=False)) if own else dict.fromkeys(others)
    cues = [Cue(turn.text, cast.get(turn.voice_id, turn.voice_id)) for turn in body.inputs]
    lexicons = [locator.named for locator in body.pronunciation_dictionary_locators]
    asked = Asked("", None, body.language_code, 1.0, body.seed, audio, markup="tags", inputs=cues, lexicons=lexicons)
    if not request.url.path.endswith("/with-timestamps"):
        return asked
    kind = _Lines if "/stream/" in request.url.path else _Whole
    sent = kind(dialogue(cues), dialect.timeline(1.0), audio)
    sent.cast = _Cast(owners(cues), [turn.voice_id for turn in body.inputs])
    return dataclasses.replace(asked, body=sent, with_words=True)


def _described(name: str) -> dict[str, Any]:
    return {"voice_id": name, "name": name, "category": "premade", "labels": {}, "description": None}


_COUNTS = "character_count voice_add_edit_counter voice_slots_used professional_voice_slots_used voice_limit "
_COUNTS += "professional_voice_slots_used_in_workspace professional_voice_limit max_credit_limit_extension"
_RIGHTS = "can_extend_character_limit allowed_to_extend_character_limit can_extend_voice_limit "
_RIGHTS += "can_use_instant_voice_cloning can_use_professional_voice_cloning"
_SUBSCRIPTION = {"tier": "own", "status": "active", "character_limit": 10**9, "currency": None}
_SUBSCRIPTION |= dict.fromkeys(_COUNTS.split(), 0) | dict.fromkeys(_RIGHTS.split(), False)
_SUBSCRIPTION |= {"current_overage": {"amount": "0", "currency": "usd"}}


def routes(service: Service) -> Sequence[BaseRoute]:
    """The routes of this dialect."""
    dialect = Dialect("elevenlabs", service, _refusal, ("request-id", "x-trace-id"))

    async def convert(request: Request) -> Response:
        return await dialect.speak(request, partial(_asked, dialect, request))

    async def converse(request: Request) -> Response:
        known = {*await dialect.voices(request), *service.voices.aliases}
        return await dialect.speak(
            request, partial(_asked_dialogue, dialect, known, service.speech.spec().voices, request)
        )

    async def voices(request: Request) -> Response:
        wanted, names = request.query_params.get("search", "").lower(), await dialect.voices(request)
        found = [_described(name) for name in names if wanted in name]
        paging = {"has_more": False, "total_count": len(found), "next_page_token": None}
        return JSONResponse({"voices": found, **paging})

    async def voice(request: Request) -> Response:
        return JSONResponse(_described(await dialect.known_voice(request)))

    async def models(request: Request) -> Response:
        spec = service.speech.spec()
        languages = [{"language_id": code, "name": code} for code in languages_of(spec)]
        able = {"can_do_text_to_speech": True, "can_do_voice_conversion": False, "languages": languages}
        return JSONResponse([{"model_id": name, "name": name, **able} for name in service.speech.model_names(spec)])

    async def user(request: Request) -> Response:
        if request.url.path.endswith("/subscription"):
            return JSONResponse(_SUBSCRIPTION)
        facts = {"user_id": "sonoro", "workspace_id": "sonoro", "created_at": service.created_s, "is_new_user": False}
        flags = ("can_use_delayed_payment_methods", "is_onboarding_completed", "is_onboarding_checklist_completed")
        more = {**dict.fromkeys(flags, False), "seat_type": "workspace_admin", "subscription": _SUBSCRIPTION}
        return JSONResponse({**facts, **more})

    speak = "/v1/text-to-speech/{voice}"
    for path in ("", "/stream", "/with-timestamps", "/stream/with-timestamps"):
        dialect.http("POST", speak + path, convert)
        dialect.http("POST", "/v1/text-to-dialogue" + path, converse)
    for path, answer in (("/v1/voices", voices), ("/v2/voices", voices), ("/v1/voices/{voice}", voice)):
        dialect.http("GET", path, answer)
    for path in ("/v1/user", "/v1/user/subscription"):
        dialect.http("GET", path, user)
    dialect.http("GET", "/v1/models", models, _is_ours)
    add_elevenlabs_dictionaries(dialect)
    for path, is_multi in (("/stream-input", False), ("/multi-stream-input", True)):
        dialect.socket(speak + path, partial(_Session, dialect=dialect, is_multi=is_multi), has_late_key=True)
    return dialect.routes
