"""Text into segments that can be spoken one by one, and how long they may take. Knows no tokeniser and no model.

Length is counted in letters of an alphabet: a CJK character, a digit and a capital (it may be spelled out) take about
as long to say as three.
"""

from __future__ import annotations

import bisect
import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import sentencex

from sonoro.core.types import is_speakable

__all__ = [
    "LETTERS_PER_S",
    "MIN_BOUND_S",
    "MIN_MAX_CHARACTERS",
    "SECONDS_PER_LETTER",
    "Segment",
    "cut_live",
    "cut_sentence",
    "frames_bound",
    "frames_expected",
    "join_text",
    "segment_ends",
    "split_text",
    "spoken_length",
    "with_lead",
]

LETTERS_PER_S = 15.0
"""Ordinary speech."""

SECONDS_PER_LETTER = 3 / LETTERS_PER_S
"""Three times as slow as ordinary speech."""

MIN_BOUND_S = 5.0
"""A single word may be drawn out, or come with a breath before it."""

MIN_MAX_CHARACTERS = 16
"""The least a segment may be asked to hold."""

_LONG = 3
_AHEAD = 64
_MAX_MARKS = 8
_LONG_CHARACTER = re.compile(
    "[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff0-9０-９A-Z]"
)

_CLAUSE_END = re.compile(r"[,;:][\"')\]]*(?:\s+|(?=[\u3040-\u9fff]))|[、，；：—–…]+[”’»」』）]*\s*")
_SPACE = re.compile(r"\s+")
_SPACELESS = re.compile("[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef]")
"""Characters of scripts that put no space between words, and their marks."""

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


@dataclass(eq=False)
class Segment:
    """What is prompted together: `text`, from character `start` to `end` of the request's own.

    Where a model takes it as it comes, `ids` are those known so far, and `is_whole` says that these are all.
    """

    text: str
    start: int
    end: int
    ids: list[int] | None = None
    is_whole: bool = True
    _counted: tuple[int, int] = (0, 0)

    @property
    def letters(self) -> int:
        """How long it takes to say, as `spoken_length` counts, which is done once for a text that does not grow."""
        if self._counted[0] != len(self.text):
            self._counted = len(self.text), spoken_length(self.text)
        return self._counted[1]

    def halve(self, language: str) -> Segment | None:
        """Cut it after the sentence that ends nearest to its middle: what follows. None where it is one sentence, or
        ids are known of it."""
        ends = [] if self.ids is not None else _sentence_ends(self.text, language)
        ends = [end for end in ends if is_speakable(self.text[:end]) and is_speakable(self.text[end:])]
        if not ends:
            return None
        cut = min(ends, key=lambda end: abs(2 * end - len(self.text)))
        at = self.start + round((self.end - self.start) * cut / len(self.text))
        rest = Segment(self.text[cut:].lstrip(), at, self.end)
        self.text, self.end = self.text[:cut].rstrip(), at
        return rest


def spoken_length(text: str) -> int:
    """Letters of an alphabet that take about as long to say as `text`."""
    return len(text) + (_LONG - 1) * len(_LONG_CHARACTER.findall(text))


def frames_bound(text: str, language: str, frame_s: float) -> int:
    """Frames after which speaking `text` has certainly run away: .2 s for each letter of `spoken_length`, 5 s at
    least. The same in every language: the script decides."""
    return math.ceil(max(MIN_BOUND_S, SECONDS_PER_LETTER * spoken_length(text)) / frame_s)


def frames_expected(text: str, language: str, frame_s: float) -> int:
    """Frames that `text` takes in ordinary speech, with a second to spare. Takes what `frames_bound` does."""
    return math.ceil((1.0 + spoken_length(text) / LETTERS_PER_S) / frame_s)


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
    return [segment for piece in _packed(pieces, max_characters) if is_speakable(segment := piece.strip())]


