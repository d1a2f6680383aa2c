"""Bounds: a sign before an amount that is compared with nothing: >90%, <$5, >= 2, ~$30."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import SURE, Candidate, before
from sonoro.text.english.tables import pairs

from .common import whole

STARTS = ("sign",)

_BOUND = re.compile(r"(?P<sign>>=|<=|[<>≥≤]|~(?=\s?[$£€¥₹]))\s?(?=-?~?[$£€¥₹]?\.?\d)")
_HEART = re.compile(r"<3(?=\s*(?:$|\n|!|<3))")
_BEFORE_HEART = re.compile(
    r"(?:[!?.)]|<3|\b(?:love|miss|u|ya|you|thanks|thx|best|much|guys|all|it|this|night|day|babe|xo+)) ?$"
)
_SAID = pairs("> = more than | < = less than | >= = at least | <= = at most | ≥ = at least | ≤ = at most | ~ = about")
_COMPARED = re.compile(r"\w\s?$|[)\]%²³°]\s?$|\w\|\s?$|[^\s(\[,;:\"|]$")
"""What is compared: a number, a variable, or whatever touches the sign."""


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if (found := _HEART.match(text, at)) and _BEFORE_HEART.search(before(text, at)):
        yield whole(found, SURE / 4, "heart")
    found = _BOUND.match(text, at)
    if found is None:
        return
    is_word = re.search(r"[A-Za-z]{2}\s$", before(text, at, 3)) and not found[0].endswith(" ")
    if is_word or not _COMPARED.search(before(text, at)):
        yield whole(found, SURE / 2, _SAID[found["sign"]], end=found.end("sign"))


EXAMPLES = (
    (">90% of users", "more than ninety percent of users."),
    ("children >12 and <$5", "children more than twelve and less than five dollars."),
    (">= 2.0, < 3", "at least two point zero, less than three."),
    ("for ~$30; x > 5", "for about thirty dollars, x is greater than five."),
)
