"""Wire types shared by all processes: requests, audio and other events, and the description of a model.

Imports no torch and knows no model. A `SpeechRequest` is validated when it is constructed, and once against the model
by `ModelSpec.resolve`. The engine also refuses what does not fit it, or what a model's `prepare` refuses."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from sonoro.core.blends import find_voice
from sonoro.core.errors import ErrorFacts, InvalidReference, InvalidRequest, UnknownLanguage, UnknownVoice, suggestion
from sonoro.core.events import Fault, Mark, Timings, Word
from sonoro.core.options import OptionSpec, OptionValue, VoiceDescription
from sonoro.core.script import Script

FinishReason = Literal["stop", "length", "runaway", "cancelled", "error"]
"""`stop`: the model emitted its end; `length`: the caller's `max_frames`; `runaway`: the bound from the text."""

TextFormat = Literal["auto", "plain", "markdown", "html"]
"""How a text is written; "auto" finds out by its marks."""

Markup = Literal["auto", "voices", "ssml", "tags", "deepgram", "none"]
"""The syntax of a text's markup. `auto`: SSML if the text begins as such, else tags that no prose has; `voices`: the
same and `[voice:NAME]`, `[rate:N]`; `tags`: those of all other services."""

OnMarkup = Literal["refuse", "plain"]
"""What to do with markup that is not honoured: refuse the text, or speak it without."""

OnFault = Literal["mark", "retry", "continue"]
"""How a segment is handled that is faulty by the model's attention: `mark` reports it; `retry` speaks it again before
any of it is sent; `continue` breaks it off at its last good word while it plays and continues from there."""

VoiceMode = Literal["named", "described", "cloned"]
"""How a voice is given: as one of the model's own, as a description in words, as reference audio."""

ReferenceUse = Literal["prompt", "reference"]
"""`prompt`: the recording and its transcript begin the prompt; `reference`: only the timbre is taken."""

VoiceSex = Literal["female", "male"]
"""The sex that listeners perceive."""

MAX_SEED = 2**63 - 1
MAX_ATTEMPTS = 10
MAX_PARALLEL = 256

MAX_EMBEDDING = 1e4
"""Bound of the numbers of a speaker embedding: real ones are around 10 at most, and half precision overflows beyond."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters for sampling the first code of a frame. None means the model's default. Temperature 0 is greedy."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, 0.0, 10.0)
        _check_number("top_k", self.top_k, 0, 1_000_000)
        _check_number("top_p", self.top_p, 0.0, 1.0, above=True)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 10.0, above=True)

    def over(self, defaults: SamplingParams) -> SamplingParams:
        """These values where they are not None, else `defaults`."""
        given = {name: value for name, value in msgspec.structs.asdict(self).items() if value is not None}
        return msgspec.structs.replace(defaults, **given)


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """A recording of a voice to clone, with its transcript in `text`; made by `sonoro.audio.references.read_reference`.
    `pcm` is mono float32 little-endian at `sample_rate`. `digest`, the SHA-256 of `pcm`, is computed once, in at most
    20 ms, and sent along."""

    pcm: bytes
    sample_rate: int
    text: str | None = None
    use: ReferenceUse = "prompt"
    digest: str = ""

    def __post_init__(self) -> None:
        if not self.digest:
            msgspec.structs.force_setattr(self, "digest", hashlib.sha256(self.pcm).hexdigest())

    def check(self) -> None:
        """Raise `InvalidReference` if its `use` needs a transcript and has none. Whether the model can clone at all is
        the caller's check."""
        if self.use == "prompt" and not (self.text or "").strip():
            raise InvalidReference(
                "ref_text", self.text, "in-context cloning needs the transcript of the reference (or use x-vector only)"
            )

    @property
    def samples(self) -> npt.NDArray[np.float32]:
        """Mono samples [S] float32 in [-1, 1], read-only."""
        return np.frombuffer(self.pcm, dtype="<f4")

    @property
    def duration_s(self) -> float:
        return len(self.pcm) / 4 / self.sample_rate


class SpeechRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One text to speak. Valid once constructed. With `max_frames` None the text's length bounds the audio.

    The voice is given by name in `voice`, by `references`, or as a `speaker_embedding`. `ModelSpec.resolve` sets
    `voice_digest` for a registered voice.
    Chunk lengths follow the listener's playback; if `is_reproducible`, they follow a fixed rule instead, so the same
    request in the same batches gives the same bytes.
    If `is_live`, `text` is the first piece, possibly empty; the rest follows while it is spoken.
    `attempts` bounds how often a segment that runs away or is faulty is spoken, each time with the next seed. Above 1,
    the audio of a segment is held back until it has ended, unless `on_fault` is "continue"; with "mark", only runaways
    are spoken again; with "retry", words at the end that the last attempt did not reach are spoken alone after it, and
    not sent if they run away. A runaway ends the request, unless an earlier attempt at its segment was faulty but ended
    by itself: that is a fault, and the text goes on. By default `attempts` is 1, or 2 if `on_fault` needs it, and
    `on_fault` "retry" if `attempts` is above 1, else "mark".
    `with_words` asks for word times, if the model gives them.
    At most `parallel` segments are spoken at once, in slots that nobody else waits for. The audio of each is then sent
    once it has ended, in order, and no prompt includes the segments before it. Not for live text or with `max_frames`.
    `cast` are further voices that lines of `script` name, in lower case: registered ones by digest, and recordings.
    `script` is what the markup of `text` says, as `sonoro.text.script.scripted` reads it; None: `text` as it stands.
    `is_resolved`: validated and completed by `ModelSpec.resolve`, once, where the request came in."""

    id: str
    text: str
    markup: Markup = "auto"
    on_markup: OnMarkup = "refuse"
    script: Script | None = None
    voice: str | None = None
    voice_digest: str | None = None
    language: str | None = None
    text_format: TextFormat = "auto"
    instructions: str | None = None
    references: tuple[Reference, ...] = ()
    speaker_embedding: tuple[float, ...] | None = None
    sampling: SamplingParams = msgspec.field(default_factory=SamplingParams)
    seed: int = 0
    max_frames: int | None = None
    ignore_eos: bool = False
    is_live: bool = False
    is_reproducible: bool = False
    attempts: int | None = None
    on_fault: OnFault | None = None
    with_words: bool = False
    parallel: int = 1
    cast: dict[str, str | Reference] = {}
    options: dict[str, OptionValue] = {}
    is_resolved: bool = False

    def __post_init__(self) -> None:
        for field in ("text", "voice", "language", "instructions"):
            if field == "text" or getattr(self, field) is not None:
                check_text(field, getattr(self, field))
        for field, kind in (("text_format", TextFormat), ("markup", Markup), ("on_markup", OnMarkup)):
            if getattr(self, field) not in (known := get_args(kind)):
                raise InvalidRequest(field, getattr(self, field), f"it must be {', '.join(known[:-1])} or {known[-1]}")
        if not self.is_live and not self.text.strip():
            nothing = f"{len(self.text)} characters"
            raise InvalidRequest("text", nothing, 'give at least one that is not white space, as in "Good morning."')
        if not self.is_live and not is_speakable(self.text):
            raise InvalidRequest("text", self.text, "it must hold at least one letter or digit")
        _check_number("seed", self.seed, 0, MAX_SEED)
        _check_number("max_frames", self.max_frames, 1, 1_000_000)
        _check_number("attempts", self.attempts, 1, MAX_ATTEMPTS)
        _check_number("parallel", self.parallel, 1, MAX_PARALLEL)
        self._check_attempts()
        if self.instructions is not None and not self.instructions.strip():
            raise InvalidRequest("instructions", self.instructions, "leave it out instead of giving white space")

    @property
    def may_have_markup(self) -> bool:
        """Whether `text` may say more than itself. Quick, as it is asked of every request."""
        text = self.text
        return self.markup != "none" and (self.markup == "ssml" or "<" in text or "[" in text or "\\" in text)

    @property
    def least_attempts(self) -> int:
        """The fewest attempts with which `on_fault` works."""
        return 1 if self.on_fault in (None, "mark") else 2

    def _check_attempts(self) -> None:
        if self.is_live and (self.attempts or 1) > 1:
            limit = "live text is spoken as it comes: it must be 1, or left out"
            raise InvalidRequest("attempts", self.attempts, limit)
        if self.on_fault is not None and self.on_fault not in get_args(OnFault):
            raise InvalidRequest("on_fault", self.on_fault, "it must be one of " + ", ".join(get_args(OnFault)))
        if self.least_attempts > 1 and self.is_live:
            raise InvalidRequest("on_fault", self.on_fault, "live text is spoken as it comes: it must be mark")
        if (self.attempts or self.least_attempts) < self.least_attempts:
            raise InvalidRequest("attempts", self.attempts, f"with on_fault {self.on_fault} it must be at least 2")


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Capabilities of a loaded model, for every layer that must not know which model it is.

    `hop`: samples per frame. `max_frames`: bound of a segment. `sampling` has no None. `speaker_embedding_size`: 0 if
    the model takes no embeddings. `text_normalizer`: "english" if the model reads only what `sonoro.text.read`
    writes, with `respellings`. `attempts`: the default where audio is returned whole. `voice_aliases`: further names,
    in lower case, of `voices`. `lead_in`: samples of silence at the start, fewer than `hop`, which are cut.
    `can_blend`: a voice may be a blend of its own ones, as `sonoro.core.blends` reads it.
    `is_continued`: a prompt holds the segments before its own, which keep the voice alike.
    `needs_transcript`: a recording to clone with `use` "prompt" needs its transcript.
    `arpabet`, `cues`: what stands in a text before and after phonemes in ARPAbet, and before and after words that say
    how the next ones are spoken, if the model takes such."""

    name: str
    sample_rate: int
    hop: int
    max_frames: int
    voice_modes: tuple[VoiceMode, ...]
    voices: tuple[str, ...]
    languages: tuple[str, ...]
    sampling: SamplingParams
    options: tuple[OptionSpec, ...] = ()
    accepts_instructions: bool = False
    text_normalizer: Literal["english"] | None = None
    respellings: dict[str, str] = {}
    voice_sexes: dict[str, VoiceSex] = {}
    voice_descriptions: dict[str, VoiceDescription] = {}
    speaker_embedding_size: int = 0
    attempts: int = 1
    voice_aliases: dict[str, str] = {}
    lead_in: int = 0
    is_continued: bool = False
    can_blend: bool = False
    needs_transcript: bool = True
    arpabet: tuple[str, str] | None = None
    cues: tuple[str, str] | None = None

    @property
    def lead_in_s(self) -> float:
        return self.lead_in / self.sample_rate

    @property
    def frame_s(self) -> float:
        return self.hop / self.sample_rate

    def resolve(self, request: SpeechRequest, registered: Mapping[str, str] = MappingProxyType({})) -> SpeechRequest:
        """Validate `request` against this model and fill in its defaults (voice, language, sampling, options).
        `registered` maps the names of registered voices to their digests. Raises `InvalidRequest` (or a subclass) for
        what this model cannot do. Called once per request, where it comes in."""
        assert not request.is_resolved, "a request is resolved once"
        voice = self._voice(request, registered)
        for recording in request.cast.values():
            if isinstance(recording, Reference):
                self.check_cloning("cast")
                recording.check()
        if request.parallel > 1:
            has_voice = bool(request.references) or (voice is not None and voice in registered)
            self._check_parallel(request, has_voice=has_voice)
        if request.instructions is not None and not self.accepts_instructions:
            limit = f"{self.name} does not follow instructions; leave them out"
            raise InvalidRequest("instructions", request.instructions, limit)
        if request.text_format != "auto" and self.text_normalizer is None:
            raise InvalidRequest("text_format", request.text_format, f"{self.name} reads a text as it stands")
        if request.max_frames is not None and request.max_frames > self.max_frames:
            raise InvalidRequest("max_frames", request.max_frames, f"at most {self.max_frames} for {self.name}")
        return msgspec.structs.replace(
            request,
            voice=voice,
            voice_digest=None if voice is None or request.voice is None else registered.get(voice),
            language=self._language(request.language),
            sampling=request.sampling.over(self.sampling),
            attempts=request.attempts or request.least_attempts,
            on_fault=request.on_fault or ("retry" if (request.attempts or 1) > 1 else "mark"),
            options=self._options(request.options, is_live=request.is_live),
            is_resolved=True,
        )

    def check_cloning(self, field: str, references: Sequence[Reference] = ()) -> None:
        """Raise `InvalidReference` about `field` if this model cannot clone voices, or if one of `references` lacks a
        transcript that this model needs."""
        if "cloned" not in self.voice_modes:
            ways = {"named": "name one of its own", "described": "describe one in instructions"}
            instead = " or ".join(ways[mode] for mode in self.voice_modes if mode in ways)
            raise InvalidReference(field, "given", f"{self.name} cannot clone voices; {instead}")
        for reference in references if self.needs_transcript else ():
            reference.check()

    def _voice(self, request: SpeechRequest, registered: Collection[str]) -> str | None:
        if request.speaker_embedding is not None:
            self._check_embedding(request, request.speaker_embedding)
            return None
        if request.references:
            self.check_cloning("ref_audio", request.references)
            if request.voice is not None:
                raise InvalidRequest("voice", request.voice, "leave it out: the reference audio is the voice")
            return None
        if request.voice is not None and request.voice.lower() in registered:
            return request.voice.lower()
        if "named" not in self.voice_modes:
            if request.voice is not None:
                everybodys = _everybodys(registered)
                known = f"known voices: {listed(everybodys)}" if everybodys else f"{self.name} has no named voices"
                raise UnknownVoice("voice", request.voice, known)
            if "cloned" in self.voice_modes:
                raise InvalidReference("ref_audio", None, f"{self.name} speaks only as a reference recording; give one")
            return None
        given = (self.voices[0] if request.voice is None else request.voice).lower()
        if (name := self.voice_aliases.get(given, given)) in self.voices:
            return name
        blend = find_voice(given, self.voices, self.voice_aliases, can_blend=True) if self.can_blend else None
        if blend is None:
            known = listed((*self.voices, *_everybodys(registered)))
            raise UnknownVoice("voice", request.voice, f"known voices: {known}")
        return blend

    def _check_embedding(self, request: SpeechRequest, embedding: tuple[float, ...]) -> None:
        size = self.speaker_embedding_size
        if not size:
            raise InvalidRequest("speaker_embedding", f"{len(embedding)} numbers", f"{self.name} does not take any")
        if request.voice is not None or request.references:
            field, value = ("voice", request.voice) if request.voice is not None else ("references", "given")
            raise InvalidRequest(field, value, "leave it out: the speaker embedding is the voice")
        if len(embedding) != size:
            raise InvalidRequest("speaker_embedding", f"{len(embedding)} numbers", f"it must have {size}")
        for number in embedding:
            if not (isinstance(number, (int, float)) and abs(number) <= MAX_EMBEDDING):
                limit = f"each number must be finite, at most {MAX_EMBEDDING:g} away from 0"
                raise InvalidRequest("speaker_embedding", number, limit)

    def _check_parallel(self, request: SpeechRequest, *, has_voice: bool) -> None:
        limit = ""
        if request.is_live:
            limit = "live text is spoken as it comes: it must be 1, or left out"
        elif request.max_frames is not None:
            limit = "a maximum of frames counts one segment after another: leave one of the two out"
        elif self.is_continued and not has_voice:
            limit = f"{self.name} keeps its voice by the segments before: give it a recording or a registered voice"
        if limit:
            raise InvalidRequest("parallel", request.parallel, limit)

    def _language(self, language: str | None) -> str:
        name = "auto" if language is None else language.lower()
        if name not in self.languages:
            raise UnknownLanguage("language", language, "known languages: " + ", ".join(self.languages))
        return name

    def _options(self, given: dict[str, OptionValue], *, is_live: bool) -> dict[str, OptionValue]:
        known = {option.name: option for option in self.options}
        defaults = {name: option.default for name, option in known.items()}
        if is_live:
            defaults |= {name: option.live_default for name, option in known.items() if option.live_default is not None}
        for name, value in given.items():
            if name not in known:
                nearest = suggestion(name, known)
                limit = f"{nearest}{' ' * bool(nearest)}known options: {', '.join(sorted(known)) or 'none'}"
                raise InvalidRequest(f"options.{name}", value, limit)
        return {name: option.check(given[name]) if name in given else defaults[name] for name, option in known.items()}


