"""The body of a speech request, checked, and what the engine is asked for it. Knows no engine and no HTTP.

The fields are those of OpenAI's API and the further ones that speech servers share; the model's own options are fields
too. What is neither is passed over.
"""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sonoro.core.audio import read_reference
from sonoro.core.errors import InvalidReference, InvalidRequest
from sonoro.core.types import ModelSpec, Reference, SamplingParams, SpeechRequest
from sonoro.server.config import OPENAI_VOICES

__all__ = ["SpeechBody", "VoiceId", "body_schema", "parse_body", "speech_request"]

logger = logging.getLogger(__name__)


class VoiceId(BaseModel):
    """A voice by its id."""

    model_config = ConfigDict(strict=True)

    id: str


class SpeechBody(BaseModel):
    """A text to speak, and how. A field that is left out, or null, is the model's choice."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    input: str = Field(description="the text to speak")
    model: str | None = Field(None, description="a name of the loaded model")
    voice: str | VoiceId | None = Field(None, description="a voice of the model, or an alias of one")
    speaker: str | None = Field(None, description="the same as voice")
    instructions: str | None = Field(None, description="how to speak, or who speaks, in words")
    response_format: str = Field("mp3", description="mp3, opus, aac, flac, wav or pcm (16 bits, mono)")
    speed: float = Field(1.0, description="0.25 to 4")
    stream_format: Literal["audio", "sse"] = Field("audio", description="the audio itself, or events that hold it")
    sample_rate: int | None = Field(None, description="of the audio, in Hz; the model's own if left out")
    language: str | None = Field(None, description="a language of the model, or auto")
    seed: int | None = Field(None, description="the same seed draws the same speech; 0 if left out")
    temperature: float | None = Field(None, description="0 is greedy")
    top_k: int | None = Field(None, description="draw from the k likeliest; 0 keeps all")
    top_p: float | None = Field(None, description="draw from the likeliest that hold this probability")
    repetition_penalty: float | None = Field(None, description="above 1 avoids repetition")
    max_new_tokens: int | None = Field(None, description="most frames; bounded by the text if left out")
    ignore_eos: bool | None = Field(None, description="speak for max_new_tokens frames, wherever the text ends")
    ref_audio: str | None = Field(None, description="recording of the voice to clone, data:audio/...;base64,...")
    ref_text: str | None = Field(None, description="transcript of ref_audio")
    x_vector_only_mode: bool | None = Field(None, description="clone the timbre alone")


def body_schema() -> dict[str, Any]:
    """The JSON schema of a `SpeechBody`, without references into itself."""
    schema = SpeechBody.model_json_schema()
    kinds = schema.pop("$defs")
    voice = schema["properties"]["voice"]
    voice["anyOf"] = [kinds[kind["$ref"].rpartition("/")[2]] if "$ref" in kind else kind for kind in voice["anyOf"]]
    return schema


def parse_body(payload: bytes) -> SpeechBody:
    """The body in `payload`, JSON. Raises `InvalidRequest` naming the first field that is wrong."""
    try:
        return SpeechBody.model_validate_json(payload)
    except ValidationError as errors:
        first = errors.errors(include_url=False)[0]
        # Of a field that may be of several types, the place names the type too.
        field = str(first["loc"][0]) if first["loc"] else "body"
        shown = None if first["type"] == "missing" else first["input"]
        # Valid JSON that is no object, or bytes that are no JSON, would be shown whole as the value.
        value = f"{len(payload)} bytes" if field == "body" else shown
        raise InvalidRequest(field, value, first["msg"]) from errors


def speech_request(
    body: SpeechBody, request_id: str, spec: ModelSpec, aliases: Mapping[str, str], max_characters: int
) -> SpeechRequest:
    """What `body` asks of the model of `spec`; `aliases` are further names of its voices, in lower case.

    Raises `InvalidRequest` (or a subclass) for what a request cannot be or this model cannot do. Decodes a reference,
    which takes time.
    """
    if len(body.input) > max_characters:
        raise InvalidRequest("input", f"{len(body.input)} characters", f"it must have at most {max_characters}")
    references = _references(body)
    request = SpeechRequest(
        id=request_id,
        text=body.input,
        voice=_voice(body, spec, aliases, is_cloned=bool(references)),
        language=body.language,
        instructions=body.instructions or None,
        references=references,
        sampling=SamplingParams(
            temperature=body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            repetition_penalty=body.repetition_penalty,
        ),
        seed=0 if body.seed is None else body.seed,
        max_frames=body.max_new_tokens,
        ignore_eos=bool(body.ignore_eos),
        options=_options(body, request_id, spec),
    )
    return spec.resolve(request)


def _voice(body: SpeechBody, spec: ModelSpec, aliases: Mapping[str, str], *, is_cloned: bool) -> str | None:
    voice = body.voice.id if isinstance(body.voice, VoiceId) else body.voice
    if voice is not None and body.speaker is not None and voice != body.speaker:
        raise InvalidRequest("speaker", body.speaker, f"it is another name of voice, which is {voice!r}")
    name = voice if voice is not None else body.speaker
    # Clients of OpenAI's API must name a voice. Where there is none to name, any of its names will do.
    if name is not None and name.lower() in OPENAI_VOICES and (is_cloned or not spec.voices):
        return None
    return None if name is None else aliases.get(name.lower(), name)


def _options(body: SpeechBody, request_id: str, spec: ModelSpec) -> dict[str, bool | int | float | str]:
    """The model's own options among the further fields; which others there were is a matter of the debug log."""
    known = {option.name: option for option in spec.options}
    given = {name: value for name, value in (body.model_extra or {}).items() if value is not None}
    if unknown := sorted(given.keys() - known.keys()):
        logger.debug("event=fields_ignored id=%s count=%d fields=%.200r", request_id, len(unknown), unknown)
    return {name: known[name].check(value) for name, value in given.items() if name in known}


def _references(body: SpeechBody) -> tuple[Reference, ...]:
    if body.ref_audio is not None:
        use: Literal["reference", "prompt"] = "reference" if body.x_vector_only_mode else "prompt"
        return (read_reference(_decode(body.ref_audio), text=body.ref_text, use=use),)
    if body.ref_text is not None:
        raise InvalidReference("ref_text", body.ref_text, "it is the transcript of ref_audio; give that too")
    if body.x_vector_only_mode:
        raise InvalidReference("x_vector_only_mode", True, "it says how to use ref_audio; give that too")
    return ()


def _decode(url: str) -> bytes:
    """The bytes in a data: URL. Nothing is fetched or opened for a client."""
    head, comma, data = url.partition(",")
    if not comma or not head.lower().startswith("data:") or not head.lower().endswith(";base64"):
        raise InvalidReference("ref_audio", url, "it must be a data: URL, data:audio/wav;base64,...")
    try:
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidReference("ref_audio", url, f"it must be valid base64 ({error})") from error
