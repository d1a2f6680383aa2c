"""The Python API: `TTS(...).generate("...")`. Torch is imported with the first `TTS`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import itertools
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar, overload

import msgspec
import numpy as np

from sonoro.api_audio import Audio, AudioPiece
from sonoro.audio.files import from_pcm16, read_reference, to_pcm16
from sonoro.core.config import EngineConfig
from sonoro.core.errors import EngineBusy, EngineClosed, InvalidReference, InvalidRequest, SonoroError, suggestion
from sonoro.core.events import Word, at_speed
from sonoro.core.types import Event, Failed, Finished, ModelSpec, OnFault, Reference, SamplingParams, SpeechRequest
from sonoro.text.english.readable import remarks

if TYPE_CHECKING:
    from sonoro.engine.engine import Engine
    from sonoro.models.base import LoadedModel

Method = TypeVar("Method", bound=Callable[..., Any])
Argument = TypeVar("Argument")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)

_request_numbers = itertools.count()


@dataclass(frozen=True, kw_only=True)
class _Keywords:
    """The keywords of `speech_request`, documented there; any other is an option of the model."""

    language: str | None = None
    instructions: str | None = None
    ref_audio: bytes | str | Path | None = None
    ref_text: str | None = None
    x_vector_only: bool = False
    seed: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float | None = None
    max_frames: int | None = None
    ignore_eos: bool = False
    attempts: int | None = None
    on_fault: OnFault | None = None


def _with_keywords(function: Method) -> Method:
    """Add `_Keywords` to the signature of `function`, before its `**options`."""
    *first, options = (made := inspect.signature(function)).parameters.values()
    parameters = [*first, *inspect.signature(_Keywords).parameters.values(), options]
    function.__signature__ = made.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


@_with_keywords
def speech_request(text: str, voice: str | None = None, **options: Any) -> SpeechRequest:
    """Make a request to speak `text`. None means the model's default (seed: 0). Raises `InvalidRequest`.

    text: the text to speak.
    voice: one of the model's voices (`TTS.voices`); default: the first.
    language: one of `TTS.languages`; default: "auto".
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
    options: the model's own options, listed in `TTS.spec.options`.
    """
    given = _Keywords(**{name: options.pop(name) for name in _Keywords.__dataclass_fields__ if name in options})
    return SpeechRequest(
        id=f"tts-{next(_request_numbers)}",
        text=text,
        voice=voice,
        language=given.language,
        instructions=given.instructions,
        references=_references(given),
        sampling=SamplingParams(**{name: getattr(given, name) for name in SamplingParams.__struct_fields__}),
        seed=0 if given.seed is None else given.seed,
        max_frames=given.max_frames,
        ignore_eos=given.ignore_eos,
        attempts=given.attempts,
        on_fault=given.on_fault,
        options=options,
    )


def _references(given: _Keywords) -> tuple[Reference, ...]:
    if given.ref_audio is not None:
        source, text = given.ref_audio, given.ref_text
        return (read_reference(source, text=text, use="reference" if given.x_vector_only else "prompt"),)
    if given.ref_text is not None:
        raise InvalidReference("ref_text", given.ref_text, "it is the transcript of ref_audio; give that too")
    if given.x_vector_only:
        raise InvalidReference("x_vector_only", True, "it needs ref_audio; give that too")
    return ()


def listen(pieces: Generator[AudioPiece, None, Finished], take: Callable[[AudioPiece], None]) -> Finished:
    """Call `take` with every piece of a stream; return its `Finished`."""
    while isinstance(received := _next(pieces), AudioPiece):
        take(received)
    return received


def _next(pieces: Generator[AudioPiece, None, Finished]) -> AudioPiece | Finished:
    """The next piece, or the stream's `Finished`."""
    try:
        return next(pieces)
    except StopIteration as end:
        finished: Finished = end.value
        return finished


class _Job(NamedTuple):
    """A request and the playback speed of its audio."""

    request: SpeechRequest
    speed: float


_SPEED_HELP = "speed: tempo of the audio, 0.25 to 4, at the same pitch."


