"""Standard streams, files of text and exit codes of the commands. Quick to import."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from sonoro.core.errors import EngineError, InvalidRequest, OutputError, SonoroError

if TYPE_CHECKING:
    from collections.abc import Iterator

FAILURE, BAD_INPUT = 1, 2


class Stopped(Exception):
    """A command was stopped by signal `number`; `code` is the exit code of shells for that, 128 + number."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = 128 + number


def show(*lines: str) -> None:
    """Print `lines` and flush. Raises `OutputError` if stdout cannot be written; does nothing if it is closed."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.flush()
    except OSError as error:
        raise OutputError(f"cannot write stdout: {error.strerror}") from error


def read_text(text: str | None, file: Path | None, command: str = "say") -> str:
    """The text of an argument of `command`, of stdin for "-", or of a file. Raises `InvalidRequest`."""
    if text is None and file is None:
        example = f'sonoro {command} "Good morning."'
        raise InvalidRequest("text", None, f"give one, as in {example}, or - for stdin, or --file FILE")
    if text is not None and file is not None:
        raise InvalidRequest("text", text, f"--file {file} is given too; leave one of them out")
    try:
        if file is not None:
            return file.read_text(encoding="utf-8-sig")  # without a byte order mark
        if text != "-":
            return str(text)
        if sys.stdin is None:
            raise InvalidRequest("text", text, "stdin is closed")
        return sys.stdin.buffer.read().decode("utf-8-sig")
    except OSError as error:
        raise InvalidRequest("file", str(file), f"it must be a readable file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest("text", str(file or "stdin"), f"it must be UTF-8 ({error.reason})") from error


def say_on_stderr(*lines: str) -> None:
    """Print `lines` on stderr, if there is one."""
    if sys.stderr is not None:
        print(*lines, sep="\n", file=sys.stderr)


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """A block whose errors end the process with one line on stderr: exit code 2 for invalid input."""
    try:
        yield
    except SonoroError as error:
        end(str(error), FAILURE if isinstance(error, EngineError) else BAD_INPUT)
    except Stopped as stop:
        end(str(stop), stop.code)
    except KeyboardInterrupt:
        end("interrupted", Stopped("", signal.SIGINT).code)


def end(message: str, code: int) -> NoReturn:
    """Print an error line on stderr and exit."""
    say_on_stderr("error: " + " ".join(message.split()))
    try:
        show()
    except OutputError:
        # The interpreter would raise again when it flushes the buffer at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
