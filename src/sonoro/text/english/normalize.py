"""Text normalisation for English: writes everything out in letters, for voices that read nothing else.

What is read how, is in `rules`. Knows no voice, no tokenizer and no sentence splitting."""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from types import MappingProxyType

from sonoro.core.errors import InvalidRequest
from sonoro.text.english.roman import Rule
from sonoro.text.english.rules import RULES, SUPERSCRIPTS, compiled, feet, power
from sonoro.text.splitting import Span, SpokenText

_KEPT_TEXTS = 16
"""Texts whose normalised form is kept: a caller may ask for remarks about a text that is then spoken."""


@dataclass(frozen=True)
class NormalizedText(SpokenText):
    """`text` has only letters, spaces and . , ? ! ' and ends in one of . ? ! unless it is empty. `dropped` has each
    character that could not be spoken, once, in order of appearance."""

    dropped: str = ""


_FOLDED = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛`´ʼ′", "'"),
        **dict.fromkeys('“”„‟«»‹›″"', " "),
        **dict.fromkeys("‐‑", "-"),
        **{
            "−": " minus ",
            "→": " to ",
            "⇒": " to ",
            "·": " ",
            "¿": " ",
            "¡": " ",
            "∞": " infinity ",
            "√": " the square root of ",
        },
        **dict.fromkeys("—―", " -- "),
        "–": "--",
        **{"ß": "ss", "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "ı": "i"},
        **{"đ": "d", "Đ": "D", "þ": "th", "Þ": "Th", "ð": "d", "Ð": "D", "×": " times ", "÷": " divided by "},
        # Signs whose meaning would be lost in ASCII.
        **{"≠": " is not equal to ", "≤": " is at most ", "≥": " is at least ", "≈": " is about "},
        **{"±": " plus or minus ", "№": "number ", "§": " section ", "©": " copyright ", "®": " registered "},
        "™": " trademark ",
    }
)


def _fold_character(match: re.Match[str]) -> str:
    decomposed = unicodedata.normalize("NFKD", match[0].translate(_FOLDED)).translate(_FOLDED)
    return "".join(c for c in decomposed if c in "\n\t" or unicodedata.category(c) not in ("Mn", "Cf", "Cc", "Me"))


_FOLD: list[Rule] = compiled(
    [
        (r"(?<![\d.])(\d{1,2})\s?['′’]\s?(\d{1,2})\s?(?:[\"″”]|'')", feet),
        # Superscript digits are not part of the number before them.
        # Behind longer words they mark a note, but for squares and cubes of two letters: km², mc².
        (rf"(?<=\d)([{SUPERSCRIPTS}]+)|(?<=\b[A-Za-z])([{SUPERSCRIPTS}]+)|(?<=\b[A-Za-z]{{2}})([²³])(?!\w)", power),
        (rf"(?<=\w)(?=[{SUPERSCRIPTS}])|(?<=\d)(?=[¼-¾⅐-⅞])", " "),
        (r"[^\n\t -~]|[\"`]", _fold_character),
    ]
)


def _ending(match: re.Match[str]) -> str:
    marks = match[0]
    return next(mark for mark in "?!." if mark in marks) + " "


_TIDY: list[Rule] = [
    (re.compile(r"\s{2,}|[^\S ]"), " "),
    (re.compile(r"(?<![ ,])[ ,]*[.?!][ .,?!]*"), _ending),
    (re.compile(r" ?,[ ,]*"), ", "),
    (re.compile(r"^[ ,.?!]+|(?<![ ,])[ ,]+$"), ""),
]
_UNREAD = re.compile(r"[^A-Za-z.,?!'\s]")
_LAST: list[Rule] = [(_UNREAD, " "), *_TIDY, *compiled([(r"^\s+|\s+$", ""), (r"(?s)(?<=[^.?!])\Z", ".")])]

Edit = tuple[int, str, str]
"""A replacement in a text: at which character, of what, and by what."""


@dataclass(frozen=True)
class _Written:
    """A text of `length` characters that has become `text` by the `edits` of each rule."""

    text: str
    length: int
    edits: tuple[list[Edit], ...] = ()

    def apply(self, rules: Iterable[Rule]) -> _Written:
        """The text after `rules` in order, each at every match."""
        text, made = self.text, list[list[Edit]]([[]])
        for pattern, replacement in rules:
            text = pattern.sub(partial(_replace, made[-1], replacement), text)
            if made[-1]:
                made.append([])
        return _Written(text, self.length, (*self.edits, *made[:-1]))

    def origins(self) -> list[Span]:
        """For each character of `text`, the range of the written text that it comes from."""
        return reduce(_edited, self.edits, [(at, at + 1) for at in range(self.length)])


