"""The JSON body of a speech request: its fields, its validation, and its conversion to a `SpeechRequest`.

The fields are OpenAI's, common ones of other speech servers, and the model's own options. Others are ignored."""

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, Self, TypeVar, get_args

import msgspec
import numpy as np
from pydantic import BaseModel, Field, JsonValue, ValidationError, model_validator

from sonoro.audio.encoders import (
    FORMATS,
    LOUDNESS_HELP,
    MAX_BIT_RATE,
    MAX_RATE,
    MAX_SPEED,
    MIN_BIT_RATE,
    MIN_RATE,
    MIN_SPEED,
)
from sonoro.audio.references import MAX_REFERENCE_S
from sonoro.core.errors import InvalidReference, InvalidRequest, UnknownVoice
from sonoro.core.script import Script
from sonoro.core.types import (
    MAX_ATTEMPTS,
    MAX_PARALLEL,
    MAX_SEED,
    Markup,
    ModelSpec,
    OnMarkup,
    Reference,
    ReferenceUse,
    SamplingParams,
    SpeechRequest,
    TextFormat,
    VoiceMode,
    is_speakable,
)
from sonoro.server.config import OPENAI_VOICES
from sonoro.server.recordings import Recordings
from sonoro.text.script import Delivery, Lexicon, at_speed, read_script, scripted
from sonoro.text.script.dialogue import BETWEEN_S, MAX_CUES, Cue, dialogue
from sonoro.transport.encoded_voice import VoiceFacts

logger = logging.getLogger(__name__)

MAX_REFERENCES = 8
MAX_BATCH = 32
MAX_COMMAS = 40_000
"""In a body: its parse then takes at most some 15 ms. An embedding has up to 16,384 numbers."""
MAX_ESCAPES = 500_000
"""In a body, backslashes and bytes outside ASCII: a parse of 15 MiB of them takes 40 ms, of a recording in base64, in
which some clients escape each slash, 10 ms."""
MAX_FIELDS = 256
MAX_NAME_CHARACTERS = 256

_BLOCK_BYTES = 2**18

_TYPE = re.compile(r"str|int|float|bool|[A-Z]\w*|[\w-]+\W.*")
"""What pydantic names in a location between fields: the member of a union."""

Body = TypeVar("Body", bound=BaseModel)


def _number(description: str, minimum: float, maximum: float | None) -> Any:
    """An optional number within bounds."""
    return Field(None, description=description, ge=minimum, le=maximum)


def _or_null(*words: str) -> dict[str, JsonValue]:
    """The JSON schema of one of `words`, or null for the default."""
    return {"type": ["string", "null"], "enum": [*words, None]}


_TASKS: dict[str, VoiceMode] = {"CustomVoice": "named", "VoiceDesign": "described", "Base": "cloned"}
"""Voice modes by the task types of other speech servers."""


class VoiceId(BaseModel, strict=True):
    """A voice by its id."""

    id: str


class SpokenReference(BaseModel, strict=True):
    """A recording of a voice, and its transcript."""

    audio: str = Field(description="as ref_audio")
    text: str | None = Field(None, description="as ref_text")


class SpokenInput(BaseModel, strict=True, extra="forbid"):
    """What one speaker of a dialogue says."""

    text: str
    voice: str | None = Field(None, description="a voice of the model, or an alias; in all inputs or in none")
    speed: float = Field(1.0, ge=MIN_SPEED, le=MAX_SPEED)


