"""The evaluation sentences except the mixed texts, read from files. The corpus holds none of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from builtin_voice.word_errors import words_of

_FOLDER = Path(__file__).parent
JUDGED_HARVARD = 100
"""Number of Harvard sentences, from the first, for evaluation; the mixed texts use words of the others."""


@dataclass(frozen=True, slots=True)
class Carrier:
    """A `sentence` with the common word `word`, which must be heard in it."""

    word: str
    sentence: str

    def is_in(self, heard: str) -> bool:
        """Whether `word`, or one that sounds the same, is among the words `heard`, in one piece or in two."""
        words = words_of(heard).split()
        pairs = ["".join(pair) for pair in pairwise(words)]
        alike = {words_of(word) for word in (self.word, *_ALIKE.get(self.word, ()))}
        return not alike.isdisjoint([*words, *pairs]) or any(f" {word} " in f" {words_of(heard)} " for word in alike)


_ALIKE = {
    "aisle": ("isle", "I'll"),
    "choir": ("quire",),
    "cliché": ("clichet",),
    "colonel": ("kernel",),
    "clothes": ("close",),
    "doughnuts": ("donuts",),
    "entrée": ("on tray",),
    "fiancé": ("fiancée",),
    "jewelry": ("jewellery",),
    "muscle": ("mussel",),
    "principle": ("principal",),
    "threw": ("through",),
    "yogurt": ("yoghurt",),
}
"""Accepted transcriptions of a word that was spoken correctly."""


def read_harvard() -> list[str]:
    """The 720 Harvard sentences (IEEE, 1969) in order."""
    return _lines("harvard.txt")


def read_everyday() -> list[str]:
    """Two hundred sentences of the kind that people have read aloud."""
    return _lines("everyday.txt")


def read_carriers() -> list[Carrier]:
    """Common words that small voices garble, each in a sentence of its own."""
    lines = _lines("carriers.txt")
    return [Carrier(re.findall(r"\*(.+?)\*", line)[0], line.replace("*", "")) for line in lines]


def _lines(name: str) -> list[str]:
    return (_FOLDER / name).read_text("utf-8").splitlines()
