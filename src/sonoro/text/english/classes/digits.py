"""Numbers that are names: read digit by digit (codes, emergency calls) or in pairs (rooms, flights, models)."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, POSSIBLE, SURE, UNLIKELY, Candidate, after, before
from sonoro.text.english.numbers import cardinal, digits, grouped
from sonoro.text.english.tables import pairs

from .common import pieces, whole

STARTS = ("digit",)

_GROUPS = re.compile(
    r"(?:\d{1,12}(?:-\d{1,12}){1,5}|\d{3}(?: \d{3}){1,3}|\d{4}(?: \d{4}){1,5}(?: \d{2})?)(?![\w-]|[.,]\d)"
)
_ANY_RUN = re.compile(r"\d+", re.ASCII)
_RUN = re.compile(r"\d++(?![.,]?\d)")
_CALLS = r"call(?:s|ed|ing)?|dial(?:ed)?|ring|phone|text"
_CODES = r"codes?|pin|otp|zip|password|passcode|cvv|cvc|acct|ref|pnr|ext(?:ension)?"
_NUMBERED = r"serial|account|reference|confirmation|order|tracking"
NEAR = rf"{_CALLS}|{_CODES}|{_NUMBERED}|number|end(?:ing|s)|is|was"
_SPELLED = re.compile(
    rf"""(?ix) \b (?: end(?:ing|s)(?:[ ](?:in|with))?(?:[ ][-*]{{1,4}})? | dial(?:ed)? | {_CODES}
    | (?:text|reply)[ ](?-i:[A-Z\d]{{2,12}})[ ]to | (?:{_NUMBERED})(?:[ ](?:number|no))? )
    \.? [:#\ ]* (?:is[ ]|was[ ])? \#? $"""
)
_COUNTED = re.compile(r" (?:lines|words|characters|bytes|pages|people|times)\b")
_CALL = re.compile(rf"(?i)\b(?:{_CALLS}|calls? to)\s(?:\d{{3}}(?:,|,? or)\s)*$")
_TEXTED = re.compile(r"(?i)\btext\s$")
_CALLED = re.compile(r" (?:calls?|callers?|operators?|dispatch(?:ers?)?|centers?|emergency|hotline|lifeline)\b")
FAR = rf"\bport\b|\b(?:{_CALLS}) \d{{3}}"
_PAIRED = re.compile(
    r"(?i)\b(?:room|rooms|suite|apartment|apt\.?|flight|flights|route|highway|hwy\.?|interstate|bus|gate|channel|boeing|airbus|"
    r"form|office|xbox|levi'?s|fahrenheit|amtrak|tram|train|port|error|status|locker|unit|peugeot|porsche|building)\s#?$"
    r"|\bport (?:is|to) $"
)
_NAMED = re.compile(r"(?<![\w.$£€&-])(?!(?:AD|BC|CE|USD|EUR|GBP|CHF|JPY|ISBN|FY) )[A-Z]{2,5}\s$")
"""Capitals before a number that names a model, a standard, a flight."""

LAST_RESORT = UNLIKELY + 2
"""Above a number without a class: a run of digits that has no other reading from its place on is never lost."""

_EMERGENCY = re.compile(r"(?:911|999|112|411|311|211|988)(?![.,]?\d|[-–/:]\d)")
_SPECIAL = re.compile(
    r"(?:24/7/365|24/7|9/11|50[-/]50|20-20(?= vision| hindsight)|20/20|401\(?k\)?|403\(?b\)?|7[0-9]7(?=s))(?P<s>s)?"
    r"(?![\w/-])"
)
_SCREEN = re.compile(r"(?P<lines>240|360|480|576|720|1080|1440|2160)(?P<scan>[pi])(?P<rate>\d\d)?(?!\w)")
_ERROR = re.compile(r"[45]\d\d(?= (?:error|not found|page)s?\b)", re.IGNORECASE)
_STATUS = re.compile(r"[45]0\d(?= (?:or|and|after|before|then|but|if|when|on|for|with|from|to|instead)\b|[.,;:)!?]|$)")
_ANSWERED = re.compile(r"(?i)\b(?:returns?|returned|throws?|gives?|gave|got|gets?|https?(?:/[\d.]+)?|response|a) $")
"""What a server answers: it returns 404."""