class AudioChunk(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Consecutive audio of one request: PCM16 little-endian mono; `index` counts from 0. `voice`: None for its own.
    `characters`: spoken of the text by its end, as in `Finished`. `words`, `marks`: those whose times became final with
    it; None if not asked for, or if the model gives none. Above 0, `pause_s` is its exact length before tempo."""

    request_id: str
    index: int
    pcm: bytes
    characters: int = 0
    words: tuple[Word, ...] | None = None
    pause_s: float = 0.0
    marks: tuple[Mark, ...] = ()
    voice: str | None = None


class Finished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a request, after its last `AudioChunk`. `frames`: frames sent as audio.
    `characters`: characters of the text spoken in them, exact at the end of a segment (so all of the text after
    `stop`), else an estimate. `words`: those not sent with a chunk. `faults`: parts probably not spoken as written, if
    words are asked for or attempts are above 1. `warnings`: markup of the text that was not honoured."""

    request_id: str
    reason: FinishReason
    frames: int
    characters: int
    timings: Timings
    words: tuple[Word, ...] | None = None
    faults: tuple[Fault, ...] = ()
    warnings: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The end of a request that failed, with the facts of the error."""

    request_id: str
    facts: ErrorFacts

    @classmethod
    def of(cls, request_id: str, error: Exception) -> Failed:
        """The `Failed` of a request and an error."""
        return cls(request_id=request_id, facts=ErrorFacts.of(error))


Event = AudioChunk | Finished | Failed


def check_text(field: str, text: object) -> None:
    """Raise `InvalidRequest` about `field` unless `text` is a string that UTF-8 can encode."""
    if not isinstance(text, str):
        raise InvalidRequest(field, text, "it must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, text, "it must be text that UTF-8 can hold, without lone surrogates") from error


def is_speakable(text: str) -> bool:
    """Whether `text` holds a letter or a digit."""
    return any(map(str.isalnum, text))


def _everybodys(voices: Collection[str]) -> list[str]:
    """The `voices` without an owner: error messages must not reveal the others."""
    return [voice for voice in voices if "." not in voice]


def listed(names: Collection[str], most: int = 20) -> str:
    """`names` for a message, cut after `most`."""
    shown = ", ".join(list(names)[:most])
    return shown if len(names) <= most else f"{shown}, and {len(names) - most} more"


def _check_number(field: str, value: float | None, low: float, high: float, *, above: bool = False) -> None:
    """Raise `InvalidRequest` unless `value` is None or within `low` to `high`; int bounds require a whole number."""
    if value is None:
        return
    kind, accepted = ("a whole number", int) if isinstance(low, int) else ("a number", (int, float))
    is_number = isinstance(value, accepted) and not isinstance(value, bool)
    is_inside = is_number and math.isfinite(value) and (value > low if above else value >= low) and value <= high
    if not is_inside:
        raise InvalidRequest(
            field, value, f"it must be {kind} {'above' if above else 'at least'} {low} and at most {high}"
        )
