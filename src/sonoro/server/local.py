"""The routes for the user's own `sonoro say`, which finds the server by a socket of this machine.

Speech here has the chunks that `say` makes by itself, so it is the same to the bit where the arithmetic is."""

import asyncio
import base64
import dataclasses
import functools
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from sonoro.core.errors import InvalidRequest
from sonoro.core.nearby import digest, stamp
from sonoro.core.types import AudioChunk, Finished, ModelSpec, SpeechRequest
from sonoro.core.version import VERSION
from sonoro.server.bodies import sse_event
from sonoro.server.errors import Refusal
from sonoro.server.schemas import SpeechBody, parse
from sonoro.server.service import Service
from sonoro.server.stream import AudioBody, Speech
from sonoro.text.english.readable import remarks
from sonoro.transport.messages import WorkerSettings

_INAUDIBLE = {
    *("config", "slots", "max_voices", "max_registered_voices", "voices_folder", "pages", "prefix_cache_bytes"),
    *("memory_fraction", "prefill_tokens", "frame_batches", "prefill_buckets", "codec_batches", "is_ready_early"),
}
"""Fields of the settings that do not change what is said."""


class Identity:
    """What a server of `settings` speaks with: version, voice, and settings unlike those of `say`. Make it before the
    engines read their files."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._stamp = stamp()
        given, usual = _heard(settings), _heard(WorkerSettings())
        self._unlike = {name: str(value) for name, value in given.items() if value != usual[name]}

    @functools.cached_property
    def _digest(self) -> str:
        found = digest()
        return found if stamp() == self._stamp else ""

    def shown(self) -> dict[str, Any]:
        """As JSON. Reads files the first time."""
        return {"version": VERSION, "stamp": self._stamp, "digest": self._digest, "settings": self._unlike}


def _heard(settings: WorkerSettings) -> dict[str, Any]:
    fields = {**msgspec.structs.asdict(settings), **dataclasses.asdict(settings.config)}
    return {name: value for name, value in fields.items() if name not in _INAUDIBLE}


class SaidBody(AudioBody):
    """Events with PCM and how much of the text it speaks; `remarks` on the text come with the first."""

    def __init__(self, remarks: tuple[str, ...]) -> None:
        self._first: dict[str, Any] = {"remarks": remarks} if remarks else {}
        self._characters = 0

    def content_type(self, audio: str) -> str:
        return "text/event-stream"

    def note(self, chunk: AudioChunk) -> None:
        self._characters = chunk.characters

    def packet(self, audio: bytes) -> bytes:
        first, self._first = self._first, {}
        encoded = base64.b64encode(audio).decode()
        return sse_event({"type": "speech.audio.delta", "audio": encoded, "characters": self._characters, **first})

    def end(self, finished: Finished, usage: dict[str, int]) -> bytes:
        facts = {"finish_reason": finished.reason, "characters": finished.characters}
        return sse_event({"type": "speech.audio.done", "usage": usage, **facts, **self._first})

    def failure(self, refused: Refusal) -> bytes:
        return sse_event({"type": "error", **refused.body})


def local_routes(service: Service) -> APIRouter:
    """The routes for `say`: what speaks here, and speech as `say` makes it by itself."""
    router, factory = APIRouter(prefix="/local", include_in_schema=False), service.speech
    router.dependencies.extend(service.keys.required)
    identity = Identity(service.client.settings)

    @router.get("")
    async def identify() -> dict[str, Any]:
        """What must be equal to a command's own, and the names of the voices."""
        spec = factory.spec()
        shown = await asyncio.to_thread(identity.shown)
        return {**shown, "voices": spec.voices, "sample_rate": spec.sample_rate}

    @router.post("/speech", response_class=Response)
    async def speech(request: Request) -> Response:
        """Speak the text of a `SpeechBody`."""

        async def prepare(payload: bytes) -> Speech:
            body = parse(SpeechBody, payload).model_copy(update={"response_format": "pcm", "stream_format": "audio"})
            made = await factory.make(body, request.state.request_id, request.state.caller)
            try:
                said = await asyncio.to_thread(_remarks, made.request, factory.spec())
            except InvalidRequest:
                made.encoding.close()
                made.held.close()
                raise
            asked = msgspec.structs.replace(made.request, is_reproducible=True)
            return dataclasses.replace(made, request=asked, body=SaidBody(said))

        return await factory.respond(request, prepare)

    return router


def _remarks(request: SpeechRequest, spec: ModelSpec) -> tuple[str, ...]:
    """What `say` warns of in the text of `request`. Raises `InvalidRequest` for a text that it refuses."""
    script = request.script
    text, warnings = (request.text, ()) if script is None else (script.text, script.warnings)
    found = remarks(text, request.text_format) if spec.text_normalizer is not None else ()
    return (*(f"not honoured: {one}" for one in warnings), *found)
