"""Feet and inches by their signs or short names: 5'11", 12", 3' x 4', 211 ft 5 in, 8 x 10 in."""

import re
import unicodedata
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, SURE, Candidate, Piece, after, before
from sonoro.text.english.numbers import count, decimal, ordinal

from .common import NUMBER, is_attributive, pieces, whole
from .fraction import mixed, simple

STARTS = ("digit", "sign")

_PART = r"[½⅓⅔¼¾⅛⅜⅝⅞]|\d{1,2}/\d{1,2}"
_FEET = re.compile(rf"(?P<feet>\d{{1,3}})\s?'\s?-?(?P<inches>\d{{1,2}}(?:\.\d+)?)\s?(?P<part>{_PART})?\s?(?:\"|'')")
_CLOCKED = re.compile(
    r"(?P<minutes>\d{1,3})'\s?(?P<seconds>[1-5][2-9]|[2-5][01]|0\d|\d(?=\.\d))(?P<part>\.\d{1,3})?\s?(?:\"|'')"
)
"""Minutes and seconds: no inches are so many, or padded."""

_FEET_RANGE = re.compile(r"(?P<low>\d{1,3})'(?P<to>\s?(?:-|–|to)\s?)(?=\d{1,3}')")
_INCHES = re.compile(rf"(?:(?P<number>{NUMBER})(?![/\d]))?[\s-]?(?P<part>{_PART})?\s?\"(?!\w)")
_OPEN_QUOTE = re.compile(r"(?:^|[\s(\[])\"(?=\w|$)[^\"]*$")
_SIDES = re.compile(
    rf"(?P<one>{_PART}|{NUMBER})(?P<unit>['\"])?(?P<side>[WDHL])?\s?(?P<by>[x×]|by)\s?"
    rf"(?P<two>{NUMBER})(?P<unit2>['\"])(?P<side2>[WDHL](?!\w))?"
    rf"(?:\s?(?P<by2>[x×]|by)\s?(?P<three>{NUMBER})(?P<unit3>['\"])(?P<side3>[WDHL](?!\w))?)?"
)
_WHOLE = re.compile(NUMBER)
_SIDE = {"W": "wide", "D": "deep", "H": "high", "L": "long"}
_FOOT = re.compile(r"(?P<number>\d{1,5})'(?![\w'])")
_SIZED = re.compile(r"\s?(?:by|tall|wide|long|high|deep|ladder|ceilings?)\b")
_INCH_WORD = re.compile(
    rf"(?:(?P<low>{NUMBER})\s?(?P<by>[x×])\s?)?(?P<number>{NUMBER})"
    rf"(?:\s|(?<=ft \d)|(?<=ft \d\d))(?P<symbol>in)(?P<dot>\.)?"
    r"(?=(?<=\.) [a-z]|\s*(?:$|[.,;:)x×]|by\b|tall|wide|long|thick|high|deep|of (?:rain|snow)))"
)
_INCH_JOINED = re.compile(rf"(?P<number>{NUMBER})-in(?P<dot>\.)?(?![\w-])")
_AFTER_FEET = re.compile(r"\d(?:\s?ft\.?|\s?feet|')\s?$")
_IN_NUMBER = re.compile(r"[\w$£€#]$|\d[.,/]$")
_TO_FEET = re.compile(r"(?P<to>\s?[-–]\s?)(?=\d{1,2}')")
_MINUTE = re.compile(r"(?P<minute>\d{1,3})(?:(?P<plus>\+)(?P<added>\d{1,2}))?'(?![\w'\"])")
_AFTER_MINUTE = re.compile(r"[.,;:)!?]|$| (?:and|or|to|from|with|by|after|when|as|but)\b")
_OF_MATCH = re.compile(r"\bthe (?:\d{1,3}(?:\+\d{1,2})?'(?:,| and|, and) )*$")
"""A minute of a match: in the 45+2' and 78'."""


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if _IN_NUMBER.search(before(text, at, 2)):
        return
    if found := _CLOCKED.match(text, at):
        second = decimal((found["seconds"].lstrip("0") or "0") + (found["part"] or ""))
        minutes = count(found["minutes"], "minute", "minutes")
        yield pieces(found, SURE / 2, (minutes, "minutes"), (f"{second} second{'s' * (second != 'one')}", "seconds"))
    if found := _FEET_RANGE.match(text, at):
        yield pieces(found, SURE, (decimal(found["low"]), "low"), ("to", "to"))
    if found := _FEET.match(text, at):
        made = whole(found, SURE, f"{decimal(found['feet'])} foot {_with_part(found['inches'], found['part'])}")
        yield made
        if to := _TO_FEET.match(text, made.end):
            yield Candidate(to.end(), SURE, (*made.pieces, Piece("to", *to.span("to"))))
    if "'" in text[at + 1 : at + 7] and (found := _MINUTE.match(text, at)) and _is_of_match(text, found):
        yield _minute(found)
    if (
        (found := _INCHES.match(text, at))
        and (found["number"] or found["part"])
        and not _OPEN_QUOTE.search(before(text, at, 80))
    ):
        inches = " inch" if is_attributive(text, at, found.end()) else _inches(found["number"], found["part"])
        yield whole(found, LIKELY, _with_part(found["number"], found["part"]) + inches)
    if found := _SIDES.match(text, at):
        yield _sides(found)
    if (found := _FOOT.match(text, at)) and _SIZED.match(after(text, found.end())):
        is_one = found["number"] == "1" or is_attributive(text, at, found.end())
        yield whole(found, LIKELY, f"{decimal(found['number'])} {'foot' if is_one else 'feet'}")
    if found := _INCH_JOINED.match(text, at):
        yield whole(found, SURE, f"{decimal(found['number'])} inch")
    if found := _INCH_WORD.match(text, at):
        cost = SURE if _AFTER_FEET.search(before(text, at)) or found["dot"] or found["by"] else LIKELY
        low = f"{decimal(found['low'])} by " if found["low"] else ""
        is_attribute = is_attributive(text, at, found.end())
        said = low + decimal(found["number"]) + (" inch" if is_attribute else _inches(found["number"] + low))
        is_end = bool(found["dot"]) and not after(text, found.end()).strip()
        yield whole(found, cost, said, mark="." * is_end)