class WithoutNulls(BaseModel):
    """A body in which null means the default, for any field."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        """Drop null fields, which many clients send for defaults."""
        if not isinstance(fields, dict):
            return fields
        if len(fields) > MAX_FIELDS:
            raise ValueError(f"it must have at most {MAX_FIELDS} fields")
        return {name: value for name, value in fields.items() if value is not None}


class SpeechBody(WithoutNulls, strict=True, extra="allow", allow_inf_nan=False):
    """A text to speak, and how. A field that is missing or null takes the model's default."""

    input: str = Field(description="the text to speak", examples=["Hello there."], json_schema_extra={"minLength": 1})
    model: str | None = Field(None, description="a name of the loaded model", examples=["tts-1"])
    voice: str | VoiceId | None = Field(None, description="a voice of the model, or an alias", examples=["alloy"])
    speaker: str | None = Field(None, description="the same as voice")
    instructions: str | None = Field(None, description="how to speak, or who speaks, in words")
    response_format: str = Field("mp3", description="pcm is 16-bit mono", json_schema_extra=_or_null(*FORMATS))
    speed: float = Field(
        1.0,
        description="tempo, at the same pitch",
        ge=MIN_SPEED,
        le=MAX_SPEED,
        json_schema_extra={"type": ["number", "null"]},
    )
    loudness: float | str | None = Field(None, description=LOUDNESS_HELP)
    stream_format: Literal["audio", "sse", "json"] = Field(
        "audio",
        description="the audio itself, server-sent events with audio as it is generated, or one JSON object",
        json_schema_extra=_or_null("audio", "sse", "json"),
    )
    timestamps: list[Literal["word"]] | None = Field(
        None, description="add word times to events or JSON; they are null if the model gives none"
    )
    sample_rate: int | None = _number("of the audio, in Hz; default: the model's", MIN_RATE, MAX_RATE)
    bit_rate: int | None = _number(
        "of mp3, opus and aac, in bits per second; default: by format and rate", MIN_BIT_RATE, MAX_BIT_RATE
    )
    language: str | None = Field(None, description="a language of the model, or auto")
    text_format: TextFormat = Field(
        "auto",
        description="how the input is written, for a model that reads text by classes: the built-in voice",
        json_schema_extra=_or_null("auto", "plain", "markdown", "html"),
    )
    markup: Markup = Field(
        "auto",
        description="the syntax of pauses, say-as and the like in the input (docs/markup.md)",
        json_schema_extra=_or_null(*get_args(Markup)),
    )
    on_markup: OnMarkup = Field(
        "refuse",
        description="for markup that the model cannot honour: refuse the input, or speak its plain text",
        json_schema_extra=_or_null("refuse", "plain"),
    )
    inputs: list[SpokenInput] | None = Field(
        None, min_length=1, max_length=MAX_CUES, description="a dialogue, in place of input"
    )
    pause_between: float = Field(
        BETWEEN_S, description="seconds between two inputs", json_schema_extra={"type": ["number", "null"]}
    )
    voices: dict[str, str | SpokenReference] | None = Field(
        None, max_length=64, description="names for voice, inputs and tags: of the model's voices, or of recordings"
    )
    voice_aliases: dict[str, str] | None = Field(None, max_length=64, description="as voices")
    allow_voice_tags: bool | None = Field(None, description="true: as markup voices")
    lexicons: list[str | dict[str, JsonValue] | list[JsonValue]] | None = Field(
        None, max_length=8, description="how words are said: names of lexicons, lists of rules, or aliases by word"
    )
    seed: int | None = _number("the same seed gives the same speech; default: 0", 0, MAX_SEED)
    temperature: float | None = _number("0 is greedy", 0, 10)
    top_k: int | None = _number("sample from the k most likely codes; 0 keeps all", 0, 1_000_000)
    top_p: float | None = _number("nucleus sampling: keep the most likely codes of this total probability", 0, 1)
    repetition_penalty: float | None = _number("above 1 avoids repetition", 0, 10)
    max_new_tokens: int | None = _number("maximum number of frames; default: by the text's length", 1, 1_000_000)
    ignore_eos: bool | None = Field(None, description="generate max_new_tokens frames, wherever the text ends")
    attempts: int | None = _number(
        "maximum attempts at a sentence that runs away; above 1 a sentence is sent only once it has ended",
        1,
        MAX_ATTEMPTS,
    )
    on_fault: Literal["mark", "retry", "continue"] | None = Field(
        None,
        description="what to do with a sentence that is not spoken as written: report it, speak it again before any of "
        "it is sent (within attempts; words that the last did not reach, alone), or break it off at its last good word "
        "and continue from there",
        json_schema_extra=_or_null("mark", "retry", "continue"),
    )
    parallel: int | None = _number(
        "how many segments are spoken at once, in slots that nobody waits for; each is then sent once it has ended",
        1,
        MAX_PARALLEL,
    )
    task_type: Literal["CustomVoice", "VoiceDesign", "Base"] | None = Field(
        None, description="a voice of the model, one described by instructions, or one cloned from ref_audio"
    )
    ref_audio: str | None = Field(
        None, description="recording of the voice to clone: data:audio/...;base64,..., or a URL if the server allows it"
    )
    ref_text: str | None = Field(None, description="transcript of ref_audio")
    references: list[SpokenReference] | None = Field(
        None, min_length=1, max_length=MAX_REFERENCES, description="in place of ref_audio and ref_text"
    )
    x_vector_only_mode: bool | None = Field(None, description="clone only the timbre")
    speaker_embedding: list[float] | None = Field(
        None, max_length=16_384, description="the voice as an embedding of the model's speaker encoder"
    )
    stream: bool | None = Field(None, description="ignored: the audio is always streamed")
    initial_codec_chunk_frames: int | None = _number("ignored: the server's configuration decides", 1, None)

    @property
    def cast(self) -> dict[str, SpokenReference]:
        """The recordings among `voices`, by name in small letters."""
        return {name.lower(): one for name, one in (self.voices or {}).items() if isinstance(one, SpokenReference)}

    @model_validator(mode="before")
    @classmethod
    def _with_input(cls, fields: Any) -> Any:
        """Give a dialogue a text."""
        is_dialogue = isinstance(fields, dict) and fields.get("inputs") is not None
        return {"input": "", **fields} if is_dialogue else fields

    @model_validator(mode="after")
    def _of_inputs(self) -> Self:
        """Make the text of a dialogue. Raises `InvalidRequest`."""
        if self.inputs is not None:
            if self.input:
                raise InvalidRequest("inputs", f"{len(self.inputs)} given", "give input or inputs, not both")
            self.input = dialogue([Cue(one.text, one.voice, one.speed) for one in self.inputs], self.pause_between)
            if self.voice is None and self.speaker is None:
                # A model without voices of its own needs one.
                self.voice = self.inputs[0].voice
        return self


