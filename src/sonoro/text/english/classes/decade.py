"""Decades and centuries: 1980s, '80s, 1960s-80s, mid-1990s, 1420s."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import SURE, Candidate, before
from sonoro.text.english.numbers import cardinal, decade, year

from .common import is_between, pieces, whole

STARTS = ("digit", "sign")

_DECADE = re.compile(
    r"'?(?P<one>(?:1\d|20)\d0|\d0)\s?'?[sS](?P<range>\s?(?:-|–|to)\s?'?(?P<two>(?:1\d|20)\d0|\d0)'?s)?(?:'(?=\s[a-z])|(?![\w']))"
)
_YEARS = re.compile(
    r"(?P<one>1[1-9]\d\d|10[1-9]\d|20\d\d)\s?(?P<dash>-|–|—|/)\s?(?P<two>\d{4}|\d\d)(?P<s>'?s)?(?![\w%]|[.,]\d|\s?(?:-|–)\d)"
)
_SHORT_YEAR = re.compile(r"'(?P<year>0\d)(?![\w'])")
_SAME = re.compile(r"(?P<digit>[1-9])s(?![\w'])")
_BEFORE_SAME = re.compile(r"(?i)\b(?:two|three|four|five|six|all|both|double|triple|no) $|[A-Za-z]-$")
"""Several of one digit: two 9s, all 7s."""

_IN_NUMBER = re.compile(r"[\d$£€]$|\d[.,]$")
_AFTER_THE = re.compile(
    r"(?i)\b(?:\d0s (?:and|or|to)|the|mid-|mid|low|lower|high|upper|early|late|his|her|their|our|my|your|in)\s?$"
)


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if _IN_NUMBER.search(before(text, at, 1)):
        return
    if found := _DECADE.match(text, at):
        is_century = found["one"].endswith("00") and len(found["one"]) == 4
        said = _century(found["one"]) if is_century else decade(found["one"])
        if found["range"]:
            yield pieces(found, SURE, (f"{said} to", "one"), (decade(found["two"]), "two"))
        elif len(found["one"]) == 4 or "'" in found[0] or _AFTER_THE.search(before(text, at)):
            yield whole(found, SURE, said)
    if text[at + 1 : at + 2] == "s" and (found := _SAME.match(text, at)) and _BEFORE_SAME.search(before(text, at)):
        yield whole(found, SURE / 2, cardinal(found["digit"]) + ("es" if found["digit"] == "6" else "s"))
    if found := _SHORT_YEAR.match(text, at):
        yield whole(found, SURE, year(found["year"]))
    if found := _YEARS.match(text, at):
        one, two = found["one"], found["two"]
        later = int(two if len(two) == 4 else one[:2] + two)
        is_joined = found["dash"] != "/" or later == int(one) + 1
        to = "and" if is_between(text, found) else "to"
        if later > int(one) and later < 2200 and is_joined:
            said = (
                decade(two)
                if found["s"]
                else (year(two) if len(two) == 4 else cardinal(two) if two[0] != "0" else year(two))
            )
            yield pieces(found, SURE + 1, (year(one), "one"), (to, "dash"), (said, "two"))


def _century(number: str) -> str:
    return cardinal(number) + "s" if number[1:] == "000" else year(number) + "s"


EXAMPLES = (
    ("the 1980s, '80s and 1910s", "the nineteen eighties, eighties and nineteen tens."),
    ("1960s-80s, mid-1980s", "nineteen sixties to eighties, mid nineteen eighties."),
    (
        "1914–1918, 1980-1986, 1960-80",
        "nineteen fourteen to nineteen eighteen, nineteen eighty to nineteen eighty six, nineteen sixty to eighty.",
    ),
    ("the 2000s", "the two thousands."),
    ("the 1990s' music, low 30s, two 9s", "the nineteen nineties music, low thirties, two nines."),
    ("2011-12, 2019/20, in his 40s", "twenty eleven to twelve, twenty nineteen to twenty, in his forties."),
)