def _with_part(number: str | None, part: str | None) -> str:
    if not part:
        return decimal(number or "")
    top, bottom = unicodedata.normalize("NFKD", part).replace("⁄", "/").split("/")
    return f"{decimal(number)} and {mixed(top, bottom)}" if number else simple(top, bottom)


def _side(number: str) -> str:
    return (
        simple(*unicodedata.normalize("NFKD", number).replace("⁄", "/").split("/"))
        if not _WHOLE.fullmatch(number)
        else decimal(number)
    )


def _is_of_match(text: str, found: re.Match[str]) -> bool:
    is_named = _OF_MATCH.search(before(text, found.start())) is not None
    return is_named and _AFTER_MINUTE.match(after(text, found.end())) is not None


def _minute(found: re.Match[str]) -> Candidate:
    added = (("plus", "plus"), (decimal(found["added"]), "added")) if found["added"] else ()
    minute = decimal(found["minute"]) if added else f"{ordinal(found['minute'])} minute"
    return pieces(found, SURE / 2, (minute, "minute"), *added)


def _inches(number: str | None, part: str | None = None) -> str:
    return " inch" if number is None or (number == "1" and not part) else " inches"


def _sides(found: re.Match[str]) -> Candidate:
    """The sides of a thing: the unit of all but the last is said where it is written."""
    parts: list[tuple[str, str]] = []
    for number, which, by in (("one", "", ""), ("two", "2", "by"), ("three", "3", "by2")):
        if found[number]:
            unit, side = found[f"unit{which}"], _SIDE.get(found[f"side{which}"], "")
            is_one = found[number] == "1" or _WHOLE.fullmatch(found[number]) is None
            named = {
                "'": "foot" if is_one else "feet",
                '"': _inches(found[number] if not is_one else None).strip(),
            }.get(unit or "", "")
            parts += [("by", by)] * bool(by) + [(f"{_side(found[number])} {named} {side}".strip(), number)]
    return pieces(found, SURE, *parts)


EXAMPLES = (
    ('5\'11" and 12"', "five foot eleven and twelve inches."),
    ("a 3' x 4' rug, 8 x 10 in", "a three feet by four feet rug, eight by ten inches."),
    ("19'32\" and 4'05\"", "nineteen minutes thirty two seconds and four minutes five seconds."),
    ('a 24" monitor, a 9-in. pan', "a twenty four inch monitor, a nine inch pan."),
    (
        "5'4\"-5'6\"; in the 45+2' and 78'",
        "five foot four to five foot six, in the forty five plus two and seventy eighth minute.",
    ),
    ("3/4\" x 10'", "three quarters inch by ten feet."),
    ("6'-8' tall", "six to eight feet tall."),
    ("211 ft 5 in", "two hundred and eleven feet five inches."),
    ('6\' 2½", 3 1/2"', "six foot two and a half, three and a half inches."),
    ('3⅛" or 7/16"', "three and one eighth inches or seven sixteenths inch."),
)