def _with_request_keywords(method: Method) -> Method:
    """Add the keywords of `speech_request`, which `method` passes on, and `speed` to its signature and docstring."""
    made = inspect.signature(speech_request)
    owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    speed = inspect.Parameter("speed", inspect.Parameter.KEYWORD_ONLY, default=1.0, annotation="float")
    *keywords, options = made.parameters.values()
    method.__signature__ = made.replace(  # type: ignore[attr-defined]
        parameters=[owner, *keywords, speed, options], return_annotation=inspect.signature(method).return_annotation
    )
    explained = inspect.getdoc(speech_request) or ""
    *lines, last = explained[explained.index("text:") :].splitlines()
    method.__doc__ = "\n".join([inspect.cleandoc(method.__doc__ or ""), "", *lines, _SPEED_HELP, last])
    return method


Item = str | Mapping[str, Any] | SpeechRequest
"""An item of a batch: a text, a mapping of `speech_request`'s keywords, or a request."""


class TTS:
    """A loaded model, ready to speak. Thread-safe; requests of several threads are batched together.

    model: a checkpoint folder, a hub id, the name of a known configuration, or None for the built-in voice.
    device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1".
    dtype: "bfloat16" or "float32"; None to choose by device.
    load_format: "auto", or "dummy" for random weights.
    config: an `EngineConfig`, a mapping of its fields, or the path of a YAML file with them.

    `close`, or the end of a `with` block, frees the model. Raises `CheckpointError` or `ConfigError`.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel | None = None,
        device: str = "auto",
        dtype: str | None = None,
        load_format: str = "auto",
        config: EngineConfig | Mapping[str, Any] | str | Path | None = None,
    ) -> None:
        from sonoro.engine.engine import Engine
        from sonoro.models import registry

        self.config = _engine_config(config)
        if model is None or isinstance(model, (str, Path)):
            how = {"load_format": load_format, "quantization": self.config.quantization}
            model = registry.load(model, device=device, dtype=dtype, **how)
        engine = Engine(model.model, self.config)
        self.spec: ModelSpec = engine.spec
        """The model's capabilities."""
        self._engine: Engine | None = engine
        self._queues: dict[str, deque[Event]] = {}
        self._abandoned: deque[tuple[str, deque[Event]]] = deque()
        self._lock = threading.Lock()

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
        return self._open.has_words

    @property
    def finds_faults(self) -> bool:
        """Whether the model tells what it did not speak as written; if not, `Audio.faults` is empty."""
        return self._open.finds_faults

    def remarks(self, text: str) -> tuple[str, ...]:
        """Warnings about `text`: characters that will be left out, or another language.

        `generate` and the other methods log them, except for a `SpeechRequest`. Raises `InvalidRequest` for a text
        mostly in a script that the voice cannot read.
        """
        return remarks(text) if self.spec.text_normalizer is not None else ()

    def close(self) -> None:
        """Free the model and its memory. Running and later requests raise `EngineClosed`."""
        with self._lock:
            if self._engine is None:
                return
            self._engine = None
            for request_id, queue in self._queues.items():
                queue.append(Failed.of(request_id, _closed()))
        import torch

        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @overload
    def generate(self, text: str | SpeechRequest, *request: Any, **fields: Any) -> Audio: ...

    @overload
    def generate(self, text: Sequence[Item], *request: Any, **fields: Any) -> list[Audio]: ...

    @_with_request_keywords
    def generate(self, text: Any = None, *request: Any, **fields: Any) -> Audio | list[Audio]:
        """Speak `text` and return all of the audio. A list is spoken as a batch and returned in order.

        The same request, or list, gives the same bytes on the same machine and versions, as long as this object runs no
        other requests. An item of a list is a text, a mapping of the keywords below, which override those of the call,
        or a request made by `sonoro.api.speech_request`. Raises `InvalidRequest` or `EngineError`.
        """
        if isinstance(text, Sequence) and not isinstance(text, str):
            return self._speak(list(self._items(text, *request, **fields)))
        return self._speak([self._job(text, *request, **fields)])[0]

    def generate_batch(self, items: Sequence[Item]) -> list[Audio]:
        """`generate` for a list of items.

        Raises `InvalidRequest` or `EngineError` for the first item that fails, with its number in a note; the others
        are cancelled.
        """
        if isinstance(items, (str, Mapping)):
            raise InvalidRequest("items", items, "it must be a sequence of texts or requests, even for one")
        return self._speak(list(self._items(items)))

    @_with_request_keywords
    def stream(self, *request: Any, **fields: Any) -> Generator[AudioPiece, None, Finished]:
        """Yield the audio as it is generated, in pieces that grow with the listener's lead.

        Errors are raised by the first `next`. Closing the generator cancels the request. Returns a `Finished`.
        """
        return (yield from self._streamed(self._job(*request, **fields)))

    @_with_request_keywords
    async def agenerate(self, *request: Any, **fields: Any) -> Audio:
        """`generate` for one text, without blocking the event loop. Concurrent calls are batched (`asyncio.gather`).

        Cancelling the task cancels the request.
        """
        job = self._job(*request, **fields)
        pieces = self._streamed(job._replace(request=_returned_whole(job.request, self.spec)))
        received: list[AudioPiece] = []
        try:
            while isinstance(piece := await _in_thread(_next, pieces), AudioPiece):
                received.append(piece)
        finally:
            pieces.close()
        return self._joined(received, piece)

    @_with_request_keywords
    async def astream(self, *request: Any, **fields: Any) -> AsyncGenerator[AudioPiece, None]:
        """`stream` without blocking the event loop. Closing it, or cancelling its task, cancels the request."""
        pieces = self.stream(*request, **fields)
        try:
            while isinstance(piece := await _in_thread(_next, pieces), AudioPiece):
                yield piece
        finally:
            pieces.close()

    def _job(self, text: str | SpeechRequest | None = None, *args: Any, speed: float = 1.0, **fields: Any) -> _Job:
        if text is None:
            raise InvalidRequest("text", None, "give a text to speak")
        if isinstance(text, SpeechRequest):
            if args or fields:
                field, value = ("voice", args[0]) if args else next(iter(fields.items()))
                raise InvalidRequest(field, value, "a SpeechRequest takes no further fields; make it with this one")
            if text.is_live:
                raise InvalidRequest("is_live", True, "only an `EngineClient` can append text")
            return _Job(text, speed)
        for name in ("ref_audio", "ref_text", "x_vector_only"):
            if fields.get(name):
                self.spec.check_cloning(name)
        request = msgspec.structs.replace(speech_request(text, *args, **fields), with_words=True)
        known = [option.name for option in self.spec.options]
        for name, value in request.options.items():
            if name not in known and (nearest := suggestion(name, [*_KEYWORDS, *known])):
                raise InvalidRequest(f"options.{name}", value, nearest)
        for remark in self.remarks(text):
            logger.warning("%s", remark)
        return _Job(request, speed)

    def _items(self, items: Sequence[Item], *request: Any, **fields: Any) -> Iterator[_Job]:
        shared = dict(zip(("voice",), request, strict=True)) | fields if request else fields
        for number, item in enumerate(items):
            with _noting_item(number):
                job = self._job(**(shared | dict(item) if isinstance(item, Mapping) else {"text": item} | shared))
            yield job

    def _speak(self, jobs: Sequence[_Job]) -> list[Audio]:
        audio = []
        requests = [_returned_whole(request, self.spec) for request, _ in jobs]
        with self._running(requests):
            for number, (request, (_, speed)) in enumerate(zip(requests, jobs, strict=True)):
                with _noting_item(number if len(requests) > 1 else None):
                    pieces: list[AudioPiece] = []
                    finished = listen(self._at_speed(speed, self._pieces(request.id)), pieces.append)
                    audio.append(self._joined(pieces, finished))
        return audio

    def _streamed(self, job: _Job) -> Generator[AudioPiece, None, Finished]:
        with self._running([job.request]):
            return (yield from self._at_speed(job.speed, self._pieces(job.request.id)))

    def _joined(self, pieces: Sequence[AudioPiece], finished: Finished) -> Audio:
        return Audio(
            samples=np.concatenate([np.zeros(0, np.float32), *(piece.samples for piece in pieces)]),
            sample_rate=self.sample_rate,
            finish_reason=finished.reason,
            frames=finished.frames,
            time_to_first_audio_s=finished.timings.first_audio_s,
            total_s=finished.timings.total_s,
            words=_joined_words([*(piece.words for piece in pieces), finished.words]),
            faults=finished.faults,
        )

    def _at_speed(
        self, speed: float, pieces: Generator[AudioPiece, None, Finished]
    ) -> Generator[AudioPiece, None, Finished]:
        """Change the tempo of `pieces`. Raises `InvalidRequest` for an invalid speed."""
        from sonoro.audio.encoders import Encoder

        with Encoder("pcm", self.sample_rate, speed=speed) as encoder:
            if speed == 1:
                return (yield from pieces)
            index = characters = 0
            words: tuple[Word, ...] | None = None
            while True:
                received = _next(pieces)
                if received.words is not None:
                    words = (words or ()) + at_speed(received.words, speed)
                if isinstance(received, AudioPiece):
                    pcm, characters = encoder.feed(to_pcm16(received.samples)), received.characters
                else:
                    pcm = encoder.finish()
                if pcm:
                    yield AudioPiece(from_pcm16(pcm), self.sample_rate, index, characters, words)
                    index, words = index + 1, None
                if isinstance(received, Finished):
                    return msgspec.structs.replace(received, words=words)

    @contextlib.contextmanager
    def _running(self, requests: Sequence[SpeechRequest]) -> Iterator[None]:
        """Submit `requests` to the engine; those still running at the end of the block are cancelled."""
        held: list[tuple[str, deque[Event]]] = []
        try:
            for number, request in enumerate(requests):
                with self._lock, _noting_item(number if len(requests) > 1 else None):
                    self._cancel_abandoned()
                    self._submit(request)
                    queue = self._queues[request.id] = deque()
                    held.append((request.id, queue))
            yield
        finally:
            # Not under the lock: the garbage collector may close a stream in a thread that is inside a tick.
            self._abandoned.extend(held)

    def _submit(self, request: SpeechRequest) -> None:
        """Submit `request`, ticking the engine while its queue is full."""
        while True:
            try:
                self._open.submit(request if request.is_resolved else self.spec.resolve(request))
            except EngineBusy:
                self._tick()
            else:
                return

    @property
    def _open(self) -> Engine:
        """The engine. Raises `EngineClosed` after `close`."""
        if self._engine is None:
            raise _closed()
        return self._engine

    def _cancel_abandoned(self) -> None:
        """Cancel the requests abandoned since the last call. An id may be in use again, with another queue."""
        while self._abandoned:
            request_id, queue = self._abandoned.popleft()
            if self._queues.get(request_id) is queue:
                del self._queues[request_id]
                self._open.cancel(request_id)

    def _pieces(self, request_id: str) -> Generator[AudioPiece, None, Finished]:
        """Yield the audio of a running request, ticking the engine, for all threads, while its queue is empty."""
        queue = self._queues[request_id]
        while True:
            while not queue:
                with self._lock:
                    # Another thread may have filled it while this one waited.
                    if not queue:
                        self._tick()
            event = queue.popleft()
            if isinstance(event, Finished):
                return event
            if isinstance(event, Failed):
                raise event.facts.error
            yield AudioPiece(from_pcm16(event.pcm), self.sample_rate, event.index, event.characters, event.words)

    def _tick(self) -> None:
        self._cancel_abandoned()
        assert self._open.has_work, "a request is awaited that the engine does not hold"
        for event in self._open.tick():
            # Cancelled requests have no queue.
            if event.request_id in self._queues:
                self._queues[event.request_id].append(event)


