"""`sonoro tune`: how kernels run best on the card at hand. Loads torch only when it begins."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["tune"]


def tune(
    *,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="a weight as 4096x2048 or 12288x2048:gated, again for more; all of known models if none"),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="the file; in the user's cache if none")] = None,
    device: Annotated[str, typer.Option(help="the GPU")] = "cuda",
) -> None:
    """Measure how products run best on this GPU, for minutes; goes on where it was broken off. Read at every start."""
    import torch

    from sonoro.profile.tune import Tuning, parse_shape, run

    tuning = Tuning(tuple(parse_shape(text) for text in shape or ()), output)
    run(tuning, torch.device(device), typer.echo)
