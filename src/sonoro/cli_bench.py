"""`sonoro bench frame | engine | serve | live`: times measured, as a table and as JSON."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonoro.cli_common import (
    Commit,
    Config,
    DataType,
    Device,
    LoadFormat,
    Model,
    Quantization,
    fields_of,
    floats,
    json_object,
    number,
    numbers,
    range_of,
    show,
    takes,
)
from sonoro.core.errors import ConfigError, EngineError, OutputError

if TYPE_CHECKING:
    from sonoro.bench.load import ServeBench

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None)


def _writable(text: str) -> Path:
    """Raises `OutputError` where no results can be written, before anything is measured."""
    path, is_new = Path(text), not Path(text).exists()
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    return path


Out = Annotated[
    Any, typer.Option("--out", "-o", parser=_writable, metavar="FILE", help="write the results here as JSON too")
]
Eager = Annotated[bool, typer.Option("--eager", help="no graphs: the same kernels, launched one by one")]


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure how fast this machine speaks."""
    if context.invoked_subcommand is None:
        show(context.get_help())


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Bench:
    """Fields have the names of those of the benches they are for; options are shorter."""

    out: Out = None
    commit: Commit = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModelBench(_Bench):
    model: Model = None
    load_format: LoadFormat = "auto"
    device: Device = "auto"
    dtype: DataType = None
    quantization: Quantization = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Frame(_ModelBench):
    batch: Annotated[Any, numbers("batch", "batch sizes")] = "1,8,32,64,128,256"
    context: Annotated[int, number("context", int, "positions that are attended to")] = 512
    is_eager: Eager = False


