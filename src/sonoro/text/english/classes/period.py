"""Years of an era, quarters, halves and fiscal years, and what is said of a year: 750 BC, 2Q22, H1 2021, fl. 1420."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, SURE, Candidate, before
from sonoro.text.english.numbers import cardinal, ordinal, year
from sonoro.text.english.tables import pairs

from .common import ends_sentence, pieces, whole

STARTS = ("digit", "letter")

_ERA = re.compile(
    r"(?P<year>\d{1,3}(?:,\d{3})+|\d{1,4})s?\s?(?P<era>B\.?C\.?E\.?|B\.?C\.?|A\.?D\.?|C\.?E\.?)(?![A-Za-z])"
)
_ERA_FIRST = re.compile(r"(?P<era>A\.?D\.?) (?P<year>\d{1,4})(?!\d)")
_PART = re.compile(
    r"(?:(?P<number>[1-4])(?P<part>[QH])|(?P<part2>[QH])(?P<number2>[1-4]))"
    r"(?:(?:(?(part2)(?:\s|(?=')|(?=20))|\s?)|\s?(?P<fy>FY)\s?|\s?of\s)(?P<year>(?:19|20)\d\d|'?\d\d)(?![\d%]|[.,]\d))?(?!\w)"
)
_FISCAL = re.compile(
    r"(?P<fy>FY)\s?'?(?P<year>(?:19|20)\d\d|\d\d)(?!\d)"
    r"(?:(?P<to>/|\s?[-–]\s?(?P<fy2>FY)?)(?P<next>(?:20)?\d\d)(?![\w-]))?"
)
_ABBREVIATED = re.compile(r"(?:(?P<word>fl|b|d|r|est|cir)\. ?(?=(?:1\d|20)\d\ds?\b)|(?P<about>ca?)\. ?(?=\d))")
_ABBREVIATIONS = pairs(
    "fl = flourished | ca = circa | c = circa | cir = circa | b = born | d = died | r = reigned | est = established"
)
WORDS = frozenset(_ABBREVIATIONS)
_IN_NUMBER = re.compile(r"[\w$£€]$|\d[.,/:-]$")
_OF_BUSINESS = re.compile(r"(?:\b[Ii]n|\b[Tt]he|\b[Ff]or|[Oo]ur|[Tt]his|[Ll]ast) $")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if _IN_NUMBER.search(before(text, at, 2)):
        return
    if (found := _PART.match(text, at)) and (found["year"] or _is_quarter(text, found)):
        yield _part(found)
    if found := _ERA.match(text, at):
        yield pieces(found, LIKELY, *_era(found), mark="." * ends_sentence(text, found.end()) * found[0].endswith("."))
    if found := _ERA_FIRST.match(text, at):
        said, era = _era(found)
        yield pieces(found, LIKELY, era, said)
    if found := _ABBREVIATED.match(text, at):
        group = "word" if found["word"] else "about"
        yield pieces(found, SURE / 4, (_ABBREVIATIONS[found[group]], group))
    if found := _FISCAL.match(text, at):
        to = "to F Y" if found["fy2"] else "to"
        more = [(to, "to"), (_short_year(found["next"]), "next")] if found["next"] else []
        yield pieces(found, SURE, ("F Y", "fy"), (_short_year(found["year"]), "year"), *more)


def _era(found: re.Match[str]) -> tuple[tuple[str, str], ...]:
    era = " ".join("ay" if letter == "A" else letter for letter in found["era"] if letter.isalpha())
    number = found["year"]
    said = year(number) if len(number) in (3, 4) else cardinal(number)
    return ((said, "year"), (era, "era"))


def _is_quarter(text: str, found: re.Match[str]) -> bool:
    """Whether a quarter without a year is one: the context speaks of business, and Q1 is no question."""
    return found["part2"] == "Q" and _OF_BUSINESS.search(before(text, found.start())) is not None


def _part(found: re.Match[str]) -> Candidate:
    part = "quarter" if "Q" in (found["part"], found["part2"]) else "half"
    said = f"the {ordinal(found['number'] or found['number2'])} {part}"
    of = " of F Y " if found["fy"] else " of "
    return whole(found, SURE, said + (of + _short_year(found["year"]) if found["year"] else ""))


def _short_year(number: str) -> str:
    return year(number.lstrip("'"))


EXAMPLES = (
    ("750 BC and AD 79", "seven fifty B C and ay D seventy nine."),
    ("10,000 BC, 44 B.C.", "ten thousand B C, forty four B C."),
    ("2Q22 and Q3 2023", "the second quarter of twenty two and the third quarter of twenty twenty three."),
    ("H1 2021 or 2H21", "the first half of twenty twenty one or the second half of twenty one."),
    ("in FY2022", "in F Y twenty twenty two."),
    ("fl. 1420", "flourished fourteen twenty."),
)
