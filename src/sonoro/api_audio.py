"""The audio that `sonoro.api` returns, whole or in pieces."""

import base64
import io
import itertools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from sonoro.audio.encoders import Encoder, Gains
from sonoro.audio.files import output_format, write_audio
from sonoro.audio.pcm import from_pcm16, to_pcm16
from sonoro.audio.player import find_player
from sonoro.core.errors import OutputError
from sonoro.core.events import Fault, Mark, Word, marks_at_speed
from sonoro.core.events import at_speed as words_at_speed
from sonoro.core.types import Finished, FinishReason
from sonoro.core.version import extra
from sonoro.words import captions

Pieces = Generator["AudioPiece", None, Finished]
"""The audio of a request; returns its `Finished`."""


@dataclass(frozen=True, eq=False)
class _Sound:
    """Mono `samples` [S] float32 in [-1, 1]. Has a length in samples, and converts to a numpy array."""

    samples: npt.NDArray[np.float32] = field(repr=False)
    sample_rate: int

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.sample_rate

    def __len__(self) -> int:
        return len(self.samples)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.array(self.samples, dtype=dtype, copy=copy)


@dataclass(frozen=True, eq=False)
class AudioPiece(_Sound):
    """Consecutive audio of a stream: mono `samples` [S] float32 in [-1, 1]; `index` counts from 0.
    `characters`: characters of the text spoken by its end, exact at the end of a segment, else an estimate. `words`:
    those whose times became final with it, in seconds from the start of the stream; the last ones are in
    `Finished.words`. None if the model gives no word times. Above 0, the piece ends with a pause of `pause_s` at speed
    1. `marks` are those of the text whose times became final with it, as of words. `voice` speaks it; None: that of the
    request."""

    index: int
    characters: int = 0
    words: tuple[Word, ...] | None = None
    pause_s: float = 0.0
    marks: tuple[Mark, ...] = ()
    voice: str | None = None


@dataclass(frozen=True, eq=False)
class Audio(_Sound):
    """All audio of a request: mono `samples` [S] float32 in [-1, 1]. A notebook displays it as a player.
    `time_to_first_audio_s` and `total_s` count from the acceptance of the request. Times of `words` count from the
    first sample; None if the model gives none. `faults` are parts of the text probably not spoken as written,
    `warnings` its markup that was not honoured, `marks` the places that it names."""

    finish_reason: FinishReason
    frames: int
    time_to_first_audio_s: float
    total_s: float
    words: tuple[Word, ...] | None = None
    faults: tuple[Fault, ...] = ()
    warnings: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()

    @property
    def rtf(self) -> float:
        """Real-time factor: wall time over audio time; infinite without audio."""
        return self.total_s / self.duration_s if len(self.samples) else float("inf")

    def save(self, file: str | Path | BinaryIO, format: str | None = None) -> None:
        """Write wav, flac, mp3, opus or pcm to a path or an open binary file; `format` defaults to the suffix.
        A file without a name is written as wav. An open file is not closed. Raises `OutputError`."""
        if isinstance(file, (str, Path)):
            write_audio(file, self.samples, self.sample_rate, format)
            return
        if format is None:
            # The name of a temporary file may be a number.
            name = getattr(file, "name", None)
            format = output_format(name) if isinstance(name, str) and Path(name).suffix else "wav"
        try:
            file.write(self.to_bytes(format))
        except (OSError, TypeError, ValueError) as error:
            raise OutputError(f"cannot write {file!r}: {error}") from error

    def to_bytes(self, format: str = "wav") -> bytes:
        """Encode as the bytes of a wav, flac, mp3, opus or pcm file. Raises `OutputError` for another format."""
        made = io.BytesIO()
        write_audio(made, self.samples, self.sample_rate, format)
        return made.getvalue()

    def play(self) -> None:
        """Play the audio on this machine, and block until its end. Raises `OutputError`."""
        player = find_player(self.sample_rate)
        if player is None:
            raise OutputError(f"cannot play: found neither a sound device nor a program that plays; {extra('play')}")
        with player:
            player.write(to_pcm16(self.samples))

    def _repr_html_(self) -> str:
        audio = base64.b64encode(self.to_bytes()).decode()
        return f'<audio controls src="data:audio/wav;base64,{audio}"></audio>'


def make_captions(kind: str, text: str, words: Sequence[Word]) -> str:
    """Captions of `text` from the times of its `words`, as a file of `kind` srt, vtt or json."""
    return captions.FORMATS[kind](text, words)


def listen(pieces: Pieces, take: Callable[[AudioPiece], None]) -> Finished:
    """Call `take` with every piece of a stream; return its `Finished`."""
    while isinstance(received := next_piece(pieces), AudioPiece):
        take(received)
    return received


def next_piece(pieces: Pieces) -> AudioPiece | Finished:
    """The next piece, or the stream's `Finished`."""
    try:
        return next(pieces)
    except StopIteration as end:
        finished: Finished = end.value
        return finished


def played(pieces: Pieces, sample_rate: int, speed: float, gains: Gains | None) -> Pieces:
    """`pieces` at the tempo `speed` and at the level of `gains`. Raises `InvalidRequest` for an invalid speed."""
    if speed == 1 and gains is None:
        return (yield from pieces)
    with Encoder("pcm", sample_rate, speed=speed, gains=gains) as encoder:
        index = characters = 0
        words: tuple[Word, ...] | None = None
        marks: tuple[Mark, ...] = ()
        while True:
            received = next_piece(pieces)
            if isinstance(received, Finished):
                if pcm := encoder.finish():
                    yield AudioPiece(from_pcm16(pcm), sample_rate, index, characters, words, marks=marks)
                    words, marks = None, ()
                words, marks = _added(words, received.words, speed), marks + marks_at_speed(received.marks, speed)
                return msgspec.structs.replace(received, words=words, marks=marks)
            words, marks = _added(words, received.words, speed), marks + marks_at_speed(received.marks, speed)
            pause_s, characters, voice = received.pause_s, received.characters, received.voice
            pcm = encoder.pause(pause_s) if pause_s else encoder.feed(to_pcm16(received.samples), voice)
            if pcm:
                pause_s = pause_s if speed == 1 else 0.0
                yield AudioPiece(from_pcm16(pcm), sample_rate, index, characters, words, pause_s, marks, voice)
                index, words, marks = index + 1, None, ()


def _added(words: tuple[Word, ...] | None, more: tuple[Word, ...] | None, speed: float) -> tuple[Word, ...] | None:
    return words if more is None else (*(words or ()), *words_at_speed(more, speed))


def joined(pieces: Sequence[AudioPiece], finished: Finished, sample_rate: int) -> Audio:
    """All audio of a request, of its `pieces` and its end. It has words if any part has."""
    words = [words for words in (*(piece.words for piece in pieces), finished.words) if words is not None]
    return Audio(
        samples=np.concatenate([np.zeros(0, np.float32), *(piece.samples for piece in pieces)]),
        sample_rate=sample_rate,
        finish_reason=finished.reason,
        frames=finished.frames,
        time_to_first_audio_s=finished.timings.first_audio_s,
        total_s=finished.timings.total_s,
        words=tuple(itertools.chain.from_iterable(words)) if words else None,
        faults=finished.faults,
        warnings=finished.warnings,
        marks=(*itertools.chain.from_iterable(piece.marks for piece in pieces), *finished.marks),
    )
