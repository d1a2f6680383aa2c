"""`sonoro bench frame | engine | voice | serve | live | plan`: times measured or foreseen, as a table and as JSON."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from sonoro.cli_common import Config, DataType, Device, LoadFormat, Model, number, numbers, show, span
from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError, EngineError, OutputError

__all__ = ["app"]

app = typer.Typer(rich_markup_mode=None)

Eager = Annotated[bool, typer.Option("--eager", help="no graphs: the same kernels, launched one by one")]
Out = Annotated[Path | None, typer.Option("--out", "-o", help="write the results here as JSON too")]
Server = Annotated[str, typer.Option(help="the server, as http://localhost:8000")]
Voice = Annotated[str, typer.Option(help="a voice of the server")]
ServedModel = Annotated[str | None, typer.Option("--model", help="a model of the server; its first if none")]
Dataset = Annotated[str, typer.Option(help="builtin, or a file of texts or of id|ref_text|ref_audio|text")]
Seed = Annotated[int, number("seed", int, "draws arrivals, texts and lengths")]
Frames = Annotated[str | None, typer.Option(help="how long each request speaks, drawn from this range")]
ApiKey = Annotated[str | None, typer.Option(help="sent as a bearer token")]
Extra = Annotated[str | None, typer.Option(help="JSON object of further fields of a request; null drops one")]
Timeout = Annotated[float, number("timeout", float, "seconds until a request has failed")]
Facts = Annotated[str | None, typer.Option(help="JSON object: the server's arm, gpu, cpu, driver, torch, dtype")]
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
    _check_out(out)
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
    _check_out(out)
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


@app.command()
def voice(
    *,
    model: Model = None,
    load_format: LoadFormat = "auto",
    streams: Annotated[int, number("streams", int, "requests that are spoken meanwhile")] = 16,
    reference: Annotated[str, typer.Option(help="seconds of the references that are encoded")] = "10,60",
    repeats: Annotated[int, number("repeats", int, "references of each length")] = 5,
    config: Config = None,
    device: Device = "auto",
    dtype: DataType = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Time the longest wait for a frame of running streams while reference audio is encoded."""
    lengths = numbers("reference", reference)
    chosen = EngineConfig.from_file(config) if config else None
    _check_out(out)
    from sonoro.profile.voice import VoiceBench, run

    run(
        VoiceBench(
            model=model,
            load_format=load_format,
            streams=streams,
            reference_s=lengths,
            repeats=repeats,
            config=chosen,
            device=device,
            dtype=dtype,
            out=out,
            commit=commit,
        )
    )


