"""Names of letters and digits: B2A23C, x86-64, i7-9700K, a Boeing 747-400, covid-19, MIG-25."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, POSSIBLE, SURE, Candidate, Piece, before
from sonoro.text.english.numbers import cardinal, decade, digits, grouped

from .common import pieces, whole
from .initialism import is_spelled, spell

STARTS = ("letter", "digit")

_MIXED = re.compile(r"(?=[\w.-]{0,63}\d)(?=[\w.-]{0,63}[A-Za-z])[A-Za-z\d]{1,32}(?:[-/][A-Za-z\d]{1,32}){0,8}(?![\w@])")
_MODEL = re.compile(
    r"(?<!pages )(?:7[0-9]7-(?:\d00|[1-9]0?)|(?:A3\d0|A\d{3}|MD|DC)-\d{1,4})[A-Z]{0,2}(?P<s>s)?(?![\w-])"
)
_STANDARD = re.compile(r"[A-Z]\.(?P<number>\d{3,4})(?![\w.,]*\d)")
_CLAUSE = re.compile(r"(?P<letter>[A-Z])\.(?P<number>\d{1,2}(?:\.\d{1,2}){0,3})(?![\w]|\.\w)")
"""A clause of a contract, a figure of an appendix: D.3."""

_EPISODE = re.compile(r"[Ss]0?(?P<s>\d{1,2})[Ee]0?(?P<e>\d{1,2})(?!\w)")
_PAPER = re.compile(r"(?P<name>arXiv):(?P<month>\d{4})(?P<dot>\.)(?P<number>\d{4,5})(?:v(?P<version>\d{1,2}))?(?!\w)")
_DOCKET = re.compile(r"(?P<one>\d{1,3})-(?P<two>\d{3,5})(?![\w-]|[.,]\d)")
_OF_DOCKET = re.compile(r"\b(?:[Nn]o\.|[Nn]umber|[Rr]oom|Rm\.|[Cc]ase|[Uu]nit|[Ss]uite|Ste\.) $")
"""A number in two parts: No. 21-1234, Room 3-214."""

_HARDWARE = re.compile(r"(?:[\dA-Fa-f]{2}:){5}[\dA-Fa-f]{2}(?![\w:])")
_CODE = re.compile(r"(?!\d/\d\d?-\d/)\d{1,6}(?:[-/]\d{1,6}){2,8}(?![\w])")
_PARTS = re.compile(r"[A-Za-z]+|\d+|[-/]")
_PLURAL = re.compile(r"(?P<name>[A-Z]{1,3})-?(?P<number>[1-9]\d{1,2})s(?!\w)")
_SERIES = re.compile(r"(?:^|-)[A-Z]{1,4}-$")
_PREFIX = re.compile(r"(?:pre|post|mid|anti|non|early|late|sub|super|trans|all|top|under|over)-\d")
_CODES = "pnr|otp|code|ref|id|serial|plate|vin"
NEAR = rf"{_CODES}|tracking|consignment|no"
_CODED = re.compile(
    rf"(?i)\b(?:{_CODES}|(?:tracking|consignment)(?= no| number|:))"
    r"(?: no\.?| number)?(?: is)?:? #?$"
)
_LONG = re.compile(r"(?=[A-Z\d]{10})[A-Z\d]*\d[A-Z]+\d")
"""A code of ten characters or more, with digits before and behind its letters."""
_CHIP = re.compile(r"^[im]\d-$")
_WORDS = re.compile(r"[a-z]{3,}|[A-Z][a-z]+|in|of|to|on|by|at|or|up|is|it|no|so|an|as")
_CAMEL = re.compile(r".*[a-z]{3}|(?:[A-Z][a-z]+){2,}$")
_JOINED = re.compile(r"[\w$£€#@.]$|\d[,:/-]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    context = before(text, at)
    if _JOINED.search(context):
        return
    if found := _HARDWARE.match(text, at):
        yield whole(
            found,
            SURE / 2,
            " ".join(digits(sign) if sign.isdecimal() else spell(sign) for sign in found[0] if sign != ":"),
        )
    if found := _PLURAL.match(text, at):
        yield pieces(found, SURE / 2, (spell(found["name"]), "name"), (decade(found["number"]), "number"))
    if found := _STANDARD.match(text, at):
        yield whole(found, SURE, f"{spell(found[0][0])} dot {grouped(found['number'])}")
    if found := _CLAUSE.match(text, at):
        number = " point ".join(cardinal(part) for part in found["number"].split("."))
        yield pieces(found, SURE, (spell(found["letter"]), "letter"), (f"point {number}", "number"))
    if text[at] == "a" and (found := _PAPER.match(text, at)):
        version = f"version {cardinal(found['version'])}" if found["version"] else ""
        paper = (digits(found["month"]), "month"), ("dot", "dot"), (digits(found["number"]), "number")
        yield pieces(found, SURE / 2, ("archive", "name"), *paper, (version, "version"))
    if (
        text[at] <= "9"
        and "-" in text[at + 1 : at + 4]
        and (found := _DOCKET.match(text, at))
        and _OF_DOCKET.search(context)
    ):
        yield pieces(found, SURE, (grouped(found["one"]), "one"), (grouped(found["two"]), "two"))
    if found := _EPISODE.match(text, at):
        yield pieces(found, SURE / 2, (f"season {cardinal(found['s'])}", "s"), (f"episode {cardinal(found['e'])}", "e"))
    if found := _MODEL.match(text, at):
        yield _read(found, SURE, is_paired=True)
    found = _MIXED.match(text, at)
    if found is None:
        found = _CODE.match(text, at)
        if found is not None:
            yield _read(found, POSSIBLE, is_paired=False)
        return
    if not _is_unit_like(found[0]):
        yield _read(found, LIKELY, is_paired=False, is_code=bool(_CODED.search(context) or _LONG.match(found[0])))


def _is_unit_like(name: str) -> bool:
    """Whether it is a number with a few letters behind it (12kg, 5pm, 1st), which other classes read."""
    return (
        _PREFIX.match(name) is not None
        or re.search(
            r"^\d+[sk]$|^\d+x\d+-|^\d+(?:st|nd|rd|th)-|\d(?:st|nd|rd|th|ST|ND|RD|TH|am|pm|AM|PM)$|-\d+s$|-old$|-y/o$|^\d+-(?:ft|in|m|km|cm|mm|lb|kg|mi|yd|oz)-[a-z]"
            r"|^\d{1,2}[ap]m-",
            name,
        )
        is not None
    )


def _read(found: re.Match[str], cost: float, *, is_paired: bool, is_code: bool = False) -> Candidate:
    made: list[Piece] = []
    for part in _PARTS.finditer(found[0]):
        ahead = found[0][: part.start()]
        is_model = is_paired or ahead[-1:].isalpha() or _SERIES.search(ahead) is not None
        said = "slash" if part[0] == "/" else _said(part[0], is_paired=is_model, is_code=is_code)
        if len(part[0]) == 5 and part[0].isdecimal() and _CHIP.match(ahead):
            said = f"{cardinal(part[0][:2])} {grouped(part[0][2:])}"
        if is_paired and part[0] == "s":
            made[-1] = made[-1]._replace(said=f"{made[-1].said}s", end=part.end() + found.start())
        elif part[0] != "-":
            made.append(Piece(said, part.start() + found.start(), part.end() + found.start()))
    return Candidate(found.end(), cost, tuple(made))


def _said(part: str, *, is_paired: bool, is_code: bool) -> str:
    if part.isdecimal():
        if (is_code and not part.endswith("000")) or len(part) > 4 or (part[0] == "0" and len(part) > 1):
            return digits(part)
        return grouped(part) if len(part) == 4 or (is_paired and len(part) == 3) else cardinal(part)
    is_word = (
        _WORDS.fullmatch(part) or _CAMEL.match(part) or (len(part) > 1 and part.isupper() and not is_spelled(part))
    )
    return part if is_word else spell(part)


EXAMPLES = (
    ("a Boeing 747-400, 737-800s", "a Boeing seven forty seven four hundred, seven thirty seven eight hundreds."),
    ("x86-64", "x eighty six sixty four."),
    ("i7-9700K", "i seven ninety seven hundred K."),
    ("B2A23C", "B two ay twenty three C."),
    ("covid-19, MIG-25, C24", "covid nineteen, M I G twenty five, C twenty four."),
    ("an F-150, the B-52s, US-101", "an F one fifty, the B fifty twos, U S one oh one."),
    ("an i9-12900K, Sections D.3 to D.6", "an i nine twelve nine hundred K, Sections D point three to D point six."),
    ("tracking no. 1Z999AA101", "tracking number one Z nine nine nine ay ay one zero one."),
    ("tracking CVE-2021-3013", "tracking C V E twenty twenty one thirty thirteen."),
    (
        "arXiv:2101.00001v2, No. 21-1234",
        "archive two one zero one dot zero zero zero zero one version two, Number twenty one twelve thirty four.",
    ),
    ("your otp is ab9453", "your otp is ay b nine four five three."),
)