def _replace(edits: list[Edit], replacement: str | Callable[[re.Match[str]], str], match: re.Match[str]) -> str:
    """What replaces `match`, which is added to `edits`."""
    if isinstance(replacement, str):
        new = match.expand(replacement) if "\\" in replacement else replacement
    else:
        new = replacement(match)
    if new != match[0]:
        edits.append((match.start(), match[0], new))
    return new


def _edited(origins: list[Span], edits: Sequence[Edit]) -> list[Span]:
    """The `origins` of a text after `edits`. Words that a match and its replacement share keep theirs; the text between
    them gets the range between."""
    edited: list[Span] = []
    at = 0
    for start, old, new in edits:
        edited += origins[at:start]
        for old_start, old_end, new_start, new_end in _matching(old, new):
            replaced = slice(start + old_start, start + old_end)
            is_kept = old[old_start:old_end] == new[new_start:new_end]
            edited += origins[replaced] if is_kept else [_hull(origins, replaced)] * (new_end - new_start)
        at = start + len(old)
    return edited + origins[at:]


def _hull(origins: list[Span], replaced: slice) -> Span:
    """The range that the `origins` of the `replaced` characters cover; empty if there are none."""
    if spans := origins[replaced]:
        return spans[0][0], max(end for _, end in spans)
    end = origins[replaced.start - 1][1] if replaced.start else 0
    return end, end


_RUN = re.compile(r"\w+")


def _matching(old: str, new: str) -> Iterator[tuple[int, int, int, int]]:
    """Align `old` and `new`: pairs of corresponding spans that cover both, of shared words and of what is between."""
    olds, news = ([(found[0], *found.span()) for found in _RUN.finditer(text)] for text in (old, new))
    old_at = new_at = 0
    if {word for word, *_ in olds} & {word for word, *_ in news}:
        blocks = difflib.SequenceMatcher(None, [w for w, *_ in olds], [w for w, *_ in news], autojunk=False)
        for first, second, length in blocks.get_matching_blocks():
            for at in range(length):
                (_, old_start, old_end), (_, start, end) = olds[first + at], news[second + at]
                yield old_at, old_start, new_at, start
                yield old_start, old_end, start, end
                old_at, new_at = old_end, end
    yield old_at, len(old), new_at, len(new)


def check_readable(text: str) -> None:
    """Raise `InvalidRequest`, naming the script, if more letters of `text` are unreadable than readable."""
    folded = _Written(text, len(text)).apply(_FOLD).text
    # A single Greek letter is read by its name.
    words = re.findall(r"[^\W\d_a-zA-Z]{2,}|[^\W\d_a-zA-ZͰ-Ͽ]", folded)
    foreign = Counter(_script(letter) for word in words for letter in word)
    if foreign.total() > sum(letter.isascii() and letter.isalpha() for letter in folded):
        [(script, _)] = foreign.most_common(1)
        raise InvalidRequest("text", text, f"it is written in {script}; this voice reads English, in Latin letters")


def normalize_english(
    text: str, *, lowercase: bool = False, respellings: Mapping[str, str] = MappingProxyType({})
) -> NormalizedText:
    """Normalise `text` to its spoken form. What has none is dropped and reported, never guessed. `respellings` maps
    lower-case spoken words to the spelling to use; a letter's is used where its capital begins an initialism.
    Idempotent. The result's text is empty if nothing speakable is left."""
    written, dropped = _written_out(text)
    if respellings:
        # A letter only as a capital that begins an initialism: neither the s of "747's" nor that of "US".
        letter = r"(?<!\w')(?<!\b[A-Z] )"
        keys = [rf"{letter}{key.upper()}" if len(key) == 1 else f"(?i:{re.escape(key)})" for key in respellings]
        words = re.compile(rf"\b(?:{'|'.join(keys)})\b")
        written = written.apply([(words, lambda match: respellings[match[0].lower()])])
    return NormalizedText(written.text.lower() if lowercase else written.text, written.origins, dropped)


@lru_cache(_KEPT_TEXTS)
def _written_out(text: str) -> tuple[_Written, str]:
    """`text` after all rules, and the characters that were dropped."""
    written = _Written(text, len(text)).apply([*_FOLD, *RULES])
    dropped = "".join(dict.fromkeys(_UNREAD.findall(written.text)))
    return written.apply(_LAST), dropped


def _script(letter: str) -> str:
    """The name of the script of `letter`, by Unicode."""
    name = unicodedata.name(letter, "an unknown script").split()[0]
    known = {"CJK": "Chinese characters", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean"}
    return known.get(name, name.title())
