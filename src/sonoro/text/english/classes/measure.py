"""Numbers with units: 12kg, 5 kg/m³, 2-5 lb, 4 1/2 lbs, 25 x 7 m, 20%."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, SURE, Candidate, Piece, after, before
from sonoro.text.english.numbers import decimal
from sonoro.text.english.tables import listed

from .common import INTEGER, LABELS, NUMBER, SCALE, SENTENCE, is_attributive, pieces
from .fraction import mixed, simple
from .units import unit

STARTS = ("digit", "sign")

NEAR = rf"per|sq|cu|fl|highs?|lows?|{SCALE}"
_SYMBOL = (
    r"(?:sq\.?[ -]?(?:ft|m|km|mi)\.?|cu ft|fl\.? oz|ft-lb|(?:°|deg\.?)\s[CF](?![A-Za-z])"
    r"|[A-Za-zμΩÅ°%‰¢]{1,5})"
)
_POWER = r"(?:[²³]|\^[23]|(?<=[a-zA-Z])[23](?!\d))"
_AMOUNT = (
    rf"(?P<number>{INTEGER}\s?/\s?\d+(?=\s?(?:lbs?|cups?|c\.|tsp|tbsp|in|ft|mi|oz|kg)(?!\w))"
    rf"|[1-9]\d{{0,2}}(?: \d{{3}}){{1,3}}(?!\d)|{NUMBER})"
    rf"(?:[\s-](?P<fraction>\d/\d{{1,2}}))?(?:\s?(?P<vulgar>[½¼¾⅓⅔⅛]))?"
    rf"(?:\s(?P<scale>{SCALE}))?"
)
_FIRST = rf"(?:(?P<first>{NUMBER})\s?(?P<by0>[x×])\s?(?={NUMBER}\s?[x×]))?"
_RANGE = (
    rf"(?:{_FIRST}(?P<low>{NUMBER})(?P<symbol0>\s?(?:%|°[CF]?)|[a-z]{{1,3}}(?=(?:-|–)\d))?\s?"
    rf"(?P<by>-|–|—|x|×|to|(?:(?<=\d\d)|(?<=[4-9]))/(?=\d+\s?(?:[kMG]?Hz|[kMG]bps|[GT]B|V)\b))\s?)?"
)
_ONE = rf"(?P<minus>-)?{_RANGE}{_AMOUNT}(?P<gap>\s?-?)(?P<symbol>{_SYMBOL})(?P<power>{_POWER})?"
_UNDER = rf"\s?(?P<per>/|\bper\b|·)\s?(?P<hundred>100\s?)?(?P<under>[A-Za-zμ]{{1,5}})(?P<under_power>{_POWER})?"
_END = r"(?![\w'²³])(?P<dot>(?<=[a-zT])\.(?=\s+[a-z\d(=]|[,;)]|\s[NSEW]{1,2}\.? of\b))?"
_FORM, _ALONE = re.compile(rf"{_ONE}(?:{_UNDER})?{_END}"), re.compile(rf"{_ONE}(?P<per>)(?P<under>){_END}")
_VULGAR = re.compile(r"(?P<part>[½¼¾⅓⅔⅛])\s?(?P<symbol>[A-Za-z]{2,5})(?![\w'])(?P<dot>\.(?=\s[a-z]))?")
_STONE = re.compile(r"(?P<number>\d{1,3})\s?(?P<symbol>st)(?=\s?\d{1,2}\s?lbs?\b)")
_LETTERS = frozenset("MBbTxKkCFAHNGds")
"""Letters that are magnitudes, names or labels more often than units."""

_AFTER_LETTER = re.compile(
    r"\s*(?:$|[,;:)]|\.(?:\s|$)(?! ?[A-Z]\w* (?:St|Ave|Rd)))"
    r"| (?:and|or|to|at|of|fuses?|breakers?|currents?|circuits?|chargers?|supply)\b"
)
_OF_CURRENT = re.compile(
    r"\s?(?:at|@|/|,)?\s?[\d.]+\s?[kmM]?[VW]\b| (?:max|rated|fuses?|breakers?|circuits?|chargers?|sockets?|plugs?)\b"
)
_AFTER_VOLTAGE = re.compile(r"\d\s?[kmM]?[VW](?:\s?[/,@x×]|,? (?:at|and))?\s?$")
_LABELLED = re.compile(rf"\b(?:{LABELS}|(?i:route|hwy\.?|highway|exit|apt\.?|suite)) $")
_PARTS = {"½": "12", "¼": "14", "¾": "34", "⅓": "13", "⅔": "23", "⅛": "18"}
_SECONDS = re.compile(
    r"\s(?:rests?|planks?|intervals?|sprints?|exposures?|bursts?|timeouts?|delay|wait|interval|timer|limit|window|clips?|videos?|ads?|spots?|later|each|apart|elapsed)\b"
)
_ENDS_SECONDS = re.compile(
    r"\s*$|[,;:)?!]|\.(?:$|\s+[A-Z])| (?:and|or|to|in|at|for|on|before|after|then|left|until|when|while|between|from)\b"
)
_TEN_SECONDS = re.compile(r"(?<!the )\b10s$")
_NO_SIDES = listed("GB TB W ml mL cl l L g kg mg oz lb lbs")
"""Units that no side of a thing has: 2 x 500ml is so many of them."""

POWERS = {"²": "square", "2": "square", "³": "cubic", "3": "cubic"}
_RATE = r"\b(?:rates?|yields?|spreads?|hikes?|cuts?|fed|bonds?|curve|margins?|coupon|premium|points?)\b"
_OF_RATE = re.compile(rf"(?i){_RATE}{SENTENCE}$|\b(?:by|up|down|rose|fell|added|lost|gained) $|\d%,? \(?[+-]?\s?$")
_TEMPERATURE = (
    r"\b(?:ovens?|temp(?:erature)?s?|(?:pre)?heat(?:ed|ing)?|bak(?:e|ed|ing)|roast(?:ed|ing)?|fever|boils?|freezes)\b"
)
_OF_TEMPERATURE = re.compile(
    rf"(?i){_TEMPERATURE}{SENTENCE}$|\b(?:(?:high|low)s? of|it(?:'s| is| was)|temp\.) $|\d\s?°?[FC]\s?(?:\(|/|or) ?$"
)
_BEFORE_TEMPERATURE = re.compile(r"\s?(?:\(|/|or )\s?\d{2,3}\s?°?[FC]\b")
FAR = f"{_RATE}|{_TEMPERATURE}"
_OF_TIME = re.compile(
    r" (?:plan|contract|warranty|term|period|loan|mortgage|delay|drive|walk|ride|break|run|wait|fixed)\b"
)
_OF_THINGS = re.compile(
    r" (?:adapters?|bags?|balls?|batter(?:y|ies)|bottles?|bulbs?|cables?|cans?|capsules?|cards?|chargers?|cups?|"
    r"discs?|disks?|drives?|engines?|files?|filters?|glass(?:es)?|guns?|hikes?|jacks?|jars?|lens(?:es)?|limits?|"
    r"motors?|outlets?|packets?|pans?|plugs?|pots?|races?|radius|rides?|rods?|rounds?|runs?|screens?|sensors?|shells?|"
    r"sockets?|steaks?|supply|tablets?|tanks?|trips?|tins?|film|tubes?|turbo|walks?|zones?)\b"
)
_OF_SPORT = re.compile(r" (?:dash|sprint|relay|race|hurdles|freestyle|backstroke|breaststroke|butterfly|swim)\b")
_NOUNS = {"m": _OF_SPORT, **dict.fromkeys(("yr", "yrs", "min", "hr", "mo"), _OF_TIME)}
"""What follows a unit that is singular, by the unit."""

_JOINT = re.compile(rf"(?:\s?/\s?|[-–])(?={NUMBER}\s?[A-Za-zμΩ°])")
_PER_TIME = re.compile(r"(?P<per>/)(?P<time>day|d|hr?|min|wk|week|month|year)(?!\w)")
_SPOONS = {"t": "tsp", "T": "tbsp", "pt": "pt."}
_OF_ARRIVAL = re.compile(r"\bETA:? $")
_PRINTED = re.compile(r" (?:font|type|lead|game|shot|play|rex|behind|ahead|clear|up|down|off)\b")
_SHORT_WORDS = listed("in a at as am pm do me us to or by no it is be we he bar mil mo ha pt cal sec")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    context = before(text, at, 2)
    is_sign = not text[at].isdecimal()
    found = _VULGAR.match(text, at) if is_sign else None
    if found and found["symbol"] not in _SHORT_WORDS and (names := unit(found["symbol"])):
        yield pieces(found, SURE / 2, (simple(*_PARTS[found["part"]]), "part"), (names[0], "symbol"))
    if re.search(r"[\d$£€#]$|\d[.,]$" if not is_sign else r"[\w)]$|[\d)]\s$", context):
        return
    if found := _STONE.match(text, at):
        yield pieces(found, SURE, (decimal(found["number"]), "number"), ("stone", "symbol"))
    if made := _first(text, at):
        yield made
        # Before a second measure a slash is not spoken: 5V/2A, 350°F / 180°C; a dash is "to": 20Hz-20kHz.
        if (joint := _JOINT.match(text, made.end)) and _first(text, joint.end()):
            said = "," if "/" in joint[0] else "to"
            yield Candidate(joint.end(), made.cost, (*made.pieces, Piece(said, *joint.span())))
        if time := _PER_TIME.match(text, made.end):
            under = "day" if time["time"] == "d" else time["time"]
            known = unit(under)
            more = pieces(time, 0.0, ("per", "per"), (known[0] if known else under, "time")).pieces
            yield Candidate(time.end(), made.cost, (*made.pieces, *more))


def _first(text: str, at: int) -> Candidate | None:
    found = (form.match(text, at) for form in (_FORM, _ALONE))
    return next((made for one in found if one and (made := _measure(text, one))), None)


def _number(found: re.Match[str]) -> str:
    groups = found.groupdict()
    number = found["number"].replace(" ", "")
    if "/" in number:
        top, bottom = number.split("/")
        return simple(top, bottom)
    said = decimal(number)
    if groups.get("fraction"):
        said += " and " + mixed(*groups["fraction"].split("/"))
    if groups.get("vulgar"):
        said += " and " + mixed(*_PARTS[groups["vulgar"]])
    return f"{said} {groups['scale']}" if groups.get("scale") else said


def _symbol(text: str, found: re.Match[str]) -> str:
    """The unit's symbol as the table has it: degrees for the F of an oven, a teaspoon for "1 t. salt"."""
    symbol = re.sub(r"(?<=[glq])\.?[ -]", " ", found["symbol"]).replace("° ", "°").rstrip(".")
    if symbol in _SPOONS and found["dot"] and found["gap"] == " " and not _PRINTED.match(after(text, found.end())):
        return _SPOONS[symbol]
    if symbol == "m" and _OF_ARRIVAL.search(before(text, found.start(), 8)):
        return "min"
    if symbol not in ("F", "C") or len(found["number"]) < 2 or _LABELLED.search(before(text, found.start())):
        return symbol
    context = before(text, found.start(), 60)
    is_hot = symbol == "F" and len(found["number"]) == 3 and context.endswith(" at ")
    is_temperature = is_hot or _OF_TEMPERATURE.search(context)
    return "°" * bool(is_temperature or _BEFORE_TEMPERATURE.match(after(text, found.end()))) + symbol


