"""Reads English: finds the cheapest way to cut a block of text into classes, and says each. Knows no voice.

Every class offers candidates at each token; what none claims is read as it stands. The sum of the costs decides, so the
order of the classes does not matter. Each written character is accounted for: by the origin of a spoken word, or as
dropped.
"""

import heapq
import itertools
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from types import MappingProxyType, ModuleType

from sonoro.core.types import TextFormat
from sonoro.text.english.heteronyms import places
from sonoro.text.english.line import SIGN, WORD, Candidate, Piece, Recogniser, fold, token_end
from sonoro.text.english.signs import read_sign
from sonoro.text.splitting import Span, SpokenText
from sonoro.text.structure import blocks_of

_SUPERSCRIPTS = frozenset("⁰¹²³⁴⁵⁶⁷⁸⁹⁻₀₁₂₃₄₅₆₇₈₉")
_PLAIN = re.compile(
    r"(?P<word>(?:[a-z]{2,}|a(?! ?[-*/^])|[A-Z][a-z]{2,})(?:'[a-z]+)?)(?P<mark>[.,;:!?]?)(?P<end>\s+|\Z)"
)
"""A word that is none of a class unless it is one of `classes.WORDS`, with the mark and the white space behind it."""

_BEHIND_DOT = re.compile(r"\d|\.?/")
"""What makes a dot or an apostrophe begin a class: .5, '80s, ./run, ../up."""

_AND_OF_NUMBER = re.compile(
    r"\b(?:hundred|thousand|[a-z]+illion)( and) "
    r"(?!a half|one (?:half|quarter|third|[a-z]+th)\b|[a-z]+ (?:halves|quarters|thirds|[a-z]+ths)\b)[a-z]"
)
"""What British English says within a number, and American does not; a fraction behind one has it in both."""

_OWNER = re.compile(r"'s(?!\w)")
_MARKS = "?!.,"
_KEPT_TEXTS = 16
"""Texts whose reading is kept: a caller may ask for remarks about a text that is then spoken."""


@dataclass(frozen=True)
class Reading(SpokenText):
    """What a voice says: `text` has only letters, spaces and . , ? ! ' and ends in one of . ? ! unless it is empty.

    Its origins are spans of the written text, empty for an added mark. `dropped` has each character that could not be
    spoken, once, in order of appearance."""

    dropped: str = ""


@cache
def classes() -> ModuleType:
    """The package of the classes, imported when the first text is read."""
    return import_module("sonoro.text.english.classes")


@cache
def _recognisers(kind: str) -> tuple[Recogniser, ...]:
    """The classes with forms that begin with a token of `kind`."""
    return tuple(module.recognise for module in classes().CLASSES if kind in module.STARTS)


def read_block(text: str, origins: Sequence[Span] | None = None) -> tuple[list[Piece], str]:
    """Read one block (a paragraph or a heading) of `text`: its pieces, with spans of the written text, and what was
    dropped. `origins` are the spans of its characters in the written text; None: its own."""
    folded, spans = fold(text, origins)
    dropped: list[str] = []
    pieces = [
        Piece(said, *_span(spans, piece.start, piece.end))
        for piece in _cheapest(folded, dropped)
        if (said := " ".join(piece.said.split()))
    ]
    return pieces, "".join(dropped)


def _span(spans: Sequence[Span] | None, start: int, end: int) -> Span:
    if spans is None:
        return start, end
    if start >= end:
        at = spans[start][0] if start < len(spans) else (spans[-1][1] if spans else 0)
        return at, at
    return spans[start][0], max(spans[end - 1][1], spans[start][1])


def _cheapest(text: str, dropped: list[str]) -> Iterator[Piece]:
    """The pieces along the path of least cost through `text`."""
    best: dict[int, tuple[float, int, Sequence[Piece]]] = {0: (0.0, -1, ())}
    ahead: list[int] = []
    end = 0
    while end < len(text):
        start = end
        while ahead and ahead[0] <= start:
            heapq.heappop(ahead)
        if not ahead and start in best and (plain := _plain_words(text, start)):
            # No class begins in these words, and none that began before ends in them.
            words, end = plain
            best[end] = best[start][0], start, words
            continue
        end = token_end(text, start)
        # A candidate may end within a token: VIII's, 29th's.
        inner = [start] if start in best else []
        while ahead and ahead[0] < end:
            if (at := heapq.heappop(ahead)) > start:
                inner.append(at)
        while inner:
            at = inner.pop()
            cost = best[at][0]
            for candidate in _candidates(text, at, end):
                total = cost + candidate.cost
                known = best.get(candidate.end)
                if known is None or total < known[0]:
                    best[candidate.end] = (total, at, candidate.pieces)
                    if candidate.end < end:
                        inner.append(candidate.end)
                    elif candidate.end > end and known is None:
                        heapq.heappush(ahead, candidate.end)
    at, path = len(text), []
    while at > 0:
        _, before, pieces = best[at]
        path.append((before, at, pieces))
        at = before
    for start, end, pieces in reversed(path):
        if not pieces and not text[start:end].isspace():
            dropped += _unspoken(text, start, end)
        yield from pieces if isinstance(pieces, list) else _tiled(text, pieces, start, end)


