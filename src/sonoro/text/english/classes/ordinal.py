"""Ordinal numbers written with digits: 23rd, 1,000th. A wrong ending is read as letters."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, SURE, Candidate, before
from sonoro.text.english.numbers import cardinal, ordinal

from .common import INTEGER, pieces, whole

STARTS = ("digit", "letter")

_REPORTER = re.compile(r"(?P<name>[A-Z])\.\s?(?P<number>[23])d\b")
"""A series of law reports: F.3d."""

_ORDINAL = re.compile(rf"({INTEGER})\s?(st|nd|rd|th|ST|ND|RD|TH)\b")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if (found := _REPORTER.match(text, at)) and not before(text, at, 1).isalnum():
        yield pieces(found, SURE / 2, (found["name"], "name"), (ordinal(found["number"]), "number"))
    found = _ORDINAL.match(text, at)
    if found is None or (found.start(2) > found.end(1) and found[2] == "st"):
        return
    number, ending = found[1].replace(",", ""), found[2].lower()
    if ending == _ending(number) and (number[0] != "0" or number == "0"):
        yield whole(found, LIKELY, ordinal(found[1]))
    elif found.start(2) == found.end(1):
        yield pieces(found, LIKELY, (cardinal(found[1]), 1), (" ".join(ending), 2))


def _ending(number: str) -> str:
    if number[-2:-1] == "1":
        return "th"
    return {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th")


EXAMPLES = (
    ("the 1st, 23rd and 101st", "the first, twenty third and one hundred and first."),
    ("1,000th", "one thousandth."),
    ("0th and 11th and 111th", "zeroth and eleventh and one hundred and eleventh."),
    ("123 F.3d 456", "one hundred and twenty three F third four hundred and fifty six."),
    ("4rd", "four r d."),
)
