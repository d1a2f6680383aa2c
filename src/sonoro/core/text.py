"""Text into segments that can be spoken one by one, and how long they may take. Knows no tokeniser and no model.

Length is counted in letters of an alphabet: a CJK character, a digit and a capital (it may be spelled out) take about
as long to say as three.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Iterator

import sentencex

__all__ = ["MIN_BOUND_S", "MIN_MAX_CHARACTERS", "SECONDS_PER_LETTER", "frames_bound", "split_text", "spoken_length"]

SECONDS_PER_LETTER = 0.2
"""Three times as slow as ordinary speech (about 15 letters a second)."""

MIN_BOUND_S = 5.0
"""A single word may be drawn out, or come with a breath before it."""

MIN_MAX_CHARACTERS = 16
"""The least a segment may be asked to hold."""

_LONG = 3
_MAX_MARKS = 8
_LONG_CHARACTER = re.compile(
    "[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff0-9０-９A-Z]"
)

_CLAUSE_END = re.compile(r"[,;:][\"')\]]*(?:\s+|(?=[\u3040-\u9fff]))|[、，；：—–…]+[”’»」』）]*\s*")
_SPACE = re.compile(r"\s+")

_LANGUAGE_CODES = {
    "arabic": "ar", "chinese": "zh", "danish": "da", "dutch": "nl", "english": "en", "finnish": "fi", "french": "fr",
    "german": "de", "greek": "el", "hebrew": "he", "hindi": "hi", "indonesian": "id", "italian": "it",
    "japanese": "ja", "korean": "ko", "malay": "ms", "norwegian": "no", "polish": "pl", "portuguese": "pt",
    "russian": "ru", "spanish": "es", "swedish": "sv", "swahili": "sw", "thai": "th", "turkish": "tr",
    "vietnamese": "vi",
}  # fmt: skip

_SCRIPTS = (
    ("ja", re.compile("[\u3040-\u30ff]")),
    ("zh", re.compile("[\u3400-\u9fff]")),
    ("ko", re.compile("[\uac00-\ud7af]")),
    ("ru", re.compile("[\u0400-\u04ff]")),
    ("ar", re.compile("[\u0600-\u06ff]")),
    ("hi", re.compile("[\u0900-\u097f]")),
)


def spoken_length(text: str) -> int:
    """Letters of an alphabet that take about as long to say as `text`."""
    return len(text) + (_LONG - 1) * len(_LONG_CHARACTER.findall(text))


def frames_bound(text: str, language: str, frame_s: float) -> int:
    """Frames after which speaking `text` has certainly run away: .2 s for each letter of `spoken_length`, 5 s at
    least. The same in every language: the script decides."""
    return math.ceil(max(MIN_BOUND_S, SECONDS_PER_LETTER * spoken_length(text)) / frame_s)


def split_text(text: str, language: str, max_characters: int) -> list[str]:
    """`text` in segments of at most `max_characters` (as `spoken_length` counts), as few as sentence ends allow.

    Neighbouring sentences share a segment where they fit. A sentence that is too long is split after clause
    punctuation, else at white space, else anywhere but before a combining mark. Nothing that can be spoken is lost:
    white space at the edges goes, as does a segment without letter or digit. `language` is a name or an ISO code.
    """
    assert max_characters >= MIN_MAX_CHARACTERS, max_characters
    pieces = _sentences(text, _language_code(text, language))
    for split in (_after(_CLAUSE_END), _after(_SPACE), _characters):
        pieces = [
            part
            for piece in pieces
            for part in (_packed(split(piece), max_characters) if _is_long(piece, max_characters) else [piece])
        ]
    segments = (segment.strip() for segment in _packed(pieces, max_characters))
    return [segment for segment in segments if any(character.isalnum() for character in segment)]


def _is_long(piece: str, max_characters: int) -> bool:
    return spoken_length(piece.strip()) > max_characters


def _packed(pieces: list[str], max_characters: int) -> list[str]:
    """Neighbours joined while they fit."""
    packed: list[str] = []
    for piece in pieces:
        if packed and not _is_long(packed[-1] + piece, max_characters):
            packed[-1] += piece
        else:
            packed.append(piece)
    return packed


def _sentences(text: str, code: str) -> list[str]:
    """`text` cut after every sentence, white space kept: the parts join to the whole."""
    # The splitter slices bytes where it meets white space of several bytes (U+3000, U+2028), so it sees none: one
    # character replaces one, and its cuts apply to the original.
    plain = _SPACE.sub(lambda found: "".join(c if c in "\n\r\t" else " " for c in found[0]), text)
    sentences, start = [], 0
    for sentence in sentencex.segment(code, plain):
        sentences.append(text[start : start + len(sentence)])
        start += len(sentence)
    assert start == len(text), "the sentence splitter lost text"
    return sentences


def _after(pattern: re.Pattern[str]) -> Callable[[str], list[str]]:
    """A function that cuts after every match of `pattern`; the parts join to the whole."""

    def cut(piece: str) -> list[str]:
        ends = [0, *(found.end() for found in pattern.finditer(piece)), len(piece)]
        return [piece[start:end] for start, end in itertools.pairwise(ends) if end > start]

    return cut


def _characters(piece: str) -> list[str]:
    """Single characters, each with the combining marks that follow it."""

    def clusters() -> Iterator[str]:
        start = 0
        for index in range(1, len(piece)):
            if not unicodedata.category(piece[index]).startswith("M") or index - start > _MAX_MARKS:
                yield piece[start:index]
                start = index
        yield piece[start:]

    return list(clusters())


def _language_code(text: str, language: str) -> str:
    """What the sentence splitter calls `language`; where that is not known, the language its script suggests."""
    name = language.lower()
    if name in _LANGUAGE_CODES:
        return _LANGUAGE_CODES[name]
    if len(name) == 2 and name.isascii():
        return name
    return next((code for code, script in _SCRIPTS if script.search(text)), "en")
