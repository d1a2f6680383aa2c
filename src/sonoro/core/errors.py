"""The error tree: everything sonoro raises on purpose.

    SonoroError
    ├── InvalidRequest            a field of a request is out of bounds; names field, value and limit
    │   ├── UnknownVoice
    │   ├── VoiceExists           a voice of that name is registered already
    │   ├── UnknownLanguage
    │   └── InvalidReference      reference audio that cannot be used
    ├── ConfigError               a field of the configuration is wrong; names field, value and limit
    ├── CheckpointError           a model folder cannot be used; names the file or tensor
    │   ├── CheckpointNotFound
    │   └── TensorMismatch        a tensor is missing, extra or misshapen
    ├── OutputError               audio cannot be written where it was asked for
    └── EngineError               the engine could not serve a request
        ├── EngineBusy            too many requests are waiting
        ├── EngineClosed
        └── EngineCrashed         its process ended unexpectedly

Each carries a stable `code` for programs and a message for people. Nothing here knows HTTP or a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import NamedTuple

_SIZE = re.compile(r"\d[\d.]* (characters|bytes|given|numbers|s)")
_ADDRESS = re.compile(r"( at)? ?\b0x[0-9a-fA-F]{5,}\b")


class SonoroError(Exception):
    """Base of every error raised on purpose. Each class has its own `code`, or inherits one."""

    code = "error"

    def __init_subclass__(cls, code: str | None = None) -> None:
        cls.code = code or cls.code


class _FieldError(SonoroError):
    """A named field holds a value outside its limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field, self.value, self.limit = field, value, limit
        super().__init__(f"{_given(field, value)}; {limit}")

    @classmethod
    def unless(cls, is_allowed: bool, field: str, value: object, limit: str) -> None:
        """Raise this error unless the value `is_allowed`."""
        if not is_allowed:
            raise cls(field, value, limit)


class InvalidRequest(_FieldError, code="invalid_request"):
    """A field of a request is out of bounds."""


class UnknownVoice(InvalidRequest, code="unknown_voice"):
    """The model has no voice of that name; the message lists the known ones."""


class VoiceExists(InvalidRequest, code="voice_exists"):
    """A voice of that name is registered already; it must be deleted first."""


class UnknownLanguage(InvalidRequest, code="unknown_language"):
    """The model does not speak that language; the message lists the known ones."""


class InvalidReference(InvalidRequest, code="invalid_reference"):
    """Reference audio that is not audio, or too short, too long, silent, or lacks its transcript."""


class ConfigError(_FieldError, code="config"):
    """A field of the configuration is unknown or out of bounds."""


class CheckpointError(SonoroError, code="checkpoint"):
    """A model folder cannot be used; the message names the file."""


class CheckpointNotFound(CheckpointError, code="checkpoint_not_found"):
    """There is no such model folder, hub repository or built-in name."""


class TensorMismatch(CheckpointError, code="tensor_mismatch"):
    """A tensor of a checkpoint is missing, extra or misshapen; the message names it."""


class OutputError(SonoroError, code="output"):
    """Audio cannot be written where it was asked for."""


class EngineError(SonoroError, code="engine"):
    """The engine could not serve a request."""


class EngineBusy(EngineError, code="engine_busy"):
    """Too many requests are waiting; the same request can be accepted later."""


class EngineClosed(EngineError, code="engine_closed"):
    """The engine was closed before the request finished."""


class EngineCrashed(EngineError, code="engine_crashed"):
    """The engine process of the request ended; the message says how. It is replaced."""


class ErrorFacts(NamedTuple):
    """An error as data, for another process. `value` is formatted as in the message."""

    code: str
    message: str
    field: str | None = None
    value: str | None = None
    limit: str | None = None

    @classmethod
    def of(cls, error: Exception) -> ErrorFacts:
        """The facts of `error`. An error outside the tree becomes an `EngineError` that names its class."""
        if isinstance(error, _FieldError):
            return cls(error.code, str(error), error.field, _shown(error.value), error.limit)
        if isinstance(error, SonoroError):
            return cls(error.code, str(error))
        return cls(EngineError.code, f"{type(error).__name__}: {error}")

    @property
    def error(self) -> SonoroError:
        """The error rebuilt: of the class with this code, with its message, field and limit."""
        kind = next((kind for kind in _kinds(SonoroError) if kind.code == self.code), EngineError)
        error = kind.__new__(kind)
        Exception.__init__(error, self.message)
        if isinstance(error, _FieldError):
            error.field, error.value, error.limit = self.field or "", self.value, self.limit or ""
        return error


def suggestion(name: str, known: Iterable[str]) -> str:
    """The closest of the `known` names, as "did you mean ...?"; "" if none is close."""
    nearest: list[str] = import_module("difflib").get_close_matches(name, known, 1)
    return f"did you mean {nearest[0]}?" if nearest else ""


def _kinds(root: type[SonoroError]) -> Iterator[type[SonoroError]]:
    yield root
    for kind in root.__subclasses__():
        yield from _kinds(kind)


def _given(field: str, value: object) -> str:
    """What was given for `field`, in words. A size, as "5000 characters", is not quoted."""
    if value is None:
        return f"{field}: nothing was given"
    if value == "given":
        return f"{field} was given"
    if isinstance(value, str) and _SIZE.fullmatch(value):
        return f"{field}: {value}"
    return f"{field}: {_shown(value)} is not allowed"


def _shown(value: object) -> str:
    begin = value[:1000] if isinstance(value, str | bytes) else value  # it may have megabytes
    text = repr(begin)
    length = len(text) + (len(value) - len(begin) if isinstance(value, str | bytes) else 0)  # type: ignore[arg-type]
    return text if length <= 80 else f"{text[:60]}... ({length} characters)"


def without_addresses(text: str) -> str:
    """`text` without memory addresses, as in Python's default reprs."""
    return _ADDRESS.sub("", text)


@contextmanager
def border(tell: Callable[[Exception], object]) -> Iterator[None]:
    """A context that no `Exception` leaves, for the borders of a request, a process or a check.
    An exception ends the block and is passed to `tell` within the handler, which may log it or raise another."""
    try:
        yield
    except Exception as error:
        tell(error)
