"""The routes of uploaded voices: register a recording under a name, list and delete voices."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from python_multipart.multipart import parse_options_header
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.responses import JSONResponse

from sonoro.core.errors import InvalidReference, InvalidRequest, UnknownVoice, VoiceExists
from sonoro.core.types import ModelSpec, ReferenceUse
from sonoro.server.errors import Answers, TooManyVoices, refusals
from sonoro.server.keys import Caller
from sonoro.server.middleware import CLIENT_GONE
from sonoro.server.openapi import object_of
from sonoro.server.recordings import naming
from sonoro.server.service import Service
from sonoro.server.stream import cancel_on_disconnect
from sonoro.transport.encoded_voice import VoiceFacts, voice_name

MAX_FORM_BYTES = 64 * 1024
"""Upper bound of a form without its recording."""

MAX_CONSENT = 2000

_STRING, _OR_NONE = {"type": "string"}, {"type": ["string", "null"]}
_VOICE = object_of(
    ("name", "use", "duration_s", "created_at"),
    name=_STRING,
    use={"enum": ["prompt", "reference"], "description": "cloned with its transcript, or the timbre only"},
    duration_s={"type": "number"},
    created_at={"type": "integer"},
    transcript=_OR_NONE,
    consent=_OR_NONE,
    id={**_STRING, "description": "for admin keys only: the unique name of the voice"},
    owner={**_OR_NONE, "description": "for admin keys only; null if the voice is everybody's"},
)
_FORM = object_of(
    ("audio", "name"),
    audio={**_STRING, "format": "binary", "description": "a recording of 0.5 to 60 s"},
    name={**_STRING, "pattern": "^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$"},
    ref_text={**_STRING, "description": "transcript of the recording, if the model needs it; or x_vector_only_mode"},
    x_vector_only_mode={**_STRING, "enum": ["true", "false"], "default": "false"},
    consent={**_STRING, "maxLength": MAX_CONSENT, "description": "a statement of consent, stored with the voice"},
)
_TAKES = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
_LISTED_VOICE = object_of(
    ("id", "name"),
    id=_STRING,
    name=_STRING,
    sex={"enum": ["female", "male"], "description": "as listeners perceive it; missing if unknown, like the next two"},
    accent={**_STRING, "description": "its accent or language"},
    adjectives={"type": "array", "items": _STRING},
)
_LIST = object_of(
    ("voices", "aliases", "uploaded_voices"),
    voices={"type": "array", "items": _LISTED_VOICE},
    aliases={"type": "object", "additionalProperties": _STRING},
    uploaded_voices={"type": "array", "items": _VOICE},
)


def _answers(status: int, schema: dict[str, Any], *refused: int) -> Answers:
    return {status: {"description": "", "content": {"application/json": {"schema": schema}}}, **refusals(*refused)}


_LISTED = _answers(200, _LIST, 401, 403, 503)
_ADDED = _answers(201, _VOICE, 400, 401, 403, 408, 409, 413, 429, 503, 507)
_DELETED = _answers(200, {"type": "object", "required": ["name", "deleted"]}, 401, 403, 404, 503)


def voice_routes(service: Service) -> APIRouter:
    """The routes of voices; on a server with keys, only the listing of the model's voices needs none."""
    router = APIRouter(prefix="/v1/audio/voices")
    with_key = service.keys.required
    client, config = service.client, service.config

    @router.get("", responses=_LISTED, dependencies=service.keys.optional)
    async def voices(request: Request) -> dict[str, Any]:
        """The voices that a request may name: the model's, their aliases, and, with a key, uploaded ones."""
        caller, spec = request.state.caller, service.speech.spec()
        uploaded = [facts for facts in await service.voices.scan() if caller.sees(facts)]
        named = sorted({facts.called for facts in uploaded} & service.voices.by_name(caller).keys())
        shown = [_shown(facts, caller) for facts in uploaded]
        listed = [{"id": name, "name": name, **described(spec, name)} for name in (*spec.voices, *named)]
        return {"voices": listed, "aliases": service.voices.aliases, "uploaded_voices": shown}

    @router.post(
        "", response_class=Response, responses=_ADDED, openapi_extra=_TAKES, status_code=201, dependencies=with_key
    )
    async def add(request: Request) -> Response:
        """Register a recording as a voice, which can be used at once."""
        async with service.speech.bodies.body(request, config.max_upload_bytes + MAX_FORM_BYTES) as payload:
            service.speech.spec()
            # In a thread: a minute of audio takes 12 ms.
            form = await asyncio.to_thread(read_form, payload, request.headers.get("content-type"))
            name, use = await _free_name(service, request.state.caller, _text(form, "name") or ""), _use(form)
            consent = _text(form, "consent", MAX_CONSENT)
            text = _text(form, "ref_text", config.max_characters)
            with naming("audio"):
                decoding = service.speech.recordings.decode(_audio(form), text, use, request.state.caller.owner)
                if (reference := await cancel_on_disconnect(request.receive, decoding)) is None:
                    return Response(status_code=CLIENT_GONE)
                with service.speech.hold((reference,), request.state.caller):
                    facts = await service.voices.store.add(name, (reference,), consent, client.encode_voice)
        return JSONResponse(_shown(facts, request.state.caller), 201)

    @router.delete("/{name}", responses=_DELETED, dependencies=with_key)
    async def delete(request: Request, name: str) -> dict[str, Any]:
        """Delete an uploaded voice. Running requests still use it."""
        service.speech.spec()
        caller = request.state.caller
        theirs = [facts for facts in await service.voices.scan() if caller.may_delete(facts)]
        known = {facts.called: facts.name for facts in theirs if facts.owner == caller.owner}
        known |= {facts.name: facts.name for facts in theirs}
        if name.lower() not in known:
            raise UnknownVoice("name", name, "you have registered no voice of that name")
        await service.voices.store.delete(known[name.lower()])
        return {"name": name.lower(), "deleted": True}

    return router


