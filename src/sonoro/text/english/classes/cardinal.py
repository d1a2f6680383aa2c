"""Whole and decimal numbers, with a minus sign where one can stand; the reading of a number that no class claims."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, NUMBER, POSSIBLE, SURE, Candidate, before
from sonoro.text.english.numbers import cardinal, decimal, digits, grouped, year

from .common import NUMBER as FORM
from .common import SCALE, pieces, whole

STARTS = ("digit", "sign")

_NUMBER = re.compile(rf"(?P<minus>-)?(?P<number>{FORM})(?![\d])")
_MINUS = re.compile(r"(?:^|[\s(\[{=:;,/\"?!—–|]|\bto\s)$")
_CONTINENTAL = re.compile(r"\d{1,3}(?:\.\d{3}){1,6}+(?:,\d{1,2})?(?![.,]?\d)")
_SHORT_SCALE = re.compile(
    rf"(?P<number>{FORM})(?P<scale>[kM]|"
    rf"K(?= (?:likes|views|followers|subs|stars|users|downloads)\b)|\s?(?:bn|tn))(?![\w'])"
)
_SCALE_RANGE = re.compile(
    rf"(?P<low>{FORM})(?P<scale1>[kMB])?(?P<to>-|–)(?P<number>{FORM})(?P<scale>[kMB]|bn|tn)(?![\w'])"
)
NEAR = "ran|runs?|running|race|walk"
_AFTER_RUN = re.compile(rf"(?i)\b(?:{NEAR})(?: (?:an?|the|my|his|her|their|first|another))? $")
_BEFORE_RACE = re.compile(r" (?:race|run|walk|jog)\b")
_BORE = re.compile(
    r"\.(?P<bore>\d{2,3})(?:(?P<cal>[ -]cal)\b\.?"
    r"|(?=[ -](?:calib(?:er|re)|ACP|LR|[Mm]agnum|rifles?|pistols?|revolvers?|handguns?|rounds?|bullets?)\b))"
)
_AVERAGE = re.compile(r"\.(?P<average>\d{3})(?![\w.])")
_OF_BATTER = re.compile(r"\b(?:hit(?:s|ting)?|bat(?:s|ted|ting)?|averag(?:es?|ed|ing)|slugg(?:ed|ing)) $")
_SCALES = {"k": "thousand", "m": "million", "b": "billion", "bn": "billion", "tn": "trillion"}
_SCIENTIFIC = re.compile(r"(\d+(?:\.\d+)?)(?:[eE]([+-]?)(\d{1,3})|\s?(?:[x×*]|·)\s?10\^(-?)(\d{1,3}))(?![\w-])")
_SPACED = re.compile(r"[1-9]\d?(?: \d{3}){2,4}(?![\w]|[ .,-]?\d)|[1-9]\d{0,2}(?: \d{3}){0,3} 000(?![\w]| ?\d)")
_GROUPED = re.compile(r"\d{1,3}(?:(['_])\d{3})(?:\1\d{3}){0,5}(?![\w'])")
_COMMA = re.compile(
    rf"(?:\d{{1,3}},\d\d|0,\d|\d{{1,3}},\d(?=\s?%|\s(?:{SCALE}|kg|km|cm|mm|ml|m|g|l)\b))(?![\w]|[.,]\d)"
)
_COUNTED = re.compile(rf"\s+(?:{SCALE}|people|times|items|points|votes|men|women|students|users|pages|words)\b")
_OWNER = re.compile(rf"(?P<number>{FORM})'[sS](?![\w'])")
_DOZENS = re.compile(r"(?P<number>10{1,2}|10?,?000|100,?000|1,000,000)s(?= of\b)")
_ROUND = frozenset(["100", "1000", "1,000", "1000000", "1,000,000"])
_AFTER_A = re.compile(r"\b[aA] $")
_LIKE_YEAR = range(1100, 2100)
_OF_YEAR = re.compile(r"(?i)\b(?:years?|anno|in|since|until|by|circa|of)\s$")
_IN_TOKEN = re.compile(r"[\w.]$")
_IN_RANGE = re.compile(r"[\w.,$£€-]$")
_IN_NUMBER = re.compile(r"[\w.,']$")
_AFTER_DIGITS = re.compile(r"[\d.,]$")


def _in_scales(text: str, at: int) -> Iterator[Candidate]:
    """Numbers of thousands, millions and dozens."""
    if found := _SHORT_SCALE.match(text, at):
        is_race = found[0] in ("5k", "10k", "15k") and (
            _AFTER_RUN.search(before(text, at)) or _BEFORE_RACE.match(text, found.end())
        )
        scale = "K" if is_race else _SCALES[found["scale"].strip().lower()]
        yield pieces(found, LIKELY, (decimal(found["number"]), "number"), (scale, "scale"))
    if (found := _SCALE_RANGE.match(text, at)) and not _IN_RANGE.search(before(text, at, 1)):
        low = decimal(found["low"]) + (f" {_SCALES[found['scale1'].lower()]}" if found["scale1"] else "")
        high = (decimal(found["number"]), "number"), (_SCALES[found["scale"].lower()], "scale")
        yield pieces(found, SURE, (low, "low"), ("to", "to"), *high)
    if found := _DOZENS.match(text, at):
        said = "ten" if found["number"] == "10" else cardinal(found["number"]).removeprefix("one ")
        yield whole(found, SURE, said + "s")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if found := _SCIENTIFIC.match(text, at):
        sign, power = (found[2], found[3]) if found[3] else (found[4], found[5])
        is_written = found[3] is None or "." in found[1] or "e" in found[0] or bool(found[2])
        if is_written and not _IN_TOKEN.search(before(text, at, 1)):
            minus = "minus " * (sign == "-")
            yield whole(found, SURE, f"{decimal(found[1])} times ten to the power of {minus}{cardinal(power)}")
    if (found := _BORE.match(text, at)) and not _IN_TOKEN.search(before(text, at, 1)):
        yield pieces(found, SURE / 2, (grouped(found["bore"]), "bore"), ("cal" * bool(found["cal"]), "cal"))
    if (found := _AVERAGE.match(text, at)) and _OF_BATTER.search(before(text, at)):
        yield whole(found, SURE, grouped(found["average"]))
    if found := _SPACED.match(text, at):
        yield whole(found, LIKELY, cardinal(found[0].replace(" ", "")))
    if (found := _GROUPED.match(text, at)) and not _IN_NUMBER.search(before(text, at, 1)):
        yield whole(found, LIKELY, cardinal(re.sub(r"\D", "", found[0])))
    if (found := _COMMA.match(text, at)) and not _AFTER_DIGITS.search(before(text, at, 1)):
        yield whole(found, POSSIBLE, decimal(found[0].replace(",", ".")))
    yield from _in_scales(text, at)
    if found := _CONTINENTAL.match(text, at):
        groups, _, decimals = found[0].partition(",")
        if decimals or groups.count(".") > 1:
            number = groups.replace(".", "") + ("." + decimals if decimals else "")
            yield whole(found, LIKELY, decimal(number))
    found = _NUMBER.match(text, at)
    if found is None or (found["minus"] and not _MINUS.search(before(text, at))):
        return
    number = found["number"]
    if (owner := _OWNER.match(text, at)) and not found["minus"]:
        is_year = len(owner["number"]) == 4 and owner["number"].isdecimal() and int(owner["number"]) in _LIKE_YEAR
        yield whole(owner, NUMBER - 1, (year if is_year else decimal)(owner["number"]) + "'s")
    if number[0] == "." and _IN_TOKEN.search(before(text, at, 1)):
        return
    minus_sign: tuple[tuple[str, str], ...] = (("minus", "minus"),) if found["minus"] else ()
    if (
        len(number) == 4
        and number.isdecimal()
        and (int(number) in _LIKE_YEAR or (int(number) > 1000 and _OF_YEAR.search(before(text, at))))
        and not minus_sign
        and not _COUNTED.match(text, found.end())
    ):
        yield whole(found, NUMBER - 1, year(number))
    # Ten digits without commas, a unit or a round end are a telephone or an article's number.
    is_code = len(number) > 9 and number.isdecimal() and not number.endswith("000")
    said = digits(number) if is_code else decimal(number)
    if number in _ROUND and not minus_sign and _AFTER_A.search(before(text, at, 3)):
        said = said.removeprefix("one ")
    yield pieces(found, NUMBER, *minus_sign, (said, "number"))


EXAMPLES = (
    ("13,000 and 9000", "thirteen thousand and nine thousand."),
    ("-2 to -0.1", "minus two to minus zero point one."),
    (".1665", "point one six six five."),
    ("1.000.000", "one million."),
    (
        "3,14 and 1'000 and 12,34,567",
        "three point one four and one thousand and one million two hundred and thirty four thousand five hundred"
        " and sixty seven.",
    ),
    ("1 234 567 of them", "one million two hundred and thirty four thousand five hundred and sixty seven of them."),
    ("12 000 people", "twelve thousand people."),
    ("1.234,56", "one thousand two hundred and thirty four point five six."),
    ("about 1.5M users, 10k stars", "about one point five million users, ten thousand stars."),
    ("1.5E-3 and 1e6", "one point five times ten to the power of minus three and one times ten to the power of six."),
    ("5-10k people, 1,5 million", "five to ten thousand people, one point five million."),
    ("agent 007", "agent zero zero seven."),
    ("1994 and 2100", "nineteen ninety four and two thousand one hundred."),
    ("in 1066, the year 2525, 1984's", "in ten sixty six, the year twenty five twenty five, nineteen eighty four's."),
    ("100s of people, a 1000 knobs", "hundreds of people, a thousand knobs."),
    ("2000 people", "two thousand people."),
)