@app.command()
def serve(
    *,
    url: Annotated[str | None, typer.Option(help="the server, as http://localhost:8000")] = None,
    rps: Annotated[str | None, typer.Option(help="requests a second, one level after the other: an open loop")] = None,
    concurrency: Annotated[str | None, typer.Option(help="clients at once, by level: a closed loop")] = None,
    duration: Annotated[str, typer.Option(help="seconds of a level that count: one for all, or one for each")] = "20",
    warm_up: Annotated[float, number("warm_up", float, "seconds before them that do not")] = 3.0,
    seed: Seed = 0,
    dataset: Dataset = "builtin",
    voice: Voice = "alloy",
    ref: Annotated[
        str | None, typer.Option(help="a recording to clone, sent with each request; list: the dataset's own")
    ] = None,
    ref_text: Annotated[str | None, typer.Option(help="what is said in it")] = None,
    x_vector_only: Annotated[bool, typer.Option("--x-vector-only", help="clone its timbre alone")] = False,
    model: ServedModel = None,
    frames: Frames = None,
    clients: Annotated[str, typer.Option(help="raw, or openai: OpenAI's own client")] = "raw",
    processes: Annotated[int, number("processes", int, "processes that send; 0 chooses by load and cores")] = 0,
    overload: Annotated[
        float | None,
        number("overload", float, "the server's max_queue_wait_ms: judge three rates as before, during, after"),
    ] = None,
    api_key: ApiKey = None,
    extra: Extra = None,
    sample_rate: Annotated[int, number("sample_rate", int, "of answers without X-Sample-Rate")] = 24000,
    timeout: Timeout = 60.0,
    facts: Facts = None,
    out: Out = None,
    plot: Annotated[Path | None, typer.Option(help="draw the results here (png, svg, pdf)")] = None,
    compare: Annotated[tuple[Path, Path] | None, typer.Option(help="two results files; sends nothing")] = None,
    commit: Commit = None,
) -> None:
    """Time a speech server's answers by load: any server of the OpenAI speech API."""
    rates, levels = _floats("rps", rps) if rps else (), numbers("concurrency", concurrency) if concurrency else ()
    lengths = span("frames", frames) if frames else None
    fields, known = _object("extra", extra), _object("facts", facts)
    with _extra("bench"):
        from sonoro.bench.client import SpeechClient, Target
        from sonoro.bench.load import ServeBench, run
        from sonoro.bench.report import compare as compared
        from sonoro.bench.report import read_results, show_comparison

        if plot is not None:
            from sonoro.bench.plot import check, draw

            check(plot)
    if compare is not None:
        arms = {path.stem if compare[0].stem != compare[1].stem else str(path): read_results(path) for path in compare}
        if len(arms) < 2:
            raise ConfigError("compare", str(compare[0]), "the two files must differ")
        comparison = compared(*arms.values())
    elif url is None:
        raise ConfigError("url", None, "give the server to load, or two files to --compare")
    else:
        speaker: type[SpeechClient] = SpeechClient
        if clients == "openai":
            with _extra("openai"):
                from sonoro.bench.official import OfficialClient

            speaker = OfficialClient
        elif clients != "raw":
            raise ConfigError("clients", clients, "it must be raw or openai")
        bench = ServeBench(
            Target(
                url, model=model, voice=voice, api_key=api_key, extra=fields, sample_rate=sample_rate, timeout_s=timeout
            ),
            rps=rates,
            concurrency=levels,
            duration_s=_floats("duration", duration),
            warm_up_s=warm_up,
            seed=seed,
            dataset=dataset,
            frames=lengths,
            ref=ref,
            ref_text=ref_text,
            x_vector_only=x_vector_only,
            speaker=speaker,
            processes=processes,
            max_queue_wait_ms=overload,
            facts=known,
            out=out,
            commit=commit,
        )
        _check_out(out)
        values = run(bench)
        arms = {values["model"]: values}
    if plot is not None:
        draw(arms, plot)
    if compare is not None:
        show_comparison(comparison)
    elif overload is not None and not values["verdict"]["is_met"]:
        raise EngineError("overload: a figure is beyond its limit, see verdict")


@app.command()
def live(
    *,
    url: Server,
    requests: Annotated[int, number("requests", int, "texts, each sent whole and word by word")] = 50,
    barge_ins: Annotated[int, number("barge_ins", int, "answers that are cancelled")] = 20,
    warm_up: Annotated[int, number("warm_up", int, "of each, before them, that do not count")] = 3,
    word_ms: Annotated[float, number("word_ms", float, "milliseconds from word to word")] = 10.0,
    seed: Seed = 0,
    dataset: Dataset = "builtin",
    voice: Voice = "alloy",
    model: ServedModel = None,
    frames: Frames = None,
    api_key: ApiKey = None,
    extra: Extra = None,
    timeout: Timeout = 60.0,
    facts: Facts = None,
    out: Out = None,
    commit: Commit = None,
) -> None:
    """Time text that is spoken while it is written, beside whole text, and how soon it is cancelled."""
    lengths = span("frames", frames) if frames else None
    fields, known = _object("extra", extra), _object("facts", facts)
    with _extra("bench"):
        from sonoro.bench.client import Target
        from sonoro.bench.live_bench import LiveBench, run
    bench = LiveBench(
        Target(url, model=model, voice=voice, api_key=api_key, extra=fields, timeout_s=timeout),
        requests=requests,
        barge_ins=barge_ins,
        warm_up=warm_up,
        word_ms=word_ms,
        seed=seed,
        dataset=dataset,
        frames=lengths,
        facts=known,
        out=out,
        commit=commit,
    )
    _check_out(out)
    run(bench)


@contextlib.contextmanager
def _extra(name: str) -> Iterator[None]:
    """Imports that a bare install lacks. Raises `ConfigError` that says how to get them."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError("bench", error.name, f'it must be installed: pip install "sonoro[{name}]"') from error


def _check_out(out: Path | None) -> None:
    """Raises `OutputError` where no results can be written: to be asked before anything is measured."""
    if out is None:
        return
    is_new = not out.exists()
    try:
        out.open("a").close()
        if is_new:
            out.unlink()
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror}") from error


def _floats(field: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(field, text, 'it must be numbers between commas, as "0.5,1,10"') from error


def _object(field: str, text: str | None) -> dict[str, Any]:
    """The JSON object in `text`; none is an empty one."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise ConfigError(field, text, f"it must be JSON ({error})") from error
    if not isinstance(value, dict):
        raise ConfigError(field, text, 'it must be a JSON object, as {"name": "value"}')
    return value
