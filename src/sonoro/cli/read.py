"""`sonoro read`: prints the words of a text as the built-in voice says them. Needs no model."""

import json
import re
from pathlib import Path
from typing import Annotated, cast

import typer

from sonoro.cli.common import TextFormatOption
from sonoro.cli.streams import read_text
from sonoro.core.errors import UnknownVoice
from sonoro.core.nearby import BUILTIN_VOICE
from sonoro.core.types import SpeechRequest, TextFormat
from sonoro.text import Reading
from sonoro.text import read as read_english
from sonoro.text.script.elements import knows

_TAG = re.compile(r"</?([A-Za-z][\w:-]*)(?=[\s/>])[^<>]*>")
_HTML = (
    "a abbr article aside b big blockquote body br button caption center cite code col dd del details dfn div dl dt em "
    "figcaption figure font footer form h1 h2 h3 h4 h5 h6 head header hr html i img input ins kbd label li link main "
    "mark meta nav ol p pre q s samp script section select small span strike strong style sub summary sup svg table "
    "tbody td template textarea tfoot th thead think time title tr tt u ul var video wbr"
)


def read(
    text: Annotated[list[str] | None, typer.Argument(help="what to read; - reads stdin", show_default=False)] = None,
    *,
    file: Annotated[Path | None, typer.Option(help="read the text in this file")] = None,
    text_format: TextFormatOption = None,
    voice: Annotated[str | None, typer.Option(help='a built-in voice: American ones say no "hundred and"')] = None,
    json_: Annotated[
        bool, typer.Option("--json", help="print each word with the written text that it is said for")
    ] = False,
) -> None:
    """Print TEXT as the built-in voice will say it: words, and marks of pauses; on stderr what it leaves out."""
    known = cast("TextFormat", text_format or "auto")
    given = read_text(" ".join(text) if text else None, file, "read")
    request = SpeechRequest(id="", text=given, text_format=known)
    reading = read_english(request.text, request.text_format, locale=_locale(voice))
    if json_:
        said = {"text": reading.text, "words": _words(request.text, reading), "dropped": reading.dropped}
        typer.echo(json.dumps(said, ensure_ascii=False, indent=2))
        return
    typer.echo(re.sub(r"([.?!]) ", "\\1\n", reading.text))
    if reading.dropped:
        typer.echo(f"left out, as it cannot be said: {reading.dropped}", err=True)
    if unknown := [
        *dict.fromkeys(name for name in _TAG.findall(given) if name.lower() not in _HTML.split() and not knows(name))
    ]:
        typer.echo(f"left out, as unknown tags: {', '.join(unknown)}", err=True)


def _locale(voice: str | None) -> str:
    """The locale of a built-in voice, by default the first. Raises `UnknownVoice`."""
    config = json.loads(Path(BUILTIN_VOICE, "config.json").read_text("utf-8"))
    known = config["spk_description"]
    name = next(iter(known)) if voice is None else config["voice_aliases"].get(voice.lower(), voice.lower())
    if name not in known:
        raise UnknownVoice("voice", voice, "known voices: " + ", ".join(known))
    locale: str = known[name]["locale"]
    return locale


def _words(text: str, reading: Reading) -> list[dict[str, str | int]]:
    """Each word of a reading with its place in the written text."""
    found: list[dict[str, str | int]] = []
    for word in re.finditer(r"[\w']+", reading.text):
        start, end = reading.origins[word.start()][0], reading.origins[word.end() - 1][1]
        found.append({"word": word[0], "start": start, "end": end, "written": text[start:end]})
    return found
