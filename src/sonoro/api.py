"""The Python face: `TTS(...).generate("...")`. Knows no model; torch is loaded with the first `TTS`."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from sonoro.core.audio import from_pcm16, read_reference, write_audio
from sonoro.core.config import EngineConfig
from sonoro.core.errors import EngineBusy, InvalidReference, InvalidRequest, SonoroError
from sonoro.core.types import (
    Event,
    Failed,
    Finished,
    FinishReason,
    ModelSpec,
    OptionValue,
    Reference,
    SamplingParams,
    SpeechRequest,
)

if TYPE_CHECKING:
    from sonoro.models.base import LoadedModel

__all__ = ["TTS", "Audio", "AudioPiece", "listen", "speech_request"]

Method = TypeVar("Method", bound=Callable[..., Any])

_request_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class AudioPiece:
    """Consecutive audio of a stream: mono `samples` [S] float32 in [-1, 1]; `index` counts from 0."""

    samples: npt.NDArray[np.float32] = field(repr=False)
    sample_rate: int
    index: int

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.sample_rate


@dataclass(frozen=True, eq=False)
class Audio:
    """Speech, whole: mono `samples` [S] float32 in [-1, 1], and how it came about.

    Times count from the acceptance of the request.
    """

    samples: npt.NDArray[np.float32] = field(repr=False)
    sample_rate: int
    finish_reason: FinishReason
    frames: int
    time_to_first_audio_s: float
    total_s: float

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.sample_rate

    @property
    def rtf(self) -> float:
        """Wall time over audio time; infinite when there is no audio."""
        return self.total_s / self.duration_s if len(self.samples) else float("inf")

    def save(self, path: str | Path, format: str | None = None) -> None:
        """Write wav, flac, mp3, opus or pcm, by the path's suffix or as given. Raises `OutputError`."""
        write_audio(path, self.samples, self.sample_rate, format)


def speech_request(
    text: str,
    voice: str | None = None,
    *,
    language: str | None = None,
    instructions: str | None = None,
    ref_audio: bytes | str | Path | None = None,
    ref_text: str | None = None,
    x_vector_only: bool = False,
    seed: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    max_frames: int | None = None,
    ignore_eos: bool = False,
    attempts: int = 1,
    **options: OptionValue,
) -> SpeechRequest:
    """A request to speak `text`; None stands for the model's default, and for seed 0.

    `ref_audio` (a file's path or bytes) is cloned: continued in context with its transcript `ref_text`, or only its
    timbre with `x_vector_only`. `max_frames` bounds the audio (by default the text's length does). What runs away is
    spoken again, up to `attempts` times in all. `options` are the model's own, as `TTS.spec.options` lists them. Raises
    `InvalidRequest`.
    """
    return SpeechRequest(
        id=f"tts-{next(_request_numbers)}",
        text=text,
        voice=voice,
        language=language,
        instructions=instructions,
        references=_references(ref_audio, ref_text, x_vector_only),
        sampling=SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, repetition_penalty=repetition_penalty
        ),
        seed=0 if seed is None else seed,
        max_frames=max_frames,
        ignore_eos=ignore_eos,
        attempts=attempts,
        options=options,
    )


def _references(audio: bytes | str | Path | None, text: str | None, x_vector_only: bool) -> tuple[Reference, ...]:
    if audio is not None:
        return (read_reference(audio, text=text, use="reference" if x_vector_only else "prompt"),)
    if text is not None:
        raise InvalidReference("ref_text", text, "it is the transcript of ref_audio; give that too")
    if x_vector_only:
        raise InvalidReference("x_vector_only", x_vector_only, "it says how to use ref_audio; give that too")
    return ()


