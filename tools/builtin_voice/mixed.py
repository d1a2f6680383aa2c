"""A thousand texts of every kind that people send, and the definition of a truncated or runaway reading.

One word to 400 characters, numbers, sums, dates, abbreviations, marks. Words come from the Harvard sentences that the
evaluation does not use otherwise, none of which is ever trained on; the list is the same everywhere.
`python -m builtin_voice.mixed FILE` writes the pieces of every text that a voice is judged by, a piece a line.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable
from pathlib import Path

from builtin_voice.judged import JUDGED_HARVARD, read_carriers, read_everyday, read_harvard

TEXTS = 1000
LONGEST = 400
PIECE = 250
SEED = 5
SHORT_RATIO = 0.75
"""Shorter than this share of the teacher's reading, something was left out."""
RUNAWAY_RATIO = 1.5
"""Longer than this many times the teacher's reading, something was drawn out or made up."""
SLACK_S = 0.25
"""A frame or two at each end, which is much of a single word."""

_NAMES = ("Smith", "Miller", "Brown", "Anna", "Robert", "Helen", "George", "Mary")
_MONTHS = ("January", "March", "May", "June", "August", "October", "December")
_ABBREVIATED = (
    "Dr. {name} met Mrs. {name} at {hour}:{minute:02d} p.m.",
    "Prof. {name} works for the U.S. Dept. of Energy.",
    "Bring tools, e.g. a {word}, a {word}, etc.",
    "It was {name} vs. {name}, i.e. the last game.",
    "The FBI and the CIA asked about the {word}.",
    "St. {name} is approx. {small} km from Mt. {name}.",
    "Mr. {name} Jr. lives at {small} Elm St.",
    "The CEO of {name} Inc. paid with a USB key.",
    "Send it to {name} Ltd., No. {small}, by Dec. {day}.",
    "The UK left the EU, didn't it?",
)
_NUMBERED = (
    "It cost ${large}.{minute:02d} in {year}.",
    "On {month} {day}, {year}, {large} people came.",
    "About {percent}% of {large} is too much.",
    "The answer is {small}.{minute:02d}, not -{small}.",
    "Call 555-{year} at {hour}:{minute:02d}.",
    "Pages {small}-{large} are on the {day}th shelf.",
    "Take 1/2 of it, or 3/4, or {small}/100.",
    "It is {small}°C and {percent} km/h in room {small}.",
    "{small}, {large}, {year}, {percent}.",
    "She was born in the 19{tens}0s and ran {small} miles.",
    "£{small} million, or €{large}, or ${small}.",
    "At {hour}:00 I had {large} emails & {small} calls.",
)
_MARKED = (
    "“{sentence}” she said; then... nothing!",
    "Wait -- {word}?! No: {word}, {word}, (and) {word}.",
    "{sentence} *Really*? Yes: {word}.",
    "WELL, {sentence}",
    "{word}/{word} & {word} + {word} = {word}?",
    "the {word}-{word} isn't 'new'",
)


def _words(sentences: list[str]) -> list[str]:
    return sorted({word.strip(".,?!'\"").lower() for sentence in sentences for word in sentence.split()} - {""})


class _Writer:
    """Writes one text of each kind per call, drawing everything from its own generator."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._sentences = read_harvard()[JUDGED_HARVARD:]
        self._vocabulary = _words(self._sentences)
        self._kinds: dict[Callable[[], str], int] = {
            self._word: 12,
            self._run: 10,
            self._sentence: 18,
            self._long: 25,
            lambda: self._filled(_NUMBERED): 17,
            lambda: self._filled(_ABBREVIATED): 10,
            lambda: self._filled(_MARKED): 8,
        }

    def text(self) -> str:
        return self._rng.choices(list(self._kinds), list(self._kinds.values()))[0]()

    def _sentence(self) -> str:
        return self._rng.choice(self._sentences)

    def _word(self) -> str:
        return self._rng.choice(self._vocabulary).capitalize() + self._rng.choice(("", ".", ".", "!", "?"))

    def _run(self) -> str:
        words = self._rng.choices(self._vocabulary, k=self._rng.randint(2, 9))
        return self._rng.choice((" ", ", ")).join(words)

    def _long(self) -> str:
        """Sentences up to a length, which the last ones may have been broken for."""
        length = self._rng.randint(90, LONGEST)
        text = self._sentence()
        while len(text) < length:
            text = f"{text} {self._filled(_NUMBERED) if self._rng.random() < 0.1 else self._sentence()}"
        return text if len(text) <= LONGEST else text[:LONGEST].rsplit(" ", 1)[0]

    def _filled(self, templates: tuple[str, ...]) -> str:
        rng = self._rng
        pieces = rng.choice(templates).split("{")
        return pieces[0] + "".join(self._value(*piece.split("}", 1)) for piece in pieces[1:])

    def _value(self, field: str, rest: str) -> str:
        rng = self._rng
        name, _, shape = field.partition(":")
        values: dict[str, Callable[[], int | str]] = {
            "name": lambda: rng.choice(_NAMES),
            "month": lambda: rng.choice(_MONTHS),
            "word": lambda: rng.choice(self._vocabulary),
            "sentence": self._sentence,
            "small": lambda: rng.randint(1, 99),
            "large": lambda: rng.choice((rng.randint(100, 999), rng.randint(1000, 99_999))),
            "percent": lambda: rng.randint(1, 99),
            "year": lambda: rng.randint(1100, 2099),
            "tens": lambda: rng.randint(2, 9),
            "day": lambda: rng.choice((4, 5, 6, 7, 8, 9, *range(10, 21), *range(24, 31))),
            "hour": lambda: rng.randint(1, 12),
            "minute": lambda: rng.randint(0, 59),
        }
        return f"{values[name]():{shape}}{rest}"


def mixed_texts(seed: int = SEED) -> list[str]:
    """The thousand texts, all different; with another seed, others of the same kinds."""
    writer, texts = _Writer(seed), dict[str, None]()
    while len(texts) < TEXTS:
        texts[writer.text()] = None
    return list(texts)


def judged_texts() -> list[str]:
    """Every text that is judged, each once, in the order in which they are read."""
    carried = [carrier.sentence for carrier in read_carriers()]
    return list(dict.fromkeys([*read_harvard()[:JUDGED_HARVARD], *read_everyday(), *carried, *mixed_texts()]))


def pieces_of(text: str) -> list[str]:
    """`text` as its teacher reads it: sentences together up to `PIECE` letters, marks of emphasis left out."""
    pieces = [""]
    for sentence in re.split(r"(?<=[.!?]) +", text.replace("*", "")):
        if pieces[-1] and len(pieces[-1]) + len(sentence) > PIECE:
            pieces.append("")
        pieces[-1] = f"{pieces[-1]} {sentence}".strip()
    return pieces


def is_short(duration_s: float, teacher_s: float) -> bool:
    return duration_s < SHORT_RATIO * teacher_s - SLACK_S


def is_runaway(duration_s: float, teacher_s: float) -> bool:
    return duration_s > RUNAWAY_RATIO * teacher_s + SLACK_S


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(f"{piece}\n" for text in judged_texts() for piece in pieces_of(text)), "utf-8")
