"""`sonoro bench frame | engine`: our own times on this machine, as a table and one line of JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sonoro.cli_common import Config, DataType, Device, LoadFormat, Model, number, numbers, show, span
from sonoro.core.config import EngineConfig

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None)

Eager = Annotated[bool, typer.Option("--eager", help="no graphs: the same kernels, launched one by one")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="write the results here as JSON too")]
Commit = Annotated[str | None, typer.Option(help="what is run, where there is no checkout to ask")]


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure how fast this machine speaks."""
    if context.invoked_subcommand is None:
        show(context.get_help())


@app.command()
def frame(
    *,
    model: Model = None,
    load_format: LoadFormat = "auto",
    batch: Annotated[str, typer.Option(help="batch sizes")] = "1,8,32,64,128,256",
    context: Annotated[int, number("context", int, "positions that are attended to")] = 512,
    eager: Eager = False,
    snake: Annotated[bool, typer.Option("--snake", help="add a table of the codec's activation at its shapes")] = False,
    device: Device = "auto",
    dtype: DataType = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Time one frame and its codec by batch size, beside the time that reading the memory takes."""
    sizes = numbers("batch", batch)
    from sonoro.profile.frame import FrameBench, run

    run(
        FrameBench(
            model=model,
            load_format=load_format,
            batch=sizes,
            context=context,
            is_eager=eager,
            has_snake=snake,
            device=device,
            dtype=dtype,
            out=out,
            commit=commit,
        )
    )


@app.command()
def engine(
    *,
    model: Model = None,
    load_format: LoadFormat = "auto",
    concurrency: Annotated[str, typer.Option(help="clients at once, one level after the other")] = "1,8,32,64,128,256",
    frames: Annotated[str, typer.Option(help="how long each request speaks, drawn from this range")] = "30-90",
    eager: Eager = False,
    slots: Annotated[int | None, number("slots", int, "requests that run at once; as many as clients if none")] = None,
    config: Config = None,
    duration: Annotated[float, number("duration", float, "seconds of a level")] = 8.0,
    warm_up: Annotated[float, number("warm_up", float, "seconds at its begin that do not count")] = 2.0,
    seed: Annotated[int, number("seed", int, "draws the lengths and texts")] = 0,
    device: Device = "auto",
    dtype: DataType = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Time requests through the engine process by the number of clients, each sending one after the other."""
    levels, lengths = numbers("concurrency", concurrency), span("frames", frames)
    chosen = EngineConfig.from_file(config) if config else None
    from sonoro.profile.engine import EngineBench, run

    run(
        EngineBench(
            model=model,
            load_format=load_format,
            concurrency=levels,
            frames=lengths,
            is_eager=eager,
            slots=slots,
            config=chosen,
            duration_s=duration,
            warm_up_s=warm_up,
            seed=seed,
            device=device,
            dtype=dtype,
            out=out,
            commit=commit,
        )
    )
