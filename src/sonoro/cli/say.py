"""`sonoro say`: speaks a text into a file, which is written as it is generated. Imports torch when it runs."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from sonoro.api import TTS, AudioPiece, RequestFields, listen, speech_request, with_script, written
from sonoro.api_audio import make_captions
from sonoro.audio.files import FORMATS, STDOUT, STREAMABLE_FORMATS, AudioWriter, check_place, output_format
from sonoro.cli import common
from sonoro.cli.common import FAILURE, Stopped, number, read_text, show
from sonoro.core.config import EngineConfig
from sonoro.core.errors import InvalidReference, InvalidRequest, OutputError
from sonoro.core.events import Fault, Word
from sonoro.core.types import Finished, OptionValue, SpeechRequest
from sonoro.text.origins import shown
from sonoro.text.script.dialogue import dialogue, read_play

if TYPE_CHECKING:
    from sonoro.models.base import LoadedModel

Captions = Sequence[tuple[str, Path]]
"""Formats and paths of caption files to write."""

_LINE_S = 2.0
"""How often progress is printed without a terminal."""

_OUT = "out.wav"
"""The default output, which is replaced."""


class _Terminated(BaseException):
    """SIGTERM was received."""


_Stream = Annotated[
    bool, typer.Option("--stream", help="refuse formats that cannot be written chunk by chunk (not wav or pcm)")
]
_Progress = Annotated[
    bool | None, typer.Option("--progress/--no-progress", help="show progress on stderr; default: on a terminal")
]
_Attempts = Annotated[
    int | None,
    number("attempts", int, "maximum attempts at a part that runs away or is faulty, each with another seed"),
]
_OnFault = Annotated[
    str | None,
    typer.Option(help="for a part not spoken as written: mark, retry, or continue from its last good word"),
]
_Check = Annotated[
    bool, typer.Option("--check", help="list the parts probably not spoken as written; exit code 1 if any")
]
_Repetition = Annotated[float | None, number("repetition_penalty", float, "above 1 avoids repetition")]
_MaxFrames = Annotated[int | None, number("max_frames", int, "maximum frames; default: by the text's length")]


def say(
    text: Annotated[str | None, typer.Argument(help="what to speak; - reads stdin", show_default=False)] = None,
    *,
    file: Annotated[Path | None, typer.Option(help="speak the text in this file")] = None,
    out: Annotated[str, typer.Option("--out", "-o", help="file to write; - is stdout")] = _OUT,
    format: Annotated[str | None, typer.Option(help=f"{', '.join(FORMATS)}; default: by the suffix of --out")] = None,
    stream: _Stream = False,
    srt: Annotated[Path | None, typer.Option(help="write captions to this file, as SubRip")] = None,
    vtt: Annotated[Path | None, typer.Option(help="write captions to this file, as WebVTT")] = None,
    words: Annotated[Path | None, typer.Option(help="write word times to this file, as JSON")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace files that exist; out.wav always is")] = False,
    progress: _Progress = None,
    model: common.Model = None,
    voice: Annotated[str | None, typer.Option(help="a voice of the model; `sonoro voices` lists them")] = None,
    language: Annotated[str | None, typer.Option(help="a language of the model, or auto")] = None,
    text_format: common.TextFormatOption = None,
    markup: common.MarkupOption = None,
    on_markup: common.OnMarkupOption = None,
    lexicon: common.Lexicons = None,
    cast: common.Cast = None,
    instructions: Annotated[str | None, typer.Option(help="how to speak, or who speaks, in words")] = None,
    ref_audio: Annotated[Path | None, typer.Option(help="recording of the voice to clone")] = None,
    ref_text: Annotated[str | None, typer.Option(help="transcript of --ref-audio")] = None,
    x_vector_only: Annotated[bool, typer.Option("--x-vector-only", help="clone only the timbre")] = False,
    speed: Annotated[float, number("speed", float, "tempo, 0.25 to 4, at the same pitch")] = 1.0,
    seed: Annotated[int, number("seed", int, "the same seed gives the same speech")] = 0,
    attempts: _Attempts = None,
    on_fault: _OnFault = None,
    check: _Check = False,
    temperature: Annotated[float | None, number("temperature", float, "0 is greedy; default: the model's")] = None,
    top_k: Annotated[int | None, number("top_k", int, "sample from the k most likely codes; 0 keeps all")] = None,
    top_p: Annotated[float | None, number("top_p", float, "nucleus sampling: total probability to keep")] = None,
    repetition_penalty: _Repetition = None,
    max_frames: _MaxFrames = None,
    option: Annotated[list[str] | None, typer.Option(help="NAME=VALUE, an option of the model (see info)")] = None,
    device: common.Device = "auto",
    dtype: common.DataType = None,
    codec_dtype: common.CodecType = None,
    quantization: common.Quantization = None,
    load_format: common.LoadFormat = "auto",
    config: common.Config = None,
) -> int:
    """Speak TEXT into a file.
    The file is written as the audio is generated, and is playable even after an interrupt. The exit code is 1 if a part
    of the text ran away or, with --check, was not spoken as written."""
    return _say(SimpleNamespace(**locals()))


def _say(options: Any) -> int:
    """`say` with its `options`."""
    format = output_format(options.out, options.format)
    if options.stream and format not in STREAMABLE_FORMATS:
        raise OutputError(f"--stream: {format} cannot be written chunk by chunk; use {' or '.join(STREAMABLE_FORMATS)}")
    request = _request(options)
    asked = ("srt", options.srt), ("vtt", options.vtt), ("json", options.words)
    captions = [(kind, path) for kind, path in asked if path is not None]
    for _, path in captions:
        check_place(path)
    audio = [] if options.out == STDOUT else [Path(options.out)]
    _check_outputs([*audio, *(path for _, path in captions)], is_forced=options.force)
    options.replaces = any(path.is_file() for path in audio)
    # Faults are found by word times.
    request = msgspec.structs.replace(request, with_words=bool(captions) or options.check)
    engine = options.config or EngineConfig(slots=1)
    engine = engine.over(codec_dtype=options.codec_dtype, quantization=options.quantization)
    with _until_terminated():
        speaker = TTS(_load(options, engine.quantization), config=engine)
        if captions and not speaker.has_words:
            raise OutputError(f"{captions[0][1]}: {speaker.spec.name} gives no word times")
        if options.check and not speaker.finds_faults:
            raise OutputError(f"--check: {speaker.spec.name} cannot tell what was not spoken as written")
        request = with_script(request, speaker.spec, options.lexicon or (), options.speed)
        warnings = () if request.script is None else request.script.warnings
        for remark in (
            *(f"not honoured: {one}" for one in warnings),
            *speaker.remarks(written(request), request.text_format),
        ):
            print(f"warning: {remark}", file=sys.stderr)
        return _speak_into(speaker, request, options, format, captions)


def _check_outputs(outputs: Sequence[Path], *, is_forced: bool) -> None:
    """Raise `OutputError` for two outputs with one file, and for a file that exists unless it is the default or
    `is_forced`."""
    names = [os.path.realpath(path) for path in outputs]
    for path, name in zip(outputs, names, strict=True):
        if names.count(name) > 1:
            raise OutputError(f"{path}: two outputs cannot have the same file")
        if path.is_file() and str(path) != _OUT and not is_forced:
            raise OutputError(f"{path}: the file exists; --force replaces it")


def _request(options: Any) -> SpeechRequest:
    """The request of `say`'s `options`. Reproducible: the same options give the same file."""
    given = {name: value for name, value in vars(options).items() if name in RequestFields.__annotations__}
    given["options"] = _options(options.option or [])
    text = read_text(options.text, options.file)
    if options.cast is not None:
        text, given["markup"] = dialogue(read_play(text, options.cast)), given["markup"] or "voices"
    try:
        request = speech_request(text, options.voice, **given)
    except InvalidReference as error:
        from sonoro.models import registry

        # If the model cannot clone at all, report that instead of the fault in the recording.
        spec = registry.describe(options.model, device=options.device, dtype=options.dtype).spec
        spec.check_cloning(error.field)
        raise
    return msgspec.structs.replace(request, is_reproducible=True)


