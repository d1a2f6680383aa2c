"""The text of one block as the classes see it, and what they answer: candidates with costs.

Folding makes one form of quotes, dashes, spaces and accented letters; signs that carry a meaning stay. Every folded
character remembers its span of the written text.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

Span = tuple[int, int]


class Piece(NamedTuple):
    """Words that are said (letters, spaces and apostrophes), or a mark of a pause (. , ? !), for `text[start:end]`."""

    said: str
    start: int
    end: int


class Candidate(NamedTuple):
    """A reading of the text up to `end`, by one class. The path with the least sum of costs is read."""

    end: int
    cost: float
    pieces: tuple[Piece, ...]


Recogniser = Callable[[str, int], Iterable[Candidate]]
"""The candidates of a class that begin at a position of a text, which is the start of a token."""

SURE, LIKELY, POSSIBLE, UNLIKELY = 1.0, 3.0, 6.0, 12.0
"""Costs of a class: its form is read so nowhere else; in most texts; where the context supports it; as a last resort.

A word that is read as it stands costs `WORD`, a sign `SIGN`, a number without a class `NUMBER`."""

WORD, SIGN, NUMBER = 2.0, 2.0, 10.0

_FOLDED = str.maketrans(
    {
        **dict.fromkeys("‘’‛`´ʼ＇", "'"),
        **dict.fromkeys("“”„‟«»‹›″‶", '"'),
        **{"′": "'", "‚": ",", "‐": "-", "‑": "-", "⁃": "-", "−": "-", "–": "–", "‒": "–", "—": "—", "―": "—"},
        **{"ß": "ss", "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "ı": "i"},
        **{
            "đ": "d",
            "Đ": "D",
            "þ": "th",
            "Þ": "Th",
            "ð": "d",
            "Ð": "D",
            "µ": "μ",
            "∆": "Δ",
            "Ω": "Ω",
            "Å": "Å",
            "…": "...",
            "º": "°",
            "⁄": "/",
        },
    }
)
_SIGNS = frozenset("°€£¥₹₩₽₿¢²³¹⁰⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞×÷±≠≤≥≈→⇒←∞√№§©®™–—μΩÅ·•‰πΔ﹣․＊")
_INVISIBLE = ("Mn", "Cf", "Cc", "Me")


def fold(text: str, origins: Sequence[Span] | None = None) -> tuple[str, Sequence[Span] | None]:
    """Fold `text`, whose characters come from `origins` (None: from themselves); returns the same of the result."""
    if text.isascii() and "`" not in text and "\x00" not in text:
        return text, origins
    folded: list[str] = []
    spans: list[Span] = []
    for at, character in enumerate(text):
        new = character if character.isascii() and character != "`" else _folded(character)
        if character in "Å−" and text[at + 1 : at + 2].isalnum() and (character == "Å" or text[at - 1 : at].isalnum()):
            # The letter of a name, not the unit; the minus of a difference, not a hyphen.
            new = "A" if character == "Å" else character
        folded.append(new)
        spans += [origins[at] if origins is not None else (at, at + 1)] * len(new)
    return "".join(folded), spans


def _folded(character: str) -> str:
    new = character.translate(_FOLDED)
    if new.isascii() or character in _SIGNS or new in _SIGNS:
        return new
    decomposed = unicodedata.normalize("NFKD", new)
    return "".join(c for c in decomposed.translate(_FOLDED) if unicodedata.category(c) not in _INVISIBLE)


_NUMERAL = "²³¹¼-¾⁰-⁹₀-₉⅐-↏"
"""Signs of numbers that `\\w` counts as letters."""

_LETTER = rf"[^\W\d_{_NUMERAL}]"
_TOKEN = re.compile(
    rf"{_LETTER}+(?:'{_LETTER}+)*[²³¹⁰⁴-⁹]*|\d+|\s+|<=|==(?!=)|>=|[-=]>|!=|([^\w\s]|[_{_NUMERAL}])\1*|."
)


def token_end(text: str, start: int) -> int:
    """Where the token ends that begins at `start`: a run of letters (with a word's apostrophes and footnote marks), of
    digits, of white space or of one sign."""
    found = _TOKEN.match(text, start)
    assert found is not None
    return found.end()


def before(text: str, at: int, most: int = 40) -> str:
    """What stands before `at`, for a pattern that ends there."""
    return text[max(0, at - most) : at]


def after(text: str, at: int, most: int = 40) -> str:
    """What stands from `at` on, for a pattern that begins there."""
    return text[at : at + most]
