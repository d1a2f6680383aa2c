"""`sonoro verify`: checks a model on this machine. Imports torch when it runs."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from sonoro.cli.common import CodecType, Commit, DataType, Device, LoadFormat, NamedModel, Quantization
from sonoro.cli.streams import say_on_stderr


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

    if sys.stderr is not None and sys.stderr.isatty():
        say_on_stderr(
            "each check is reported as it ends; the built-in voice takes 1 to 5 minutes on a CPU, by its cores"
        )
    run(Verification(**given))
