"""`sonoro bench say | frame | engine | serve | live`: benchmarks, with results as a table and as JSON."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sonoro.cli import common
from sonoro.cli.common import fields_of, json_object, number, numbers, range_of
from sonoro.cli.streams import show
from sonoro.core.errors import ConfigError, EngineError, OutputError
from sonoro.core.version import extra

if TYPE_CHECKING:
    from sonoro.bench.load import ServeBench

app = typer.Typer(rich_markup_mode=None)


def _writable(text: str) -> Path:
    """Parse a path for results. Raises `OutputError` before anything is measured if it cannot be written."""
    path, is_new = Path(text), not Path(text).exists()
    try:
        path.open("a").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}") from error
    return path


_Out = Annotated[
    Any, typer.Option("--out", "-o", parser=_writable, metavar="FILE", help="write the results here as JSON too")
]
_ServerModel = Annotated[str | None, typer.Option(help="a model of the server; default: the first")]
_Voice = Annotated[str, typer.Option(help="a voice of the server")]
_ApiKey = Annotated[str | None, typer.Option(help="sent as a bearer token")]
_Extra = Annotated[Any, json_object("extra", "JSON object of further request fields; null drops one")]
_Timeout = Annotated[float, number("timeout", float, "seconds after which a request fails")]
_Seed = Annotated[int, number("seed", int, "for arrivals, texts and lengths")]
_Dataset = Annotated[str, typer.Option(help="builtin, or a file of texts or of id|ref_text|ref_audio|text")]
_Frames = Annotated[Any, range_of("frames", "frames of a request, sampled from this range")]
_Facts = Annotated[Any, json_object("facts", "JSON object: the server's arm, gpu, cpu, driver, torch, dtype")]


_TEXT = "The birch canoe slid on the smooth planks. Glue the sheet to the dark blue background."


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure speed and latency."""
    if context.invoked_subcommand is None:
        show(context.get_help())


@app.command()
def frame(
    *,
    batch: Annotated[Any, numbers("batch", "batch sizes")] = "1,8,32,64,128,256",
    context: Annotated[int, number("context", int, "positions in the KV cache")] = 512,
    is_eager: common.Eager = False,
    model: common.Model = None,
    load_format: common.LoadFormat = "auto",
    device: common.Device = "auto",
    dtype: common.DataType = None,
    quantization: common.Quantization = None,
    out: _Out = None,
    commit: common.Commit = None,
) -> None:
    """Time a decode step and its codec by batch size, beside the lower bound of reading the weights."""
    given = locals()
    from sonoro.profile.frame import FrameBench, run

    run(FrameBench(**given))


@app.command()
def say(
    *,
    text: Annotated[str, typer.Option(help="what is spoken")] = _TEXT,
    voice: Annotated[str | None, typer.Option(help="a voice of the model")] = None,
    threads: Annotated[Any, numbers("threads", "counts of CPU threads, measured in turn")] = "1",
    repeats: Annotated[int, number("repeats", int, "readings of each arm, and cold starts")] = 5,
    model: common.Model = None,
    kokoro: Annotated[Path | None, typer.Option(help="folder of kokoro-v1.0.onnx and voices-v1.0.bin")] = None,
    piper: Annotated[Path | None, typer.Option(help="a voice of Piper, an .onnx file")] = None,
    out: _Out = None,
    commit: common.Commit = None,
) -> None:
    """Time one speaker on this machine's CPU, with compiled code and in torch: RTF, first packet, start, memory."""
    given = locals()
    from sonoro.profile.say import SayBench, run

    run(SayBench(**given))


@app.command()
def engine(
    *,
    concurrency: Annotated[
        Any, numbers("concurrency", "levels of concurrent clients, measured in turn")
    ] = "1,8,32,64,128,256",
    frames: _Frames = "30-90",
    is_eager: common.Eager = False,
    slots: Annotated[int | None, number("slots", int, "requests that run at once; default: the clients")] = None,
    config: common.Config = None,
    duration_s: Annotated[float, number("duration", float, "seconds of a level")] = 8.0,
    warm_up_s: Annotated[float, number("warm_up", float, "seconds of warm-up at its start")] = 2.0,
    seed: Annotated[int, number("seed", int, "for lengths and texts")] = 0,
    model: common.Model = None,
    load_format: common.LoadFormat = "auto",
    device: common.Device = "auto",
    dtype: common.DataType = None,
    quantization: common.Quantization = None,
    out: _Out = None,
    commit: common.Commit = None,
) -> None:
    """Time requests to an engine process, without HTTP, by the number of concurrent clients."""
    given = locals()
    from sonoro.profile.engine import EngineBench, run

    run(EngineBench(**given))