def described(spec: ModelSpec, name: str) -> dict[str, Any]:
    """What is known of how a voice sounds: `sex`, `accent`, `adjectives`."""
    sex, description = spec.voice_sexes.get(name), spec.voice_descriptions.get(name)
    sounds = {} if description is None else msgspec.to_builtins(description)
    return sounds if sex is None else {"sex": sex, **sounds}


async def _free_name(service: Service, caller: Caller, name: str) -> str:
    """The id of a new voice `name` of `caller`. Raises `InvalidRequest`, `VoiceExists` or `TooManyVoices`."""
    called = voice_name(name)
    if called in service.voices.reserved_names():
        raise InvalidRequest("name", name, "it is the name of a voice of the model, or of OpenAI's API")
    mine = f"{called}.{caller.owner}" if caller.owner else called
    # Scanned, for what was registered through other fronts and servers.
    if any(facts.name in (called, mine) for facts in await service.voices.scan()):
        raise VoiceExists("name", name, "a voice of that name is registered; delete it first")
    share = service.stored_voices(caller.owner)
    if service.voices.store.count(caller.owner) >= share:
        raise TooManyVoices(f"{share} voices of this key are registered, as many as it may have; delete one first")
    return mine


def _shown(facts: VoiceFacts, caller: Caller) -> dict[str, Any]:
    """A voice as `caller` sees it; admins see its owner."""
    shown = {name: getattr(facts, name) for name in ("use", "duration_s", "transcript", "consent")}
    whose = {"id": facts.name, "owner": facts.owner or None} if caller.is_admin else {}
    return {"name": facts.called, **shown, "created_at": int(facts.created_at_s), **whose}


Form = Mapping[str, str | bytes]
"""The fields of a form; files are bytes."""


def read_form(payload: bytes, content_type: str | None) -> Form:
    """Parse the multipart form in `payload`. Raises `InvalidRequest`."""
    kind, options = parse_options_header(content_type)
    edge = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not payload.rstrip().endswith(b"--" + edge + b"--"):
        # A truncated form would parse as one whose last field is missing.
        raise InvalidRequest("body", f"{len(payload)} bytes", "it must be multipart/form-data, whole")

    async def stream() -> AsyncGenerator[bytes, None]:
        yield payload

    async def read() -> Form:
        headers = Headers({"content-type": content_type or ""})
        parser = MultiPartParser(headers, stream(), max_files=1, max_fields=16, max_part_size=MAX_FORM_BYTES)
        parser.spool_max_size = len(payload)  # in memory: a full disk refuses no upload
        form = await parser.parse()
        try:
            return {
                name: await value.read() if isinstance(value, UploadFile) else value
                for name, value in form.multi_items()
            }
        finally:
            await form.close()

    try:
        return asyncio.run(read())
    except MultiPartException as error:
        limit = f"it must be multipart/form-data ({error.message})"
        raise InvalidRequest("body", f"{len(payload)} bytes", limit) from error


def _text(form: Form, field: str, max_characters: int = 100) -> str | None:
    value = form.get(field)
    if isinstance(value, bytes):
        raise InvalidRequest(field, "a file", "it must be text, not a file")
    if value is not None and len(value) > max_characters:
        raise InvalidRequest(field, f"{len(value)} characters", f"it must have at most {max_characters}")
    return value or None


def _use(form: Form) -> ReferenceUse:
    given = _text(form, "x_vector_only_mode") or "false"
    if given.lower() not in ("true", "false"):
        raise InvalidRequest("x_vector_only_mode", given, "it must be true or false")
    return "reference" if given.lower() == "true" else "prompt"


def _audio(form: Form) -> bytes:
    value = form.get("audio")
    if not isinstance(value, bytes):
        raise InvalidReference("audio", value, "it must be a file, whole, in the form")
    return value
