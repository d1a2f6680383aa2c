"""Times of day and durations: 5pm, 10:30, 21:51:31, 2pm-5pm, 1h30m."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, SURE, Candidate, Piece, after, before
from sonoro.text.english.numbers import cardinal, count, decimal

from .common import DASH, before_capital, pieces

STARTS = ("digit", "letter")

_HALF = r"(?P<half>[aApP])(?:\.?\s?[mM](?![a-zA-Z])(?P<dot>\.)?|(?<=:\d\d[ap])(?![\w'/-]))"
_ZONE = r"(?:\s?\(?(?P<zone>(?i:[ecmp][sd]t|gmt|utc|[ecmp]\.[sd]\.t\.?|cet|cest|bst|ist|jst|et|pt)(?![A-Za-z]))\)?)"
_CLOCK = re.compile(
    rf"(?P<hour>[01]?\d|2[0-4])(?::(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d)(?P<part>\.\d{{1,9}})?)?)(?!\d|:|\.\d)(?:\s?{_HALF}|(?P<h>\s?h(?:rs?)?\b))?{_ZONE}?(?P<z>Z\b|(?:(?<=T\d\d:\d\d)|(?<=T\d\d:\d\d:\d\d))[+-]\d\d:?\d\d\b)?"
)
_LAP = re.compile(r"(?P<minute>\d{1,2}):(?P<second>[0-5]\d)\.(?P<part>\d{1,3})(?![\w:]|\.\d)")
_RACED = re.compile(
    r"(?P<one>\d{1,2}):(?P<two>[0-5]\d)(?::(?P<three>[0-5]\d))?(?:\.(?P<part>\d{1,3}))?"
    r"(?= (?:mile|marathon|half[ -]marathon|lap|split|pace|800|1500|5[Kk]|10[Kk])\b)"
)
"""How long a race is run, before its name: a 2:59:58 marathon, a sub-4:00 mile."""

_COUNTDOWN = re.compile(r"T(?P<minus>[-−])(?=\d+\s?(?:s|sec|seconds|min|minutes|h|hours|days)\b)")
_HALVES = re.compile(
    r"(?P<one>1[0-2]|[1-9])(?::(?P<minute>[0-5]\d))?(?P<half>[ap])(?P<to>[-–])(?=(?:1[0-2]|[1-9])(?::[0-5]\d)?[ap](?!\w))"
)
_HALF_END = re.compile(r"(?P<one>1[0-2]|[1-9])(?::(?P<minute>[0-5]\d))?(?P<half>[ap])(?!\w)")
"""Hours as schedules write them: 9a-5p."""

_DOTTED = re.compile(rf"(?P<hour>1[0-2]|0?[1-9])\.(?P<minute>[0-5]\d)(?P<second>)\s?{_HALF}{_ZONE}?(?P<z>)")
_HOUR = re.compile(rf"(?P<hour>1[0-2]|0?[1-9])(?P<minute>)(?P<second>)\s?{_HALF}{_ZONE}?(?P<z>)")
_OFFSET = re.compile(r"(?P<zone>GMT|UTC)(?P<sign>[-+−])(?P<hour>\d{1,2})(?::?(?P<minute>\d\d))?(?!\w)")
_NOON = re.compile(r"(?P<noon>noon|midnight)(?P<to>\s?(?:-|–)\s?)(?=\d)")
_HOURS = re.compile(r"(?P<h>\d{1,2})h(?P<m>[0-5]\d)(?!\w)")
_AT_HOUR = re.compile(r"\b(?:at|by|until|from|to) $")
_AGO = re.compile(r"(?P<number>\d{1,4})\s?(?P<unit>[smhdwy])(?=\s(?:ago|later)\b)")
_AGO_UNITS = {"s": "second", "m": "minute", "h": "hour", "d": "day", "w": "week", "y": "year"}
_TO = re.compile(
    rf"{DASH}(?=noon\b|midnight\b|\d{{1,2}}(?::[0-5]\d)?\s?(?:[ap]\.?m\b|$|[.,;](?!\d)|[^\w.,:;%-]))", re.IGNORECASE
)
_BARE = re.compile(
    rf"(?P<hour>1[0-2]|[1-9])(?::(?P<minute>[0-5]\d))?(?P<to>{DASH})(?=(?:1[0-2]|0?[1-9])(?::[0-5]\d)?\s?[ap]\.?\s?m\b)",
    re.IGNORECASE,
)
_BARE_TO = re.compile(r"(?P<hour>1[0-2]|[1-9])(?P<to>[-–—])(?=(?:[01]?\d|2[0-3]):[0-5]\d(?![\d:]))")
_MINUTES = re.compile(r"(?P<minute>2[5-9]|[3-9]\d|\d{3}):(?P<second>[0-5]\d)(?![\w:]|\.\d)")
_RAN = "in|at|ran|took|lasts|lasted"
NEAR = rf"{_RAN}|time|record"
_OF_MINUTES = re.compile(rf"\b(?:{_RAN}|time of|record of)(?: (?:just|about|under|over))? $")
_MILITARY = re.compile(r"(?P<hour>[01]\d|2[0-4])(?P<minute>[0-5]\d)(?P<unit>\s?(?:hours|hrs?)\b|Z\b)")
_MILITARY_AT = re.compile(r"(?P<hour>0\d)(?P<minute>[0-5]\d)(?!\w|[-–.,]\d)")
_MILITARY_TO = re.compile(
    r"(?P<hour>[01]\d|2[0-4])(?P<minute>[0-5]\d)(?P<to>\s?(?:-|–|to)\s?)(?=(?:[01]\d|2[0-4])[0-5]\d\s?(?:hours|hrs?)\b)"
)
_MILITARY_PAIR = re.compile(
    r"(?P<hour>0\d)(?P<minute>[03]0|[14]5)(?P<to>\s?[-–]\s?)(?P<hour2>[01]\d|2[0-4])(?P<minute2>[03]0|[14]5)(?!\w|[-–.,]\d)"
)
_DOTTED_AT = re.compile(
    r"(?P<hour>1\d|2[0-3]|0?[1-9])\.(?P<minute>[0-5]\d)(?![\w%]|[.,]\d| (?:per|each|percent|million|billion)\b)"
)
FAR = r"\b(?:leav(?:es?|ing)|left|depart\w*|arriv\w*|calls)\b"
_TRAVEL = re.compile(rf"{FAR}(?: [a-z]+){{0,2}} at $")
_TRAVELS = re.compile(r" (?:trains?|bus|ferry|coach|service|express|(?:to|from) [A-Z][a-z])")
_NEXT = r"(?:,?\s?(?=\d))?"
_DURATION = re.compile(
    rf"(?:(?P<d>\d+)\s?d(?:ays?)?{_NEXT})?(?:(?P<h>\d+)\s?h(?:(?:ou)?rs?)?{_NEXT})?"
    rf"(?:(?P<m>\d+)\s?m(?:in(?:ute)?s?)?{_NEXT})?(?:(?P<s>\d+)\s?s(?:ec(?:ond)?s?)?)?(?![\w])"
)
_AT = re.compile(r"T(?=\d\d:\d\d)")
_UNITS = (("d", "day"), ("h", "hour"), ("m", "minute"), ("s", "second"))
_IN_NUMBER = re.compile(r"\d[.,:/]$|[$£€#]$|[A-SU-Za-z]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    context = before(text, at, 2)
    if text[at].isalpha():
        if (found := _AT.match(text, at)) and context[-1:].isdecimal():
            yield pieces(found, SURE, ("at", 0))
        if text[at] == "T" and (found := _COUNTDOWN.match(text, at)) and not context[-1:].isalnum():
            yield pieces(found, SURE / 2, ("T", 0), ("minus", "minus"))
        if text[at] in "GUnm":
            yield from _named(text, at)
        return
    if _IN_NUMBER.search(context):
        return
    for form in (_CLOCK, _DOTTED, _HOUR):
        if found := form.match(text, at):
            yield _time(text, found)
    yield from _of_races(text, at)
    yield from _in_four_digits(text, at)
    if (found := _DOTTED_AT.match(text, at)) and _is_travel(text, found):
        yield pieces(found, SURE, (cardinal(found["hour"].lstrip("0")), "hour"), (_minutes(found["minute"]), "minute"))
    if found := _BARE.match(text, at):
        minute = f" {_minutes(found['minute'])}" if found["minute"] and found["minute"] != "00" else ""
        yield pieces(found, LIKELY, (cardinal(found["hour"]) + minute, "hour"), ("to", "to"))
    if found := _BARE_TO.match(text, at):
        yield pieces(found, LIKELY, (cardinal(found["hour"]), "hour"), ("to", "to"))
    if (found := _MINUTES.match(text, at)) and _OF_MINUTES.search(before(text, at)):
        second = "minutes" if found["second"] == "00" else _minutes(found["second"])
        yield pieces(found, SURE, (cardinal(found["minute"]), "minute"), (second, "second"))
    if found := _AGO.match(text, at):
        name = _AGO_UNITS[found["unit"]]
        yield pieces(
            found, SURE, (cardinal(found["number"]), "number"), (name + "s" * (found["number"] != "1"), "unit")
        )
    if found := _HOURS.match(text, at):
        is_clock = _AT_HOUR.search(before(text, at)) is not None
        minute = _minutes(found["m"]) if is_clock else count(found["m"].lstrip("0") or "0", "minute", "minutes")
        hour = cardinal(found["h"].lstrip("0") or "0") if is_clock else count(found["h"], "hour", "hours")
        yield pieces(found, SURE, (hour, "h"), (minute, "m"))
    found = _DURATION.match(text, at)
    if found and sum(found[unit] is not None for unit, _ in _UNITS) > 1:
        named = [
            (f"{cardinal(found[unit])} {name}{'s' * (found[unit] != '1')}", unit)
            for unit, name in _UNITS
            if found[unit]
        ]
        yield pieces(found, SURE, *named)


def _of_races(text: str, at: int) -> Iterator[Candidate]:
    """Lengths of races and laps, and hours of schedules."""
    if ":" in text[at + 1 : at + 3] and (found := _RACED.match(text, at)):
        yield _raced(found)
    if (
        "-" in text[at + 2 : at + 7]
        and (found := _HALVES.match(text, at))
        and (end := _HALF_END.match(text, found.end()))
    ):
        made = (*_half(found), *pieces(found, 0.0, ("to", "to")).pieces, *_half(end))
        yield Candidate(end.end(), SURE / 2, made)
    if found := _LAP.match(text, at):
        second = decimal(f"{int(found['second'])}.{found['part']}")
        minutes = count(found["minute"], "minute", "minutes")
        yield pieces(found, SURE, (minutes, "minute"), (second, "second"), ("seconds", "part"))


def _half(found: re.Match[str]) -> tuple[Piece, ...]:
    minute = f" {_minutes(found['minute'])}" if found["minute"] not in (None, "00") else ""
    half = "ay m" if found["half"] == "a" else "p m"
    return pieces(found, 0.0, (cardinal(found["one"]) + minute, "one"), (half, "half")).pieces


def _raced(found: re.Match[str]) -> Candidate:
    one, two, three, part = found.groups()
    if three in (None, "00") and two == "00" and not part:
        name = "minute" if three is None else "hour"
        return pieces(found, SURE / 2, (f"{cardinal(one)} {name}", "one"))
    said = [cardinal(one), _minutes(two), *([_minutes(three)] if three else [])]
    return pieces(found, SURE / 2, (" ".join(said) + (f" {decimal('.' + part)}" if part else ""), "one"))


def _in_four_digits(text: str, at: int) -> Iterator[Candidate]:
    if found := _MILITARY.match(text, at):
        yield pieces(found, SURE / 2, *_military(found), ("Zulu" if found["unit"] == "Z" else "hours", "unit"))
    if found := _MILITARY_TO.match(text, at):
        yield pieces(found, SURE / 4, *_military(found), ("to", "to"))
    if (found := _MILITARY_AT.match(text, at)) and _AT_HOUR.search(before(text, at)):
        yield pieces(found, SURE, *_military(found))
    if found := _MILITARY_PAIR.match(text, at):
        yield pieces(found, SURE / 2, *_military(found), ("to", "to"), *_military(found, "2"))


def _is_travel(text: str, found: re.Match[str]) -> bool:
    """Whether a train or the like goes at a time with a dot: leaves at 16.20, the 4.15 to Leeds."""
    context = before(text, found.start())
    is_named = context.lower().endswith("the ") and _TRAVELS.match(after(text, found.end()))
    return bool(is_named or _TRAVEL.search(context))


def _military(found: re.Match[str], which: str = "") -> tuple[tuple[str, str], ...]:
    hour, minute = found[f"hour{which}"], found[f"minute{which}"]
    said = _minutes(hour) if hour != "00" else "zero"
    return (said, f"hour{which}"), ("hundred" if minute == "00" else _minutes(minute), f"minute{which}")


def _named(text: str, at: int) -> Iterator[Candidate]:
    """What begins with a name: GMT-5, noon-1pm."""
    if found := _OFFSET.match(text, at):
        sign = "plus" if found["sign"] == "+" else "minus"
        minute = _minutes(found["minute"]) if found["minute"] not in (None, "00") else ""
        hour = cardinal(found["hour"].lstrip("0") or "0")
        yield pieces(found, SURE, (" ".join(found["zone"]), "zone"), (sign, "sign"), (hour, "hour"), (minute, "minute"))
    if found := _NOON.match(text, at):
        yield pieces(found, SURE, (found["noon"], "noon"), ("to", "to"))


def _time(text: str, found: re.Match[str]) -> Candidate:
    hour, minute, second, half = found["hour"], found["minute"] or "00", found["second"], found["half"]
    bare = str(int(hour))
    if second and not (half and minute == second == "00"):
        said = _long(bare, minute, second, found.groupdict().get("part") or "")
    elif minute == "00":
        on_the_hour = "o'clock" if 1 <= int(hour) <= 12 else "hundred"
        said = cardinal(bare) + ("" if half else f" {on_the_hour}")
    else:
        said = f"{cardinal(bare)} {_minutes(minute)}"
    parts: list[tuple[str, str]] = [(said, "hour")]
    if half:
        letter = "M" if found[0][found.end("half") - found.start() :].strip(". ").startswith("M") else "m"
        parts.append((f"{'ay' if half in 'aA' else half} {letter}", "half"))
    if found.groupdict().get("h"):
        parts.append(("hours", "h"))
    if found["zone"]:
        zone = [letter for letter in found["zone"].upper() if letter.isalpha()]
        parts.append((" ".join(zone), "zone"))
    if found["z"]:
        parts.append(("U T C" + _offset(found["z"]), "z"))
    is_end = found[0].endswith(".") and (not after(text, found.end()).strip() or _is_end(text, found.end()))
    to = _TO.match(text, found.end())
    if to is None:
        return pieces(found, SURE, *parts, mark="." * is_end)
    made = pieces(found, SURE, *parts)
    return Candidate(to.end(), SURE, (*made.pieces, *pieces(to, SURE, ("to", 0)).pieces))


def _offset(zone: str) -> str:
    """Z is UTC itself; +05:30 five thirty after it."""
    if zone == "Z":
        return ""
    hour, minute = zone[1:3], zone[-2:]
    sign = "plus" if zone[0] == "+" else "minus"
    return f" {sign} {cardinal(str(int(hour)))}{'' if minute == '00' else ' ' + _minutes(minute)}"


_AFTER_TIME = re.compile(
    r"\s+(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun|Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec|[ECMP][SD]T|GMT|UTC|Eastern|Pacific|Central)"
)


def _is_end(text: str, at: int) -> bool:
    return before_capital(text, at) and not _AFTER_TIME.match(text, at)


def _minutes(minute: str) -> str:
    return f"oh {cardinal(minute[1])}" if minute[0] == "0" else cardinal(minute)


def _long(hour: str, minute: str, second: str, part: str) -> str:
    named = [
        count(f"{int(number)}{rest}", name, name + "s")
        for number, name, rest in ((hour, "hour", ""), (minute, "minute", ""), (second, "second", part))
    ]
    return f"{named[0]} {named[1]} and {named[2]}"


EXAMPLES = (
    ("5pm, 1 a.m. and 01:00", "five p m, one ay m and one o'clock."),
    ("10:00:00 p.m.", "ten p m."),
    ("21:51:31", "twenty one hours fifty one minutes and thirty one seconds."),
    ("at 24:00 or 23:05", "at twenty four hundred or twenty three oh five."),
    ("2pm-5pm; 4:00 am - 8:12 pm", "two p m to five p m, four ay m to eight twelve p m."),
    ("open 9-5pm, 9–5:30", "open nine to five p m, nine to five thirty."),
    ("10 km in 42:15, a ratio of 42:15", "ten kilometers in forty two fifteen, a ratio of forty two to fifteen."),
    ("2 hours 15 min, then more", "two hours fifteen minutes, then more."),
    ("1.59 p.m. est", "one fifty nine p m E S T."),
    ("1h30m; 2h 45min; 1d 4h", "one hour thirty minutes, two hours forty five minutes, one day four hours."),
    ("at 0600 hours, 1430 hrs", "at oh six hundred hours, fourteen thirty hours."),
    ("at 0430Z, 19:30h", "at oh four thirty Zulu, nineteen thirty hours."),
    ("a lap of 2:05.37", "a lap of two minutes five point three seven seconds."),
    ("left at 5 p.m. He went", "left at five p m. He went."),
    ("0800-1600 hrs, by 0730", "oh eight hundred to sixteen hundred hours, by oh seven thirty."),
    ("GMT-5; noon-1pm, 10am-noon", "G M T minus five, noon to one p m, ten ay m to noon."),
    ("1h45, at 20h30, 3w ago", "one hour forty five minutes, at twenty thirty, three weeks ago."),
    ("01:02:03.5", "one hour two minutes and three point five seconds."),
    (
        "a 2:59:58 marathon, a sub-4:00 mile, T-10 s",
        "a two fifty nine fifty eight marathon, a sub four minute mile, T minus ten seconds.",
    ),
    ("at 5 p.m. Monday", "at five p m Monday."),
)