def _measure(text: str, found: re.Match[str]) -> Candidate | None:
    symbol = _symbol(text, found)
    is_close = found["gap"] in ("", "-")
    names = unit(symbol)
    if found["low"] and found["by"] in "-–—" and re.match(r"\s?[=≈]", text[found.end() : found.end() + 2]):
        return None
    is_other = (found["symbol0"] or "").isalpha() and found["symbol0"] != symbol
    if names is None or is_other or not _is_unit(text, found, symbol, is_close=is_close):
        return None
    is_part = re.fullmatch(r"(\d+)\s?/\s?(\d+)", found["number"]) is not None
    is_one = (found["number"] == "1" or is_part) and not (
        found["fraction"] or found["vulgar"] or found["scale"] or found["low"]
    )
    if symbol in ("bp", "bps") and _is_rate(text, found):
        names = ("basis point", "basis points")
    nouns = _NOUNS.get(symbol, _OF_THINGS)
    is_before_noun = is_attributive(text, found.start(), found.end(), is_close=found["gap"] == "") or (
        nouns is not None and not found["dot"] and nouns.match(text, found.end()) is not None
    )
    is_singular = is_one or "-" in found["gap"] or found["per"] == "·" or is_before_noun
    name = names[0] if is_singular else names[1]
    power = POWERS.get((found["power"] or "")[-1:], "")
    said = f"{power} {name}".strip()
    parts: list[tuple[str, str]] = [("minus", "minus")] if found["minus"] else []
    joined = ""
    if found["low"]:
        parts += [(decimal(found["first"]), "first"), ("by", "by0")] if found["first"] else []
        by = "times" if symbol in _NO_SIDES and not found["first"] else "by"
        is_mixed = is_part and found["by"] == "-" and found["low"].isdecimal() and not found["symbol0"]
        joined = "and" if is_mixed else {"x": by, "×": by, "/": "or"}.get(found["by"], "to")
        parts += [(decimal(found["low"]), "low")]
        if found["symbol0"] and (low := unit(found["symbol0"].strip())):
            parts += [(low[found["low"] != "1"], "symbol0")]
        parts += [(joined, "by")]
    number = mixed(*re.split(r"\s?/\s?", found["number"])) if joined == "and" else _number(found)
    parts += [(number, "number"), (said, "symbol")]
    if found["under"]:
        under = unit(found["under"])
        if under is None:
            return None
        power = POWERS.get((found["under_power"] or "")[-1:], "")
        named = f"{under[0]} squared" if power and under[0] == "second" else f"{power} {under[0]}".strip()
        if found["hundred"] or (found["per"] == "·" and not is_one):
            named = "one hundred " * bool(found["hundred"]) + under[1]
        parts += [("per" if found["per"] != "·" else "", "per"), (named, "under")]
    # 0.5mm² is no product of letters.
    has_power = is_close and len(symbol) > 1 and bool(found["power"])
    return pieces(found, SURE - has_power / 4 if is_close or len(symbol) > 1 else LIKELY, *parts)


