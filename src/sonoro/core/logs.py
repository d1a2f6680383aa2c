"""The format of logs: one line per event with time and level, as text or as JSON.

Messages are written as `event=NAME key=value ...`; the keys become those of the JSON. Knows no event.
"""

from __future__ import annotations

import json
import logging
import re
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

_GIVEN = "sonoro_fields"
"""The attribute of a record with its fields as given to `log_event`, so that the message need not be parsed."""


class LineFormatter(logging.Formatter):
    """Formats a record as a line: time (UTC), level, event and fields; records of other packages have the event `log`.

    Memory addresses are removed. Exception messages are printed only for loggers of `sonoro`: elsewhere they may quote
    a client's text, and only the stack and the class are printed.
    """

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


def configure_logging(level: int, *, is_json: bool = False, stream: TextIO | None = None) -> None:
    """Log `level` and above to stderr (or `stream`); from other packages only warnings and above.

    Debug logs of other packages hold what clients write. May be called again. Does nothing if the root logger already
    has other handlers.
    """
    root = logging.getLogger()
    if any(not isinstance(handler.formatter, LineFormatter) for handler in root.handlers):
        return
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(LineFormatter(is_json=is_json))
    root.handlers = [handler]
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger(_OURS).setLevel(level)


def log_event(logger: logging.Logger, level: int, event: str, fields: Mapping[str, object]) -> None:
    """Log `event` with `fields`, in order; None is shown as "-" or null."""
    given = {"event": event, **fields}
    template = " ".join((f"event={event}", *(f"{name}=%s" for name in fields)))
    logger.log(level, template, *fields.values(), extra={_GIVEN: given})
