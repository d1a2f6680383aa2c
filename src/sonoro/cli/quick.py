"""`sonoro say` by a running server. Knows only options that change nothing else; for the others `say` itself speaks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sonoro.audio.files import STDOUT
from sonoro.cli.client import LostServer, Server, find_server
from sonoro.cli.speaking import Target, conclude, speak_into, until_terminated
from sonoro.cli.streams import read_text, say_on_stderr
from sonoro.core.errors import EngineError

if TYPE_CHECKING:
    from collections.abc import Callable

_FLAGS = {
    **{
        "--force": ("force", True),
        "--stream": ("stream", True),
        "-v": ("verbose", True),
        "--verbose": ("verbose", True),
    },
    **{"--play": ("play", True), "--no-play": ("play", False)},
    **{"--progress": ("progress", True), "--no-progress": ("progress", False)},
    **{"--server": ("server", True), "--no-server": ("server", False)},
}
_VALUES: dict[str, Callable[[str], Any]] = {
    "out": str,
    "format": str,
    "file": Path,
    "voice": str,
    "speed": float,
    "seed": int,
} | {
    **dict.fromkeys(("language", "text_format", "markup", "on_markup"), str),
    "loudness": lambda text: text if text == "none" else float(text),
}
"""Options with a value, and its type."""

_OF_REQUEST = ("voice", "speed", "loudness", "seed", "language", "text_format", "markup", "on_markup")


class _NotQuick(Exception):
    """Why `say` itself must speak."""


def say(arguments: list[str]) -> int | list[str]:
    """Speak as `sonoro say` with `arguments` by a running server; return the exit code, or else arguments of the same
    meaning for `say` itself."""
    is_verbose = "-v" in arguments or "--verbose" in arguments
    try:
        options, words, others = _parse(arguments)
        server = _server(options)
        text = read_text(" ".join(words) if words else None, options.get("file"))
        if words == ["-"]:
            arguments = [*others, "--", text]
        if not any(character.isalnum() for character in text):
            raise _NotQuick("there is nothing to speak")
        code = _speak(server, text, options, is_verbose=is_verbose)
        if is_verbose:
            say_on_stderr(f"spoken by the server at {server.path}")
    except _NotQuick as reason:
        if is_verbose:
            say_on_stderr(f"spoken in this process: {reason}")
        return arguments
    return code


def _server(options: dict[str, Any]) -> Server:
    """A server for `options`. Raises `_NotQuick`."""
    server, reason = find_server() if options.get("server", True) else (None, "as --no-server asks")
    if server is None:
        raise _NotQuick(reason)
    voice = options.get("voice", "")
    if voice and voice.lower() not in server.voices:
        raise _NotQuick(f"the server has no voice {voice!r}")
    return server


def _speak(server: Server, text: str, options: dict[str, Any], *, is_verbose: bool) -> int:
    """Speak `text` by `server`; return the exit code. Raises `_NotQuick` if that fails and can be begun again."""
    how = {"is_streamed": options.get("stream", False), "is_forced": options.get("force", False)}
    target = Target.of(options.get("out"), options.get("format"), [], play=options.get("play"), **how)
    fields = {"input": text, **{name: options[name] for name in _OF_REQUEST if name in options}}
    speech = server.speech(fields, lambda remark: say_on_stderr(f"warning: {remark}"))
    try:
        with until_terminated():
            spoken = speak_into(target, speech, server.sample_rate, len(text), is_shown=options.get("progress"))
    except LostServer as error:
        if error.was_heard and (target.is_played or target.out == STDOUT):
            raise EngineError(f"{error}; --no-server speaks without it") from error
        if error.was_heard and not target.replaces:
            Path(target.out).unlink(missing_ok=True)
        raise _NotQuick(str(error)) from error
    return conclude(target, spoken, is_verbose=is_verbose)


def _parse(arguments: list[str]) -> tuple[dict[str, Any], list[str], list[str]]:
    """The options in `arguments`, the words of the text, and the arguments without them. Raises `_NotQuick` for any
    other option, and for a value that `say` must refuse."""
    options, words, others = dict[str, Any](), list[str](), list[str]()
    rest = iter(arguments)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if argument == "-" or not argument.startswith("-"):
            words.append(argument)
            continue
        if argument in _FLAGS:
            options |= [_FLAGS[argument]]
            others.append(argument)
            continue
        field = "out" if name == "-o" else name[2:].replace("-", "_")
        if field not in _VALUES or name.startswith("--") == (name == "-o") or "_" in name:
            raise _NotQuick(f"{name} is not for servers")
        others += [argument] if equals else [argument, value := next(rest, "")]
        try:
            options[field] = _VALUES[field](value)
        except ValueError as error:
            raise _NotQuick(f"{name} is not valid") from error
    return options, words, others