def _is_rate(text: str, found: re.Match[str]) -> bool:
    """Whether points are of a rate, rather than bits per second: those are whole."""
    return _OF_RATE.search(before(text, found.start(), 60)) is not None or "." in found["number"]


def _is_unit(text: str, found: re.Match[str], symbol: str, *, is_close: bool) -> bool:
    """Whether letters after a number are a unit: not an initial (in 2005 W. Smith), nor a word (in, at)."""
    if symbol == "s" and not found["under"]:
        if not is_close:
            is_time = "." in found["number"] or before(text, found.start(), 2) == "= "
            follows = after(text, found.end())
            return is_time or bool(_SECONDS.match(follows) or (found.start() and _ENDS_SECONDS.match(follows)))
        is_decade = (
            found["number"].endswith("0")
            and "." not in found["number"]
            and not _TEN_SECONDS.search(before(text, found.end()))
        )
        is_decade = is_decade and before(text, found.start(), 1) != "="
        return found["by"] not in ("x", "×") and (not is_decade or bool(_SECONDS.match(after(text, found.end()))))
    if symbol == "c":
        return bool(found["dot"]) and not is_close
    if found["gap"] == " " and before(text, found.start(), 1).isalpha():
        return False
    if symbol.isupper() and len(symbol) == 1 and is_close and _LABELLED.search(before(text, found.start())):
        return False
    if symbol == "A" and is_close and not found["under"]:
        return bool(
            "." in found["number"]
            or _OF_CURRENT.match(after(text, found.end()))
            or _AFTER_VOLTAGE.search(before(text, found.start()))
        )
    if symbol in _LETTERS and not found["under"]:
        is_electric = symbol in "AKN" and not is_close and _AFTER_LETTER.match(after(text, found.end()))
        return bool(is_electric) and not _LABELLED.search(before(text, found.start()))
    if symbol in ("BR", "BA") or (symbol == "ac" and is_close):
        return is_close and symbol != "ac"
    if symbol in _SHORT_WORDS and not is_close:
        if symbol == "sec" and found["dot"]:
            return True
        return symbol in ("ha", "bar", "sec", "mo") and not re.match(r"\s+[a-z]+", after(text, found.end(), 4))
    if len(symbol) == 1 and not is_close and symbol.isalpha():
        follows = text[found.end() : found.end() + 3]
        return not re.match(r"\.? [A-Z]", follows) or symbol.islower() or follows in (" AC", " DC")
    return True


