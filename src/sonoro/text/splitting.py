"""Splits text into segments that are spoken one by one, and bounds their durations. Knows no tokeniser and no model.

Length is counted in letters: a CJK character, a digit or a capital (which may be spelled out) counts as three, as it
takes about as long to say."""

from __future__ import annotations

import bisect
import itertools
import math
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import sentencex

from sonoro.core.config import MIN_BOUND_S, MIN_SEGMENT_LETTERS
from sonoro.core.script import Line, Span
from sonoro.core.types import is_speakable
from sonoro.text.origins import Origins

LETTERS_PER_S = 15.0
"""The rate of ordinary speech."""

SECONDS_PER_LETTER = 3 / LETTERS_PER_S
"""The slowest rate: a third of ordinary speech."""

_LONG = 3
_AHEAD = 64
_MAX_MARKS = 8
_LONG_CHARACTER = re.compile(
    "[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff0-9０-９A-Z]"
)

_CLAUSE_END = re.compile(r"[,;:][\"')\]]*(?:\s+|(?=[\u3040-\u9fff]))|[、，；：—–…]+[”’»」』）]*\s*")
_SPACE = re.compile(r"\s+")
_SPACELESS = re.compile("[\u3000-\u30ff\u3400-\u9fff\uf900-\ufaff\uff00-\uffef]")
"""Characters and punctuation of scripts without spaces between words."""

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


Measure = Callable[[str], int]


@dataclass(frozen=True)
class SpokenText:
    """A text as it is spoken, and which part of the written text each of its characters comes from.
    `trace` tells those origins; it is called once they are needed. Without it, `text` is the written text."""

    text: str
    trace: Callable[[], Sequence[Span]] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def origins(self) -> Sequence[Span]:
        """For each character the range of the written text that it comes from: for an expansion all of the expanded
        text, for an addition an empty range."""
        return [(at, at + 1) for at in range(len(self.text))] if self.trace is None else self.trace()

    @cached_property
    def letters(self) -> int:
        """`spoken_length` of the text."""
        return spoken_length(self.text)

    def span(self, start: int, end: int) -> Span:
        """The range of the written text that characters `start` to `end` come from."""
        first = self.origins[start][0]
        return first, self.origins[end - 1][1] if start < end else first

    def part(self, start: int, end: int) -> SpokenText:
        """The text from character `start` to `end`."""
        return SpokenText(self.text[start:end], lambda: self.origins[start:end])

    def stripped(self) -> SpokenText:
        """The text without white space at its ends."""
        return self.part(len(self.text) - len(self.text.lstrip()), len(self.text.rstrip()))

    def through(self, origins: Origins) -> SpokenText:
        """The text, of which the written text has `origins` itself: its origins are composed with those."""

        def trace() -> list[Span]:
            spans = (origins.span(start, end) for start, end in self.origins)
            return [(start, max(start, end)) for start, end in spans]

        return SpokenText(self.text, trace)

    def moved(self, by: int) -> SpokenText:
        """The text of which the written text begins at character `by` of a longer one."""
        return SpokenText(self.text, lambda: [(start + by, end + by) for start, end in self.origins])


def joined(parts: Sequence[SpokenText], separator: str = "") -> SpokenText:
    """`parts` with `separator` between them."""

    def trace() -> list[Span]:
        origins: list[Span] = []
        for number, part in enumerate(parts):
            at = origins[-1][1] if origins else 0
            origins += [*[(at, at)] * (len(separator) if number else 0), *part.origins]
        return origins

    return SpokenText(separator.join(part.text for part in parts), trace)


def replaced(text: SpokenText, pattern: re.Pattern[str], made: Callable[[re.Match[str]], str]) -> SpokenText:
    """`text` with each match of `pattern` replaced; what replaces it comes from where the match did."""
    found = list(pattern.finditer(text.text))
    if not found:
        return text
    whole = pattern.sub(made, text.text)

    def trace() -> list[tuple[int, int]]:
        origins, at = list[tuple[int, int]](), 0
        for match in found:
            start, end = match.span()
            origins += text.origins[at:start]
            origins += [text.span(start, end)] * len(made(match))
            at = end
        return [*origins, *text.origins[at:]]

    return SpokenText(whole, trace)