def _tiled(text: str, pieces: Sequence[Piece], start: int, end: int) -> Iterable[Piece]:
    """`pieces` with spans that leave no letter or digit of `text[start:end]` between them."""
    words = [number for number, piece in enumerate(pieces) if piece.said not in _MARKS]
    if len(pieces) == 1 or not words:
        return (pieces[0]._replace(start=start, end=end),) if words else pieces
    tiled = list(pieces)
    for number, after in itertools.zip_longest(words, words[1:]):
        begin = start if number == words[0] else tiled[number].start
        stop = end if after is None else max(tiled[after].start, begin)
        while stop > begin and text[stop - 1].isspace():
            stop -= 1
        tiled[number] = tiled[number]._replace(start=begin, end=stop)
    return tiled


def _candidates(text: str, start: int, end: int) -> Iterator[Candidate]:
    first = text[start]
    if first.isspace():
        yield Candidate(end, 0.0, ())
        return
    if first.isalpha() or (
        first == "'" and end - start > 1 and text[start + 1].isalpha() and text[start - 1 : start].isalnum()
    ):
        # Behind a word a raised digit is a footnote's mark, if no class reads it as a power.
        cost = WORD if text[end - 1].isalpha() else WORD + 8
        yield Candidate(end, cost if first.isalpha() else 0.0, _word(text[start:end], start))
        kind = "letter"
        if (plain := _PLAIN.match(text, start)) and plain["word"] not in classes().WORDS:
            return
    elif first.isdecimal() and first.isascii():
        kind = "digit"
    else:
        kind = "sign"
        said = None if first in _SUPERSCRIPTS else read_sign(text, start, end)
        yield Candidate(end, SIGN, (Piece(said, start, end),) if said else ())
        if first == "'" and _OWNER.match(text, start) and text[start - 1 : start].isalnum():
            yield Candidate(start + 2, 0.0, (Piece("'s", start, start + 2),))
        if first in ',;:!?"' or (first in ".'" and not _BEHIND_DOT.match(text, end)):
            return
    for recognise in _recognisers(kind):
        for candidate in recognise(text, start):
            if candidate.end > start:
                yield candidate


def _plain_words(text: str, start: int) -> tuple[list[Piece], int] | None:
    """The pieces of the plain words and marks from `start` on, and where they end."""
    pieces: list[Piece] = []
    end, words = start, classes().WORDS
    while (found := _PLAIN.match(text, end)) and found["word"] not in words:
        at = found.end("word")
        pieces.append(Piece(found["word"], end, at))
        if mark := found["mark"]:
            pieces.append(Piece("," if mark in ";:" else mark, at, at + 1))
        end = found.end()
        if end == len(text):
            break
    return (pieces, end) if pieces else None


def _word(word: str, start: int) -> tuple[Piece, ...]:
    """A word as it stands; letters of other scripts are left out."""
    said = "".join(letter for letter in word if letter.isascii())
    if len(word) <= 3 and len(said) < len(word):
        # Greek letters of formulas by their names: α, ΔT, but not a word in Greek.
        named = [unicodedata.name(letter, "").split() for letter in word if not letter.isascii()]
        if len(named) == 1 and named[0][:1] == ["GREEK"]:
            greek = named[0][-1].lower()
            parts = [letter if letter.isascii() else greek for letter in word]
            return tuple(Piece(part, start + n, start + n + 1) for n, part in enumerate(parts) if part.strip("'"))
    if not said.strip("'"):
        return ()
    return (Piece(said.rstrip("'"), start, start + len(word)),)


def _unspoken(text: str, start: int, end: int) -> list[str]:
    """The characters of a stretch without a reading that count as dropped: not the signs that are silent."""
    kept = []
    for at in range(start, end):
        character = text[at]
        if character.isalnum() or (not character.isspace() and read_sign(text, at, at + 1) is None):
            kept.append(character)
    return kept


