"""The one internal form of a text with markup, and what a syntax builds it with. Knows no syntax and no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from sonoro.core.errors import InvalidRequest
from sonoro.core.script import Said, Span
from sonoro.text.origins import Origins

MAX_PAUSE_S, MAX_PAUSES_S = 60.0, 600.0
MIN_RATE, MAX_RATE = 0.25, 4.0
MAX_GAIN = 4.0
_SHOWN = 80


@dataclass(frozen=True)
class Style:
    """How a stretch of text is spoken; None is as the request says."""

    voice: str | None = None
    rate: float = 1.0
    gain: float = 1.0
    language: str | None = None
    emotion: str | None = None


class Ignored(NamedTuple):
    """Markup that is not honoured, `unless` the model can do that: its `name`, and where it was sent."""

    name: str
    at: int
    unless: str = ""


@dataclass
class Marked:
    """A text without its markup, with an origin for each character, and what the markup says, by character of `text`.

    `styles` has the style from each place on, the last of several at one place; a line ends there even if the style
    before comes back. `pauses` the seconds of silence at a place, `borders` the places where a
    sentence ends whatever the punctuation, `marks` places of the source and their names. What `ignored` lists was left
    out of this."""

    source: str
    text: str = ""
    origins: Origins = field(default_factory=Origins)
    styles: list[tuple[int, Style]] = field(default_factory=lambda: [(0, Style())])
    pauses: dict[int, float] = field(default_factory=dict)
    borders: list[int] = field(default_factory=list)
    said: list[Said] = field(default_factory=list)
    marks: list[tuple[int, str]] = field(default_factory=list)
    ignored: list[Ignored] = field(default_factory=list)
    pauses_s: float = 0.0

    @property
    def style(self) -> Style:
        return self.styles[-1][1]

    def add(self, text: str, start: int, end: int | None = None) -> None:
        """Append `text`, sent from `start` on, character by character, or as a whole up to `end`."""
        self.text += text
        self.origins.add(len(text), start, end)

    def turn(self, style: Style) -> None:
        """Continue in `style`."""
        if style != self.style:
            self.styles.append((len(self.text), style))

    def pause(self, seconds: float, name: str, at: int) -> None:
        """Add a pause here, written as `name` at `at` of the source. Raises `InvalidRequest` if it is too long."""
        if not 0 <= seconds <= MAX_PAUSE_S:
            raise self.error(name, at, f"a pause has 0 to {MAX_PAUSE_S:g} s")
        self._separate(at)
        if seconds:
            place = len(self.text)
            self.pauses[place] = self.pauses.get(place, 0.0) + seconds
        self.pauses_s += seconds
        if self.pauses_s > MAX_PAUSES_S:
            raise self.error(name, at, f"all pauses together have at most {MAX_PAUSES_S:g} s")

    def border(self, at: int) -> None:
        """End a sentence here, at `at` of the source."""
        self._separate(at)
        if not self.borders or self.borders[-1] != len(self.text):
            self.borders.append(len(self.text))

    def _separate(self, at: int) -> None:
        """Part the words before from those to come."""
        if self.text and not self.text[-1].isspace():
            self.text += " "
            self.origins.add_run(1, max(at, self.origins.end), 0, 0)

    def free(self, start: int, end: int) -> list[Span]:
        """The stretches of characters `start` to `end` between the borders of markup, without what it replaces."""
        borders = {start, end, *self.pauses, *self.borders, *(at for at, _ in self.styles)}
        borders.update(at for said in self.said for at in said[:2])
        taken = {at for said in self.said for at in range(said.start, said.end)}
        cuts = sorted(at for at in borders if start <= at <= end)
        return [(first, last) for first, last in pairwise(cuts) if first not in taken]

    def ends_at(self, end: int) -> bool:
        """Whether what is said in one breath ends at character `end`, the last that there is."""
        last = [*self.borders[-1:], *self.pauses, self.styles[-1][0], *(said.end for said in self.said[-1:])]
        return end in last

    def ignore(self, name: str, at: int, *, unless: str = "") -> None:
        self.ignored.append(Ignored(name, at, unless))

    def error(self, name: str, at: int, limit: str) -> InvalidRequest:
        """The error that refuses the markup `name` at `at`."""
        return InvalidRequest("text", name[:_SHOWN], f"{place_of(self.source, at)}: {limit}")


def place_of(source: str, at: int) -> str:
    """Line and column of character `at`, from 1."""
    before = source[:at]
    return f"line {before.count(chr(10)) + 1}, column {at - (before.rfind(chr(10)) + 1) + 1}"