@dataclass(eq=False)
class Segment:
    """The text of one prompt: `spoken`, which is written as characters `start` to `end` of the request's text.
    For live text, `ids` are the token ids known so far, all of them once it `is_whole`. `line` is that of a script
    which it belongs to, and which it `ends_line`; `lead_s` of silence come before it."""

    spoken: SpokenText
    start: int
    end: int
    ids: list[int] | None = None
    is_whole: bool = True
    line: Line | None = None
    ends_line: bool = False
    lead_s: float = 0.0

    @property
    def text(self) -> str:
        return self.spoken.text

    def halve(self, language: str) -> Segment | None:
        """Cut the segment at the sentence end nearest to its middle, and return the second half; None if it is one
        sentence or has `ids`."""
        ends = [] if self.ids is not None else _sentence_ends(self.text, language)
        ends = [end for end in ends if is_speakable(self.text[:end]) and is_speakable(self.text[end:])]
        if not ends:
            return None
        cut = min(ends, key=lambda end: abs(2 * end - len(self.text)))
        rest = self.cut(cut, self.spoken.origins[cut][0])
        self.spoken = self.spoken.part(0, len(self.text.rstrip()))
        return rest

    def cut(self, at: int, written: int) -> Segment:
        """Cut the segment before character `at`, which is written at character `written` of the request's text; return
        the rest."""
        rest = Segment(self.spoken.part(at, len(self.text)).stripped(), written, self.end)
        rest.line, rest.ends_line, self.ends_line = self.line, self.ends_line, False
        self.spoken, self.end = self.spoken.part(0, at), written
        return rest


def placed(parts: Sequence[SpokenText], start: int, end: int) -> list[Segment]:
    """The segments of `parts`, which are together written as characters `start` to `end` of a request's text."""
    segments: list[Segment] = []
    for number, part in enumerate(parts, start=1):
        segments.append(Segment(part, start, end if number == len(parts) else part.origins[-1][1]))
        start = segments[-1].end
    return segments


def spoken_length(text: str) -> int:
    """The number of letters that take about as long to say as `text`."""
    return len(text) + (_LONG - 1) * len(_LONG_CHARACTER.findall(text))


def frames_bound(text: str, frame_s: float) -> int:
    """Frames after which speaking `text` is a runaway: .2 s per letter of `spoken_length`, 5 s at least."""
    return math.ceil(max(MIN_BOUND_S, SECONDS_PER_LETTER * spoken_length(text)) / frame_s)


def frames_expected(text: str, frame_s: float) -> int:
    """Frames that `text` takes in ordinary speech, plus a second."""
    return math.ceil((1.0 + spoken_length(text) / LETTERS_PER_S) / frame_s)


def split_text(spoken: SpokenText, language: str, max_letters: int) -> list[SpokenText]:
    """Split `spoken` into segments of at most `max_letters` (as `spoken_length` counts).
    Neighbouring sentences share a segment if they fit. A longer sentence is split after clause punctuation, else at
    white space, else anywhere but before a combining mark. Only white space between segments and at the end, and
    segments without a letter or digit, are dropped. `language` is a name or an ISO code."""
    assert max_letters >= MIN_SEGMENT_LETTERS, max_letters
    pieces = _sentences(spoken.text, _language_code(spoken.text, language))
    for split in (partial(_after, _CLAUSE_END), partial(_after, _SPACE), _characters):
        pieces = [
            part
            for piece in pieces
            for part in (_packed(split(piece), max_letters) if _is_long(piece, max_letters) else [piece])
        ]
    segments, start = [], 0
    for piece in _packed(pieces, max_letters):
        if is_speakable(piece):
            lead = len(piece) - len(piece.lstrip()) if start else 0
            segments.append(spoken.part(start + lead, start + len(piece.rstrip())))
        start += len(piece)
    return segments


def join_text(segments: Sequence[str]) -> str:
    """Join `segments` of one text by spaces, but without one beside Chinese or Japanese."""
    joined = segments[0]
    for segment in segments[1:]:
        is_spaced = joined[-1:].isascii() or not (_SPACELESS.match(joined[-1:]) or _SPACELESS.match(segment))
        joined += (" " if is_spaced else "") + segment
    return joined


