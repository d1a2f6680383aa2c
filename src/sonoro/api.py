"""The Python API: `TTS(...).generate("...")`. Torch is imported with the first `TTS`."""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypedDict, TypeVar, Unpack, overload

import msgspec

from sonoro.api_audio import Audio, AudioPiece, Pieces, joined, listen, next_piece, played
from sonoro.api_engine import SharedEngine, noting_item
from sonoro.audio.encoders import Loudness, gains_for
from sonoro.audio.references import read_reference
from sonoro.core.config import EngineConfig
from sonoro.core.errors import InvalidReference, InvalidRequest, suggestion
from sonoro.core.options import OptionValue
from sonoro.core.types import (
    Finished,
    Markup,
    ModelSpec,
    OnFault,
    OnMarkup,
    Reference,
    SamplingParams,
    SpeechRequest,
    TextFormat,
)
from sonoro.text.english.readable import remarks
from sonoro.text.script import MAX_LEXICONS, Lexicon, lexicon_of, read_lexicon, scripted

if TYPE_CHECKING:
    from sonoro.models.base import LoadedModel

Argument = TypeVar("Argument")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

_request_numbers = itertools.count()


LexiconLike = Lexicon | Mapping[str, Any] | Sequence[Any] | str | Path
"""A lexicon, its rules, aliases by word, or the path of a file with them."""


Recording = bytes | str | Path


class RequestFields(TypedDict, total=False):
    """The keywords of a request. One that is left out, or None, is the model's default (seed: 0).

    language: one of `TTS.languages`; default: "auto".
    text_format: how the text is written: "auto", "plain", "markdown" or "html", for a model that reads text by classes.
    markup: the syntax of pauses and the like in the text: "auto", "voices", "ssml", "tags", "deepgram" or "none".
    on_markup: for markup that the model cannot honour: "refuse", the default, or "plain": speak the text without it.
    instructions: how to speak, or who speaks, in words, if the model accepts that.
    ref_audio: a recording of the voice to clone, 0.5 to 60 s, as a path or a file's bytes, if the model can clone.
    ref_text: transcript of `ref_audio`.
    x_vector_only: clone only the timbre of `ref_audio`, without `ref_text`.
    seed: the same seed gives the same speech.
    temperature: 0 is greedy; higher is more varied.
    top_k: sample from the k most likely codes; 0 keeps all.
    top_p: nucleus sampling, above 0 and at most 1: keep the most likely codes of this total probability.
    repetition_penalty: above 1 avoids repetition.
    max_frames: maximum number of frames; default: by the text's length.
    ignore_eos: generate `max_frames` frames even if the model ends before; for benchmarks.
    attempts: maximum attempts at a segment that runs away, each with the next seed; default: 1, or `TTS.spec.attempts`
        where the audio is returned whole.
    on_fault: how to handle a segment that is not spoken as written, by the model's attention: "mark" reports it,
        "retry" speaks it again within `attempts`, and alone the words at the end that the last did not reach;
        "continue" breaks it off at its last good word and goes on there.
    cast: recordings of further voices by name, for markup and lines that name them: a path or a file's bytes, or these
        with the transcript.
    parallel: how many segments are spoken at once, up to 256; the audio of each then comes whole, in order.
    options: the model's own options by name, listed in `TTS.spec.options`; each may also be a keyword of its own."""

    language: str | None
    text_format: TextFormat | None
    markup: Markup | None
    on_markup: OnMarkup | None
    instructions: str | None
    ref_audio: bytes | str | Path | None
    ref_text: str | None
    x_vector_only: bool
    seed: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    repetition_penalty: float | None
    max_frames: int | None
    ignore_eos: bool
    attempts: int | None
    on_fault: OnFault | None
    parallel: int | None
    cast: Mapping[str, Recording | tuple[Recording, str]] | None
    options: Mapping[str, OptionValue]


class SpokenFields(RequestFields, total=False):
    """The keywords of `TTS.generate` and its like: those of a request, and how its audio is played.
    speed: tempo of the audio, 0.25 to 4, at the same pitch; default: 1.
    loudness: level of the audio in LUFS, -36 to -16, with true peaks up to -1.5 dBTP, or "none": as the model speaks;
        default: -18 for a voice whose own loudness is known, as that of the built-in ones is, else "none".
    lexicons: how words are said, as for `TTS`, which they come before."""

    speed: float
    loudness: Loudness | None
    lexicons: Sequence[LexiconLike]


