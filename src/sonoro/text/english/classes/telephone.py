"""Telephone, card and identity numbers and IP addresses: read digit by digit, with a pause between groups."""

import re
from collections.abc import Callable, Iterator

from sonoro.text.english.line import SURE, Candidate, Piece, before
from sonoro.text.english.numbers import digits

from .common import pieces, whole
from .initialism import spell

STARTS = ("digit", "sign", "letter")

_FORMS = (
    re.compile(r"\+\d{1,3}(?:[ .()-]{0,2}\d){6,14}(?![\d])"),
    re.compile(r"(?:1[ .-]?)?(?:\(\d{3}\)[ -]?|\d{3}[ .-])\d{3}[ .-]\d{4}(?:-\d{1,5})?(?![\d]|-\d)"),
    re.compile(r"\d{3}-\d{4}(?![\d-])"),
    re.compile(r"\d{5}-\d{4}(?![\d-])"),
    re.compile(r"\d{1,5}-\d{2,7}-\d{2,6}-[\dX](?![\w-])"),
    re.compile(r"97[89]-\d{1,5}-\d{2,7}-\d{1,6}-[\dX](?![\d])"),
    re.compile(r"\d{3}-\d{2}-\d{4}(?![\d-])|\d{4}([ -])\d{4}\1\d{4}\1\d{4}(?![\d])"),
    re.compile(r"\(0\d{1,4}\)[ -]?\d{3,4}[ -]?\d{3,4}(?![\d-])"),
    re.compile(
        r"0\d{2,4}[ -]\d{3,4}[ -]?\d{3,4}(?![\d-])|0\d{2,4}/\d{5,8}(?![\d/])|0\d[ -]\d{4}[ -]\d{4}(?![\d-])"
        r"|0\d( |\.)\d\d\1\d\d\1\d\d\1\d\d(?![\d-])|1[38]00 \d{3} \d{3}(?![\d-]|[.,]\d)"
    ),
)
_LETTERS = re.compile(
    r"(?:[A-Z]{2}\d\d(?: [A-Z\d]{4}){3,7}(?: [A-Z\d]{1,3})?|[A-Z]{2} ?\d\d \d\d \d\d ?[A-D]"
    r"|GB \d{3} \d{4} \d\d|1Z(?: [A-Z\d]{2,4}){4,6})(?!\w)"
)
"""An IBAN, a British national insurance or VAT number, a parcel's number."""

_LETTERED = re.compile(r"1-8\d\d-(?=[\d-]{0,12}[A-Z])[A-Z\d]{1,12}(?:-[A-Z\d]{1,12}){0,4}(?![\w-])")
_ADDRESS = re.compile(r"(?:\d{1,3}\.){3}\d{1,3}(?::(?P<port>\d{1,5}))?(?P<mask>/\d{1,2})?(?!\w|\.\d)")
_EXTENSION = re.compile(r",?\s?(?P<word>x|[Ee]xt\.?)\s?(?P<number>\d{1,6})\b")
_GROUP = re.compile(r"\d+|[A-Z]+|X")
_JOINED = re.compile(r"[\w.,$£€-]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if _JOINED.search(before(text, at, 1)) and text[at] != "+":
        return
    if found := _ADDRESS.match(text, at):
        yield whole(found, SURE, _ip(found))
    if found := _LETTERED.match(text, at):
        yield _grouped(found, _spoken)
    if found := _LETTERS.match(text, at):
        yield _grouped(found, lambda group: digits(group) if group.isdecimal() else spell(group))
    for form in () if before(text, at, 4) == "ISO " else _FORMS:
        if (found := form.match(text, at)) and found[0][-1] != "(":
            made = _grouped(found, digits)
            extension = _EXTENSION.match(text, made.end)
            yield made
            if extension:
                more = pieces(extension, 0.0, ("extension", "word"), (digits(extension["number"]), "number"))
                yield Candidate(more.end, made.cost, (*made.pieces, *more.pieces))


def _grouped(found: re.Match[str], say: Callable[[str], str]) -> Candidate:
    made: list[Piece] = []
    if found[0].startswith("+"):
        made.append(Piece("plus", found.start(), found.start() + 1))
    for number, group in enumerate(_GROUP.finditer(found[0])):
        if made and made[0].said == "plus" and found[0][: group.end() + 1].endswith("(0)"):
            continue
        start, end = group.start() + found.start(), group.end() + found.start()
        if number:
            made.append(Piece(",", start, start))
        made.append(Piece(say(group[0]), start, end))
    return Candidate(found.end(), SURE / 2, tuple(made))


def _spoken(group: str) -> str:
    if group in ("800", "888", "877", "866"):
        return f"{digits(group[0])} hundred" if group == "800" else digits(group)
    return (
        digits(group)
        if group.isdecimal()
        else group
        if len(group) > 2
        else group.title()
        if group in ("GO", "MY")
        else " ".join(group)
    )


def _ip(found: re.Match[str]) -> str:
    address = found[0].partition(":")[0].partition("/")[0]
    said = " dot ".join(digits(part) for part in address.split("."))
    if found["port"]:
        said += f" port {digits(found['port'])}"
    return said + (f" slash {digits(found['mask'][1:])}" if found["mask"] else "")


EXAMPLES = (
    ("Call 555-1234.", "Call five five five, one two three four."),
    ("555-0100 x123", "five five five, zero one zero zero extension one two three."),
    ("+44 20 7946 0018", "plus four four, two zero, seven nine four six, zero zero one eight."),
    ("+44 (0)20 7946 0018", "plus four four, two zero, seven nine four six, zero zero one eight."),
    ("(123) 123-5678", "one two three, one two three, five six seven eight."),
    ("1-800-GO-2-HAUL", "one, eight hundred, Go, two, HAUL."),
    ("192.168.0.1:8080", "one nine two dot one six eight dot zero dot one port eight zero eight zero."),
    (
        "1300 655 506, 03-1234-5678, 01 42 68 53 00",
        "one three zero zero, six five five, five zero six, "
        "zero three, one two three four, five six seven eight, zero one, four two, six eight, five three, zero zero.",
    ),
    ("(020) 7946 0000", "zero two zero, seven nine four six, zero zero zero zero."),
    ("ssn 111-11-1111", "ssn one one one, one one, one one one one."),
)