def cut_live(
    text: str, given: int, language: str, max_letters: int, *, is_last: bool, length: Measure | None = None
) -> tuple[int, bool]:
    """How many characters of arriving `text` may be spoken now as one segment, and whether the segment ends there.

    `given` characters were released before. Text that ends (`is_last`) within `max_letters` is one segment, as for
    `split_text`. Otherwise text is released at once up to a sentence end past the segment's middle, from there by whole
    sentences that fit; the segment ends at a sentence end, else after a clause, else at white space, else anywhere.
    `length` measures a text (default: `spoken_length`)."""
    length, middle = length or spoken_length, max_letters // 2
    window = text[: 2 * max_letters + _AHEAD]
    letters = length(text.strip()) if len(window) == len(text) else math.inf
    if letters <= max_letters and (is_last or letters < middle):
        return len(text), is_last
    ends = _sentence_ends(window, language)
    if letters <= max_letters:
        is_past_middle = any(length(text[:end].strip()) >= middle for end in ends)
        return max(given, ends[-1] if is_past_middle else len(text)), False
    for cuts in (ends, _ends_of(_CLAUSE_END, window), _ends_of(_SPACE, window), range(1, len(window) + 1)):
        fitting = [cut for cut in cuts if cut >= max(given, 1)]
        # Lengths grow with the text, so the longest that fits is found by bisection.
        fits = bisect.bisect_right(fitting, max_letters, key=lambda cut: length(window[:cut].strip()))
        if fits:
            return fitting[fits - 1], True
    return max(given, 1), True


def cut_sentence(text: str, language: str, max_letters: int, *, is_last: bool) -> int:
    """How many characters of arriving `text` are its first complete sentence, or the part of a longer one that a
    segment can hold; 0 while that is unknown."""
    ends = _sentence_ends(text[: 2 * max_letters + _AHEAD], language)
    cut, is_cut = (ends[0], True) if ends else cut_live(text, 0, language, max_letters, is_last=is_last)
    return cut if is_cut else 0


def _sentence_ends(text: str, language: str) -> list[int]:
    """The ends of all sentences but the last."""
    return list(itertools.accumulate(map(len, _sentences(text, _language_code(text, language)))))[:-1]


def _is_long(piece: str, max_letters: int) -> bool:
    return spoken_length(piece.strip()) > max_letters


def _packed(pieces: list[str], max_letters: int) -> list[str]:
    """Join neighbouring `pieces` while they fit."""
    packed: list[str] = []
    for piece in pieces:
        if packed and not _is_long(packed[-1] + piece, max_letters):
            packed[-1] += piece
        else:
            packed.append(piece)
    return packed


def _sentences(text: str, code: str) -> list[str]:
    """Cut `text` after every sentence, keeping white space: the parts join to the whole."""
    # The splitter fails on multi-byte white space (U+3000, U+2028), so replace it one to one; the cuts still apply.
    plain = _SPACE.sub(lambda found: "".join(c if c in "\n\r\t" else " " for c in found[0]), text)
    ends = list(itertools.accumulate(map(len, sentencex.segment(code, plain)), initial=0))
    assert ends[-1] == len(text), "the sentence splitter lost text"
    return [text[start:end] for start, end in itertools.pairwise(ends)]


def _after(pattern: re.Pattern[str], piece: str) -> list[str]:
    """Cut `piece` after every match of `pattern`; the parts join to the whole."""
    ends = [0, *_ends_of(pattern, piece), len(piece)]
    return [piece[start:end] for start, end in itertools.pairwise(ends) if end > start]


def _ends_of(pattern: re.Pattern[str], text: str) -> list[int]:
    return [found.end() for found in pattern.finditer(text)]


def _characters(piece: str) -> list[str]:
    """Single characters with their combining marks."""
    clusters, start = [], 0
    for index in range(1, len(piece)):
        if not unicodedata.category(piece[index]).startswith("M") or index - start > _MAX_MARKS:
            clusters.append(piece[start:index])
            start = index
    return [*clusters, piece[start:]]


def language_name(code: str) -> str:
    """The name of the language with the ISO `code`; the code itself if it is unknown, or a name already."""
    return next((name for name, known in _LANGUAGE_CODES.items() if known == code.lower()), code.lower())


def _language_code(text: str, language: str) -> str:
    """The sentence splitter's code of `language`; if unknown, that of the language suggested by the script."""
    name = language.lower()
    if name in _LANGUAGE_CODES:
        return _LANGUAGE_CODES[name]
    if len(name) == 2 and name.isascii():
        return name
    return next((code for code, script in _SCRIPTS if script.search(text)), "en")
