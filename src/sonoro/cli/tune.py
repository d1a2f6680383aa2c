"""`sonoro tune`: measures the fastest plans of matrix products, once per card. Imports torch when it runs."""

from pathlib import Path
from typing import Annotated

import typer

from sonoro.core.config import QUANTIZATIONS


def tune(
    *,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="a weight, 4096x2048 or 12288x2048:gated; may be repeated; default: all of known models"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="the file; default: in the user's cache")
    ] = None,
    device: Annotated[str, typer.Option(help="the GPU")] = "cuda",
    quantization: Annotated[str, typer.Option(help=f"of the weights: {', '.join(QUANTIZATIONS)}")] = "none",
) -> None:
    """Tune the matrix products for this GPU, which takes minutes and can be resumed. Every start uses the result."""
    import torch

    from sonoro.core.errors import ConfigError
    from sonoro.profile.tune import TuneSettings, parse_shape, run

    limit = "it must be " + " or ".join(QUANTIZATIONS)
    ConfigError.unless(quantization in QUANTIZATIONS, "quantization", quantization, limit)
    settings = TuneSettings(tuple(parse_shape(text) for text in shape or ()), output, quantization)
    try:
        measured = torch.device(device)
    except RuntimeError as error:
        raise ConfigError("device", device, "it must be cuda or cuda:N") from error
    run(settings, measured, typer.echo)
