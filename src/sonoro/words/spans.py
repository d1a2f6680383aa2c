"""The words of a text as written, and the tokens of a segment that speak them."""

import bisect
import re
import unicodedata
from collections.abc import Sequence, Set
from dataclasses import dataclass

from sonoro.text.splitting import Span

_SPACELESS = (
    "\u3005-\u3007\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
)
"""Scripts without spaces between words: kana, ideographs, Thai, Lao, Burmese, Khmer."""

_WORD = re.compile(rf"[{_SPACELESS}]|(?:(?!--|\.\.)[^\s—―…–{_SPACELESS}])+")
_SPOKEN_SIGNS = "%&@#*"


def word_spans(text: str, unread: Set[int] = frozenset()) -> list[Span]:
    """The ranges (start, end) of the words of `text`, split at spaces and dashes, without surrounding punctuation and
    `unread` characters, such as markup; in scripts without spaces each character with its combining marks. Signs that
    are read, such as +, are words."""
    spans: list[Span] = []
    for found in _WORD.finditer(text):
        start, end = found.span()
        while start < end and (start in unread or _is_mark(text[start])):
            start += 1
        while end > start and (end - 1 in unread or _is_mark(text[end - 1])):
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
    """A word of the text as written, `text[start:end]`, and the range of tokens that speak it, `first` to `last`, in
    fractions of tokens if several words share one."""

    start: int
    end: int
    first: float
    last: float


def spoken_words(
    words: Sequence[Span], spoken: str, origins: Sequence[Span], tokens: Sequence[Span]
) -> list[SpokenWord]:
    """The `words` that tokens speak, in order; their token ranges do not overlap.
    `spoken` is the normalised text that was tokenised, `origins` the range of the written text that each of its
    characters comes from, and `tokens` the range of characters of `spoken` that each token covers."""
    owners = _owners(words, spoken, origins)
    found: dict[int, list[float]] = {}
    for number, (start, end) in enumerate(tokens):
        owned = [owner for owner in owners[start:end] if owner is not None]
        for at, owner in enumerate(owned):
            place = found.setdefault(owner, [number + at / len(owned), 0.0])
            place[1] = max(place[1], number + (at + 1) / len(owned))
    return [SpokenWord(*words[owner], *found[owner]) for owner in sorted(found)]


def _owners(words: Sequence[Span], spoken: str, origins: Sequence[Span]) -> list[int | None]:
    """Index of the word that each character of `spoken` belongs to, non-decreasing; None for punctuation and spaces."""
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
            # From between two words: assign it to the one before, as a unit spoken after its number.
            first, last = max(first - 1, 0), max(first, 1)
        letters = [one for one in range(group, at) if spoken[one].isalnum()]
        for number, one in enumerate(letters):
            owner = first + number * (last - first) // len(letters)
            latest = max(latest, owner)
            owners[one] = latest
    return owners