def speech_request(text: str, voice: str | None = None, **fields: Unpack[RequestFields]) -> SpeechRequest:
    """Make a request to speak `text`. Raises `InvalidRequest`.
    text: the text to speak.
    voice: one of the model's voices (`TTS.voices`); default: the first.
    fields: see `RequestFields`."""
    given: dict[str, Any] = dict(fields)
    reference = (given.pop(name, None) for name in _REFERENCE_FIELDS)
    sampling = {name: given.pop(name, None) for name in SamplingParams.__struct_fields__}
    for name in ("text_format", "markup", "on_markup", "parallel"):
        if given.get(name, "") is None:
            del given[name]
    seed, options, cast = given.pop("seed", None), given.pop("options", {}), given.pop("cast", None) or {}
    return SpeechRequest(
        id=f"tts-{next(_request_numbers)}",
        text=text,
        voice=voice,
        references=_references(*reference),
        cast={name.lower(): _recording(recording) for name, recording in cast.items()},
        sampling=SamplingParams(**sampling),
        seed=0 if seed is None else seed,
        **{name: given.pop(name) for name in RequestFields.__annotations__ if name in given},
        options={**options, **given},
    )


_REFERENCE_FIELDS = ("ref_audio", "ref_text", "x_vector_only")


def _recording(given: Recording | tuple[Recording, str]) -> Reference:
    if isinstance(given, tuple):
        return read_reference(given[0], text=given[1])
    return read_reference(given, use="reference")


def _references(
    audio: bytes | str | Path | None, text: str | None, x_vector_only: bool | None
) -> tuple[Reference, ...]:
    if audio is not None:
        return (read_reference(audio, text=text, use="reference" if x_vector_only else "prompt"),)
    if text is not None:
        raise InvalidReference("ref_text", text, "it is the transcript of ref_audio; give that too")
    if x_vector_only:
        raise InvalidReference("x_vector_only", True, "it needs ref_audio; give that too")
    return ()


class _Job(NamedTuple):
    """A request, and how its audio is played."""

    request: SpeechRequest
    speed: float
    loudness: Loudness | None


Item = str | Mapping[str, Any] | SpeechRequest
"""An item of a batch: a text, a mapping of `text`, `voice` and `SpokenFields`, or a request."""


