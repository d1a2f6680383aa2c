"""Writes generated audio to files, as PCM16 or an encoding of it. Knows no model.

Imports numpy and libsndfile only for what needs them: WAV and PCM do not."""

from __future__ import annotations

import contextlib
import io
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, Self

from sonoro.audio.wav import wav_header
from sonoro.core.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

    from sonoro.audio.pcm import Samples

FORMATS = ("wav", "flac", "mp3", "opus", "pcm")
STREAMABLE_FORMATS = ("wav", "pcm")
"""Formats whose bytes need no rewriting at the end."""

STDOUT = "-"

FORMAT_OF = {f".{format}": format for format in FORMATS} | {".ogg": "opus", ".raw": "pcm"}


def check_place(target: Path) -> None:
    """Raise `OutputError` if `target` is a folder, or lacks one to be in. Writes nothing."""
    try:
        is_folder, has_folder = target.is_dir(), target.parent.is_dir()
    except OSError as error:
        raise OutputError(f"cannot write {str(target)!r}: {error.strerror}") from error
    if is_folder:
        raise OutputError(f"cannot write {str(target)!r}: it is a folder")
    if not has_folder:
        raise OutputError(f"cannot write {str(target)!r}: there is no folder {str(target.parent)!r}")


def output_format(path: str | Path, given: str | None = None) -> str:
    """The format to write `path` in: `given`, else by its suffix; WAV for stdout. Writes nothing.
    Raises `OutputError` for an unknown format or suffix, and for a path that cannot be written."""
    if given is not None and given not in FORMATS:
        raise OutputError(f"format: {given!r} is not known; one of {', '.join(FORMATS)}")
    if str(path) == STDOUT:
        return given or "wav"
    target = Path(path)
    check_place(target)
    if given is None and target.suffix.lower() not in FORMAT_OF:
        known = ", ".join(FORMAT_OF)
        raise OutputError(f"cannot write {str(target)!r}: its suffix names no format; use {known}, or give a format")
    return given or FORMAT_OF[target.suffix.lower()]


class AudioWriter:
    """Writes audio chunk by chunk to a path, to stdout ("-") or to an open binary file; a context manager.

    A file is playable after each chunk, and complete when the block ends, even with an exception such as an interrupt.
    It is removed if nothing was written, or if writing fails. A WAV header that cannot be rewritten gives no length.
    Encoded formats for anything but a file are written at the end, because closing them rewrites their header. Raises
    `OutputError` if writing fails."""

    def __init__(self, path: str | Path | BinaryIO, sample_rate: int, format: str | None = None) -> None:
        self._target = path if isinstance(path, (str, Path)) else None
        self.format = output_format(self._target or STDOUT, format)
        self._path = None if self._target is None or str(path) == STDOUT else Path(self._target)
        with self._reporting(removes=False):
            self._file = self._open() if isinstance(path, (str, Path)) else path
        self.is_empty = True
        with self._reporting():
            self._sink: _Sink
            if self.format in STREAMABLE_FORMATS:
                self._sink = _Raw(self._file, self.format, sample_rate)
            else:
                grows = self._path is not None and self._file.seekable()
                compressed = import_module("sonoro.audio.compressed")
                self._sink = compressed.CompressedFile(self._file, self.format, sample_rate, grows=grows)

    def write(self, pcm: bytes) -> None:
        """Append `pcm`, PCM16 little-endian mono."""
        with self._reporting():
            self._sink.write(pcm)
        self.is_empty = False

    def close(self) -> None:
        """Complete the file; remove it if that fails."""
        with self._reporting():
            self._sink.close()
            if self._path is not None:
                self._file.close()

    def abort(self) -> None:
        """Remove the file, if it is a regular one. Never raises, as the cause of an abort may make this fail too."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            with contextlib.suppress(OSError):
                if self._path.is_file():
                    self._path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or not (self.is_empty or issubclass(kind, OutputError)):
            self.close()
        else:
            self.abort()

    def _open(self) -> BinaryIO:
        if self._path is not None:
            return self._path.open("wb")
        if sys.stdout is None:
            raise OutputError("cannot write stdout: it is closed")
        if sys.stdout.isatty():
            raise OutputError("cannot write stdout: it is a terminal; send it to a pipe, or name a file")
        return sys.stdout.buffer

    @contextlib.contextmanager
    def _reporting(self, *, removes: bool = True) -> Iterator[None]:
        """Turn an error into an `OutputError`, and remove the file unless not `removes`."""
        try:
            yield
        except OSError as error:
            if removes:
                self.abort()
            name = "the file" if self._target is None else "stdout" if self._path is None else repr(str(self._path))
            reason = error.strerror or str(error)
            raise OutputError(f"cannot write {name}: {reason}") from error


def write_audio(path: str | Path | BinaryIO, samples: Samples, sample_rate: int, format: str | None = None) -> None:
    """Write all `samples` [S] float32 in [-1, 1]. Raises `OutputError`, and then leaves no file behind."""
    with AudioWriter(path, sample_rate, format) as writer:
        writer.write(import_module("sonoro.audio.pcm").to_pcm16(samples))


class _Sink(Protocol):
    """What an `AudioWriter` writes to. Raises `OSError`."""

    def write(self, pcm: bytes) -> None: ...

    def close(self) -> None: ...


class _Raw:
    """WAV or bare PCM16, flushed with each chunk."""

    def __init__(self, file: BinaryIO, format: str, sample_rate: int) -> None:
        self._file, self._rate = file, sample_rate
        self._header_at = file.tell() if format == "wav" and file.seekable() else None
        if format == "wav":
            file.write(wav_header(sample_rate))

    def write(self, pcm: bytes) -> None:
        self._file.write(pcm)
        self._file.flush()

    def close(self) -> None:
        if self._header_at is not None:
            # Take the size from the file: an interrupt may come between a write and a counter.
            header = wav_header(self._rate)
            size = self._file.seek(0, io.SEEK_END) - self._header_at - len(header)
            self._file.seek(self._header_at)
            self._file.write(wav_header(self._rate, size))
            self._file.seek(0, io.SEEK_END)
        self._file.flush()
