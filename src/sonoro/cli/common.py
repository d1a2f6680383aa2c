"""Shared by the commands of `sonoro`: options and their parsers."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.models import OptionInfo

from sonoro.audio.encoders import LOUDNESS_HELP, LOUDNESS_LIMIT
from sonoro.core.config import CODEC_DTYPES, QUANTIZATIONS, EngineConfig
from sonoro.core.errors import ConfigError, InvalidRequest
from sonoro.core.types import Markup

Model = Annotated[str | None, typer.Option(help="checkpoint folder, hub id or known name; default: the built-in voice")]
NamedModel = Annotated[
    str | None,
    typer.Argument(help="checkpoint folder, hub id or known name; default: the built-in voice", show_default=False),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
DataType = Annotated[str | None, typer.Option("--dtype", help="bfloat16 or float32; default: by device")]
CodecType = Annotated[
    str | None, typer.Option("--codec-dtype", help=f"{', '.join(CODEC_DTYPES)}; default: the configuration's, or auto")
]
Quantization = Annotated[
    str | None,
    typer.Option(help=f"of the layers' weights: {', '.join(QUANTIZATIONS)}; default: the configuration's, or none"),
]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy for random weights")]
Eager = Annotated[bool | None, typer.Option("--eager", help="no CUDA graphs, no compiled code on a CPU")]
Commit = Annotated[str | None, typer.Option(help="the revision to record; default: that of the checkout")]
Config = Annotated[
    Any, typer.Option(parser=EngineConfig.from_file, metavar="FILE", help="YAML file of an engine, or of a server")
]

TextFormatOption = Annotated[
    str | None,
    typer.Option("--text-format", help="how the text is written: auto, plain, markdown or html; default: auto"),
]

MarkupOption = Annotated[
    str | None,
    typer.Option("--markup", help=f"syntax of pauses and the like: {', '.join(get_args(Markup))}; default: auto"),
]


def _loudness(text: str) -> float | str:
    try:
        return text if text == "none" else float(text)
    except ValueError as error:
        raise InvalidRequest("loudness", text, LOUDNESS_LIMIT) from error


LoudnessOption = Annotated[
    Any,
    typer.Option(
        "--loudness",
        parser=_loudness,
        metavar="LUFS|none",
        help=LOUDNESS_HELP,
    ),
]
OnMarkupOption = Annotated[
    str | None, typer.Option("--on-markup", help="for markup that the model cannot honour: refuse or plain")
]


def _cast(text: str) -> dict[str, str]:
    pairs = [pair.partition("=") for pair in text.split(",")]
    if not all(name.strip() and voice.strip() for name, _, voice in pairs):
        raise InvalidRequest("cast", text, 'it must be names with voices, as "ALICE=nora,BOB=hugh"')
    return {name.strip(): voice.strip() for name, _, voice in pairs}


Cast = Annotated[
    Any,
    typer.Option(
        "--cast",
        parser=_cast,
        metavar="NAME=VOICE,...",
        help="the text is a play, NAME: ...; a VOICE may be a recording",
    ),
]
Lexicons = Annotated[
    list[Path] | None, typer.Option("--lexicon", help="file with how words are said: PLS, JSON, or lines word=alias")
]


def fields_of(kind: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the options `given` that are not None and fields of dataclass `kind`, by name."""
    return {name: given[name] for name in kind.__dataclass_fields__ if given.get(name) is not None}


def number(field: str, kind: type[int] | type[float], help: str, **shown: Any) -> OptionInfo:
    """An option --`field` for a number. Its error message shows the value, which typer's does not."""

    def parse(value: str) -> int | float:
        try:
            return kind(value)
        except ValueError as error:
            raise InvalidRequest(field, value, f"it must be a {'whole ' * (kind is int)}number") from error

    metavar = "INTEGER" if kind is int else "FLOAT"
    return typer.Option(flag(field), parser=parse, metavar=metavar, help=help, **shown)


def numbers(field: str, help: str, kind: type[int] | type[float] = int) -> OptionInfo:
    """An option --`field` for numbers separated by commas, such as "1,8,32"."""
    limit = f'it must be {"whole " * (kind is int)}numbers between commas, as "1,8,32"'
    return _parsed(field, help, lambda text: tuple(kind(part) for part in text.split(",")), limit)


def range_of(field: str, help: str) -> OptionInfo:
    """An option --`field` for a range of whole numbers, such as "30-90", or a single one."""

    def parse(text: str) -> tuple[int, int]:
        first, dash, last = text.partition("-")
        return int(first), int(last if dash else first)

    return _parsed(field, help, parse, 'it must be two whole numbers around a dash, as "30-90"')


def json_object(field: str, help: str) -> OptionInfo:
    """An option --`field` for a JSON object."""

    def parse(text: str) -> dict[str, Any]:
        if not isinstance(value := json.loads(text), dict):
            raise ValueError(f"a {type(value).__name__} is none")
        return value

    return _parsed(field, help, parse, 'it must be a JSON object, as {"name": "value"}')


def _parsed(field: str, help: str, parse: Callable[[str], Any], limit: str) -> OptionInfo:
    def parse_or_refuse(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise ConfigError(field, text, limit) from error

    return typer.Option(flag(field), parser=parse_or_refuse, metavar="TEXT", help=help)


def flag(field: str) -> str:
    """The option named after `field`."""
    return "--" + field.replace("_", "-")
