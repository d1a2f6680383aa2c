"""The command line: `sonoro say | serve | compile | tune | calibrate | info | voices | verify | bench`.

Invalid input gives one line on stderr and exit code 2. Only the commands that need torch import it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer

from sonoro.cli import bench, serve, tune
from sonoro.cli import compile as compile_
from sonoro.cli import say as say_
from sonoro.cli.common import (
    FAILURE,
    CodecType,
    Commit,
    Config,
    DataType,
    Device,
    LoadFormat,
    NamedModel,
    Quantization,
    Stopped,
    number,
    show,
)
from sonoro.core.config import EngineConfig, log_level
from sonoro.core.errors import EngineError, OutputError, SonoroError
from sonoro.core.logs import configure_logging
from sonoro.core.version import VERSION

if TYPE_CHECKING:
    from sonoro.models.base import Description

BAD_INPUT = 2

app = typer.Typer(
    name="sonoro",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench.app, name="bench")
app.command()(say_.say)
app.command()(serve.serve)
app.command("compile")(compile_.compile_command)
app.command()(tune.tune)
app.command()(tune.calibrate)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    try:
        code = app(args=arguments, standalone_mode=False)
        show()
    except typer.TyperException as error:
        _exit(error.format_message(), BAD_INPUT)
    except SonoroError as error:
        _exit(str(error), FAILURE if isinstance(error, EngineError) else BAD_INPUT)
    except Stopped as end:
        _exit(str(end), end.code)
    except (KeyboardInterrupt, typer.Abort):
        code = Stopped("", signal.SIGINT).code
    if code == Stopped("", signal.SIGINT).code:
        _exit("interrupted", code)
    sys.exit(code or 0)


@app.callback(invoke_without_command=True)
def sonoro(
    context: typer.Context, show_version: Annotated[bool, typer.Option("--version", help="print the version")] = False
) -> None:
    """Text in, streamed speech out."""
    if show_version:
        show(f"sonoro {VERSION}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        show(context.get_help())
    configure_logging(log_level())


@app.command()
def info(
    model: NamedModel = None,
    *,
    device: Device = "auto",
    dtype: DataType = None,
    slots: Annotated[int | None, number("slots", int, "add the GPU memory of an engine of so many, by part")] = None,
    quantization: Quantization = None,
    config: Config = None,
) -> None:
    """Show a model's configuration, voices, languages, options, parameters and memory."""
    sections = list(_sections(_describe(model, device, dtype)))
    if slots is not None or quantization is not None or config is not None:
        engine = (config or EngineConfig()).over(slots=slots, quantization=quantization)
        sections.append(_footprint(model, engine, dtype))
    for title, rows in sections:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        show(title, *(f"  {line.rstrip()}" for line in table))


@app.command()
def voices(model: NamedModel = None, *, device: Device = "auto", dtype: DataType = None) -> None:
    """List a model's voices, one per line."""
    spec = _describe(model, device, dtype).spec
    if not spec.voices:
        needs = {"cloned": "a reference recording (--ref-audio)", "described": "a description (--instructions)"}
        show(f"{spec.name} has no voices of its own; give " + " or ".join(needs[mode] for mode in spec.voice_modes))
    show(*spec.voices)


@app.command()
def verify(
    model: NamedModel = None,
    *,
    device: Device = "auto",
    dtype: DataType = None,
    codec_dtype: CodecType = "auto",
    quantization: Quantization = None,
    load_format: LoadFormat = "auto",
    reference: Annotated[
        str | None, typer.Option(help="a Python with the official package, to compare codes and audio with")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="the report; default: verify-MODEL.json, with the audio beside it"),
    ] = None,
    commit: Commit = None,
) -> None:
    """Check a model on this machine (kernels, graphs, dtypes, three sentences) and write a report."""
    given = locals()
    from sonoro.profile.verify import Verification, run

    run(Verification(**given))


def _describe(model: str | None, device: str, dtype: str | None) -> Description:
    from sonoro.models import registry

    return registry.describe(model, device=device, dtype=dtype)


def _sections(description: Description) -> Iterator[tuple[str, list[list[str]]]]:
    """The tables of `info`: a title and rows."""
    spec = description.spec
    yield spec.name, [[name, str(value)] for name, value in description.configuration.items()]
    speech = {
        "sample rate": f"{spec.sample_rate} Hz",
        "frame": f"{spec.hop} samples, {spec.frame_s * 1000:g} ms",
        "longest segment": f"{spec.max_frames} frames, {spec.max_frames * spec.frame_s:.0f} s",
        "voice": ", ".join(spec.voice_modes),
        "voices": ", ".join(spec.voices) or "none of its own",
        "languages": ", ".join(spec.languages),
        "instructions": "followed" if spec.accepts_instructions else "not followed",
    }
    yield "speech", [[name, value] for name, value in speech.items()]
    yield "sampling", [[name, str(value)] for name, value in msgspec.structs.asdict(spec.sampling).items()]
    yield "options", [[option.name, option.limit, f"default {option.default}", option.help] for option in spec.options]
    yield "parameters, by part", _counted(description.parameters)
    yield "parameters, by file", _counted(description.files)
    yield "memory", [[name, f"{count / 2**20:,.1f} MiB"] for name, count in description.memory_bytes.items()]


def _footprint(model: str | None, config: EngineConfig, dtype: str | None) -> tuple[str, list[list[str]]]:
    """The GPU memory of an engine, as a table of `info`."""
    from sonoro.compile.footprint import footprint

    parts = footprint(model, config, dtype).parts
    title = f"memory of an engine on a GPU: slots={config.slots} quantization={config.quantization}"
    return title, [[name, f"{count:,} bytes", f"{count / 2**20:,.1f} MiB"] for name, count in parts.items()]


def _counted(counts: dict[str, int]) -> list[list[str]]:
    return [[name, f"{count:,}"] for name, count in {**counts, "total": sum(counts.values())}.items()]


def _exit(message: str, code: int) -> NoReturn:
    """Print an error line on stderr and exit."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    try:
        show()
    except OutputError:
        # The interpreter would raise again when it flushes the buffer at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
