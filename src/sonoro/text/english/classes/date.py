"""Dates: January 15, 2020; 22 July 2012; 2006-08-05; 11/17/05; Mon-Fri."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, SURE, Candidate, Piece, after, before
from sonoro.text.english.numbers import ordinal, year
from sonoro.text.english.tables import MONTHS, pairs

from .common import pieces, whole

STARTS = ("digit", "letter")

_NUMBER_OF = {part.lower(): number for number, name in enumerate(MONTHS) for part in (name, name[:3], name[:4])}
_OF_YEAR = re.compile(r"(?P<month>0[1-9]|1[0-2])/(?P<year>20\d\d)(?![\w/]|[.,]\d)")
DAYS = pairs(
    "mon = Monday | tue = Tuesday | tues = Tuesday | tu = Tuesday | wed = Wednesday | thu = Thursday | "
    "thur = Thursday | thurs = Thursday | fri = Friday | sat = Saturday | sun = Sunday"
)
_SHORT = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec"
_MONTH = rf"(?P<month>(?i:{'|'.join(MONTHS)}|sept|{_SHORT}))(?![a-zA-Z])(?P<dot>\.)?"
_DAY = r"(?P<day>0?[1-9]|[12]\d|3[01])(?P<th>st|nd|rd|th)?(?![\d:%]|[.,]\d|\s?(?:%|[ap]\.?m\b))"
_YEAR = r"(?P<year>(?:1\d|20|21)\d\d)(?![\d%]|[.,]\d)"
_MONTH_FIRST = re.compile(rf"{_MONTH}(?P<gap>[ -]){_DAY}(?:(?P<comma>,?)[ -]{_YEAR})?")
_DAY_FIRST = re.compile(rf"{_DAY}(?P<gap>[ -])(?:of )?{_MONTH}(?:(?P<comma>,?)[ -]{_YEAR})?")
_DAYS_FIRST = re.compile(
    rf"(?P<from>\d{{1,2}})(?:st|nd|rd|th)?\s?(?P<to>-|–|to|/)\s?{_DAY} (?:of )?{_MONTH}(?:(?P<comma>,?) {_YEAR})?"
)
_MONTH_YEAR = re.compile(rf"{_MONTH}(?P<comma>,?) (?P<year>(?:1[0-9]|20|21)\d\d)(?![\d%]|[.,]\d)")
_DASHED_DAYS = re.compile(
    rf"{_MONTH} (?P<from>\d{{1,2}})(?:st|nd|rd|th)?\s?(?:-|–|to)\s?"
    rf"(?P<day>\d{{1,2}})(?:st|nd|rd|th)?(?![\w:]|[.,]\d)(?:(?P<comma>,?) {_YEAR})?"
)
_TO = re.compile(rf"(?P<to>\s?[-–]\s?)(?=(?:\d{{1,2}}(?:st|nd|rd|th)?\s)?(?:{'|'.join(MONTHS)}|{_SHORT})\b)")
_MONTH_TO = re.compile(rf"(?P<month>(?:{'|'.join(MONTHS)}|{_SHORT}))\.?{_TO.pattern}")
_MONTHS_TO = re.compile(rf"(?P<one>{_SHORT})\.?\s?(?P<to>-|–)\s?(?P<two>{_SHORT})(?![A-Za-z]|\.?\s\d)")
_ISO = re.compile(
    r"(?P<year>1[1-9]\d\d|20\d\d)(?P<sign>[-/.])(?P<month>1[0-2]|0?[1-9])(?P=sign)(?P<day>[12]\d|3[01]|0?[1-9])(?![\d])(?![-/.]\d)"
)
_BACKWARD = re.compile(
    r"(?P<one>0?[1-9]|[12]\d|3[01])(?P<sign>[-/.])(?P<two>0?[1-9]|[12]\d|3[01])(?P=sign)(?P<year>(?:1[5-9]|20|21)\d\d|\d\d)(?![\d])(?![-/.]\d)"
)
_MONTH_DAY = r"(?P<one>1[0-2]|0?[1-9])/(?P<two>0?[1-9]|[12]\d|3[01])"
_SHORT_DATE = re.compile(rf"{_MONTH_DAY}(?![\d/])")
_DAY_MONTH = re.compile(r"(?P<one>1[3-9]|2\d|3[01])/(?P<two>1[0-2]|0?[1-9])(?![\w/\"]|[.,]\d)")
_PLANNED = "booked|confirmed|planned|rescheduled|scheduled"
_BEFORE_DATE = re.compile(
    r"(?i)\b(?:on|by|until|since|before|after|due|dated|expires|through|deadline:?|ends|starts|begins|date:|"
    r"(?:as|week) of|"
    rf"(?:mon|tues?|tu|wed|thurs?|thu|fri|sat|sun)(?:day)?\.?,?|(?:{_PLANNED}) (?:for|to)) \(?$"
)
_BEHIND_DATE = re.compile(r" (?:meeting|appointment|deadline|holiday)\b")
_AT_TIME = re.compile(r",? (?:at|@|from) (?:1[0-2]|\d)(?::\d\d| ?[ap]\.?m|-| to )", re.IGNORECASE)
_SHORT_DATES = re.compile(
    rf"{_MONTH_DAY}(?P<to>\s?[-–]\s?| (?:to|through) )"
    r"(?P<one2>1[0-2]|0?[1-9])/(?P<two2>0?[1-9]|[12]\d|3[01])(?![\w/\"]|[-.,]\d)"
)
NEAR = rf"of|as|week|{_PLANNED}"
FAR = r"\b(?:card|visa|mastercard|amex)\b"
_CARD = re.compile(
    rf"(?i){FAR}[^.;]*(?:\.\d[^.;]*)* (?:exp\.?|expir(?:es|ed|y|ing)|valid (?:thru|until|to))(?: is|:)? $"
)
_CARD_MONTH = re.compile(r"(?P<month>0[1-9]|1[0-2])/(?P<year>\d\d)(?![\w/]|[.,]\d)")
_DAY_NAME = r"(?:Mon|Tues?|Wed|Thu(?:rs?)?|Fri|Sat|Sun)"
_WEEKDAY = re.compile(
    rf"(?P<name>{_DAY_NAME}|Tu)(?P<dot>\.)?(?=,? (?:\(?\d|{_SHORT})|\s?[-–]\s?{_DAY_NAME}|\.? ?(?:at|from) \d)(?![a-z])"
)
_DAYS = re.compile(rf"{_DAY_NAME}(?:/{_DAY_NAME}){{1,6}}(?![\w/])")
_DAYS_TO = re.compile(rf"(?P<one>{_DAY_NAME})\.?\s?[-–]\s?(?P<two>{_DAY_NAME})(?![a-z])(?:\.(?! [A-Z]|$))?")
WORDS = frozenset([*_NUMBER_OF, *DAYS])
_IN_NUMBER = re.compile(r"[\w$£€]$|\d[.,/:-]$")
_JOINED = re.compile(r"[\w.,/:$£€-]$")
_AFTER_THE = re.compile(r"(?i)\bthe\s$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if text[at].isdecimal():
        if not _IN_NUMBER.search(before(text, at, 2)):
            yield from _in_digits(text, at)
        yield from _day_first(text, at)
    else:
        yield from _month_first(text, at)
        yield from _words(text, at)


def _month(name: str) -> str:
    return MONTHS[_NUMBER_OF[name.lower()]]


def _is_month(found: re.Match[str], *, is_sure: bool) -> bool:
    """Whether a name that is a word too (may, march, mar, sun) is a month here."""
    return found["month"] not in ("may", "march", "mar", "dec", "sep", "oct", "MAY", "MARCH") or is_sure


def _with_to(text: str, made: Candidate) -> Candidate:
    """`made`, and "to" for a dash before another day or month."""
    found = _TO.match(text, made.end)
    if found is None:
        return made
    return Candidate(found.end(), made.cost, (*made.pieces, *pieces(found, 0.0, ("to", "to")).pieces))


def _month_first(text: str, at: int) -> Iterator[Candidate]:
    if found := _DASHED_DAYS.match(text, at):
        days = (
            (_month(found["month"]), "month"),
            (f"{ordinal(found['from'])} to", "from"),
            (ordinal(found["day"]), "day"),
        )
        yield pieces(found, SURE, *days, *_year_of(found))
    if (found := _MONTH_FIRST.match(text, at)) and _is_month(found, is_sure=bool(found["year"] or found["th"])):
        day = (_month(found["month"]), "month"), (ordinal(found["day"]), "day")
        yield _with_to(text, pieces(found, SURE, *day, *_year_of(found)))
    if (found := _MONTH_YEAR.match(text, at)) and _is_month(found, is_sure=False):
        yield _with_to(text, pieces(found, LIKELY, (_month(found["month"]), "month"), *_year_of(found)))
    if found := _MONTH_TO.match(text, at):
        yield pieces(found, SURE, (_month(found["month"]), "month"), ("to", "to"))


def _day_first(text: str, at: int) -> Iterator[Candidate]:
    if _JOINED.search(before(text, at, 1)):
        return
    the = "the " * (not _AFTER_THE.search(before(text, at, 5)))
    if (found := _DAYS_FIRST.match(text, at)) and _is_month(found, is_sure=bool(found["year"] or found["th"])):
        days = ((the + ordinal(found["from"]), "from"), ("to the", "to"), (ordinal(found["day"]), "day"))
        yield pieces(found, SURE / 2, *days, (f"of {_month(found['month'])}", "month"), *_year_of(found))
    found = _DAY_FIRST.match(text, at)
    if found is None or not _is_month(found, is_sure=bool(found["year"] or found["th"])):
        return
    said = the + ordinal(found["day"])
    made = pieces(found, SURE, (said, "day"), (f"of {_month(found['month'])}", "month"), *_year_of(found))
    yield _with_to(text, made)


def _year_of(found: re.Match[str]) -> tuple[tuple[str, str], ...]:
    if not found["year"]:
        return ()
    comma = ((",", "comma"),) if found["comma"] else ()
    return (*comma, (year(found["year"]), "year"))


def _in_digits(text: str, at: int) -> Iterator[Candidate]:
    if found := _ISO.match(text, at):
        month = MONTHS[int(found["month"]) - 1]
        yield _written_out(found, SURE, f"{month} {ordinal(found['day'])}")
    if found := _OF_YEAR.match(text, at):
        yield pieces(found, LIKELY, (MONTHS[int(found["month"]) - 1], "month"), (year(found["year"]), "year"))
    if (found := _CARD_MONTH.match(text, at)) and _CARD.search(before(text, at, 80)):
        yield pieces(found, SURE, (MONTHS[int(found["month"]) - 1], "month"), (year(f"20{found['year']}"), "year"))
    # Halves to sixteenths are fractions first.
    if (found := _SHORT_DATES.match(text, at)) and (
        max(int(found["two"]), int(found["two2"])) > 16
        or (int(found["one"]) > int(found["two"]) and found["to"] != " to ")
    ):
        first, last = (f"{MONTHS[int(found['one' + n]) - 1]} {ordinal(found['two' + n])}" for n in ("", "2"))
        to = found["to"].strip()
        yield pieces(found, LIKELY, (first, "one"), (to if to.isalpha() else "to", "to"), (last, "one2"))
    if found := _BACKWARD.match(text, at):
        yield from _backward(found)
    found = _SHORT_DATE.match(text, at) or _DAY_MONTH.match(text, at)
    behind = after(text, found.end()) if found else ""
    if found and (_BEFORE_DATE.search(before(text, at)) or _AT_TIME.match(behind) or _BEHIND_DATE.match(behind)):
        said = f"{MONTHS[int(found['one']) - 1]} {ordinal(found['two'])}" if int(found["one"]) <= 12 else ""
        yield whole(found, LIKELY + 1, said or f"the {ordinal(found['one'])} of {MONTHS[int(found['two']) - 1]}")


def _backward(found: re.Match[str]) -> Iterator[Candidate]:
    one, two, sign = int(found["one"]), int(found["two"]), found["sign"]
    is_short = len(found["year"]) == 2
    if is_short and sign != "/":
        return
    if two <= 12 and (sign != "/" or one > 12):
        yield _written_out(found, LIKELY, f"the {ordinal(found['one'])} of {MONTHS[two - 1]}")
    elif one <= 12:
        yield _written_out(found, LIKELY, f"{MONTHS[one - 1]} {ordinal(found['two'])}")


def _written_out(found: re.Match[str], cost: float, day: str) -> Candidate:
    """A date in digits: its day and month, a pause, its year."""
    start, end, at = *found.span(), found.start("year")
    made = Piece(day, start, end), Piece(",", at, at), Piece(year(found["year"]), *found.span("year"))
    return Candidate(end, cost, made)


def _words(text: str, at: int) -> Iterator[Candidate]:
    if found := _MONTHS_TO.match(text, at):
        yield pieces(found, SURE / 2, (_month(found["one"]), "one"), ("to", "to"), (_month(found["two"]), "two"))
    if found := _DAYS_TO.match(text, at):
        yield pieces(found, SURE / 2, (f"{DAYS[found['one'].lower()]} to", "one"), (DAYS[found["two"].lower()], "two"))
    if found := _DAYS.match(text, at):
        *days, last = (DAYS[day.lower()] for day in found[0].split("/"))
        yield whole(found, SURE / 2, f"{' '.join(days)} and {last}")
    if found := _WEEKDAY.match(text, at):
        is_word = found["name"] in ("Sat", "Sun") and not found["dot"]
        if not is_word or re.match(r"(?:, [A-Z]|,? \(?\d|\s?(?:-|–))", after(text, found.end())):
            yield whole(found, SURE, DAYS[found["name"].lower()])


EXAMPLES = (
    ("January 1 and june 30", "January first and June thirtieth."),
    (
        "22 July 2012 or 25th jul 2012",
        "the twenty second of July twenty twelve or the twenty fifth of July twenty twelve.",
    ),
    ("On the 13 Feb. 2007", "On the thirteenth of February two thousand and seven."),
    ("15-01-2020, 15.01.2020", "the fifteenth of January, twenty twenty, the fifteenth of January, twenty twenty."),
    ("2006-08-05 and 1998/2/30", "August fifth, two thousand and six and February thirtieth, nineteen ninety eight."),
    ("10/06/2005, 11/17/05", "October sixth, two thousand and five, November seventeenth, oh five."),
    ("JAN. 15 2020; Jan-15-2020", "January fifteenth twenty twenty, January fifteenth twenty twenty."),
    ("April 3, 1999.", "April third, nineteen ninety nine."),
    ("July 3-5, 2021; Jan 1st-3rd", "July third to fifth, twenty twenty one, January first to third."),
    ("Mon-Fri, or Tue, Jan 5", "Monday to Friday, or Tuesday, January fifth."),
    (
        "Jan-Feb 2020, 1 Jan - 5 Feb",
        "January to February twenty twenty, the first of January to the fifth of February.",
    ),
    ("22nd-24th March, Jan-Mar", "the twenty second to the twenty fourth of March, January to March."),
    ("best before 05/2026", "best before May twenty twenty six."),
    ("as of 4/20, the 4/20 meeting", "as of April twentieth, the April twentieth meeting."),
    ("Date: 4/20, 4/20 of it", "Date, April twentieth, four twentieths of it."),
    (
        "from 4/20 to 4/25, 9/8 through 9/12",
        "from April twentieth to April twenty fifth, September eighth through September twelfth.",
    ),
    (
        "from 1/4 to 3/4, odds from 2/1 to 3/1",
        "from one quarter to three quarters, odds from two to one to three to one.",
    ),
    ("July 1506", "July fifteen oh six."),
    ("I may go in march", "I may go in march."),
)
