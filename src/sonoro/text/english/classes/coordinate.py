"""Coordinates: 40°26′46″N, 40.4461° N, 79° 58' W."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import SURE, Candidate, before
from sonoro.text.english.numbers import decimal

from .common import pieces

STARTS = ("digit", "sign", "letter")

_COORDINATE = re.compile(
    r"(?:(?P<first>[NSEW])\s)?(?P<minus>-)?(?P<degrees>\d{1,3}(?:\.\d{1,10})?)\s?°\s?(?:(?P<minutes>\d{1,2}(?:\.\d{1,10})?)\s?'\s?)?(?:(?P<seconds>\d{1,2}(?:\.\d{1,10})?)\s?(?:\"|'')\s?)?"
    r"(?P<side>[NSEW]|[nN]orth|[sS]outh|[eE]ast|[wW]est)?(?![\w])"
)
_IN_WORD = re.compile(r"\w$")
_SIDES = {"N": "north", "S": "south", "E": "east", "W": "west"}


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if text[at].isalpha() and (text[at] not in _SIDES or _IN_WORD.search(before(text, at, 1))):
        return
    found = _COORDINATE.match(text, at)
    if found is None or not (found["minutes"] or found["side"] or found["first"]):
        return
    parts = [(_SIDES[found["first"]], "first")] if found["first"] else []
    parts += [("minus", "minus")] if found["minus"] else []
    for name in ("degrees", "minutes", "seconds"):
        if found[name]:
            parts.append((f"{decimal(found[name])} {name[:-1] if found[name] == '1' else name}", name))
    if found["side"]:
        parts.append((_SIDES[found["side"][0].upper()], "side"))
    yield pieces(found, SURE, *parts)


EXAMPLES = (
    ("40°26′46″N", "forty degrees twenty six minutes forty six seconds north."),
    ("N 40° 26'", "north forty degrees twenty six minutes."),
    (
        "40.4461° N, 79.98° W",
        "forty point four four six one degrees north, seventy nine point nine eight degrees west.",
    ),
)
