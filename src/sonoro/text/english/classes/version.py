"""Version numbers: v1.2.3, 3.11.4, Python 3.11."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, SURE, Candidate, before
from sonoro.text.english.numbers import cardinal, digits

from .common import whole

STARTS = ("digit", "letter")

_DOTTED = re.compile(r"\d{1,9}(?:\.\d{1,9}){2,8}(?![\w]|\.\d)")
_LETTER = re.compile(r"[vV]\.?\s?(?P<number>\d{1,6}(?:\.\d{1,6}){0,8})(?![\w]|\.\d)")
_TWO = re.compile(r"(?P<major>\d{1,3})\.(?P<minor>\d{2,3})(?![\d]|\.\d)")
_NAMED = re.compile(
    r"(?:Python|Ubuntu|iOS|macOS|Android|Node|Java|Kernel|Linux|Windows|PyTorch|Django|Rails|Go|Rust|[Vv]ersions?|Release|release)\s$"
)
_CONTEXT = re.compile(r"[\w.,$£€/-]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    context = before(text, at)
    if _CONTEXT.search(context):
        return
    if found := _DOTTED.match(text, at):
        yield whole(found, LIKELY, _said(found[0]))
    if found := _LETTER.match(text, at):
        yield whole(found, SURE, f"version {_said(found['number'])}")
    if (found := _TWO.match(text, at)) and _NAMED.search(context) and found["minor"][0] != "0":
        yield whole(found, SURE, f"{cardinal(found['major'])} point {cardinal(found['minor'])}")


def _said(number: str) -> str:
    return " point ".join(
        digits(part) if part[0] == "0" and len(part) > 1 else cardinal(part) for part in number.split(".")
    )


EXAMPLES = (
    ("version 1.2.3", "version one point two point three."),
    ("v2.0", "version two point zero."),
    ("Python 3.11", "Python three point eleven."),
)
