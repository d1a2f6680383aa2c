"""The command line: `sonoro say | serve | info | voices | bench`. Bad input is one line on stderr and exit code 2.

Knows no model; torch is loaded only by the commands that need it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from sonoro import cli_bench, cli_serve
from sonoro.api import TTS, AudioPiece, listen, speech_request
from sonoro.cli_common import CodecType, Config, DataType, Device, LoadFormat, Model, number, show
from sonoro.core.audio import FORMATS, STDOUT, STREAMABLE_FORMATS, AudioWriter, output_format
from sonoro.core.config import EngineConfig, log_level
from sonoro.core.errors import EngineError, InvalidReference, InvalidRequest, OutputError, SonoroError
from sonoro.core.types import Finished, OptionSpec, OptionValue, SpeechRequest

if TYPE_CHECKING:
    from sonoro.models.base import Description, LoadedModel

__all__ = ["app", "main"]

BAD_INPUT, FAILURE, INTERRUPTED = 2, 1, 130

app = typer.Typer(
    name="sonoro",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(cli_bench.app, name="bench")
app.command()(cli_serve.serve)

NamedModel = Annotated[str | None, typer.Argument(help="checkpoint folder, hub id or known name", show_default=False)]


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    try:
        code = app(args=arguments, standalone_mode=False)
        show()
    except typer.TyperException as error:
        _exit(error.format_message(), BAD_INPUT)
    except SonoroError as error:
        _exit(str(error), FAILURE if isinstance(error, EngineError) else BAD_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    if code == INTERRUPTED:
        _exit("interrupted", INTERRUPTED)
    sys.exit(code or 0)


@app.callback(invoke_without_command=True)
def sonoro(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="print the version")] = False,
) -> None:
    """Text in, streamed speech out."""
    if show_version:
        show(f"sonoro {version('sonoro')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        show(context.get_help())
    logging.basicConfig(level=log_level(), format="%(levelname)s %(name)s %(message)s")


@app.command()
def say(
    text: Annotated[str | None, typer.Argument(help="what to speak; - reads stdin", show_default=False)] = None,
    *,
    file: Annotated[Path | None, typer.Option(help="speak the text in this file")] = None,
    out: Annotated[str, typer.Option("--out", "-o", help="file to write; - is stdout")] = "out.wav",
    format: Annotated[str | None, typer.Option(help=f"{', '.join(FORMATS)}; by the suffix of --out if none")] = None,
    stream: Annotated[bool, typer.Option("--stream", help="write each chunk as it is made (wav or pcm)")] = False,
    model: Model = None,
    voice: Annotated[str | None, typer.Option(help="a voice of the model; `sonoro voices` lists them")] = None,
    language: Annotated[str | None, typer.Option(help="a language of the model, or auto")] = None,
    instructions: Annotated[str | None, typer.Option(help="how to speak, or who speaks, in words")] = None,
    ref_audio: Annotated[Path | None, typer.Option(help="recording of the voice to clone")] = None,
    ref_text: Annotated[str | None, typer.Option(help="transcript of --ref-audio")] = None,
    x_vector_only: Annotated[bool, typer.Option("--x-vector-only", help="clone the timbre alone")] = False,
    seed: Annotated[int, number("seed", int, "the same seed draws the same speech")] = 0,
    temperature: Annotated[
        float | None, number("temperature", float, "0 is greedy; the model's default if none")
    ] = None,
    top_k: Annotated[int | None, number("top_k", int, "draw from the k likeliest; 0 keeps all")] = None,
    top_p: Annotated[float | None, number("top_p", float, "draw from the likeliest that hold this probability")] = None,
    repetition_penalty: Annotated[
        float | None, number("repetition_penalty", float, "above 1 avoids repetition")
    ] = None,
    max_frames: Annotated[int | None, number("max_frames", int, "most frames; bounded by the text if none")] = None,
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, an option of the model (see info)")] = None,
    device: Device = "auto",
    dtype: DataType = None,
    codec_dtype: CodecType = None,
    load_format: LoadFormat = "auto",
    config: Config = None,
) -> None:
    """Speak TEXT into a file."""
    chosen = output_format(out, format)
    if stream and chosen not in STREAMABLE_FORMATS:
        raise OutputError(f"--stream: {chosen} cannot be written chunk by chunk; use {' or '.join(STREAMABLE_FORMATS)}")
    try:
        request = speech_request(
            _read_text(text, file),
            voice,
            language=language,
            instructions=instructions,
            ref_audio=ref_audio,
            ref_text=ref_text,
            x_vector_only=x_vector_only,
            seed=seed,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            max_frames=max_frames,
        )
    except InvalidReference as error:
        # What is wrong with a recording is of no interest where none can be used.
        _describe(model, device, dtype).spec.check_cloning(error.field)
        raise
    # The same request twice is the same file.
    request = msgspec.structs.replace(request, options=_options(option or []), is_reproducible=True)
    engine = EngineConfig.from_file(config) if config else EngineConfig(slots=1)
    if codec_dtype is not None:
        engine = dataclasses.replace(engine, codec_dtype=codec_dtype)
    loaded = _load(model, device, dtype, load_format)
    speaker = TTS(loaded, config=engine)
    _speak_into(speaker, request, out, chosen, is_streamed=stream)


def _load(model: str | None, device: str, dtype: str | None, load_format: str) -> LoadedModel:
    """The model, with one CPU thread for it if it is small."""
    from sonoro.engine.worker import spare_threads
    from sonoro.models import registry

    loaded = registry.load(model, device=device, dtype=dtype, load_format=load_format)
    spare_threads(loaded)
    return loaded


@app.command()
def info(model: NamedModel = None, *, device: Device = "auto", dtype: DataType = None) -> None:
    """Show a model's configuration, voices, languages, options, parameters and memory."""
    description = _describe(model, device, dtype)
    for title, rows in _sections(description):
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        show(title, *(f"  {line.rstrip()}" for line in table))