_KEYWORDS = tuple(inspect.signature(TTS.generate).parameters)[1:-1]


def _returned_whole(request: SpeechRequest, spec: ModelSpec) -> SpeechRequest:
    """`request` with defaults for audio that is returned whole: reproducible chunks, and the model's `attempts`."""
    attempts = request.attempts or (1 if request.is_live else max(spec.attempts, request.least_attempts))
    return msgspec.structs.replace(request, is_reproducible=True, attempts=attempts)


def _joined_words(told: Sequence[tuple[Word, ...] | None]) -> tuple[Word, ...] | None:
    """All words of a request; None if the model gave none."""
    words = [each for each in told if each is not None]
    return tuple(itertools.chain.from_iterable(words)) if words else None


def _closed() -> EngineClosed:
    return EngineClosed("this TTS was closed; make another")


async def _in_thread(work: Callable[[Argument], Result], argument: Argument) -> Result:
    """Run `work(argument)` in a thread. On cancellation, wait for it: a running generator cannot be closed."""
    working = asyncio.ensure_future(asyncio.to_thread(work, argument))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait([working])
        raise


@contextlib.contextmanager
def _noting_item(number: int | None) -> Iterator[None]:
    """Add a note with the number of the batch item to errors, unless `number` is None."""
    try:
        yield
    except SonoroError as error:
        if number is not None:
            error.add_note(f"in item {number} of the batch")
        raise


def _engine_config(config: EngineConfig | Mapping[str, Any] | str | Path | None) -> EngineConfig:
    if config is None:
        return EngineConfig()
    if isinstance(config, EngineConfig):
        return config
    if isinstance(config, Mapping):
        return EngineConfig.from_mapping(config)
    return EngineConfig.from_file(config)
