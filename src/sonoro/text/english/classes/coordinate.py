"""Coordinates: 40°26′46″N, 40.4461° N, 79° 58' W."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import SURE, Candidate
from sonoro.text.english.numbers import decimal

from .common import pieces

STARTS = ("digit", "sign")

_COORDINATE = re.compile(
    r"(?P<minus>-)?(?P<degrees>\d{1,3}(?:\.\d{1,10})?)\s?°\s?(?:(?P<minutes>\d{1,2}(?:\.\d{1,10})?)\s?'\s?)?(?:(?P<seconds>\d{1,2}(?:\.\d{1,10})?)\s?(?:\"|'')\s?)?"
    r"(?P<side>[NSEW]|[nN]orth|[sS]outh|[eE]ast|[wW]est)?(?![\w])"
)
_SIDES = {"N": "north", "S": "south", "E": "east", "W": "west"}


def recognise(text: str, at: int) -> Iterator[Candidate]:
    found = _COORDINATE.match(text, at)
    if found is None or not (found["minutes"] or found["side"]):
        return
    parts = [("minus", "minus")] if found["minus"] else []
    for name in ("degrees", "minutes", "seconds"):
        if found[name]:
            parts.append((f"{decimal(found[name])} {name[:-1] if found[name] == '1' else name}", name))
    if found["side"]:
        parts.append((_SIDES[found["side"][0].upper()], "side"))
    yield pieces(found, SURE, *parts)


EXAMPLES = (
    ("40°26′46″N", "forty degrees twenty six minutes forty six seconds north."),
    (
        "40.4461° N, 79.98° W",
        "forty point four four six one degrees north, seventy nine point nine eight degrees west.",
    ),
)