class TTS:
    """A loaded model, ready to speak. Thread-safe; requests of several threads are batched together.

    model: a checkpoint folder, a hub id, the name of a known configuration, or None for the built-in voice.
    device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1".
    dtype: "bfloat16" or "float32"; None to choose by device.
    load_format: "auto", or "dummy" for random weights.
    config: an `EngineConfig`, a mapping of its fields, or the path of a YAML file with them.
    lexicons: how words are said, for every request: paths of PLS, JSON or text files, aliases by word, or `Lexicon`s.

    `close`, or the end of a `with` block, frees the model. Raises `CheckpointError` or `ConfigError`."""

    def __init__(
        self,
        model: str | Path | LoadedModel | None = None,
        device: str = "auto",
        dtype: str | None = None,
        load_format: str = "auto",
        config: EngineConfig | Mapping[str, Any] | str | Path | None = None,
        *,
        lexicons: Sequence[LexiconLike] = (),
    ) -> None:
        from sonoro.engine.engine import Engine
        from sonoro.models import registry

        self.config = _engine_config(config)
        self._lexicons = _lexicons(lexicons)
        if model is None or isinstance(model, (str, Path)):
            how = {"load_format": load_format, "quantization": self.config.quantization}
            model = registry.load(model, device=device, dtype=dtype, **how)
        engine = Engine(model.model, self.config)
        self.spec: ModelSpec = engine.spec
        """The model's capabilities."""
        self._shared = SharedEngine(engine)

    @property
    def voices(self) -> tuple[str, ...]:
        return self.spec.voices

    @property
    def languages(self) -> tuple[str, ...]:
        return self.spec.languages

    @property
    def sample_rate(self) -> int:
        return self.spec.sample_rate

    @property
    def has_words(self) -> bool:
        """Whether the model gives word times; if not, `Audio.words` is None."""
        return self._shared.engine.found_heads.are_known

    @property
    def finds_faults(self) -> bool:
        """Whether the model tells what it did not speak as written; if not, `Audio.faults` is empty."""
        return self._shared.engine.found_heads.have_limits

    def remarks(self, text: str, text_format: TextFormat = "auto") -> tuple[str, ...]:
        """Warnings about `text`: characters that will be left out, or another language.
        `generate` and the other methods log them, except for a `SpeechRequest`. Raises `InvalidRequest` for a text
        mostly in a script that the voice cannot read."""
        return remarks(text, text_format) if self.spec.text_normalizer is not None else ()

    def close(self) -> None:
        """Free the model and its memory. Running and later requests raise `EngineClosed`."""
        self._shared.close()
        import torch

        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str, which is never meant
        self, text: str | SpeechRequest, voice: str | None = None, **fields: Unpack[SpokenFields]
    ) -> Audio: ...

    @overload
    def generate(
        self, text: Sequence[Item], voice: str | None = None, **fields: Unpack[SpokenFields]
    ) -> list[Audio]: ...

    def generate(
        self, text: Any = None, voice: str | None = None, **fields: Unpack[SpokenFields]
    ) -> Audio | list[Audio]:
        """Speak `text` and return all of the audio. A list is spoken as a batch and returned in order.

        The same request, or list, gives the same bytes on the same machine and versions, as long as this object runs no
        other requests. Raises `InvalidRequest` or `EngineError`.

        text: the text to speak, a request made by `sonoro.api.speech_request`, which takes no further fields but
            `speed`, or a list. An item of a list may be a mapping of fields, which override those of the call.
        voice: one of `TTS.voices`; default: the first.
        fields: see `RequestFields` and `SpokenFields`."""
        if isinstance(text, Sequence) and not isinstance(text, str):
            return self._speak(list(self._items(text, voice, **fields)))
        return self._speak([self._job(text, voice, **fields)])[0]

    def generate_batch(self, items: Sequence[Item]) -> list[Audio]:
        """`generate` for a list of items.
        Raises `InvalidRequest` or `EngineError` for the first item that fails, with its number in a note; the others
        are cancelled."""
        if isinstance(items, (str, Mapping)):
            raise InvalidRequest("items", items, "it must be a sequence of texts or requests, even for one")
        return self._speak(list(self._items(items)))

    def stream(
        self, text: str | SpeechRequest | None = None, voice: str | None = None, **fields: Unpack[SpokenFields]
    ) -> Generator[AudioPiece, None, Finished]:
        """Yield the audio as it is generated, in pieces that grow with the listener's lead; else as `generate`.
        Errors are raised by the first `next`. Closing the generator cancels the request. Returns a `Finished`."""
        job = self._job(text, voice, **fields)
        with self._shared.running([job.request]):
            return (yield from _played(job, self._shared, self.spec))

    async def agenerate(
        self, text: str | SpeechRequest | None = None, voice: str | None = None, **fields: Unpack[SpokenFields]
    ) -> Audio:
        """`generate` for one text, without blocking the event loop. Concurrent calls are batched (`asyncio.gather`).
        Cancelling the task cancels the request."""
        job = self._job(text, voice, **fields)
        request = _returned_whole(job.request, self.spec)
        pieces = self.stream(request, speed=job.speed, loudness=job.loudness)
        received: list[AudioPiece] = []
        try:
            while isinstance(piece := await _in_thread(next_piece, pieces), AudioPiece):
                received.append(piece)
        finally:
            pieces.close()
        return joined(received, piece, self.sample_rate)

    async def astream(
        self, text: str | SpeechRequest | None = None, voice: str | None = None, **fields: Unpack[SpokenFields]
    ) -> AsyncGenerator[AudioPiece, None]:
        """`stream` without blocking the event loop. Closing it, or cancelling its task, cancels the request."""
        pieces = self.stream(text, voice, **fields)
        try:
            while isinstance(piece := await _in_thread(next_piece, pieces), AudioPiece):
                yield piece
        finally:
            pieces.close()

    def _job(
        self,
        text: str | SpeechRequest | None = None,
        voice: str | None = None,
        *,
        speed: float = 1.0,
        loudness: Loudness | None = None,
        lexicons: Sequence[LexiconLike] = (),
        **fields: Any,
    ) -> _Job:
        if text is None:
            raise InvalidRequest("text", None, "give a text to speak")
        if isinstance(text, SpeechRequest):
            for field, value in [("voice", voice)] * (voice is not None) + list(fields.items()):
                raise InvalidRequest(field, value, "a SpeechRequest takes no further fields; make it with this one")
            if text.is_live:
                raise InvalidRequest("is_live", True, "only an `EngineClient` can append text")
            return _Job(with_script(text, self.spec, (*_lexicons(lexicons), *self._lexicons), speed), speed, loudness)
        for name in _REFERENCE_FIELDS:
            if fields.get(name):
                self.spec.check_cloning(name)
        request = msgspec.structs.replace(speech_request(text, voice, **fields), with_words=True)
        known = [option.name for option in self.spec.options]
        for name, value in request.options.items():
            if name not in known and (nearest := suggestion(name, [*_KEYWORDS, *known])):
                raise InvalidRequest(f"options.{name}", value, nearest)
        request = with_script(request, self.spec, (*_lexicons(lexicons), *self._lexicons), speed)
        for warning in () if request.script is None else request.script.warnings:
            logger.warning("not honoured: %s", warning)
        for remark in self.remarks(written(request), request.text_format):
            logger.warning("%s", remark)
        return _Job(request, speed, loudness)

    def _items(self, items: Sequence[Item], voice: str | None = None, **fields: Any) -> Iterator[_Job]:
        shared = fields if voice is None else {"voice": voice, **fields}
        for number, item in enumerate(items):
            with noting_item(number):
                job = self._job(**(shared | dict(item) if isinstance(item, Mapping) else {"text": item} | shared))
            yield job

    def _speak(self, jobs: Sequence[_Job]) -> list[Audio]:
        audio = []
        requests = [_returned_whole(job.request, self.spec) for job in jobs]
        with self._shared.running(requests):
            for number, job in enumerate(jobs):
                with noting_item(number if len(requests) > 1 else None):
                    pieces: list[AudioPiece] = []
                    finished = listen(_played(job, self._shared, self.spec), pieces.append)
                    audio.append(joined(pieces, finished, self.sample_rate))
        return audio