class BatchBody(BaseModel, strict=True, extra="allow", allow_inf_nan=False):
    """Texts to speak, each as a speech request; other fields are defaults for all `items`."""

    items: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_BATCH)


def parse(kind: type[Body], payload: bytes | dict[str, Any]) -> Body:
    """Validate JSON or a mapping as `kind`. Raises `InvalidRequest` naming the first invalid field."""
    if isinstance(payload, bytes):
        _check_cost(payload)
    try:
        return kind.model_validate_json(payload) if isinstance(payload, bytes) else kind.model_validate(payload)
    except ValidationError as errors:
        first = errors.errors(include_url=False, include_input=False)[0]
        # For a union the location continues with the type.
        field = str(first["loc"][0]) if first["loc"] else "body"
        # For a payload that is not a JSON object the value would be all of it, as a copy.
        value = f"{len(payload)} bytes" if field == "body" else errors.errors(include_url=False)[0]["input"]
        value = None if first["type"] == "missing" else value
        within = [str(step) for step in first["loc"][1:] if not _TYPE.fullmatch(str(step))]
        where = f"at {'.'.join(within)}: " if within else ""
        raise InvalidRequest(field, value, f"{where}{first['msg']}{_hint_for(field, payload)}") from errors


def _hint_for(field: str, payload: bytes | dict[str, Any]) -> str:
    """A hint for a missing `input`, by the names that other APIs have for it."""
    given = msgspec.json.decode(payload) if isinstance(payload, bytes) and field == "input" else payload
    meant = [name for name in ("text", "prompt", "transcript") if isinstance(given, dict) and name in given]
    return f"; did you mean input in place of {meant[0]}?" if field == "input" and meant else ""


def _check_cost(payload: bytes) -> None:
    """Raise `InvalidRequest` if JSON would take long to parse."""
    if len(payload) <= MAX_COMMAS:
        return
    commas = escapes = 0
    characters = np.frombuffer(payload, np.uint8)
    for start in range(0, len(payload), _BLOCK_BYTES):
        block = characters[start : start + _BLOCK_BYTES]
        commas += int(np.count_nonzero(block == ord(",")))
        escapes += int(np.count_nonzero((block == ord("\\")) | (block > 127)))
    for count, limit, what in ((commas, MAX_COMMAS, "commas"), (escapes, MAX_ESCAPES, "escapes and bytes not ASCII")):
        if count > limit:
            raise InvalidRequest("body", f"{len(payload)} bytes", f"it must have at most {limit} {what}")


