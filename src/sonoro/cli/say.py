"""`sonoro say`: speaks a text into a file, which is written as it is generated. Imports torch when it runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from sonoro.api import TTS, AudioPiece, RequestFields, speech_request, with_script, written
from sonoro.api_audio import Pieces, make_captions, next_piece
from sonoro.audio.files import FORMATS, check_place
from sonoro.audio.pcm import to_pcm16
from sonoro.cli import common
from sonoro.cli.common import number
from sonoro.cli.speaking import Ended, Piece, Target, conclude, speak_into, until_terminated
from sonoro.cli.streams import FAILURE, Stopped, read_text, say_on_stderr
from sonoro.core.config import EngineConfig
from sonoro.core.errors import InvalidReference, InvalidRequest, OutputError
from sonoro.core.events import Fault, Word
from sonoro.core.options import OptionValue
from sonoro.core.types import SpeechRequest
from sonoro.text.origins import shown
from sonoro.text.script.dialogue import Cue, dialogue, read_play

if TYPE_CHECKING:
    from sonoro.models.base import LoadedModel

Captions = Sequence[tuple[str, Path]]
"""Formats and paths of caption files to write."""

_Stream = Annotated[
    bool, typer.Option("--stream", help="refuse formats that cannot be written chunk by chunk (not wav or pcm)")
]
_Progress = Annotated[
    bool | None, typer.Option("--progress/--no-progress", help="show progress on stderr; default: on a terminal")
]
_Play = Annotated[
    bool | None,
    typer.Option("--play/--no-play", help="play it; default: on a terminal without --out; without a player: out.wav"),
]
_Server = Annotated[
    bool,
    typer.Option("--server/--no-server", help="let a running `sonoro serve` of this user speak, if it is the same"),
]
_Attempts = Annotated[
    int | None,
    number("attempts", int, "maximum attempts at a part that runs away or is faulty, each with another seed"),
]
_OnFault = Annotated[
    str | None,
    typer.Option(help="for a part not spoken as written: mark, retry, or continue from its last good word"),
]
_Parallel = Annotated[
    int | None, number("parallel", int, "how many parts are spoken at once; each is then written once it has ended")
]
_Check = Annotated[
    bool, typer.Option("--check", help="list the parts probably not spoken as written; exit code 1 if any")
]
_Repetition = Annotated[float | None, number("repetition_penalty", float, "above 1 avoids repetition")]
_MaxFrames = Annotated[int | None, number("max_frames", int, "maximum frames; default: by the text's length")]


def say(
    text: Annotated[list[str] | None, typer.Argument(help="what to speak; - reads stdin", show_default=False)] = None,
    *,
    file: Annotated[Path | None, typer.Option(help="speak the text in this file")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="file to write; - is stdout")] = None,
    format: Annotated[str | None, typer.Option(help=f"{', '.join(FORMATS)}; default: by the suffix of --out")] = None,
    stream: _Stream = False,
    srt: Annotated[Path | None, typer.Option(help="write captions to this file, as SubRip")] = None,
    vtt: Annotated[Path | None, typer.Option(help="write captions to this file, as WebVTT")] = None,
    words: Annotated[Path | None, typer.Option(help="write word times to this file, as JSON")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace files that exist; out.wav always is")] = False,
    play: _Play = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="say who spoke, and how fast")] = False,
    server: _Server = True,
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
    loudness: common.LoudnessOption = None,
    seed: Annotated[int, number("seed", int, "the same seed gives the same speech")] = 0,
    attempts: _Attempts = None,
    on_fault: _OnFault = None,
    parallel: _Parallel = None,
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
    """Speak TEXT aloud on a terminal, else into out.wav, which grows while it is spoken.
    The exit code is 1 if a part of the text ran away or, with --check, was not spoken as written."""
    return _say(SimpleNamespace(**locals()))


def _say(options: Any) -> int:
    """`say` with its `options`."""
    asked = ("srt", options.srt), ("vtt", options.vtt), ("json", options.words)
    captions = [(kind, path) for kind, path in asked if path is not None]
    how = {"play": options.play, "is_streamed": options.stream, "is_forced": options.force}
    target = Target.of(options.out, options.format, [path for _, path in captions], **how)
    request = _request(options)
    for _, path in captions:
        check_place(path)
    # Faults are found by word times.
    request = msgspec.structs.replace(request, with_words=bool(captions) or options.check)
    engine = options.config or EngineConfig(slots=request.parallel)
    engine = engine.over(codec_dtype=options.codec_dtype, quantization=options.quantization)
    with until_terminated():
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
            say_on_stderr(f"warning: {remark}")
        return _speak(speaker, request, options, target, captions)


def _speak(speaker: TTS, request: SpeechRequest, options: Any, target: Target, captions: Captions) -> int:
    """Speak `request`, and write its captions; return the exit code."""
    words, faults = list[Word](), list[Fault]()
    speech = _speech(speaker.stream(request, speed=options.speed, loudness=options.loudness), words, faults)
    try:
        spoken = speak_into(target, speech, speaker.sample_rate, len(request.text), is_shown=options.progress)
    except Stopped:
        _write_captions(captions, request, words)
        raise
    _write_captions(captions, request, words)
    code = conclude(target, spoken, is_verbose=options.verbose)
    if options.check:
        print(*(_fault_line(fault, request.text) for fault in faults), sep="", end="", file=sys.stderr)
    is_faulty = options.check and any(fault.outcome == "marked" for fault in faults)
    return FAILURE if is_faulty else code


def _speech(stream: Pieces, words: list[Word], faults: list[Fault]) -> Generator[Piece, None, Ended]:
    """`stream` as bytes. Its `words` and `faults` are added to these as they come."""
    while isinstance(received := next_piece(stream), AudioPiece):
        words.extend(received.words or ())
        yield Piece(to_pcm16(received.samples), received.characters)
    words.extend(received.words or ())
    faults.extend(received.faults)
    return Ended(received.reason, received.characters)


def _request(options: Any) -> SpeechRequest:
    """The request of `say`'s `options`. Reproducible: the same options give the same file."""
    text = read_text(" ".join(options.text) if options.text else None, options.file)
    fields = RequestFields.__annotations__.keys() - {"cast"}  # of recordings; the option is of names
    given = {name: value for name, value in vars(options).items() if name in fields}
    if options.cast is not None:
        cues, given["cast"] = _cues(text, options.cast)
        text, given["markup"] = dialogue(cues), given["markup"] or "voices"
        if (first := cues[0].voice) in given["cast"] and options.voice is None and options.ref_audio is None:
            # A model without voices of its own needs one.
            given |= {"ref_audio": given["cast"][first], "x_vector_only": True}
    try:
        request = speech_request(text, options.voice, **given, options=_options(options.option or []))
    except InvalidReference as error:
        from sonoro.models import registry

        # If the model cannot clone at all, report that instead of the fault in the recording.
        spec = registry.describe(options.model, device=options.device, dtype=options.dtype).spec
        spec.check_cloning(error.field)
        raise
    return msgspec.structs.replace(request, is_reproducible=True)


def _cues(text: str, cast: Mapping[str, str]) -> tuple[list[Cue], dict[str, Path]]:
    """The cues of the play `text`, and the recordings of its `cast`: voices that are names of files."""
    recordings = {name.lower(): Path(one) for name, one in cast.items() if Path(one).suffix and Path(one).is_file()}
    voices = {name: name.lower() if name.lower() in recordings else one for name, one in cast.items()}
    return read_play(text, voices), recordings


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


def _fault_line(fault: Fault, text: str) -> str:
    """A line that reports `fault`."""
    outcome = {"marked": "", "spoken_again": ", spoken again", "continued": f", continued at {fault.continued_at}"}
    words = text[fault.start : fault.end].strip()
    return f"{fault.kind} (attempt {fault.attempt + 1}{outcome[fault.outcome]}): {words!r}\n"
