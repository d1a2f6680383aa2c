"""Ordinal numbers written with digits: 23rd, 1,000th. A wrong ending is read as letters."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, Candidate
from sonoro.text.english.numbers import cardinal, ordinal

from .common import INTEGER, pieces, whole

STARTS = ("digit",)

_ORDINAL = re.compile(rf"({INTEGER})\s?(st|nd|rd|th|ST|ND|RD|TH|(?<=[23])d(?= (?:of|inst|ult|[A-Z][a-z])))\b")
_TO = re.compile(r"[-–](?=\d{1,4}(?:st|nd|rd|th)\b)")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    found = _ORDINAL.match(text, at)
    if found is None or (found.start(2) > found.end(1) and found[2] == "st"):
        return
    number, ending = found[1].replace(",", ""), found[2].lower()
    ending = _ending(number) if ending == "d" else ending
    if ending == _ending(number) and (number[0] != "0" or number == "0"):
        made = whole(found, LIKELY - (found[2] == "d"), ordinal(found[1]))
        yield made
        if to := _TO.match(text, made.end):
            yield Candidate(to.end(), LIKELY, (*made.pieces, *whole(to, 0.0, "to").pieces))
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
    ("4rd", "four r d."),
    ("the 1st-3rd", "the first to third."),
)
