"""What is per something, without a unit of its own before it: in km/h, 20/km2, 14 jobs/s; and units alone: m²."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, SURE, Candidate, Piece, before
from sonoro.text.english.numbers import decimal
from sonoro.text.english.tables import listed

from .common import NUMBER, pieces, whole
from .initialism import spell
from .measure import POWERS
from .units import unit

STARTS = ("digit", "letter", "sign")

_ALONE_PER = re.compile(
    rf"(?P<number>{NUMBER})\s?(?P<per>/)\s?(?P<under>kg|lb|km[23²³]?|mi|m[23²³]|min|hr|h|wk|mo|yr|ml|mL|L|oz|day|hour|minute|second|month|year|week)(?![\w/])"
)
_BARE = re.compile(
    r"(?P<symbol>[A-Za-z]{1,3})/(?P<under>s|h|hr|min|day|week|m[23²³]|km[23²³]|dL|mL|L|kg)(?P<power>\^?[23]|[²³])?(?![\w/^])"
    r"|(?P<length>km|cm|mm|ft|mi|m)(?P<square>[²³])(?![\w/])"
)
_BY = re.compile(r"[x×](?=\s\d)")
_AFTER_LENGTH = re.compile(r"\d(?:\s?(?:mm|cm|m|km|in|ft|yd)\.?|['\"])\s$")
WORDS = listed("km cm mm m kg mg g s ms L mL J kJ N kN W kW V Hz kHz MHz GHz kPa MPa eV keV MeV mol")
"""Units that may follow a formula or a power of ten."""

_ALONE = re.compile(rf"(?:{'|'.join(sorted(WORDS, key=len, reverse=True))})(?![\w/'-])")
_AFTER_FORMULA = re.compile(r"(?:\b[A-Za-z]{1,2} ?= ?-?[\d.,]*\d|10\^-?\d{1,3}|10[⁻⁰-⁹¹²³]{1,4})\s$")
_RATE = re.compile(r"(?P<things>[a-z]{2,12})(?P<per>/)(?P<under>s|sec|min|h|hr|day|week|month|year)(?!\w)")
_UNDER = (
    "s|sec|min|h|hrs?|d|day|wk|week|month|yr|year|shift|mL|ml|dL|L|kg|g|lb|oz|share|head|person|serving|night|unit|user|"
    "room|cell"
)
_SLASH = re.compile(rf"\s?(?P<per>/)\s?(?:(?P<many>\d{{1,3}})\s?)?(?P<under>{_UNDER})(?![\w/])")
_AFTER_THINGS = re.compile(
    r"\d (?:[a-z]{2,12} )?[a-z]{3,12}s$|\d¢$|\dx$|10\^\d{1,2}(?: [a-z]+s)?$|10[⁰-⁹¹²³]{1,2}(?: [a-z]+s)?$"
)
_EVERY = re.compile(r"q\.?\s?(?P<low>\d{1,2})(?:-(?P<high>\d{1,2}))?\s?(?P<unit>h|hrs?|d|min|wk)(?!\w)")
"""How often a medicine is taken: q8h, q4-6h."""

_THINGS = {"req": "requests", "reqs": "requests", "msgs": "messages"}
_JOINED = re.compile(r"[\w/]$")
_IN_NUMBER = re.compile(r"[\d$£€#]$|\d[.,]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if not text[at].isalnum():
        if text[at] == "/" and (found := _SLASH.match(text, at)) and _AFTER_THINGS.search(before(text, at)):
            yield _behind_slash(found)
        return
    context = before(text, at, 2)
    if text[at].isdecimal():
        if (found := _ALONE_PER.match(text, at)) and not _IN_NUMBER.search(context):
            yield _per(found)
        return
    if _BY.match(text, at) and _AFTER_LENGTH.search(before(text, at)):
        yield Candidate(at + 1, SURE / 2, (Piece("by", at, at + 1),))
    if _JOINED.search(context):
        return
    if text[at] == "q" and (found := _EVERY.match(text, at)):
        high = f"{found['low']}-{found['high']}" if found["high"] else found["low"]
        name = (unit(found["unit"]) or ("day", "days"))[high != "1"]
        said = " to ".join(map(decimal, high.split("-")))
        yield whole(found, SURE / 2, f"every {name}" if high == "1" else f"every {said} {name}")
    if (found := _ALONE.match(text, at)) and _AFTER_FORMULA.search(before(text, at)) and (names := unit(found[0])):
        yield whole(found, SURE / 2, names[1])
    if (found := _BARE.match(text, at)) and (said := _bare(found)):
        yield whole(found, SURE / 2, said)
    if (found := _RATE.match(text, at)) and (
        found["things"][3:].endswith("s") or re.search(r"(?:\d|\d[kM]) $", before(text, at, 3))
    ):
        time = unit(found["under"]) or (found["under"],) * 2
        yield pieces(
            found, SURE, (_THINGS.get(found["things"], found["things"]), "things"), ("per", "per"), (time[0], "under")
        )


def _behind_slash(found: re.Match[str]) -> Candidate:
    """What a number of things is per: 100 units/mL, 4 doses/24 h, 3x/day."""
    names = unit(found["under"]) if found["under"] != "d" else ("day", "days")
    one, many = names or (found["under"], found["under"] + "s")
    name = f"{decimal(found['many'])} {many}" if found["many"] not in (None, "1") else one
    return pieces(found, SURE / 2, ("per", "per"), (name, "under"))


def _per(found: re.Match[str]) -> Candidate:
    power = POWERS.get(found["under"][-1], "")
    names = unit(found["under"].rstrip("23²³")) or (found["under"], found["under"])
    under = f"{power} {names[0]}".strip()
    return pieces(found, LIKELY, (decimal(found["number"]), "number"), ("per", "per"), (under, "under"))


def _bare(found: re.Match[str]) -> str:
    """A unit without a number, or nothing."""
    if found["length"]:
        length = unit(found["length"])
        return f"{POWERS[found['square']]} {length[1]}" if length else ""
    spelled = (spell(found["symbol"]),) * 2 if found["symbol"].isupper() else None
    names, under = unit(found["symbol"]) or spelled, unit(found["under"].rstrip("23²³"))
    if names is None or under is None:
        return ""
    power = POWERS.get(found["under"][-1], "")
    return f"{names[1]} per {power} {under[0]}".replace("  ", " ") + " squared" * bool(found["power"])


EXAMPLES = (
    ("in km/h or m²", "in kilometers per hour or square meters."),
    (
        "100 units/mL, 4 doses/24 h, q4-6h",
        "one hundred units per milliliter, four doses per twenty four hours, every four to six hours.",
    ),
    ("14 tok/s and 20/km2", "fourteen tok per second and twenty per square kilometer."),
)