EXAMPLES = (
    ("12kg, 12KG and 1 kg", "twelve kilograms, twelve kilograms and one kilogram."),
    (
        "5 kg/m³; 20,641.3/km2",
        "five kilograms per cubic meter, twenty thousand six hundred and forty one point three per square kilometer.",
    ),
    (
        "830 kHz; 800 hp; 850 nm",
        "eight hundred and thirty kilohertz, eight hundred horsepower, eight hundred and fifty nanometers.",
    ),
    ("2-5lb or 4 1/2 lbs", "two to five pounds or four and a half pounds."),
    ("25 x 7 m", "twenty five by seven meters."),
    ("-0.4kg, 100 million kg", "minus zero point four kilograms, one hundred million kilograms."),
    ("10% to 20%", "ten percent to twenty percent."),
    ("25°C for 1 km", "twenty five degrees Celsius for one kilometer."),
    ("a 7.2-millimeter bullet", "a seven point two millimeter bullet."),
    ("41,459.00 km³", "forty one thousand four hundred and fifty nine point zero zero cubic kilometers."),
    ("3 mbps", "three megabits per second."),
    ("½ tsp. salt, 1 c. milk, 10k jobs/s", "one half teaspoon salt, one cup milk, ten thousand jobs per second."),
    ("a 26GB file", "a twenty six gigabyte file."),
    ("190°C / Gas mark 5", "one hundred and ninety degrees Celsius slash Gas mark five."),
    ("5 cm x 3 cm; up by 25 bps", "five centimeters by three centimeters, up by twenty five basis points."),
    ("1 000 km, 8 fl oz, a 5 yr plan", "one thousand kilometers, eight fluid ounces, a five year plan."),
    ("30×20×15cm, 15-20 kts", "thirty by twenty by fifteen centimeters, fifteen to twenty knots."),
    ("180 deg. C, wait 10s, 10s of them", "one hundred and eighty degrees Celsius, wait ten seconds, tens of them."),
    ("12st 7lb", "twelve stone seven pounds."),
    ("1/2 tsp, ¼ tsp", "one half teaspoon, one quarter teaspoon."),
    ("6 N·m, 5 L/100 km", "six newton meters, five liters per one hundred kilometers."),
    ("1m-2m; 230 V AC", "one meter to two meters, two hundred and thirty volts ay C."),
    (
        "2 x 500ml, 1-1/2 cups, 0.5mm²; after 30 s",
        "two times five hundred milliliters, one and a half cups, "
        "zero point five square millimeters, after thirty seconds.",
    ),
    ("a 90s timeout, in 3.1 s", "a ninety second timeout, in three point one seconds."),
)
