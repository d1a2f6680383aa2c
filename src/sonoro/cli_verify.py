"""`sonoro verify`: what to run first with weights that nobody here has run. Loads torch only when it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sonoro.cli_common import CodecType, DataType, Device, LoadFormat, NamedModel

__all__ = ["verify"]


def verify(
    model: NamedModel = None,
    *,
    device: Device = "auto",
    dtype: DataType = None,
    codec_dtype: CodecType = None,
    load_format: LoadFormat = "auto",
    reference: Annotated[
        str | None, typer.Option(help="a Python that has the official package, to compare codes and audio with it")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the report; verify-MODEL.json if none, sentences beside it")
    ] = None,
    commit: Annotated[str | None, typer.Option(help="the revision that is run, where there is no checkout")] = None,
) -> None:
    """Check a model on this machine: kernels, graphs, precisions, three sentences; a report to attach."""
    from sonoro.profile.verify import Verification, run

    run(
        Verification(
            model=model,
            device=device,
            dtype=dtype,
            load_format=load_format,
            reference=reference,
            codec_dtype=codec_dtype or "auto",
            out=output,
            commit=commit,
        )
    )
