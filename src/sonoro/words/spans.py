"""Words of a text as it was written, and which of a segment's tokens speak them. Knows no tokeniser and no model."""

from __future__ import annotations

import bisect
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SpokenWord", "spoken_words", "word_spans"]

Span = tuple[int, int]

_SPACELESS = (
    "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
)
"""Kana, ideographs, Thai, Lao, Burmese, Khmer: scripts that put no space between words."""

_WORD = re.compile(rf"[{_SPACELESS}]|(?:(?!--|\.\.)[^\s—―…–{_SPACELESS}])+")
_SPOKEN_SIGNS = "%&@#*"


def word_spans(text: str) -> list[Span]:
    """Where the words of `text` are, without the marks around them: what stands between spaces or dashes; in scripts
    without spaces each character, with the combining marks after it. A sign that is read, as +, is a word."""
    spans: list[Span] = []
    for found in _WORD.finditer(text):
        start, end = found.span()
        while start < end and _is_mark(text[start]):
            start += 1
        while end > start and _is_mark(text[end - 1]):
            end -= 1
        if start == end:
            continue
        if spans and spans[-1][1] == start and unicodedata.category(text[start]).startswith("M"):
            spans[-1] = spans[-1][0], end
        else:
            spans.append((start, end))
    return spans


def _is_mark(character: str) -> bool:
    kind = unicodedata.category(character)
    return kind[0] in "PZC" and character not in _SPOKEN_SIGNS


@dataclass(frozen=True)
class SpokenWord:
    """A word of the text as written, `text[start:end]`, and the tokens that speak it: from `first` to `last`, as
    numbers of tokens and parts of them, where several words share one."""

    start: int
    end: int
    first: float
    last: float


def spoken_words(
    words: Sequence[Span], spoken: str, origins: Sequence[Span], tokens: Sequence[Span]
) -> list[SpokenWord]:
    """Those of `words` that tokens speak, in order, which share no token but by parts.

    `spoken` is what the tokens read, `origins` where in the written text each of its characters comes from, and
    `tokens` are the spans of characters of `spoken` that each token reads.
    """
    owners = _owners(words, spoken, origins)
    found: dict[int, list[float]] = {}
    for number, (start, end) in enumerate(tokens):
        owned = [owner for owner in owners[start:end] if owner is not None]
        for at, owner in enumerate(owned):
            place = found.setdefault(owner, [number + at / len(owned), 0.0])
            place[1] = max(place[1], number + (at + 1) / len(owned))
    return [SpokenWord(*words[owner], *found[owner]) for owner in sorted(found)]


def _owners(words: Sequence[Span], spoken: str, origins: Sequence[Span]) -> list[int | None]:
    """The word that each character of `spoken` belongs to, by number, never falling; None for marks and spaces."""
    starts, ends = [start for start, _ in words], [end for _, end in words]
    owners: list[int | None] = [None] * len(spoken)
    latest = 0
    at = 0
    while at < len(spoken) and words:
        group = at
        while at < len(spoken) and origins[at] == origins[group]:
            at += 1
        start, end = origins[group]
        first = bisect.bisect_right(ends, start)
        last = bisect.bisect_left(starts, max(end, start + 1))
        if first >= last:
            # It comes from between two words: of the one before, as a unit that is said after its number.
            first, last = max(first - 1, 0), max(first, 1)
        letters = [one for one in range(group, at) if spoken[one].isalnum()]
        for number, one in enumerate(letters):
            owner = first + number * (last - first) // len(letters)
            latest = max(latest, owner)
            owners[one] = latest
    return owners
