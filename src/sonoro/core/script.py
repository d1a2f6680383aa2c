"""What an engine must know of a text with markup: its lines, and where each was written. Knows no syntax."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

Span = tuple[int, int]
"""A range of characters: start and end."""


class Run(NamedTuple):
    """The origins of `length` characters: the first is `start` to `start + width`, each next one `step` further."""

    length: int
    start: int
    step: int
    width: int


def packed(origins: Iterable[Span]) -> tuple[Run, ...]:
    """`origins` as few runs."""
    runs: list[Run] = []
    for start, end in origins:
        last = runs[-1] if runs else None
        if last is not None and end - start == last.width:
            step = start - (last.start + (last.length - 1) * last.step)
            if (last.length == 1 and step in (0, 1)) or (last.length > 1 and step == last.step):
                runs[-1] = Run(last.length + 1, last.start, step, last.width)
                continue
        runs.append(Run(1, start, 1, end - start))
    return tuple(runs)


def unpacked(runs: Iterable[Run]) -> list[Span]:
    """The origins of `runs`, one for each character."""
    return [
        (start + at * step, start + at * step + width) for length, start, step, width in runs for at in range(length)
    ]


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a script that is spoken alike and never with another in one prompt.

    `text` is what the model's reader gets, each character of it written at one of `origins` in the script's text.
    `pause_s` of silence follow it, at the model's tempo. It is played at `rate` times the tempo and at `gain` times the
    amplitude. `voice`, `voice_digest`, `language` and `instructions` take the place of the request's; None leaves it.
    """

    text: str
    origins: tuple[Run, ...]
    pause_s: float = 0.0
    rate: float = 1.0
    gain: float = 1.0
    voice: str | None = None
    language: str | None = None
    instructions: str | None = None


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """A text with markup, read: the `lines` to speak, after `lead_s` of silence. `text` is what is written without the
    markup, and `origins` where each character of it stands in the text as it was sent. It `is_plain` if
    its lines are neither Markdown nor HTML. `warnings` name what is not
    honoured, as "NAME (line L, column C)"."""

    text: str
    origins: tuple[Run, ...]
    lines: tuple[Line, ...]
    lead_s: float = 0.0
    is_plain: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def texts(self) -> list[str]:
        """What is spoken, line by line."""
        return [line.text for line in self.lines]

    @property
    def pauses_s(self) -> float:
        """The seconds of all pauses."""
        return self.lead_s + sum(line.pause_s for line in self.lines)

    @property
    def slowest(self) -> float:
        """The least rate of a line, at most 1."""
        return min(1.0, *(line.rate for line in self.lines))


def at_speed(script: Script, speed: float) -> Script:
    """`script` for audio that is then played `speed` times as fast: its pauses are made for that tempo."""
    if speed == 1:
        return script
    lines = (msgspec.structs.replace(line, pause_s=line.pause_s * speed) for line in script.lines)
    return msgspec.structs.replace(script, lead_s=script.lead_s * speed, lines=tuple(lines))


def shown(script: Script, source: str) -> str:
    """`source`, from which `script` was read, as it is shown: with a null for each character of its markup."""
    text = ["\0"] * len(source)
    for character, (start, end) in zip(script.text, unpacked(script.origins), strict=True):
        if start < end:
            text[start] = character
    return "".join(text)


class Sent:
    """Translates places in a text to places in the text as it was sent, by the `spans` of its characters there, which
    may grow."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = spans

    def span(self, start: int, end: int) -> Span:
        """Where characters `start` to `end` were sent."""
        if start >= end:
            return self.position(start), self.position(start)
        return self._spans[start][0], self._spans[end - 1][1]

    def position(self, at: int) -> int:
        """Where character `at` was sent; behind the last if it is the end."""
        return self._spans[at][0] if at < len(self._spans) else (self._spans[-1][1] if self._spans else 0)