def _write_captions(captions: Captions, request: SpeechRequest, words: Sequence[Word]) -> None:
    text = request.text if request.script is None else shown(request.script, request.text)
    for kind, path in captions:
        try:
            path.write_text(make_captions(kind, text, words), encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write {path}: {error.strerror}") from error


def _load(options: Any, quantization: str) -> LoadedModel:
    """Load the model; a small one on a CPU gets one thread."""
    from sonoro.models import registry
    from sonoro.runtime.threads import spare_threads

    how = {"load_format": options.load_format, "quantization": quantization}
    loaded = registry.load(options.model, device=options.device, dtype=options.dtype, **how)
    spare_threads(loaded.device, sum(loaded.parameters.values()))
    return loaded


def _options(pairs: list[str]) -> dict[str, OptionValue]:
    """Parse NAME=VALUE pairs as booleans, numbers or strings, which the model validates."""
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


@contextlib.contextmanager
def _until_terminated() -> Iterator[None]:
    """Turn SIGTERM into an exception in the block, like an interrupt, so that files are completed; raises `Stopped`."""

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    try:
        with _handling(raise_it, signal.SIGTERM):
            yield
    except _Terminated as end:
        raise Stopped("terminated", signal.SIGTERM) from end


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the block, so that a write is whole or not begun."""
    came = list[int]()
    try:
        with _handling(lambda number, frame: came.append(number), signal.SIGINT, signal.SIGTERM):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])


@contextlib.contextmanager
def _handling(handle: Callable[[int, FrameType | None], None], *numbers: int) -> Iterator[None]:
    """Handle the signals `numbers` by `handle` in the block, if this is the main thread, which alone may."""
    is_main = threading.current_thread() is threading.main_thread()
    before = {number: signal.signal(number, handle) for number in numbers if is_main}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _speak_into(speaker: TTS, request: SpeechRequest, options: Any, format: str, captions: Captions) -> int:
    """Speak `request` and write its audio and captions; return the exit code."""
    out, writers, words = options.out, list[AudioWriter](), list[Word]()
    audio_s = 0.0
    try:
        with contextlib.ExitStack() as stack:

            def writer() -> AudioWriter:
                # An existing file is kept until there is audio to replace it.
                if not writers:
                    writers.append(stack.enter_context(AudioWriter(out, speaker.sample_rate, format)))
                return writers[0]

            def take(piece: AudioPiece) -> None:
                nonlocal audio_s
                # An encoder's callback would swallow what a signal raises. stdout may have to wait for its reader.
                with contextlib.nullcontext() if writers and out == STDOUT else _signals_wait():
                    writer().write(piece.samples)
                audio_s += piece.duration_s
                words.extend(piece.words or ())
                show_progress(audio_s, piece.characters)

            # Progress ends first, so that its last line does not mix with an error.
            show_progress = stack.enter_context(_progress(len(request.text), is_shown=options.progress))
            finished = listen(speaker.stream(request, speed=options.speed), take)
            writer()
            words.extend(finished.words or ())
    except (KeyboardInterrupt, _Terminated) as end:
        number, how = (
            (signal.SIGINT, "interrupted") if isinstance(end, KeyboardInterrupt) else (signal.SIGTERM, "terminated")
        )
        kept = f"; {out} holds the first {audio_s:.2f} s" if audio_s and out != STDOUT else ""
        _write_captions(captions, request, words)
        raise Stopped(how + kept, number) from end
    _write_captions(captions, request, words)
    summary = _summary(out, audio_s, finished) + "; it replaces an older file" * options.replaces
    if out == STDOUT:
        print(summary, file=sys.stderr)
    else:
        show(summary)
    is_faulty = options.check and any(fault.outcome == "marked" for fault in finished.faults)
    if options.check:
        print(*(_fault_line(fault, request.text) for fault in finished.faults), sep="", end="", file=sys.stderr)
    return FAILURE if finished.reason == "runaway" or is_faulty else 0


def _fault_line(fault: Fault, text: str) -> str:
    """A line that reports `fault`."""
    outcome = {"marked": "", "spoken_again": ", spoken again", "continued": f", continued at {fault.continued_at}"}
    words = text[fault.start : fault.end].strip()
    return f"{fault.kind} (attempt {fault.attempt + 1}{outcome[fault.outcome]}): {words!r}\n"


def _summary(out: str, audio_s: float, finished: Finished) -> str:
    rtf = finished.timings.total_s / audio_s if audio_s else float("inf")
    ran_away = f"; cut after {finished.characters} characters, where it ran away: try --attempts 3"
    how = {"stop": "", "length": "; cut at --max-frames", "runaway": ran_away}
    name = "stdout" if out == STDOUT else out
    first_ms = finished.timings.first_audio_s * 1000
    return f"{name}: {audio_s:.2f} s of audio, RTF {rtf:.3f}, first packet {first_ms:.0f} ms{how[finished.reason]}"


@contextlib.contextmanager
def _progress(characters: int, *, is_shown: bool | None) -> Iterator[Callable[[float, int], None]]:
    """Show progress on stderr: a bar on a terminal, else, if asked for, a line every `_LINE_S`.
    Yields a function to call with the seconds of audio so far, and how many of the `characters` they cover."""
    console, began_s = Console(stderr=True), time.monotonic()
    if is_shown is False or (is_shown is None and not console.is_terminal):
        yield lambda audio_s, spoken: None
        return

    def figures(audio_s: float) -> str:
        return f"{audio_s:.1f} s of audio, {audio_s / (time.monotonic() - began_s):.1f} times as fast as it plays"

    if not console.is_terminal:
        due_s = began_s + _LINE_S

        def line(audio_s: float, spoken: int) -> None:
            nonlocal due_s
            if time.monotonic() >= due_s or spoken == characters:
                due_s = time.monotonic() + _LINE_S
                print(f"{100 * spoken // characters}% of the text, {figures(audio_s)}", file=sys.stderr)

        yield line
        return
    columns = (BarColumn(), TextColumn("{task.percentage:.0f}% of the text, {task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("0.0 s of audio", total=characters)
        yield lambda audio_s, spoken: bar.update(task, description=figures(audio_s), completed=spoken)
