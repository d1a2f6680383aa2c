"""What an engine must know of a text with markup: its lines, and where each was written. Knows no syntax."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

Span = tuple[int, int]
"""A range of characters: start and end."""


Run = tuple[int, int, int, int]
"""The origins of `length` characters, with `start, step, width`: the first is `start` to `start + width`, each next one
`step` further. A bare tuple, as a text with many tags has many."""


class Said(NamedTuple):
    """What is spoken in place of characters `start` to `end`, as is said at `at` of the source. `value` depends on the
    `kind`: an alias, the text of a say-as with its `form`, or phonemes in the alphabet `form`."""

    start: int
    end: int
    at: int
    kind: str
    value: str
    form: str = ""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of a script that is spoken alike and never with another in one prompt.

    `text` is what the model's reader gets, each character of it written at one of `origins` in the script's text.
    `pause_s` of silence follow it, at the model's tempo. It is played at `rate` times the tempo and at `gain` times the
    amplitude. `voice`, `language` and `instructions` take the place of the request's; None leaves it.
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
    its lines are neither Markdown nor HTML. `marks` are names of places in the text as it was sent. `warnings` name
    what is not honoured, as "NAME (line L, column C)"."""

    text: str
    origins: tuple[Run, ...]
    lines: tuple[Line, ...]
    lead_s: float = 0.0
    is_plain: bool = False
    marks: tuple[tuple[int, str], ...] = ()
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
