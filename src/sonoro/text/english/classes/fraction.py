"""Fractions: 1/2, 2 3/4, 3/4ths, and the signs ½ ¼ ⅔."""

import re
import unicodedata
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, POSSIBLE, SURE, Candidate, after, before
from sonoro.text.english.numbers import cardinal, decimal, grouped, ordinal

from .common import SENTENCE, pieces, whole

STARTS = ("digit", "sign")

_SLASHED = re.compile(
    r"(?:(?P<whole>\d{1,4})(?:\s|-)(?=\d))?(?P<part>(?P<top>\d{1,6})\s?/\s?(?P<bottom>\d{1,6})"
    r"(?P<th>(?:st|nd|rd|th|ST|ND|RD|TH)s?\b)?)(?![\d/]|[.,]\d)"
)
_TO = re.compile(r"(?P<top>[1-7])/(?P<bottom>[2-8]|1[26])(?P<to>\s?[-–]\s?)(?=[1-7]/(?:[2-8]|1[26])(?![\w/-]))")
_SIGHT = re.compile(
    r"(?P<top>20)/(?P<bottom>\d{2,3})(?= (?:vision|sight|acuity|"
    r"(?:corrected )?in (?:the|his|her|my|each|one|both)\b[a-z ]{0,7}eye)|[.,;] ?(?:left|right)|\s[OU][DSU]\b)"
)
_OUT_OF = re.compile(
    r"(?P<top>\d)(?P<of>/)(?P<bottom>10|[5-9])(?= (?:dentists|doctors|people|users|patients|customers|students|"
    r"women|men|adults|children|kids|experts|players|times|cases)\b)"
)
"""So many of those that one can count: 9/10 dentists."""