def _played(job: _Job, shared: SharedEngine, spec: ModelSpec) -> Pieces:
    """The audio of a running request as it is played."""
    request = job.request if job.request.is_resolved else spec.resolve(job.request)
    gains = gains_for(job.loudness, spec, request)
    return played(shared.pieces(request.id), spec.sample_rate, job.speed, gains)


_KEYWORDS = ("text", "voice", *RequestFields.__annotations__, "speed", "loudness", "lexicons")


def written(request: SpeechRequest) -> str:
    """The text of `request` without its markup."""
    return request.text if request.script is None else request.script.text


def with_script(
    request: SpeechRequest, spec: ModelSpec, lexicons: Sequence[LexiconLike], speed: float
) -> SpeechRequest:
    """`request` with the script of its text, for audio played at `speed`: what `TTS` makes of a request first."""
    ready = [_lexicon(one) for one in lexicons]
    return request if request.script is not None else scripted(request, spec, ready, speed=speed)


def _lexicons(given: Sequence[LexiconLike]) -> tuple[Lexicon, ...]:
    if isinstance(given, str | Mapping):
        raise InvalidRequest("lexicons", given, "it must be a list, even of one")
    if len(given) > MAX_LEXICONS:
        raise InvalidRequest("lexicons", f"{len(given)} given", f"at most {MAX_LEXICONS}")
    return tuple(_lexicon(one) for one in given)


def _lexicon(given: LexiconLike) -> Lexicon:
    if isinstance(given, Lexicon):
        return given
    if not isinstance(given, (str, Path)):
        return lexicon_of(given)
    try:
        return read_lexicon(Path(given).read_bytes(), str(given))
    except OSError as error:
        raise InvalidRequest("lexicons", str(given), f"it must be a readable file ({error.strerror})") from error


def _returned_whole(request: SpeechRequest, spec: ModelSpec) -> SpeechRequest:
    """`request` with defaults for audio that is returned whole: reproducible chunks, and the model's `attempts`."""
    attempts = request.attempts or (1 if request.is_live else max(spec.attempts, request.least_attempts))
    return msgspec.structs.replace(request, is_reproducible=True, attempts=attempts)


async def _in_thread(work: Callable[[Argument], Result], argument: Argument) -> Result:
    """Run `work(argument)` in a thread. On cancellation, wait for it: a running generator cannot be closed."""
    working = asyncio.ensure_future(asyncio.to_thread(work, argument))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


def _engine_config(config: EngineConfig | Mapping[str, Any] | str | Path | None) -> EngineConfig:
    if config is None:
        return EngineConfig()
    if isinstance(config, EngineConfig):
        return config
    if isinstance(config, Mapping):
        return EngineConfig.from_mapping(config)
    return EngineConfig.from_file(config)
