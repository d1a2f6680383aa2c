"""ElevenLabs' API, as its own SDK, LiveKit, Pipecat and Open WebUI speak it. Its base address is the root.

Ours, where nobody else says: bit rates are the server's own; `close_context` for the second time cancels; the times of
an alignment count from the end of the last character told before, and with `sync_alignment` from the beginning of the
context; what is flushed ends with a space, so that clients that wait for one time the last word.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec
from pydantic import AliasChoices, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.websockets import WebSocket

from sonoro.core.errors import InvalidRequest, SonoroError
from sonoro.core.types import AudioChunk, Finished
from sonoro.core.words import CharacterTimes
from sonoro.server.dialects.contexts import Context, ContextSession
from sonoro.server.dialects.formats import AudioFormat, sample_format
from sonoro.server.dialects.shared import Asked, Dialect, Message, Timeline, json_response, languages_of
from sonoro.server.errors import Refusal, refusal
from sonoro.server.schemas import parse
from sonoro.server.service import Service
from sonoro.server.stream import AudioBody

__all__ = ["audio_format", "routes"]

LINE_BYTES = 192 * 1024
"""Most audio of a line with times: Pipecat gives up at a line of 512 KiB, and base64 adds a third."""


def _refusal(refused: Refusal, request_id: str) -> Response:
    detail = {"status": refused.error["code"], "message": refused.error["message"]}
    return json_response(refused.status, {"detail": detail}, refused.headers)


class _Settings(Message):
    speed: float | None = None


class _Body(Message):
    text: str
    language_code: str | None = None
    voice_settings: _Settings | None = None
    seed: int | None = None


class _Said(Message):
    """What a client says on a socket."""

    text: str | None = None
    context_id: str | None = None
    flush: bool | None = None
    close_context: bool | None = None
    close_socket: bool | None = None
    voice_settings: _Settings | None = None
    seed: int | None = None
    xi_api_key: str | None = Field(None, validation_alias=AliasChoices("xi_api_key", "xi-api-key"))
    authorization: str | None = None


def audio_format(name: str) -> AudioFormat:
    """The audio that is called `name`, as "mp3_44100_128" or "ulaw_8000"."""
    codec, _, rest = name.partition("_")
    rate = rest.partition("_")[0]
    if codec in ("mp3", "opus", "pcm", "ulaw", "alaw", "wav") and rate.isdecimal() and len(rate) < 6:
        if codec in ("mp3", "opus"):
            return AudioFormat(codec, int(rate))
        return sample_format("pcm" if codec == "wav" else codec, int(rate), is_wav=codec == "wav")
    raise InvalidRequest("output_format", name, "it must be as mp3_44100_128, pcm_24000, ulaw_8000, opus_48000_64")


class _TimedLines(AudioBody):
    """A line of JSON for each chunk: its audio, and the characters whose times it tells."""

    def __init__(self, text: str, timeline: Timeline, format: AudioFormat) -> None:
        self._text, self._timeline, self._format = text, timeline, format
        self._times = CharacterTimes([], [], [])

    def content_type(self, audio: str) -> str:
        return "application/json"

    def note(self, chunk: AudioChunk) -> None:
        self._add(self._timeline.tell(self._text, chunk))

    def packet(self, audio: bytes) -> bytes:
        audio = self._format(audio)
        pieces = [audio[at : at + LINE_BYTES] for at in range(0, len(audio), LINE_BYTES)]
        return b"".join(map(self._line, pieces))

    def end(self, finished: Finished, usage: dict[str, int]) -> bytes:
        self._add(self._timeline.finish(self._text, finished))
        return self._line(b"") if self._times.characters else b""

    def failure(self, refused: Refusal) -> bytes:
        return bytes(_refusal(refused, "").body) + b"\n"

    def _add(self, times: CharacterTimes) -> None:
        self._times.characters.extend(times.characters)
        self._times.starts_s.extend(times.starts_s)
        self._times.ends_s.extend(times.ends_s)

    def _line(self, audio: bytes) -> bytes:
        times = self._alignment()
        return msgspec.json.encode({"audio_base64": base64.b64encode(audio).decode(), **times}) + b"\n"

    def _alignment(self) -> dict[str, Any]:
        """Both alignments of what was told since the last."""
        (characters, starts, ends), self._times = self._times, CharacterTimes([], [], [])
        names = ("characters", "character_start_times_seconds", "character_end_times_seconds")
        shown = dict(zip(names, (characters, starts, ends), strict=True)) if characters else None
        return {"alignment": shown, "normalized_alignment": shown}


class _TimedWhole(_TimedLines):
    """One object for all of the audio, which leaves as it is made: in groups of three bytes base64 can be cut."""

    _left = b""
    _start = b'{"audio_base64":"'

    def packet(self, audio: bytes) -> bytes:
        audio = self._left + self._format(audio)
        whole = len(audio) // 3 * 3
        start, self._start, self._left = self._start, b"", audio[whole:]
        return start + base64.b64encode(audio[:whole])

    def end(self, finished: Finished, usage: dict[str, int]) -> bytes:
        self._add(self._timeline.finish(self._text, finished))
        return self._start + base64.b64encode(self._left) + b'",' + msgspec.json.encode(self._alignment())[1:]

    def failure(self, refused: Refusal) -> bytes:
        return b""


class _Session(ContextSession):
    """A socket of one context, which has no name, or of many."""

    def __init__(self, socket: WebSocket, service: Service, dialect: Dialect, *, is_multi: bool) -> None:
        super().__init__(socket, service, dialect)
        self._is_multi, self._voice, query = is_multi, socket.path_params["voice"], socket.query_params
        self._is_phrases, self._is_synchronised = (
            query.get("auto_mode") == "true",
            query.get("sync_alignment") == "true",
        )
        self._language, self._audio = (
            query.get("language_code"),
            audio_format(query.get("output_format", "mp3_44100_128")),
        )
        self._told: dict[str | None, tuple[float, str]] = {}

    async def handle(self, message: str) -> None:
        said = parse(_Said, message.encode())
        self.check_key(said.xi_api_key or (said.authorization or "").removeprefix("Bearer "))
        if said.close_socket:
            for each in self.contexts.values():
                each.end(drops_unflushed=True)
            self.end = "closed"
            return
        name = self._name = said.context_id if self._is_multi else None
        context = self.contexts.get(name)
        if said.close_context:
            if context is not None and context.is_ended:
                context.cancel()
            elif context is not None:
                context.end(drops_unflushed=True)
        elif context is None and said.text:
            context = await self._open(name, said)
        if context is not None and not context.is_ended:
            if said.text:
                context.say(said.text, is_phrase=self._is_phrases)
            if said.flush:
                context.flush()
        # To many contexts it is a keep-alive.
        if said.text == "" and not self._is_multi:
            self.end = "closed"
            if context is not None:
                context.end()

    async def _open(self, name: str | None, said: _Said) -> Context:
        speed = (said.voice_settings or _Settings()).speed or 1.0
        self._told[name] = 0.0, " "
        return await self.open(
            name, Asked("", self._voice, self._language, speed, said.seed, self._audio, with_words=True)
        )

    async def on_audio(self, context: Context, audio: bytes, times: CharacterTimes, *, is_last: bool) -> None:
        characters, starts, ends = times
        told_s, last = self._told[context.name]
        if is_last and not (characters or last)[-1].isspace():
            end_s = ends[-1] if ends else told_s
            characters, starts, ends = [*characters, " "], [*starts, end_s], [*ends, end_s]
        shown = None
        if characters:
            from_s = 0.0 if self._is_synchronised else told_s
            at = [round(1000 * (start - from_s)) for start in (*starts, ends[-1])]
            self._told[context.name] = from_s + at[-1] / 1000, characters[-1]
            durations = [until - since for since, until in pairwise(at)]
            shown = {"chars": characters, "charStartTimesMs": at[:-1], "charDurationsMs": durations}
        await self._say(
            context.name,
            audio=base64.b64encode(audio).decode(),
            isFinal=None,
            alignment=shown,
            normalizedAlignment=shown,
        )

    async def on_failure(self, context: Context, error: SonoroError) -> None:
        self._name = context.name
        await self._tell(error)

    async def on_end(self, context: Context) -> None:
        if self._is_multi or not context.has_failed:
            await self._say(context.name, isFinal=True, audio=None)

    async def refuse(self, error: SonoroError, request_id: str | None = None) -> None:
        await self._tell(error)
        if not self._is_multi or self._name is None:
            return
        if (context := self.contexts.get(self._name)) is not None:
            context.cancel()
        else:
            await self._say(self._name, isFinal=True, audio=None)

    async def _tell(self, error: SonoroError) -> None:
        """Tell of what ends the only context: its client reads of it what comes last. Of many it is one."""
        message = refusal(error).error["message"]
        await self._say(self._name, error=message, message=message)
        if not self._is_multi:
            self.end = "closed"
            for context in self.contexts.values():
                context.has_failed = True
                context.cancel()

    async def _say(self, name: str | None, **fields: Any) -> None:
        context = {"contextId": name} if self._is_multi else {}
        await self.say({**fields, **context})


def routes(service: Service) -> Sequence[BaseRoute]:
    """What its clients ask."""
    dialect = Dialect("elevenlabs", service, _refusal, ("request-id", "x-trace-id"))

    async def convert(request: Request) -> Response:
        def read(payload: bytes) -> Asked:
            body = parse(_Body, payload)
            audio = audio_format(request.query_params.get("output_format", "mp3_44100_128"))
            speed = (body.voice_settings or _Settings()).speed or 1.0
            is_timed = request.url.path.endswith("/with-timestamps")
            kind = _TimedLines if "/stream/" in request.url.path else _TimedWhole
            sent = kind(body.text, dialect.timeline(speed), audio) if is_timed else None
            voice = request.path_params["voice"]
            return Asked(body.text, voice, body.language_code, speed, body.seed, audio, sent, with_words=is_timed)

        return await dialect.speak(request, read)

    def shown(name: str) -> dict[str, Any]:
        return {
            "voice_id": name,
            "name": name,
            "category": "premade",
            "labels": {},
            "description": None,
            "settings": {},
        }

    async def voices(request: Request) -> Response:
        wanted, names = request.query_params.get("search", "").lower(), await dialect.voices(request)
        found = [shown(name) for name in names if wanted in name]
        paging = {"has_more": False, "total_count": len(found), "next_page_token": None}
        return json_response(200, {"voices": found, **paging})

    async def voice(request: Request) -> Response:
        return json_response(200, shown(await dialect.known_voice(request)))

    async def models(request: Request) -> Response:
        spec = service.spec()
        languages = [{"language_id": code, "name": code} for code in languages_of(spec)]
        able = {"can_do_text_to_speech": True, "can_do_voice_conversion": False, "languages": languages}
        return json_response(200, [{"model_id": name, "name": name, **able} for name in service.names(spec)])

    subscription = {
        **{"tier": "own", "status": "active", "character_count": 0, "character_limit": 10**9, "currency": None},
        **dict.fromkeys(("voice_slots_used", "professional_voice_slots_used", "voice_add_edit_counter"), 0),
        **dict.fromkeys(("professional_voice_slots_used_in_workspace", "professional_voice_limit", "voice_limit"), 0),
        **dict.fromkeys(("can_extend_character_limit", "allowed_to_extend_character_limit"), False),
        **dict.fromkeys(("can_extend_voice_limit", "can_use_instant_voice_cloning"), False),
        **{"can_use_professional_voice_cloning": False, "max_credit_limit_extension": 0},
        **{"current_overage": {"amount": "0", "currency": "usd"}},
    }

    async def user(request: Request) -> Response:
        if request.url.path.endswith("/subscription"):
            return json_response(200, subscription)
        facts = {"user_id": "sonoro", "workspace_id": "sonoro", "created_at": service.created_s, "is_new_user": False}
        flags = ("can_use_delayed_payment_methods", "is_onboarding_completed", "is_onboarding_checklist_completed")
        more = {**dict.fromkeys(flags, False), "seat_type": "workspace_admin", "subscription": subscription}
        return json_response(200, {**facts, **more})

    speak = "/v1/text-to-speech/{voice}"
    for path in ("", "/stream", "/with-timestamps", "/stream/with-timestamps"):
        dialect.post(speak + path, convert)
    for path, answer in (("/v1/voices", voices), ("/v2/voices", voices), ("/v1/voices/{voice}", voice)):
        dialect.get(path, answer)
    for path in ("/v1/user", "/v1/user/subscription"):
        dialect.get(path, user)
    dialect.get(
        "/v1/models",
        models,
        lambda headers: "xi-api-key" in headers or headers.get("user-agent", "").lower().startswith("elevenlabs"),
    )
    for path, is_multi in (("/stream-input", False), ("/multi-stream-input", True)):
        dialect.socket(speak + path, partial(_Session, dialect=dialect, is_multi=is_multi), has_late_key=True)
    return dialect.routes