_SHUTTER = re.compile(r"(?P<part>1/(?P<bottom>[1-9]\d{1,4}))\s?(?P<unit>s|secs?)(?!\w)")
_RATED = re.compile(
    r"(?<![\d/.,])(?P<top>(?:10|\d)(?=/10(?: would|\s*(?:[.,;:!?)\n]|$)))|\d{1,2}\.\d|\d{1,2}(?=/\d+ stars))"
    r"(?P<of>/)(?P<bottom>5|10|100)(?![\d/]|[.,]\d)"
)
NEAR = "rat(?:ed|ing)|scored?"
_RATING = re.compile(rf"\b(?:(?:{NEAR})(?: of)?|g[ia]ve|it|this|an?|solid|definite)\s$")
_COUNTED = re.compile(
    r"(?i)\b(?:page|part|step|slide|day|chapter|episode|level|round|question|lap|stage|hole|heat|lesson)s? $"
)
FAR = r"\bodds\b|20/\d\d in\b"
_ODDS = re.compile(rf"(?i)\bodds\b{SENTENCE}$")
_QUOTED = re.compile(r" (?:odds|favou?rites?|outsiders?|shots?)\b")
_SIGN = re.compile(r"(?P<whole>\d+)?\s?(?P<sign>[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])")
_IN_NUMBER = re.compile(r"[\d/.,$£€]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if found := _SIGN.match(text, at):
        top, bottom = unicodedata.normalize("NFKD", found["sign"]).replace("⁄", "/").split("/")
        if found["whole"]:
            yield pieces(found, SURE, (cardinal(found["whole"]), "whole"), (f"and {mixed(top, bottom)}", "sign"))
        else:
            yield whole(found, SURE, simple(top, bottom))
    if (found := _RATED.match(text, at)) and (
        found["bottom"] != "10" or found["top"] == "10" or "." in found["top"] or _RATING.search(before(text, at))
    ):
        yield pieces(
            found, SURE, (decimal(found["top"]), "top"), ("out of", "of"), (decimal(found["bottom"]), "bottom")
        )
    is_slashed = "/" in text[at + 1 : at + 3]
    if is_slashed and (found := _SIGHT.match(text, at)):
        yield whole(found, SURE / 2, f"{cardinal(found['top'])} {cardinal(found['bottom'])}")
    if is_slashed and (found := _OUT_OF.match(text, at)) and not _IN_NUMBER.search(before(text, at, 2)):
        yield pieces(
            found, SURE, (cardinal(found["top"]), "top"), ("out of", "of"), (cardinal(found["bottom"]), "bottom")
        )
    if (found := _SHUTTER.match(text, at)) and not _IN_NUMBER.search(before(text, at, 1)):
        yield pieces(found, SURE / 2, (f"one {ordinal(found['bottom'])}", "part"), ("of a second", "unit"))
    if (found := _TO.match(text, at)) and not _IN_NUMBER.search(before(text, at, 1)):
        yield pieces(found, SURE, (simple(found["top"], found["bottom"]), "top"), ("to", "to"))
    found = _SLASHED.match(text, at)
    if found is None or _IN_NUMBER.search(before(text, at, 1)) or re.search(r"(?:^|/\s?)0", found["part"]):
        return
    top, bottom = found["top"], found["bottom"]
    cost = LIKELY if found["whole"] or found["th"] else POSSIBLE
    if len(top) == 4 and len(bottom) == 4:
        cost = POSSIBLE + 1
    if found["whole"]:
        yield pieces(found, cost, (cardinal(found["whole"]), "whole"), (f"and {mixed(top, bottom)}", "part"))
    elif not found["th"] and (_ODDS.search(before(text, at)) or _QUOTED.match(after(text, found.end()))):
        yield whole(found, cost, f"{cardinal(top)} to {cardinal(bottom)}")
    elif not found["th"] and _COUNTED.search(before(text, at)):
        yield whole(found, cost, f"{cardinal(top)} of {cardinal(bottom)}")
    elif found["th"] and int(bottom) > 100:
        yield whole(found, cost, f"{cardinal(top)} {ordinal(bottom)}{'s' * (top != '1')}")
    elif int(top) + int(bottom) == 100 and top > bottom and top.endswith("0"):
        yield whole(found, cost, f"{cardinal(top)} {cardinal(bottom)}")
    elif int(top) > int(bottom) > 20 and not found["th"]:
        yield whole(found, cost, f"{grouped(top)} over {grouped(bottom)}")
    else:
        yield whole(found, cost, simple(top, bottom))


def simple(top: str, bottom: str) -> str:
    """A fraction by itself: one half, three quarters, five over one hundred and twenty."""
    names = _name(bottom)
    if names is None:
        return f"{cardinal(top)} over {cardinal(bottom)}"
    return f"{cardinal(top)} {names[0] if top == '1' else names[1]}"


def mixed(top: str, bottom: str) -> str:
    """A fraction after a whole number: and a half."""
    return "a half" if (top, bottom) == ("1", "2") else simple(top, bottom)


def _name(bottom: str) -> tuple[str, str] | None:
    number = int(bottom)
    if number == 2:
        return "half", "halves"
    if not 3 <= number <= 100 and number not in (1000, 1_000_000):
        return None
    name = "quarter" if number == 4 else ordinal(str(number))
    return name, name + "s"


EXAMPLES = (
    ("1/2 a cup, 3/4 of it, 2/3", "one half a cup, three quarters of it, two thirds."),
    ("3 1/2 cups or 2-1/2 cups", "three and a half cups or two and a half cups."),
    ("7½ or ¾", "seven and a half or three quarters."),
    ("31/32 and 3 5/2", "thirty one thirty seconds and three and five halves."),
    ("1/1000", "one one thousandth."),
    ("1/4th", "one quarter."),
    ("4.5/5 stars", "four point five out of five stars."),
    ("an 8/10, 3/10 of it", "an eight out of ten, three tenths of it."),
    ("page 3/10, odds of 5/1, then 7/2", "page three of ten, odds of five to one, then seven to two."),
    ("20/40 vision; 9/10 dentists", "twenty forty vision, nine out of ten dentists."),
    ("120/80", "one twenty over eighty."),
    ("2 142/1", "two and one hundred and forty two over one."),
)