_SAID = pairs(
    "24/7/365 = twenty four seven three sixty five | 24/7 = twenty four seven | "
    "9/11 = nine eleven | 50/50 = fifty fifty | 50-50 = fifty fifty | "
    "20-20 = twenty twenty | 20/20 = twenty twenty | "
    "403b = four oh three B | 403(b) = four oh three B | 401k = four oh one K | 401(k) = four oh one K"
)
_IN_NUMBER = re.compile(r"[\w/.,$£€]$|\d[-\s]$")
_AFTER_DIGITS = re.compile(r"[\d.,]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if (found := _SPECIAL.match(text, at)) and not _IN_NUMBER.search(before(text, at, 2)):
        said = _SAID.get(found[0]) or grouped(found[0].rstrip("s")) + "s" * bool(found["s"])
        yield whole(found, SURE / 2 if found[0] in _SAID or found["s"] else POSSIBLE, said)
    if found := _SCREEN.match(text, at):
        rate = cardinal(found["rate"]) if found["rate"] else ""
        yield pieces(found, SURE, (grouped(found["lines"]), "lines"), (found["scan"], "scan"), (rate, "rate"))
    if found := _ERROR.match(text, at):
        yield whole(found, LIKELY, grouped(found[0]))
    if text[at] in "45" and (found := _STATUS.match(text, at)) and _ANSWERED.search(before(text, at)):
        yield whole(found, LIKELY, grouped(found[0]))
    found = _EMERGENCY.match(text, at)
    if found and (_CALL.search(before(text, at)) or _CALLED.match(after(text, found.end()))):
        yield whole(found, SURE, digits(found[0]))
    run = _ANY_RUN.match(text, at)
    assert run is not None
    yield whole(run, LAST_RESORT, digits(run[0]))
    context = before(text, at)
    if (found := _GROUPS.match(text, at)) and _SPELLED.search(context):
        yield whole(found, SURE, digits(found[0]))
    found = _RUN.match(text, at)
    if found is None or _AFTER_DIGITS.search(before(text, at, 1)):
        return
    is_texted = len(found[0]) > 4 and _TEXTED.search(context)
    if is_texted or (_SPELLED.search(context) and not _COUNTED.match(after(text, found.end()))):
        yield whole(found, SURE, digits(found[0]))
    elif (
        (_PAIRED.search(context) or _NAMED.search(context))
        and 3 <= len(found[0]) <= 4
        and not text.startswith(("-", "–", "'"), found.end())
    ):
        yield whole(found, LIKELY, grouped(found[0]))


EXAMPLES = (
    ("Call 911", "Call nine one one."),
    ("a 911 operator, 911 people", "a nine one one operator, nine hundred and eleven people."),
    ("Room 404, Room 215", "Room four oh four, Room two fifteen."),
    ("Flight 370 from gate 12", "Flight three seventy from gate twelve."),
    (
        "your card ending in 8876, card ending 8876",
        "your card ending in eight eight seven six, card ending eight eight seven six.",
    ),
    ("open 24/7 since 9/11", "open twenty four seven since nine eleven."),
    ("720p or 1080p60", "seven twenty p or ten eighty p sixty."),
    ("a Boeing 747", "a Boeing seven forty seven."),
    ("text STOP to 40404; Office 365", "text STOP to four zero four zero four, Office three sixty five."),
    ("Text 50500 on Hwy 101", "Text five zero five zero zero on Highway one oh one."),
    ("an account ending -4821; it returns 404.", "an account ending four eight two one, it returns four oh four."),
    ("order #112-76543", "order number one one two seven six five four three."),
    ("The code is 4071.", "The code is four zero seven one."),
    ("The code is 482 913", "The code is four eight two nine one three."),
)
