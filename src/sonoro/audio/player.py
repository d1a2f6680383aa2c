"""Plays PCM as it comes: by the package sounddevice, or by a program of the system. Quick to import."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, Self

from sonoro.audio.wav import wav_header
from sonoro.core.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Sequence

_PROBE_S, _PROBE_TIMEOUT_S = 0.02, 5.0

_RAW = {
    "aplay": ("-q", "-t", "raw", "-f", "S16_LE", "-c", "1", "-r", "{rate}"),
    "paplay": ("--raw", "--format=s16le", "--channels=1", "--rate={rate}"),
}
_WAV = {"ffplay": ("-nodisp", "-autoexit", "-loglevel", "error", "-i", "-")}
_OF_FILES = "afplay"
"""The program of macOS, which reads no pipe."""


class Player(Protocol):
    """Something that plays, with its `name`; a context manager, which at its end waits for the last sound, or, after
    an exception, stops at once. Raises `OutputError`."""

    name: str

    def write(self, pcm: bytes) -> None:
        """Play `pcm`, PCM16 little-endian mono, after what came before. May wait for room."""

    def __enter__(self) -> Self: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None: ...


def find_player(sample_rate: int) -> Player | None:
    """The first player that can be heard on this machine; None if none can."""
    with contextlib.suppress(Exception):  # the package is missing, or PortAudio, or a device
        return _Device(import_module("sounddevice"), sample_rate)
    for name, options in {**_RAW, **_WAV}.items():
        command = [name, *(option.format(rate=sample_rate) for option in options)]
        head = wav_header(sample_rate) if name in _WAV else b""
        if shutil.which(name) and _can_play(command, head + bytes(2 * round(_PROBE_S * sample_rate))):
            return _Program(command, head)
    return _FileProgram(_OF_FILES, sample_rate) if shutil.which(_OF_FILES) else None


def _can_play(command: Sequence[str], silence: bytes) -> bool:
    """Whether `command` plays a moment of `silence`: without a sound card it fails."""
    try:
        ran = subprocess.run(command, input=silence, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return ran.returncode == 0 and not ran.stderr


class _Program:
    """A program that plays what it reads; `head` comes first."""

    def __init__(self, command: Sequence[str], head: bytes = b"") -> None:
        self.name, self._command, self._head = command[0], command, head
        self._process: subprocess.Popen[bytes] | None = None

    def write(self, pcm: bytes) -> None:
        if self._process is None:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
            self._process, pcm = subprocess.Popen(self._command, **pipes), self._head + pcm
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(pcm)
            self._process.stdin.flush()
        except OSError:
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._process is not None and kind is not None:
            self._process.kill()
            self._process.communicate()
        elif self._process is not None:
            self._end(is_good=(0,))

    def _end(self, is_good: Sequence[int] = ()) -> None:
        """Wait for the end of the program. Raises `OutputError` unless its exit code `is_good`."""
        assert self._process is not None
        _, said = self._process.communicate()
        if self._process.returncode not in is_good:
            reason = said.decode(errors="replace").strip() or f"exit code {self._process.returncode}"
            raise OutputError(f"cannot play: {self.name} ended: {reason}")


class _FileProgram:
    """A program that plays a file, once there is all of it."""

    def __init__(self, name: str, sample_rate: int) -> None:
        self.name, self._sample_rate, self._pcm = name, sample_rate, bytearray()

    def write(self, pcm: bytes) -> None:
        self._pcm += pcm

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None or not self._pcm:
            return
        with tempfile.NamedTemporaryFile(suffix=".wav") as file:
            file.write(wav_header(self._sample_rate, len(self._pcm)) + self._pcm)
            file.flush()
            if code := subprocess.run([self.name, file.name], check=False).returncode:
                raise OutputError(f"cannot play: {self.name} ended with exit code {code}")


class _Device:
    """The sound device of the package `sounddevice`. Raises whatever that does, if there is none."""

    name = "sounddevice"

    def __init__(self, package: Any, sample_rate: int) -> None:
        self._stream = package.RawOutputStream(samplerate=sample_rate, channels=1, dtype="int16")

    def write(self, pcm: bytes) -> None:
        if not self._stream.active:
            self._stream.start()
        self._stream.write(pcm)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stream.abort()
        elif self._stream.active:
            self._stream.stop()  # after the last sound
        self._stream.close()
