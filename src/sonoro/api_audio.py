"""The audio that `sonoro.api` returns, whole or in pieces."""

from __future__ import annotations

import base64
import importlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from sonoro.audio.files import output_format, write_audio
from sonoro.core.errors import OutputError
from sonoro.core.events import Fault, Word
from sonoro.core.types import FinishReason


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
    `Finished.words`. None if the model gives no word times.
    """

    index: int
    characters: int = 0
    words: tuple[Word, ...] | None = None


@dataclass(frozen=True, eq=False)
class Audio(_Sound):
    """All audio of a request: mono `samples` [S] float32 in [-1, 1]. A notebook displays it as a player.

    `time_to_first_audio_s` and `total_s` count from the acceptance of the request. Times of `words` count from the
    first sample; None if the model gives none. `faults` are parts of the text probably not spoken as written.
    """

    finish_reason: FinishReason
    frames: int
    time_to_first_audio_s: float
    total_s: float
    words: tuple[Word, ...] | None = None
    faults: tuple[Fault, ...] = ()

    @property
    def rtf(self) -> float:
        """Real-time factor: wall time over audio time; infinite without audio."""
        return self.total_s / self.duration_s if len(self.samples) else float("inf")

    def save(self, file: str | Path | BinaryIO, format: str | None = None) -> None:
        """Write wav, flac, mp3, opus or pcm to a path or an open binary file; `format` defaults to the suffix.

        A file without a name is written as wav. An open file is not closed. Raises `OutputError`.
        """
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
        """Play the audio on this machine, and block until its end. Needs `pip install "sonoro[play]"`. Raises
        `OutputError`."""
        device = _sounddevice()
        try:
            device.play(self.samples, self.sample_rate, blocking=True)
        except device.PortAudioError as error:
            raise OutputError(f"cannot play: {error}") from error

    def _repr_html_(self) -> str:
        audio = base64.b64encode(self.to_bytes()).decode()
        return f'<audio controls src="data:audio/wav;base64,{audio}"></audio>'


def _sounddevice() -> ModuleType:
    try:
        return importlib.import_module("sounddevice")
    except (ImportError, OSError) as error:  # OSError: the package is there, the PortAudio it calls is not
        raise OutputError(f'cannot play: {error}; try pip install "sonoro[play]"') from error
