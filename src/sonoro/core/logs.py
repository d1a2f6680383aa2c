"""The format of logs: one line per event with time and level, as text or as JSON.

Messages are written as `event=NAME key=value ...`; the keys become those of the JSON. Knows no event."""

import contextlib
import json
import logging
import os
import re
import select
import stat
import sys
import traceback
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

from sonoro.core.errors import without_addresses

_FIELD = re.compile(r"(?P<key>\w+)=(?P<value>\S+)")
_PLACE = re.compile(r"%[-+ #0]*[\d.]*[a-z]")
_UNWORDLY = re.compile(r'[\s"=]')
_OURS = "sonoro"

MAX_WAITING_BYTES = 2**18

_GIVEN = "sonoro_fields"
"""The attribute of a record with its fields as given to `log_event`, so that the message need not be parsed."""


class LineFormatter(logging.Formatter):
    """Formats a record as a line: time (UTC), level, event and fields; records of other packages have the event `log`.
    Memory addresses are removed. Exception messages are printed only for loggers of `sonoro`: elsewhere they may quote
    a client's text, and only the stack and the class are printed."""

    def __init__(self, *, is_json: bool = False) -> None:
        super().__init__()
        self._is_json = is_json

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        fields = _fields(record)
        if record.exc_info and record.exc_info[1] is not None:
            fields["traceback"] = _traceback(record.exc_info[1], is_told=record.name.startswith(_OURS))
        if self._is_json:
            said = {"time": time, "level": record.levelname, **fields}
            return without_addresses(json.dumps(said, default=str))
        trace = fields.pop("traceback", None)
        line = " ".join([time, record.levelname, *(f"{name}={_word(value)}" for name, value in fields.items())])
        return without_addresses(line if trace is None else f"{line}\n{trace}")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    """The event of `record` and its fields; values keep their type, numbers their format."""
    if (given := record.__dict__.get(_GIVEN)) is not None:
        return {name: _value(value) for name, value in given.items()}
    template = str(record.msg)
    if not template.startswith("event=") or not isinstance(record.args, tuple):
        return {"event": "log", "logger": record.name, "message": record.getMessage()}
    fields: dict[str, Any] = {}
    values = iter(record.args)
    for found in _FIELD.finditer(template):
        value: Any = found["value"]
        taken = tuple(next(values) for _ in _PLACE.findall(value))
        if len(taken) != 1 or _PLACE.fullmatch(value) is None:
            value = value % taken
        elif isinstance(taken[0], float):
            value = float(value % taken)
        else:
            value = _value(taken[0])
        fields[found["key"]] = value
    return fields


def _value(value: object) -> str | float | None:
    """`value` if JSON can hold it, else as text."""
    return value if value is None or isinstance(value, (int, float, str)) else str(value)


def _word(value: object) -> str:
    """`value` as one word of a text line, quoted if necessary."""
    text = "-" if value is None else f"{value:.15g}" if isinstance(value, float) else str(value)
    return text if text and text.isprintable() and not _UNWORDLY.search(text) else json.dumps(text)


def _traceback(error: BaseException, *, is_told: bool) -> str:
    if is_told:
        return "".join(traceback.format_exception(error)).rstrip()
    return "".join(traceback.format_tb(error.__traceback__)) + type(error).__name__


class Outlet:
    """Writes to `stream` and never waits for its reader: up to `MAX_WAITING_BYTES` wait for the next `write`, what is
    beyond is dropped and counted in `dropped`. It has no thread, so a process may end at once after a write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._file = stream, _file_of(stream)
        self._waiting, self.dropped = bytearray(), 0

    @property
    def has_room(self) -> bool:
        return not self._waiting

    def write(self, text: str) -> None:
        if self._file is None:
            self._stream.write(text)
            self._stream.flush()
            return
        data = text.encode(errors="backslashreplace")
        self._send(self._file)
        if len(self._waiting) + len(data) <= MAX_WAITING_BYTES:
            self._waiting += data
            self._send(self._file)
        else:
            self.dropped += 1

    def _send(self, file: int) -> None:
        poll = select.poll()
        poll.register(file, select.POLLOUT)
        try:
            while self._waiting and poll.poll(0):
                # A pipe that polls as writable has room for PIPE_BUF.
                del self._waiting[: os.write(file, self._waiting[: select.PIPE_BUF])]
        except BlockingIOError:
            pass  # another process has filled the pipe since
        except OSError:
            self._waiting.clear()  # its reader is gone

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _file_of(stream: TextIO) -> int | None:
    """A file descriptor of its own for the file of `stream`, None without one: a pipe is opened again, as writes to it
    can then be made not to block without a change for other processes."""
    try:
        file = stream.fileno()
        if stat.S_ISFIFO(os.fstat(file).st_mode):
            with contextlib.suppress(OSError):  # there is no /proc, or the pipe is another user's
                return os.open(f"/proc/self/fd/{file}", os.O_WRONLY | os.O_NONBLOCK)
        return os.dup(file)
    except (OSError, AttributeError, ValueError):
        return None


class LineHandler(logging.Handler):
    """Writes a line for each record through an `Outlet`, and how many were dropped once there is room again."""

    def __init__(self, stream: TextIO, formatter: LineFormatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._outlet = Outlet(stream)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._outlet.write(self.format(record) + "\n")
            if self._outlet.dropped and self._outlet.has_room:
                fields = {"msg": "event=log_dropped lines=%d", "args": (self._outlet.dropped,)}
                told = logging.makeLogRecord({**fields, "levelno": logging.WARNING, "levelname": "WARNING"})
                self._outlet.dropped = 0
                self._outlet.write(self.format(told) + "\n")
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        self._outlet.close()
        super().close()


def configure_logging(level: int, *, is_json: bool = False, stream: TextIO | None = None) -> None:
    """Log `level` and above to stderr (or `stream`); from other packages only warnings and above.
    Debug logs of other packages hold what clients write. May be called again. Does nothing if the root logger already
    has other handlers."""
    root = logging.getLogger()
    if any(not isinstance(handler.formatter, LineFormatter) for handler in root.handlers):
        return
    for handler in root.handlers:
        handler.close()
    root.handlers = [LineHandler(stream or sys.stderr, LineFormatter(is_json=is_json))]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger(_OURS).setLevel(level)


def log_event(logger: logging.Logger, level: int, event: str, fields: Mapping[str, object]) -> None:
    """Log `event` with `fields`, in order; None is shown as "-" or null."""
    given = {"event": event, **fields}
    template = " ".join((f"event={event}", *(f"{name}=%s" for name in fields)))
    logger.log(level, template, *fields.values(), extra={_GIVEN: given})