def compose(blocks: Iterable[tuple[list[Piece], bool]], end: int) -> tuple[str, list[Span]]:
    """Join the pieces of `blocks` to a text with origins. A block that `is_sentence` gets a full stop if it lacks one;
    `end` is the length of the written text."""
    text: list[str] = []
    origins: list[Span] = []
    mark, mark_span = "", (0, 0)
    for pieces, is_sentence in blocks:
        made = [*pieces, Piece("." if is_sentence else ",", *([pieces[-1].end] * 2))] if pieces else []
        for said, start, stop in made:
            if said in _MARKS:
                if not mark or _MARKS.index(said) < _MARKS.index(mark):
                    mark, mark_span = said, (start, stop)
                continue
            is_ending = said[0] == "'" and bool(text) and not mark
            spoken = said if is_ending else said.lstrip("'")
            if not spoken:
                continue
            if text and not is_ending:
                if mark:
                    text.append(mark)
                    origins.append(mark_span)
                text.append(" ")
                origins.append((start, start))
            mark = ""
            text += spoken
            origins += [(start, stop)] * len(spoken)
    if text:
        text.append(mark if mark and mark != "," else ".")
        origins.append(mark_span if mark and mark != "," else (end, end))
    return "".join(text), origins


def read(
    text: str,
    text_format: TextFormat = "auto",
    *,
    lowercase: bool = False,
    respellings: Mapping[str, str] = MappingProxyType({}),
    heteronyms: Mapping[str, str] = MappingProxyType({}),
    context: tuple[str, str] = ("", ""),
    with_code: bool = False,
    locale: str = "en-GB",
) -> Reading:
    """Read English `text` as a voice says it. What cannot be said is dropped and reported, never guessed.

    `respellings` maps lower-case spoken words to the spelling to use; a letter's is used where its capital begins an
    initialism. `heteronyms` maps the readings of words that are written alike ("read:past"), which `context`, what
    stands before and after `text`, helps to tell. `with_code` reads code blocks too. In the `locale` en-US a number
    that is written in figures has no "and". The text is empty if nothing speakable is left."""
    said, origins, dropped = _read(text, text_format, with_code)
    if locale == "en-US" and " and " in said:
        within = (found.span(1) for found in _AND_OF_NUMBER.finditer(said))
        # What is written in words is several pieces, and said as it is written.
        said, origins = _replaced(said, origins, ((*at, "") for at in within if origins[at[0] - 1] == origins[at[1]]))
    if heteronyms:
        before, after = context
        if after:
            after = after[: len(after) - len(after.lstrip(", "))] + _read(after, "plain", with_code)[0]
        said, origins = _replaced(said, origins, places(said, heteronyms, before, after))
    if respellings:
        found = _respelling(tuple(respellings)).finditer(said)
        said, origins = _replaced(said, origins, ((*one.span(), respellings[one[0].lower()]) for one in found))
    return Reading(said.lower() if lowercase else said, lambda: origins, dropped)


@lru_cache(_KEPT_TEXTS)
def _read(text: str, text_format: TextFormat, with_code: bool) -> tuple[str, Sequence[Span], str]:
    dropped: list[str] = []
    blocks = []
    for block in blocks_of(text, text_format, with_code=with_code):
        pieces, lost = read_block(block.text, block.origins)
        blocks.append((pieces, True))
        dropped.append(lost)
    said, origins = compose(blocks, len(text))
    return said, origins, "".join(dict.fromkeys("".join(dropped)))


def _replaced(said: str, origins: Sequence[Span], changes: Iterable[tuple[int, int, str]]) -> tuple[str, list[Span]]:
    """`said` with other spellings in the order of their places; each stands for what the word was written as."""
    text: list[str] = []
    spans: list[Span] = []
    at = 0
    for start, end, new in changes:
        text += said[at:start], new
        spans += origins[at:start]
        spans += [(origins[start][0], origins[end - 1][1])] * len(new)
        at = end
    return "".join([*text, said[at:]]), [*spans, *origins[at:]]


@lru_cache(8)
def _respelling(words: tuple[str, ...]) -> re.Pattern[str]:
    # A letter only as a capital that begins an initialism: neither the s of "747's" nor that of "US".
    letter = r"(?<!\w')(?<!\b[A-Z] )"
    keys = [rf"{letter}{word.upper()}" if len(word) == 1 else f"(?i:{re.escape(word)})" for word in words]
    return re.compile(rf"\b(?:{'|'.join(keys)})\b")
