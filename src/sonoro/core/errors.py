"""The error tree: everything sonoro raises on purpose.

    SonoroError
    ├── InvalidRequest            a field of a request is out of bounds; names field, value and limit
    │   ├── UnknownVoice
    │   ├── UnknownLanguage
    │   └── InvalidReference      reference audio that cannot be used
    ├── ConfigError               a field of our own configuration is wrong; names field, value and limit
    ├── CheckpointError           a model folder cannot be used; names the file or tensor
    │   ├── CheckpointNotFound
    │   └── TensorMismatch        a tensor is missing, extra or misshapen
    ├── OutputError               audio cannot be written where it was asked for
    └── EngineError               the engine could not serve an accepted request
        └── EngineClosed

Each carries a stable `code` for programs and a message for people. Nothing here knows HTTP or a terminal.
"""

from __future__ import annotations

__all__ = [
    "CheckpointError",
    "CheckpointNotFound",
    "ConfigError",
    "EngineClosed",
    "EngineError",
    "InvalidReference",
    "InvalidRequest",
    "OutputError",
    "SonoroError",
    "TensorMismatch",
    "UnknownLanguage",
    "UnknownVoice",
]


class SonoroError(Exception):
    """Base of every error raised on purpose."""

    code = "error"


class _FieldError(SonoroError):
    """A named field holds a value outside its limit."""

    def __init__(self, field: str, value: object, limit: str) -> None:
        self.field, self.value, self.limit = field, value, limit
        super().__init__(f"{field}: {_shown(value)} is not allowed; {limit}")


class InvalidRequest(_FieldError):
    """A field of a request is out of bounds."""

    code = "invalid_request"


class UnknownVoice(InvalidRequest):
    """The model has no voice of that name; the message lists those it has."""

    code = "unknown_voice"


class UnknownLanguage(InvalidRequest):
    """The model does not speak that language; the message lists those it does."""

    code = "unknown_language"


class InvalidReference(InvalidRequest):
    """Reference audio that is not audio, or too short, too long, silent, or lacks its transcript."""

    code = "invalid_reference"


class ConfigError(_FieldError):
    """A field of our own configuration is unknown or out of bounds."""

    code = "config"


class CheckpointError(SonoroError):
    """A model folder cannot be used; the message names the file."""

    code = "checkpoint"


class CheckpointNotFound(CheckpointError):
    """There is no such model folder, hub repository or built-in name."""

    code = "checkpoint_not_found"


class TensorMismatch(CheckpointError):
    """A tensor of a checkpoint is missing, extra or misshapen; the message names it."""

    code = "tensor_mismatch"


class OutputError(SonoroError):
    """Audio cannot be written where it was asked for."""

    code = "output"


class EngineError(SonoroError):
    """The engine could not serve an accepted request."""

    code = "engine"


class EngineClosed(EngineError):
    """The engine was closed before the request finished."""

    code = "engine_closed"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"
