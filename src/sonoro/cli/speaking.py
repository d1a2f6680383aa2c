"""Writes or plays speech as it comes, until its end or a signal. Quick to import; knows no engine and no server."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sonoro.audio.files import FORMAT_OF, STDOUT, STREAMABLE_FORMATS, AudioWriter, output_format
from sonoro.cli.streams import FAILURE, Stopped, say_on_stderr, show
from sonoro.core.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Sequence
    from types import FrameType

    from sonoro.audio.player import Player

_SHORT = 200
"""Characters of a text without a progress bar: it takes longer to import than the text to speak."""


class Piece(NamedTuple):
    """Consecutive audio, PCM16, and how many characters of the text are spoken by its end."""

    pcm: bytes
    characters: int


class Ended(NamedTuple):
    """Why speech ended, in the words of `FinishReason`, and how many characters of the text were spoken."""

    reason: str
    characters: int


class Target(NamedTuple):
    """Where speech goes: `out`, a path or stdout, in `format`; or it `is_played`, and `out` is where it goes if nothing
    can play it."""

    out: str
    format: str
    is_played: bool
    replaces: bool

    @classmethod
    def of(
        cls, out: str | None, format: str | None, others: Sequence[Path], *, play: bool | None, **how: bool
    ) -> Target:
        """The target of the options `out`, `format` and `play`, None where they are not given. `how`: `is_streamed` and
        `is_forced`, both options too. `others` are files that will be written as well. Raises `OutputError`."""
        if out is not None and play:
            raise OutputError("--play: it plays in place of writing a file; leave out --play or --out")
        is_played = out is None and (play is True or (play is None and format is None and is_terminal(sys.stdout)))
        place = f"out.{format or 'wav'}" if out is None else out
        known = output_format(place, format)
        if format is not None and (named := FORMAT_OF.get(Path(place).suffix.lower(), format)) != format:
            raise OutputError(
                f"--format: {format!r} is not what {place!r} is named after, {named}; leave one of them out"
            )
        if how["is_streamed"] and known not in STREAMABLE_FORMATS:
            can = " or ".join(STREAMABLE_FORMATS)
            raise OutputError(f"--stream: {known} cannot be written chunk by chunk; use {can}")
        files = [] if place == STDOUT else [Path(place)]
        _check_outputs([*files, *others], kept=[*others, *(files if out is not None else [])], **how)
        return cls(place, known, is_played, any(path.is_file() for path in files))


def _check_outputs(outputs: Sequence[Path], kept: Sequence[Path], *, is_forced: bool, is_streamed: bool) -> None:
    """Raise `OutputError` for two outputs with one file, and for one of `kept` that exists unless it `is_forced`."""
    names = [os.path.realpath(path) for path in outputs]
    for path, name in zip(outputs, names, strict=True):
        if names.count(name) > 1:
            raise OutputError(f"{path}: two outputs cannot have the same file")
        if path in kept and path.is_file() and not is_forced:
            raise OutputError(f"{path}: the file exists; --force replaces it")


def is_terminal(stream: object) -> bool:
    """Whether `stream` is an open terminal."""
    return stream is not None and bool(stream.isatty())  # type: ignore[attr-defined]


class Spoken(NamedTuple):
    """What was said and where: seconds of audio, to its first piece, and to its end; by which player, if one."""

    audio_s: float
    first_s: float
    total_s: float
    ended: Ended
    player: str | None

    @property
    def rtf(self) -> float:
        """Real-time factor: wall time over audio time; infinite without audio."""
        return self.total_s / self.audio_s if self.audio_s else float("inf")


class _Terminated(BaseException):
    """SIGTERM was received."""


def speak_into(
    target: Target, speech: Generator[Piece, None, Ended], sample_rate: int, length: int, *, is_shown: bool | None
) -> Spoken:
    """Write or play `speech` of a text of `length` characters. Progress `is_shown`; None: on a terminal. Raises
    `Stopped` at a signal, with what was written kept, `OutputError`, and what `speech` does."""
    from sonoro.audio.player import find_player

    player = find_player(sample_rate) if target.is_played else None
    out = target.out
    sinks: list[AudioWriter | Player] = []
    began_s, first_s, audio_s = time.monotonic(), 0.0, 0.0
    try:
        with contextlib.ExitStack() as stack:

            def sink() -> AudioWriter | Player:
                # An existing file is kept until there is audio to replace it.
                if not sinks:
                    made: AudioWriter | Player = player or AudioWriter(out, sample_rate, target.format)
                    stack.enter_context(made)
                    sinks.append(made)
                return sinks[0]

            # Progress ends first, so that its last line does not mix with an error.
            tell = stack.enter_context(_progress(length, is_shown=is_shown))
            while True:
                try:
                    piece = next(speech)
                except StopIteration as stop:
                    ended: Ended = stop.value
                    break
                first_s = first_s or time.monotonic() - began_s
                # An encoder's callback would swallow what a signal raises. A player, or stdout, may have to wait.
                waits = sinks and (player is not None or out == STDOUT)
                with contextlib.nullcontext() if waits else _signals_wait():
                    sink().write(piece.pcm)
                audio_s += len(piece.pcm) / 2 / sample_rate
                tell(audio_s, piece.characters)
            made_s = time.monotonic() - began_s
            sink()
    except (KeyboardInterrupt, _Terminated) as end:
        is_interrupt = isinstance(end, KeyboardInterrupt)
        kept = f"; {out} holds the first {audio_s:.2f} s" if audio_s and out != STDOUT and player is None else ""
        number = signal.SIGINT if is_interrupt else signal.SIGTERM
        raise Stopped(("interrupted" if is_interrupt else "terminated") + kept, number) from end
    return Spoken(audio_s, first_s, made_s, ended, player.name if player is not None else None)


def conclude(target: Target, spoken: Spoken, *, is_verbose: bool) -> int:
    """Print a line on what was `spoken`; return the exit code."""
    reason, is_file = spoken.ended.reason, spoken.player is None
    ran_away = f"cut after {spoken.ended.characters} characters, where it ran away: try --attempts 3"
    notes = {
        "cut at --max-frames": reason == "length",
        ran_away: reason == "runaway",
        "nothing was found that can play it": target.is_played and is_file,
        "it replaces an older file": target.replaces and is_file,
    }
    where = "" if target.out == STDOUT else f" in {target.out}"
    how = f"{where}, made in {spoken.total_s:.1f} s" if is_file else f", played by {spoken.player}"
    said = f"{spoken.audio_s:.1f} s of speech{how}"
    (say_on_stderr if target.out == STDOUT else show)(
        "; ".join([said, *(note for note, holds in notes.items() if holds)])
    )
    if is_verbose:
        say_on_stderr(f"RTF {spoken.rtf:.3f}, first packet {1000 * spoken.first_s:.0f} ms")
    return FAILURE if reason == "runaway" else 0


@contextlib.contextmanager
def until_terminated() -> Iterator[None]:
    """Turn SIGTERM into an exception in the block, like an interrupt, so that files are completed; raises `Stopped`."""

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    try:
        with _handling(raise_it, signal.SIGTERM):
            yield
    except _Terminated as end:
        raise Stopped("terminated", signal.SIGTERM) from end


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the block, so that a write is whole or not begun."""
    came = list[int]()
    try:
        with _handling(lambda number, frame: came.append(number), signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def _handling(handle: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle the signals `numbers` by `handle` in the block, if this is the main thread, which alone may."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress(length: int, *, is_shown: bool | None) -> Iterator[Callable[[float, int], None]]:
    """Show progress on stderr, by default if that is a terminal and the text is not short. Yields a function to call
    with the seconds of audio so far, and how many characters they cover."""
    if is_shown or (is_shown is None and length > _SHORT and is_terminal(sys.stderr)):
        from sonoro.cli.progress import progress

        with progress(length) as tell:
            yield tell
    else:
        yield lambda audio_s, characters: None