async def read_references(
    body: SpeechBody, recordings: Recordings, spec: ModelSpec, owner: str = ""
) -> tuple[Reference, ...]:
    """Read and decode the recordings of `body`, unless the model cannot clone. Raises `InvalidReference`, and
    `TooManyRequests` if too many of `owner` are being decoded."""
    for field in ("ref_audio", "references", "ref_text", "x_vector_only_mode"):
        if getattr(body, field):
            spec.check_cloning(field)
    if body.references is not None and (body.ref_audio is not None or body.ref_text is not None):
        raise InvalidReference("references", f"{len(body.references)} given", "give these or ref_audio, not both")
    use: ReferenceUse = "reference" if body.x_vector_only_mode else "prompt"
    if body.references is not None:
        reading = (recordings.read(given.audio, given.text, use, "references", owner) for given in body.references)
        references = tuple(await asyncio.gather(*reading))
        if (total_s := sum(reference.duration_s for reference in references)) > MAX_REFERENCE_S:
            raise InvalidReference("references", f"{total_s:.1f} s", f"together at most {MAX_REFERENCE_S:g} s")
        return references
    if body.ref_audio is not None:
        return (await recordings.read(body.ref_audio, body.ref_text, use, owner=owner),)
    for field in ("ref_text", "x_vector_only_mode"):
        if value := getattr(body, field):
            raise InvalidReference(field, value, "it needs ref_audio; give that too")
    return ()


def speech_request(
    body: SpeechBody,
    request_id: str,
    spec: ModelSpec,
    aliases: Mapping[str, str],
    *,
    references: tuple[Reference, ...] = (),
    cast: Mapping[str, Reference] = MappingProxyType({}),
    registered: Mapping[str, VoiceFacts] = MappingProxyType({}),
    lexicons: Sequence[Lexicon] = (),
    is_live: bool = False,
) -> SpeechRequest:
    """Make the resolved request of `body` for the model of `spec`, with the `lexicons` and `cast` that it brings.
    `aliases` are further names of the model's voices, in lower case, `registered` uploads that the caller may name.
    Raises `InvalidRequest` (or a subclass) for invalid fields and for what the model cannot do."""
    embedding = None if body.speaker_embedding is None else tuple(body.speaker_embedding)
    voice, aliases = named_voice(body), _aliases(body, aliases)
    known = _also_named(registered, aliases)
    if voice is not None and voice.lower() in cast:
        references, voice = (cast[voice.lower()],), None
    has_own_voice = bool(references) or embedding is not None
    uploaded = None if voice is None else known.get(voice.lower())
    if voice is not None and uploaded is None:
        voice = _model_voice(voice, spec, aliases, has_own_voice=has_own_voice)
    _check_task(body, spec, is_cloned=has_own_voice or uploaded is not None)
    request = SpeechRequest(
        id=request_id,
        text=body.input,
        voice=voice if uploaded is None else uploaded.name,
        markup=_markup(body),
        instructions=body.instructions or None,
        references=references,
        speaker_embedding=embedding,
        sampling=SamplingParams(**{name: getattr(body, name) for name in SamplingParams.__struct_fields__}),
        seed=0 if body.seed is None else body.seed,
        max_frames=body.max_new_tokens,
        ignore_eos=bool(body.ignore_eos),
        is_live=is_live,
        with_words=bool(body.timestamps),
        parallel=body.parallel or 1,
        options=_options(body, request_id, spec),
        **{name: getattr(body, name) for name in ("language", "text_format", "on_markup", "attempts", "on_fault")},
    )
    # With a digest the voice counts as known; without one, the registered names are for the error message.
    if request.may_have_markup and (known or cast):
        request = msgspec.structs.replace(request, cast={**{name: one.digest for name, one in known.items()}, **cast})
    resolved = spec.resolve(request, {uploaded.name: uploaded.digest} if uploaded else dict.fromkeys(registered, ""))
    if not lexicons and not resolved.may_have_markup:
        return resolved
    return scripted(resolved, spec, lexicons, speed=body.speed, aliases=aliases)


