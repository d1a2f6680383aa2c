"""Version numbers: v1.2.3, 3.11.4, Python 3.11."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, SURE, Candidate, before
from sonoro.text.english.numbers import cardinal, digits, year

from .common import whole
from .initialism import spell

STARTS = ("digit", "letter")

_STAGE = r"(?:[-.]?(?P<stage>alpha|beta|rc|dev|pre|post|(?<=\d)[a-wyz])[.-]?(?P<step>\d{0,4}))?(?!\w|\.\d)"
_DOTTED = re.compile(rf"(?P<number>\d{{1,9}}(?:\.\d{{1,9}}){{2,8}}){_STAGE}")
_LETTER = re.compile(rf"[vV]\.?\s?(?P<number>\d{{1,6}}(?:\.\d{{1,6}}){{0,8}}){_STAGE}")
_TWO = re.compile(r"(?P<major>\d{1,3})\.(?P<minor>\d{2,3})(?![\d]|\.\d)")
_NAMED = re.compile(
    r"(?:Python|PyPy|Ubuntu|iOS|macOS|Android|Node|Java|Kernel|Linux|Windows|PyTorch|Django|Rails|Go|Rust|[Vv]ersions?|Release|release)"
    r"(?:\s|\s?[<>=~!^]{1,2}\s?(?:\d[\w.]{0,9},\s?[<>=~!^]{1,2}\s?){0,3})$"
)
_WIRELESS = re.compile(r"802\.(?P<part>\d{1,2})(?P<letters>[a-z]{1,2})(?!\w|\.\d)")
"""The IEEE's standards."""

_YEAR = re.compile(r"20[1-4]\d$")
_JOINED = re.compile(r"[\w.,$£€/-]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    context = before(text, at)
    if _JOINED.search(context):
        return
    if found := _DOTTED.match(text, at):
        cost = SURE / 2 if _NAMED.search(context) else LIKELY
        yield whole(found, cost, _said(found["number"]) + _stage(found))
    if found := _LETTER.match(text, at):
        yield whole(found, SURE, f"version {_said(found['number'])}{_stage(found)}")
    if found := _WIRELESS.match(text, at):
        yield whole(found, SURE, f"eight oh two dot {cardinal(found['part'])} {spell(found['letters'].upper())}")
    if (found := _TWO.match(text, at)) and _NAMED.search(context) and found["minor"][0] != "0":
        yield whole(found, SURE, f"{cardinal(found['major'])} point {cardinal(found['minor'])}")


def _said(number: str) -> str:
    return " point ".join(
        digits(part) if part[0] == "0" and len(part) > 1 else year(part) if _YEAR.match(part) else cardinal(part)
        for part in number.split(".")
    )


def _stage(found: re.Match[str]) -> str:
    """What follows a version's number: beta one."""
    if not found["stage"]:
        return ""
    stage = found["stage"] if len(found["stage"]) > 2 else spell(found["stage"].upper())
    return f" {stage} {cardinal(found['step'])}" if found["step"] else f" {stage}"


EXAMPLES = (
    ("version 1.2.3", "version one point two point three."),
    ("v2.0", "version two point zero."),
    (
        "v2.0.0-beta.1, 3.13.0rc2",
        "version two point zero point zero beta one, three point thirteen point zero R C two.",
    ),
    ("Wi-Fi 802.11ac", "Wi Fi eight oh two dot eleven ay C."),
    ("Python >=3.10,<3.13", "Python at least three point ten, less than three point thirteen."),
    ("Python 3.11", "Python three point eleven."),
)