@app.command()
@takes(_Frame)
def frame(options: _Frame) -> None:
    """Time one frame and its codec by batch size, beside the time that reading the memory takes."""
    from sonoro.profile.frame import FrameBench, run

    run(FrameBench(**vars(options)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Engine(_ModelBench):
    concurrency: Annotated[Any, numbers("concurrency", "clients at once, one level after the other")] = (
        "1,8,32,64,128,256"
    )
    frames: Annotated[Any, range_of("frames", "how long each request speaks, drawn from this range")] = "30-90"
    is_eager: Eager = False
    slots: Annotated[int | None, number("slots", int, "requests that run at once; as many as clients if none")] = None
    config: Config = None
    duration_s: Annotated[float, number("duration", float, "seconds of a level")] = 8.0
    warm_up_s: Annotated[float, number("warm_up", float, "seconds at its begin that do not count")] = 2.0
    seed: Annotated[int, number("seed", int, "draws the lengths and texts")] = 0


@app.command()
@takes(_Engine)
def engine(options: _Engine) -> None:
    """Time requests through the engine process by the number of clients, each sending one after the other."""
    from sonoro.profile.engine import EngineBench, run

    run(EngineBench(**vars(options)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Requests(_Bench):
    """What is asked of a server, and of which."""

    model: Annotated[str | None, typer.Option(help="a model of the server; its first if none")] = None
    voice: Annotated[str, typer.Option(help="a voice of the server")] = "alloy"
    api_key: Annotated[str | None, typer.Option(help="sent as a bearer token")] = None
    extra: Annotated[Any, json_object("extra", "JSON object of further fields of a request; null drops one")] = "{}"
    timeout_s: Annotated[float, number("timeout", float, "seconds until a request has failed")] = 60.0
    seed: Annotated[int, number("seed", int, "draws arrivals, texts and lengths")] = 0
    dataset: Annotated[str, typer.Option(help="builtin, or a file of texts or of id|ref_text|ref_audio|text")] = (
        "builtin"
    )
    frames: Annotated[Any, range_of("frames", "how long each request speaks, drawn from this range")] = None
    facts: Annotated[Any, json_object("facts", "JSON object: the server's arm, gpu, cpu, driver, torch, dtype")] = "{}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Serve(_Requests):
    url: Annotated[str | None, typer.Option(help="the server, as http://localhost:8000")] = None
    rps: Annotated[Any, floats("rps", "requests a second, one level after the other: an open loop")] = None
    concurrency: Annotated[Any, numbers("concurrency", "clients at once, by level: a closed loop")] = None
    duration_s: Annotated[Any, floats("duration", "seconds of a level that count: one for all, or one for each")] = "20"
    warm_up_s: Annotated[float, number("warm_up", float, "seconds before them that do not")] = 3.0
    ref: Annotated[
        str | None, typer.Option(help="a recording to clone, sent with each request; list: the dataset's own")
    ] = None
    ref_text: Annotated[str | None, typer.Option(help="what is said in it")] = None
    x_vector_only: Annotated[bool, typer.Option("--x-vector-only", help="clone its timbre alone")] = False
    clients: Annotated[str, typer.Option(help="raw, or openai: OpenAI's own client")] = "raw"
    processes: Annotated[int, number("processes", int, "processes that send; 0 chooses by load and cores")] = 0
    max_queue_wait_ms: Annotated[
        float | None,
        number("overload", float, "the server's max_queue_wait_ms: judge three rates as before, during, after"),
    ] = None
    sample_rate: Annotated[int, number("sample_rate", int, "of answers without X-Sample-Rate")] = 24000
    plot: Annotated[Path | None, typer.Option(help="draw the results here (png, svg, pdf)")] = None
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="two results files; sends nothing")] = None


@app.command()
@takes(_Serve)
def serve(options: _Serve) -> None:
    """Time a speech server's answers by load: any server of the OpenAI speech API."""
    with _extra("bench"):
        from sonoro.bench import load, report

        if options.plot is not None:
            from sonoro.bench import plot

            plot.check(options.plot)
    if options.compare is not None:
        one, other = options.compare
        arms = {path.stem if one.stem != other.stem else str(path): report.read_results(path) for path in (one, other)}
        if len(arms) < 2:
            raise ConfigError("compare", str(one), "the two files must differ")
        comparison = report.compare(*arms.values())
    else:
        values = load.run(_serve_bench(options))
        arms = {values["model"]: values}
    if options.plot is not None:
        plot.draw(arms, options.plot)
    if options.compare is not None:
        report.show_comparison(comparison)
    elif options.max_queue_wait_ms is not None and not values["verdict"]["is_met"]:
        raise EngineError("overload: a figure is beyond its limit, see verdict")


def _serve_bench(options: _Serve) -> ServeBench:
    from sonoro.bench.client import SpeechClient, Target
    from sonoro.bench.load import ServeBench

    if options.url is None:
        raise ConfigError("url", None, "give the server to load, or two files to --compare")
    speaker: type[SpeechClient] = SpeechClient
    if options.clients == "openai":
        with _extra("openai"):
            from sonoro.bench.official import OfficialClient

        speaker = OfficialClient
    elif options.clients != "raw":
        raise ConfigError("clients", options.clients, "it must be raw or openai")
    given = fields_of(ServeBench, options)
    given |= {"rps": options.rps or (), "concurrency": options.concurrency or (), "speaker": speaker}
    return ServeBench(Target(**fields_of(Target, options)), **given)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Live(_Requests):
    url: Annotated[str, typer.Option(help="the server, as http://localhost:8000")]
    requests: Annotated[int, number("requests", int, "texts, each sent whole and word by word")] = 50
    barge_ins: Annotated[int, number("barge_ins", int, "answers that are cancelled")] = 20
    warm_up: Annotated[int, number("warm_up", int, "of each, before them, that do not count")] = 3
    word_ms: Annotated[float, number("word_ms", float, "milliseconds from word to word")] = 10.0


@app.command()
@takes(_Live)
def live(options: _Live) -> None:
    """Time text that is spoken while it is written, beside whole text, and how soon it is cancelled."""
    with _extra("bench"):
        from sonoro.bench.client import Target
        from sonoro.bench.live_bench import LiveBench, run

    run(LiveBench(Target(**fields_of(Target, options)), **fields_of(LiveBench, options)))


@contextlib.contextmanager
def _extra(name: str) -> Iterator[None]:
    """Imports that a bare install lacks. Raises `ConfigError` that says how to get them."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError("bench", error.name, f'it must be installed: pip install "sonoro[{name}]"') from error
