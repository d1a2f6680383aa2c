"""How far what was heard is from what was to be spoken, in words. Knows no recogniser."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sonoro.core.normalize import normalize_english


def words_of(text: str) -> str:
    """Lower-case words alone, as the recogniser writes them."""
    return " ".join(re.findall(r"[a-z']+", normalize_english(text, lowercase=True).text))


def word_errors(text: str, heard: str) -> int:
    """The fewest words put in, left out or changed that make one of the other."""
    words = heard.split()
    row = list(range(len(words) + 1))
    for count, spoken in enumerate(text.split(), start=1):
        before, row = row, [count]
        for index, word in enumerate(words):
            row.append(min(before[index] + (word != spoken), before[index + 1] + 1, row[-1] + 1))
    return row[-1]


def word_error_rate(texts: Sequence[str], heard: Sequence[str]) -> float:
    """Word errors over the words that were to be spoken, of all `texts` together."""
    spoken = [words_of(text) for text in texts]
    errors = sum(word_errors(text, words) for text, words in zip(spoken, heard, strict=True))
    return errors / sum(len(text.split()) for text in spoken)