def script_of(
    body: SpeechBody, spec: ModelSpec, aliases: Mapping[str, str], lexicons: Sequence[Lexicon]
) -> Script | None:
    """The script of the text of `body`, which need not be valid otherwise and may name any voice. Raises
    `InvalidRequest`."""
    if not is_speakable(body.input):
        return None
    names = {**spec.voice_aliases, **_aliases(body, aliases)}
    delivery = Delivery(spec, names, body.on_markup, body.language or "auto", _Anyone())
    script = read_script(body.input, _markup(body), delivery, lexicons)
    return None if script is None else at_speed(script, body.speed)


class _Anyone(frozenset[str]):
    """Holds every name of a voice."""

    def __contains__(self, name: object) -> bool:
        return True


def _aliases(body: SpeechBody, aliases: Mapping[str, str]) -> Mapping[str, str]:
    """`aliases` of the model's voices and those of `body`, which may stand for one of them."""
    given = {**(body.voice_aliases or {}), **(body.voices or {})}.items()
    own = {name.lower(): aliases.get(one.lower(), one.lower()) for name, one in given if isinstance(one, str)}
    return {**aliases, **own} if own else aliases


def _also_named(registered: Mapping[str, VoiceFacts], aliases: Mapping[str, str]) -> Mapping[str, VoiceFacts]:
    """`registered` voices, also by further names of theirs."""
    return {**{name: registered[voice] for name, voice in aliases.items() if voice in registered}, **registered}


def _markup(body: SpeechBody) -> Markup:
    has_voices = body.allow_voice_tags or body.inputs is not None
    return "voices" if has_voices and body.markup == "auto" else body.markup


def _check_task(body: SpeechBody, spec: ModelSpec, *, is_cloned: bool) -> None:
    if body.task_type is None:
        return
    if _TASKS[body.task_type] not in spec.voice_modes:
        able = [task for task, mode in _TASKS.items() if mode in spec.voice_modes]
        raise InvalidRequest("task_type", body.task_type, f"{spec.name} supports only {' and '.join(able)}")
    if is_cloned != (body.task_type == "Base"):
        limit = "a cloned voice is Base" if is_cloned else "it needs ref_audio or the name of an uploaded voice"
        raise InvalidRequest("task_type", body.task_type, limit)


def may_name_voices(body: SpeechBody) -> bool:
    """Whether `body` or its text may name a voice. Quick, as it is asked of every request."""
    return body.voice is not None or body.speaker is not None or "voice" in body.input.lower()


def named_voice(body: SpeechBody) -> str | None:
    """The voice that `body` names. Raises `InvalidRequest` if it names two."""
    voice = body.voice.id if isinstance(body.voice, VoiceId) else body.voice
    if voice is not None and body.speaker is not None and voice != body.speaker:
        raise InvalidRequest("speaker", body.speaker, f"it is another name of voice, which is {voice!r}")
    named = voice if voice is not None else body.speaker
    if named is not None and len(named) > MAX_NAME_CHARACTERS:
        raise UnknownVoice("voice", named, f"the name of a voice has at most {MAX_NAME_CHARACTERS} characters")
    return named


def _model_voice(name: str, spec: ModelSpec, aliases: Mapping[str, str], *, has_own_voice: bool) -> str | None:
    # Clients of OpenAI's API must name a voice; ignore OpenAI's names if the model has none or the voice is cloned.
    if name.lower() in OPENAI_VOICES and (has_own_voice or not spec.voices):
        return None
    return aliases.get(name.lower(), name)


def _options(body: SpeechBody, request_id: str, spec: ModelSpec) -> dict[str, bool | int | float | str]:
    """The model's own options among the extra fields; the others are logged at debug level."""
    known, given = {option.name: option for option in spec.options}, body.model_extra or {}
    if unknown := unknown_fields(body, spec) + sorted(body.model_fields_set & {"stream", "initial_codec_chunk_frames"}):
        logger.debug("event=fields_ignored id=%s count=%d fields=%.200r", request_id, len(unknown), unknown)
    return {name: known[name].check(value) for name, value in given.items() if name in known}


def unknown_fields(body: SpeechBody, spec: ModelSpec) -> list[str]:
    """The fields of `body` that neither this API nor the model of `spec` has."""
    return sorted((body.model_extra or {}).keys() - {option.name for option in spec.options})