@app.command()
def serve(
    *,
    url: Annotated[str | None, typer.Option(help="the server, such as http://localhost:8000")] = None,
    rps: Annotated[Any, numbers("rps", "open loop: levels of requests per second, in turn", float)] = None,
    concurrency: Annotated[Any, numbers("concurrency", "closed loop: levels of concurrent clients, in turn")] = None,
    duration_s: Annotated[
        Any, numbers("duration", "measured seconds of a level: one for all, or one for each", float)
    ] = "20",
    warm_up_s: Annotated[float, number("warm_up", float, "seconds of warm-up before each level")] = 3.0,
    ref: Annotated[
        str | None, typer.Option(help="a recording to clone, sent with each request; list: the dataset's own")
    ] = None,
    ref_text: Annotated[str | None, typer.Option(help="transcript of --ref")] = None,
    x_vector_only: Annotated[bool, typer.Option("--x-vector-only", help="clone only the timbre")] = False,
    clients: Annotated[str, typer.Option(help="raw, or openai: OpenAI's own client")] = "raw",
    processes: Annotated[int, number("processes", int, "client processes; 0 chooses by load and cores")] = 0,
    max_queue_wait_ms: Annotated[
        float | None,
        number("overload", float, "the server's max_queue_wait_ms: judge three rates as before, during, after"),
    ] = None,
    sample_rate: Annotated[int, number("sample_rate", int, "of responses without X-Sample-Rate")] = 24000,
    plot: Annotated[Path | None, typer.Option(help="plot the results to this file (png, svg, pdf)")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="compare two results files; sends nothing")] = None,
    model: _ServerModel = None,
    voice: _Voice = "alloy",
    api_key: _ApiKey = None,
    extra: _Extra = "{}",
    timeout_s: _Timeout = 60.0,
    seed: _Seed = 0,
    dataset: _Dataset = "builtin",
    frames: _Frames = None,
    facts: _Facts = "{}",
    out: _Out = None,
    commit: common.Commit = None,
) -> None:
    """Load a server of OpenAI's speech API, and time its responses."""
    _load_server(plot, compare, locals())


def _load_server(plot: Path | None, compare: tuple[Path, Path] | None, given: Mapping[str, Any]) -> None:
    """`serve` with its options `given`."""
    with _extra("bench"):
        from sonoro.bench import load, report

        if plot is not None:
            from sonoro.bench.plot import check, draw

            check(plot)
    if compare is not None:
        one, other = compare
        arms = {path.stem if one.stem != other.stem else str(path): report.read_results(path) for path in compare}
        if len(arms) < 2:
            raise ConfigError("compare", str(one), "the two files must differ")
        comparison = report.compare(*arms.values())
    else:
        values = load.run(_serve_bench(given))
        arms = {values["model"]: values}
    if plot is not None:
        draw(arms, plot)
    if compare is not None:
        report.show_comparison(comparison)
    elif given["max_queue_wait_ms"] is not None and not values["verdict"]["is_met"]:
        raise EngineError("overload: a figure is beyond its limit; see verdict")


def _serve_bench(given: Mapping[str, Any]) -> ServeBench:
    from sonoro.bench.client import SpeechClient, Target
    from sonoro.bench.load import ServeBench

    if given["url"] is None:
        raise ConfigError("url", None, "give the server to load, or two files to --compare")
    speaker: type[SpeechClient] = SpeechClient
    if given["clients"] == "openai":
        with _extra("openai"):
            from sonoro.bench.official import OfficialClient

        speaker = OfficialClient
    elif given["clients"] != "raw":
        raise ConfigError("clients", given["clients"], "it must be raw or openai")
    return ServeBench(Target(**fields_of(Target, given)), **fields_of(ServeBench, given), speaker=speaker)


@app.command()
def live(
    *,
    url: Annotated[str, typer.Option(help="the server, such as http://localhost:8000")],
    requests: Annotated[int, number("requests", int, "texts, each sent whole and word by word")] = 50,
    barge_ins: Annotated[int, number("barge_ins", int, "utterances that are cancelled")] = 20,
    warm_up: Annotated[int, number("warm_up", int, "of each before these, as warm-up")] = 3,
    word_ms: Annotated[float, number("word_ms", float, "milliseconds from word to word")] = 10.0,
    model: _ServerModel = None,
    voice: _Voice = "alloy",
    api_key: _ApiKey = None,
    extra: _Extra = "{}",
    timeout_s: _Timeout = 60.0,
    seed: _Seed = 0,
    dataset: _Dataset = "builtin",
    frames: _Frames = None,
    facts: _Facts = "{}",
    out: _Out = None,
    commit: common.Commit = None,
) -> None:
    """Time live text sent word by word, compared with whole text, and the latency of cancelling."""
    given = locals()
    with _extra("bench"):
        from sonoro.bench.client import Target
        from sonoro.bench.live_bench import LiveBench, run

    run(LiveBench(Target(**fields_of(Target, given)), **fields_of(LiveBench, given)))


@contextlib.contextmanager
def _extra(name: str) -> Iterator[None]:
    """A context for imports of the extra `name`. Raises `ConfigError` that says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError("bench", error.name, f"it must be installed: {extra(name)}") from error