def listen(pieces: Generator[AudioPiece, None, Finished], take: Callable[[AudioPiece], None]) -> Finished:
    """Hand every piece of a stream to `take`; how the speech ended."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            finished: Finished = end.value
            return finished
        take(piece)


def _takes_a_request(method: Method) -> Method:
    """Show the keywords of `speech_request`, which `method` passes on, in its signature."""
    made = inspect.signature(speech_request)
    owner = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = made.replace(  # type: ignore[attr-defined]
        parameters=[owner, *made.parameters.values()], return_annotation=inspect.signature(method).return_annotation
    )
    return method


class TTS:
    """A loaded model, ready to speak. Safe to use from several threads; their requests share the batch.

    `model`: a checkpoint folder, a hub id, the name of a known configuration, or None for the built-in voice.
    `load_format="dummy"` fills the configuration with random weights. `config`: an `EngineConfig`, a mapping of its
    fields, or the path of a YAML file with them. Raises `CheckpointError` or `ConfigError`.
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
            model = registry.load(model, device=device, dtype=dtype, load_format=load_format)
        self._engine = Engine(model.model, self.config)
        self._inboxes: dict[str, deque[Event]] = {}
        self._left: deque[tuple[str, deque[Event]]] = deque()
        self._lock = threading.Lock()

    @property
    def spec(self) -> ModelSpec:
        """What the model can do."""
        return self._engine.spec

    @property
    def voices(self) -> tuple[str, ...]:
        return self.spec.voices

    @property
    def languages(self) -> tuple[str, ...]:
        return self.spec.languages

    @property
    def sample_rate(self) -> int:
        return self.spec.sample_rate

    @_takes_a_request
    def generate(self, *request: Any, **fields: Any) -> Audio:
        """Speak and return the audio whole; takes what `speech_request` takes. Raises `InvalidRequest`."""
        return self._speak([_as_request(*request, **fields)])[0]

    def generate_batch(self, items: Sequence[str | Mapping[str, Any] | SpeechRequest]) -> list[Audio]:
        """Speak all items together, answers in their order; an item is a text or the keywords of `speech_request`.

        Raises `InvalidRequest` or `EngineError` for the first item that cannot be spoken, with its number in a note;
        nothing of the batch is left running.
        """
        if isinstance(items, (str, Mapping)):
            raise InvalidRequest("items", items, "it must be a sequence of texts or requests, even for one")
        requests = []
        for number, item in enumerate(items):
            with _noting(number):
                requests.append(_as_request(**item) if isinstance(item, Mapping) else _as_request(item))
        return self._speak(requests)

    @_takes_a_request
    def stream(self, *request: Any, **fields: Any) -> Generator[AudioPiece, None, Finished]:
        """Yield the audio as it is made; takes what `speech_request` takes and raises at the first piece.

        Closing the generator cancels the request. Its return value says how the speech ended.
        """
        made = _as_request(*request, **fields)
        with self._running([made]):
            return (yield from self._pieces(made.id))

    def _speak(self, requests: Sequence[SpeechRequest]) -> list[Audio]:
        audio = []
        with self._running(requests):
            for number, request in enumerate(requests):
                with _noting(number if len(requests) > 1 else None):
                    audio.append(self._whole(request.id))
        return audio

    def _whole(self, request_id: str) -> Audio:
        pieces: list[AudioPiece] = []
        finished = listen(self._pieces(request_id), pieces.append)
        return Audio(
            samples=np.concatenate([np.zeros(0, np.float32), *(piece.samples for piece in pieces)]),
            sample_rate=self.sample_rate,
            finish_reason=finished.reason,
            frames=finished.frames,
            time_to_first_audio_s=finished.timings.first_audio_s,
            total_s=finished.timings.total_s,
        )

    @contextlib.contextmanager
    def _running(self, requests: Sequence[SpeechRequest]) -> Iterator[None]:
        """Hold `requests` in the engine; whatever has not ended at the end is cancelled."""
        held: list[tuple[str, deque[Event]]] = []
        try:
            for number, request in enumerate(requests):
                with self._lock, _noting(number if len(requests) > 1 else None):
                    self._cancel_left()
                    self._submit(request)
                    inbox = self._inboxes[request.id] = deque()
                    held.append((request.id, inbox))
            yield
        finally:
            # Without the lock: the garbage collector may close a stream in a thread that is inside a tick.
            self._left.extend(held)

    def _submit(self, request: SpeechRequest) -> None:
        """Give `request` to the engine, once as few are waiting there as may."""
        while True:
            try:
                self._engine.submit(request)
            except EngineBusy:
                self._tick()
            else:
                return

    def _cancel_left(self) -> None:
        """Cancel what has been left since the last call. An id may have been taken anew; its inbox tells."""
        while self._left:
            request_id, inbox = self._left.popleft()
            if self._inboxes.get(request_id) is inbox:
                del self._inboxes[request_id]
                self._engine.cancel(request_id)

    def _pieces(self, request_id: str) -> Generator[AudioPiece, None, Finished]:
        """The audio of a running request; ticks the engine, for everybody, while there is none."""
        inbox = self._inboxes[request_id]
        while True:
            while not inbox:
                with self._lock:
                    # Another thread may have filled it while this one waited.
                    if not inbox:
                        self._tick()
            event = inbox.popleft()
            if isinstance(event, Finished):
                return event
            if isinstance(event, Failed):
                raise event.error
            yield AudioPiece(from_pcm16(event.pcm), self.sample_rate, event.index)

    def _tick(self) -> None:
        self._cancel_left()
        assert self._engine.has_work, "a request is awaited that the engine does not hold"
        for event in self._engine.tick():
            # A request that was cancelled has no inbox any more; its end interests nobody.
            if event.request_id in self._inboxes:
                self._inboxes[event.request_id].append(event)


def _as_request(text: str | SpeechRequest | None = None, *args: Any, **fields: Any) -> SpeechRequest:
    if text is None:
        raise InvalidRequest("text", None, "say what to speak")
    if isinstance(text, SpeechRequest):
        if args or fields:
            field, value = ("voice", args[0]) if args else next(iter(fields.items()))
            raise InvalidRequest(field, value, "a SpeechRequest is whole already; make it with this field")
        if text.is_live:
            raise InvalidRequest("is_live", True, "text can be appended through an `EngineClient` alone")
        return text
    return speech_request(text, *args, **fields)


@contextlib.contextmanager
def _noting(number: int | None) -> Iterator[None]:
    """Add to what is raised which item of a batch it is about; nothing for None."""
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