@app.command()
def voices(model: NamedModel = None, *, device: Device = "auto", dtype: DataType = None) -> None:
    """List a model's voices, one a line."""
    spec = _describe(model, device, dtype).spec
    if not spec.voices:
        needs = {"cloned": "a reference recording (--ref-audio)", "described": "a description (--instructions)"}
        show(f"{spec.name} has no voices of its own; give " + " or ".join(needs[mode] for mode in spec.voice_modes))
    show(*spec.voices)


def _read_text(text: str | None, file: Path | None) -> str:
    if (text is None) == (file is None):
        raise InvalidRequest("text", text, "give either a text (- reads stdin) or --file")
    try:
        if file is not None:
            return file.read_text(encoding="utf-8")
        if text != "-":
            return str(text)
        if sys.stdin is None:
            raise InvalidRequest("text", text, "stdin is closed")
        return sys.stdin.buffer.read().decode("utf-8")
    except OSError as error:
        raise InvalidRequest("file", str(file), f"it must be a readable file ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest("text", str(file or "stdin"), f"it must be UTF-8 ({error.reason})") from error


def _options(pairs: list[str]) -> dict[str, OptionValue]:
    """NAME=VALUE as numbers, truth values or strings; the model checks them."""
    options: dict[str, OptionValue] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise InvalidRequest("option", pair, "it must be NAME=VALUE")
        try:
            parsed = json.loads(value)
        except ValueError:
            parsed = value
        options[name] = parsed if isinstance(parsed, (bool, int, float)) else value
    return options


def _speak_into(speaker: TTS, request: SpeechRequest, out: str, format: str, *, is_streamed: bool) -> None:
    rate, pieces = speaker.sample_rate, []
    with contextlib.ExitStack() as stack:
        # The progress ends first: its last line must not cut into an error's.
        writer = stack.enter_context(AudioWriter(out, rate, format)) if is_streamed else None
        tell = stack.enter_context(_progress(speaker))

        def take(piece: AudioPiece) -> None:
            pieces.append(piece)
            tell(piece)
            if writer is not None:
                writer.write(piece.samples)

        finished = listen(speaker.stream(request), take)
    if writer is None:
        with AudioWriter(out, rate, format) as writer:
            for piece in pieces:
                writer.write(piece.samples)
    summary = _summary(out, sum(piece.duration_s for piece in pieces), finished)
    if out == STDOUT:
        print(summary, file=sys.stderr)
    else:
        show(summary)


def _summary(out: str, audio_s: float, finished: Finished) -> str:
    rtf = finished.timings.total_s / audio_s if audio_s else float("inf")
    how = {"stop": "", "length": "; cut at --max-frames", "runaway": "; cut: it did not end by itself"}
    name = "stdout" if out == STDOUT else out
    first_ms = finished.timings.first_audio_s * 1000
    return f"{name}: {audio_s:.2f} s of audio, RTF {rtf:.3f}, first packet {first_ms:.0f} ms{how[finished.reason]}"


@contextlib.contextmanager
def _progress(speaker: TTS) -> Iterator[Callable[[AudioPiece], None]]:
    """A bar on stderr if that is a terminal; yields what is to be told of each piece."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda piece: None
        return
    text = TextColumn("{task.fields[frames]} frames, {task.fields[audio_s]:.1f} s of audio")
    with Progress(SpinnerColumn(), BarColumn(), text, TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("", total=None, frames=0, audio_s=0.0)
        frames = 0

        def tell(piece: AudioPiece) -> None:
            nonlocal frames
            frames += len(piece.samples) // speaker.spec.hop
            progress.update(task, frames=frames, audio_s=frames * speaker.spec.frame_s)

        yield tell


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
    yield "options", [_option_row(option) for option in spec.options]
    yield "parameters, by part", _counted(description.parameters)
    yield "parameters, by file", _counted(description.files)
    yield "memory", [[name, f"{count / 2**20:,.1f} MiB"] for name, count in description.memory_bytes.items()]


def _option_row(option: OptionSpec) -> list[str]:
    return [option.name, option.limit, f"default {option.default}", option.help]


def _counted(counts: dict[str, int]) -> list[list[str]]:
    return [[name, f"{count:,}"] for name, count in {**counts, "total": sum(counts.values())}.items()]


def _exit(message: str, code: int) -> NoReturn:
    """One line on stderr, and the end."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    try:
        show()
    except OutputError:
        # What is left in the buffer would raise again when the interpreter flushes it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)