def with_lead(text: str, segments: list[str]) -> list[str]:
    """`segments` that `text` was split into, the first one with the white space that `text` begins with."""
    spoken = text.lstrip()
    if not segments or not spoken.startswith(segments[0]):
        return segments
    return [text[: len(text) - len(spoken)] + segments[0], *segments[1:]]


def join_text(segments: Sequence[str]) -> str:
    """`segments` that were cut from one text: with a space between them, but not beside Chinese or Japanese."""
    joined = segments[0]
    for segment in segments[1:]:
        is_spaced = joined[-1:].isascii() or not (_SPACELESS.match(joined[-1:]) or _SPACELESS.match(segment))
        joined += (" " if is_spaced else "") + segment
    return joined


def segment_ends(text: str, segments: Sequence[str]) -> list[int]:
    """Where in `text` each of `segments`, into which it was split, ends: in proportion where it was rewritten."""
    ends: list[int] = []
    at, letters = 0, sum(map(len, segments))
    for segment in segments:
        found = text.find(segment, at)
        if found < 0 or is_speakable(text[at:found]):
            at += round((len(text) - at) * len(segment) / letters)
        else:
            at = found + len(segment)
        letters -= len(segment)
        ends.append(at)
    return [*ends[:-1], len(text)] if ends else []


def cut_live(
    text: str,
    given: int,
    language: str,
    max_characters: int,
    *,
    is_last: bool,
    length: Callable[[str], int] | None = None,
) -> tuple[int, bool]:
    """How much of `text`, which is still arriving, may be spoken as one segment, and whether the segment ends there.

    `given` characters were allowed before. Text that ends (`is_last`) within `max_characters` is one segment, as for
    `split_text`. Otherwise a segment is allowed word by word up to a sentence end past its middle, from there by whole
    sentences that fit; it ends at a sentence end, else after a clause, else at white space, else anywhere.
    `length` is how long a text is, `spoken_length` unless told otherwise.
    """
    length, middle = length or spoken_length, max_characters // 2
    window = text[: 2 * max_characters + _AHEAD]
    letters = length(text.strip()) if len(window) == len(text) else math.inf
    if letters <= max_characters and (is_last or letters < middle):
        return len(text), is_last
    ends = _sentence_ends(window, language)
    if letters <= max_characters:
        is_past_middle = any(length(text[:end].strip()) >= middle for end in ends)
        return max(given, ends[-1] if is_past_middle else len(text)), False
    for cuts in (ends, _ends_of(_CLAUSE_END, window), _ends_of(_SPACE, window), range(1, len(window) + 1)):
        fitting = [cut for cut in cuts if cut >= max(given, 1)]
        # Lengths grow with the text, so that the last that fits is found without measuring them all.
        fits = bisect.bisect_right(fitting, max_characters, key=lambda cut: length(window[:cut].strip()))
        if fits:
            return fitting[fits - 1], True
    return max(given, 1), True


def cut_sentence(text: str, language: str, max_characters: int, *, is_last: bool) -> int:
    """How much of `text`, which is still arriving, is a complete sentence, or as much as a segment may hold of a longer
    one; 0 while that is not known."""
    ends = _sentence_ends(text[: 2 * max_characters + _AHEAD], language)
    cut, is_cut = (ends[0], True) if ends else cut_live(text, 0, language, max_characters, is_last=is_last)
    return cut if is_cut else 0


def _sentence_ends(text: str, language: str) -> list[int]:
    """Where a sentence ends that another follows."""
    return list(itertools.accumulate(map(len, _sentences(text, _language_code(text, language)))))[:-1]


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
        ends = [0, *_ends_of(pattern, piece), len(piece)]
        return [piece[start:end] for start, end in itertools.pairwise(ends) if end > start]

    return cut


def _ends_of(pattern: re.Pattern[str], text: str) -> list[int]:
    return [found.end() for found in pattern.finditer(text)]


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
