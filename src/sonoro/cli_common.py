"""What the commands of `sonoro` share: options, their parsers, and lines on stdout."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer.models import OptionInfo

from sonoro.core.config import CODEC_DTYPES
from sonoro.core.errors import ConfigError, InvalidRequest, OutputError

__all__ = [
    "FAILURE",
    "CodecType",
    "Config",
    "DataType",
    "Device",
    "LoadFormat",
    "Model",
    "NamedModel",
    "Stopped",
    "number",
    "numbers",
    "show",
    "span",
]

Model = Annotated[str | None, typer.Option(help="checkpoint folder, hub id or known name; the built-in voice if none")]
NamedModel = Annotated[
    str | None,
    typer.Argument(help="checkpoint folder, hub id or known name; the built-in voice if none", show_default=False),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
DataType = Annotated[str | None, typer.Option("--dtype", help="bfloat16 or float32; by device if none")]
CodecType = Annotated[
    str | None, typer.Option("--codec-dtype", help=f"{', '.join(CODEC_DTYPES)}; the configuration's, or auto, if none")
]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy for random weights")]
Config = Annotated[Path | None, typer.Option(help="YAML file with the engine's configuration")]


FAILURE = 1


class Stopped(Exception):
    """A command was stopped by a signal; `code` is the exit code that says so to a shell."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.code = 128 + number


def number(field: str, kind: type[int] | type[float], help: str) -> OptionInfo:
    """An option that holds a number. Its refusal shows the value, which the command-line library's own does not."""

    def parse(value: str) -> int | float:
        try:
            return kind(value)
        except ValueError as error:
            raise InvalidRequest(field, value, f"it must be a {'whole ' * (kind is int)}number") from error

    return typer.Option(parser=parse, metavar="INTEGER" if kind is int else "FLOAT", help=help)


def numbers(field: str, text: str) -> tuple[int, ...]:
    """Whole numbers between commas, as "1,8,32". Raises `ConfigError` naming the field."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(field, text, 'it must be whole numbers between commas, as "1,8,32"') from error


def span(field: str, text: str) -> tuple[int, int]:
    """Two whole numbers around a dash, as "30-90", or one for both. Raises `ConfigError` naming the field."""
    first, dash, last = text.partition("-")
    try:
        return int(first), int(last if dash else first)
    except ValueError as error:
        raise ConfigError(field, text, 'it must be two whole numbers around a dash, as "30-90"') from error


def show(*lines: str) -> None:
    """Print `lines` and flush. Raises `OutputError` when stdout cannot be written; a closed one is left alone."""
    if sys.stdout is None:
        return
    try:
        sys.stdout.writelines(f"{line}\n" for line in lines)
        sys.stdout.flush()
    except OSError as error:
        raise OutputError(f"cannot write stdout: {error.strerror}") from error
