"""Word error rate between a text and a transcript, whichever recogniser made it.

Both sides are normalised the same way first: numbers, times and money in words, contractions apart, one spelling of
what Americans and Britons write differently; a compound is the same in one word and in two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sonoro.text import read

_WRITTEN = ((re.compile(r"\b(\d{1,2})\.(\d\d)(?= ?[ap]\.?m\b)", re.IGNORECASE), r"\1:\2"),)
_SPOKEN = (
    # After numbers alone: "hundred and six" is what some say for "hundred six".
    (r"\b(hundred|thousand|million|dollars?|pounds?|euros?) and\b", r"\1"),
    (r"\bwon't\b", "will not"),
    (r"\bcan(?:'t|not)\b", "can not"),
    (r"n't\b", " not"),
    (r"'re\b", " are"),
    (r"'ve\b", " have"),
    (r"'ll\b", " will"),
    (r"'m\b", " am"),
    (r"\b(it|that|what|there|here|he|she|who|where|how)'s\b", r"\1 is"),
    (r"'", ""),
    (r"\b(ok|okay|o k)\b", "okay"),
    (r"\b(\w{2,})our(s|ed|ing|ite|ites|hood|hoods|able|)\b", r"\1or\2"),
    (r"\b(\w{3,})is(e|es|ed|ing|er|ers|ation|ations)\b", r"\1iz\2"),
    (r"\b(\w{3,})yse(d|s|)\b", r"\1yze\2"),
    (r"\b(cen|thea|li|fib|me|kilome|centime|millime)tre(s|)\b", r"\1ter\2"),
    (r"\b(\w{3,})ll(ed|ing|er|ers)\b", r"\1l\2"),
    (r"\b(\w{3,})ogue(s|)\b", r"\1og\2"),
    (r"\b(\w{3,})ence\b", r"\1ense"),
    (r"\bgrey", "gray"),
    (r"\bcheques?\b", "check"),
    (r"\bprogramme", "program"),
    (r"\bpyjama", "pajama"),
    (r"\btyre", "tire"),
    (r"\bmum\b", "mom"),
)


def spelled_words(text: str) -> list[str]:
    """Lower-case words alone, numbers written out."""
    return re.findall(r"[a-z']+", read(text, lowercase=True).text)


def words_of(text: str) -> str:
    """Normalised lower-case words of a text or a transcript."""
    for pattern, written in _WRITTEN:
        text = pattern.sub(written, text)
    spoken = " ".join(spelled_words(text))
    for pattern, plain in _SPOKEN:
        spoken = re.sub(pattern, plain, spoken)
    return " ".join(spoken.split())


def word_errors(text: str, heard: str) -> int:
    """Edit distance in words (insertions, deletions, substitutions); a compound equals its two words."""
    spoken, words = text.split(), heard.split()
    rows = [list(range(len(words) + 1))]
    for count, word in enumerate(spoken, start=1):
        row = [count]
        for index, other in enumerate(words, start=1):
            best = min(rows[-1][index - 1] + (word != other), rows[-1][index] + 1, row[-1] + 1)
            if index > 1 and words[index - 2] + other == word:
                best = min(best, rows[-1][index - 2])
            if count > 1 and spoken[count - 2] + word == other:
                best = min(best, rows[-2][index - 1])
            row.append(best)
        rows.append(row)
    return rows[-1][-1]


def word_error_rate(texts: Sequence[str], heard: Sequence[str]) -> float:
    """Word errors over reference words, of all `texts` together."""
    spoken = [words_of(text) for text in texts]
    errors = sum(word_errors(text, words_of(words)) for text, words in zip(spoken, heard, strict=True))
    return errors / sum(len(text.split()) for text in spoken)


_TAIL_WORDS = 5
_LONGEST_LETTERS = 20
"""Recognisers write what goes on and on as one word."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How what was heard ends beside a text: so many last words `missing`, or so many `extra` ones after the text or
    among its last words. Misheard words are neither."""

    missing: int
    extra: int


def ending_of(text: str, heard: str) -> Ending:
    """Compare the ending of `heard` with that of the text, neither of them normalised yet."""
    spoken, words = words_of(text).split(), parted(words_of(heard).split())
    matches = _matches(spoken, words)
    last_spoken, last_heard = matches[-1]
    missing = max(0, len(spoken) - last_spoken - (len(words) - last_heard))
    over = (len(words) - index - (len(spoken) - at) for at, index in matches if at >= len(spoken) - _TAIL_WORDS)
    return Ending(missing, max(0, *over, 0))


def parted(words: list[str]) -> list[str]:
    """`words` with those in pieces that nobody says in one."""
    return [
        piece for word in words for piece in ([word] if len(word) <= _LONGEST_LETTERS else re.findall(".{1,6}", word))
    ]


def _matches(spoken: list[str], words: list[str]) -> list[tuple[int, int]]:
    """How many words of each have passed: none, and then after each word of their earliest longest subsequence."""
    best = [[0] * (len(words) + 1) for _ in range(len(spoken) + 1)]
    for at in range(len(spoken) - 1, -1, -1):
        for index in range(len(words) - 1, -1, -1):
            same = best[at + 1][index + 1] + 1 if spoken[at] == words[index] else 0
            best[at][index] = max(same, best[at + 1][index], best[at][index + 1])
    found, at, index = [(0, 0)], 0, 0
    while best[at][index]:
        # As early in what was heard as it can be without losing a word.
        if spoken[at] == words[index] and best[at][index] == best[at + 1][index + 1] + 1:
            at, index = at + 1, index + 1
            found.append((at, index))
        elif best[at + 1][index] == best[at][index]:
            at += 1
        else:
            index += 1
    return found
