"""Postal addresses: 1428 Elm St., 708 N 1st St, Santa Clara, CA 95051."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import SURE, Candidate, Piece, after, before
from sonoro.text.english.numbers import digits, grouped, ordinal
from sonoro.text.english.tables import pairs

from .common import STARTERS, before_capital, ends_sentence, pieces, whole
from .initialism import spell

STARTS = ("digit", "letter")

_STREETS = pairs(
    "Ave = Avenue | Blvd = Boulevard | Rd = Road | Ln = Lane | Hwy = Highway | Pkwy = Parkway | St = Street | "
    "Dr = Drive | Ct = Court | Pl = Place | Expy = Expressway | Sq = Square | Ter = Terrace | Cir = Circle | "
    "Fwy = Freeway | Tpke = Turnpike"
)
_FULL = "Street|Avenue|Road|Drive|Lane|Boulevard|Court|Place|Way|Highway|Parkway|Square|Terrace|Circle|Expressway"
_KINDS = "|".join(sorted(_STREETS, key=len, reverse=True))
_COMPASS = pairs(
    "N = North | E = East | S = South | W = West | NE = Northeast | NW = Northwest | SE = Southeast | SW = Southwest"
)
NEAR = "de|la|del"
_STREET = re.compile(
    rf"(?P<number>\d{{1,5}})(?P<letter>[A-Z]?)\s(?:(?P<side>[NSEW]|NE|NW|SE|SW)\.?\s)?(?P<name>(?:(?:[A-Z][\w'.]*|\d{{1,3}}(?:st|nd|rd|th)|de|la|del|of|the)\s){{1,4}}?)"
    rf"(?P<kind>(?i:{_KINDS})|{_FULL})(?![A-Za-z])(?P<dot>\.)?"
)
_FIRST = re.compile(r"(?!9/11|24/7)(?P<first>\d{1,5})(?P<joint>[-–/])(?=\d)")
"""Before the number of a house: 12/3 Oak St, 123-125 Main Rd."""

_AFTER_NAME = re.compile(rf"(?P<kind>{_KINDS})(?![A-Za-z])(?P<dot>\.)?")
_NAME_BEFORE = re.compile(r"\b(?:[A-Z][a-z']*|Jr\.|[A-Z]\.|\d+(?:st|nd|rd|th))\s$")
_COMMON_BEFORE = re.compile(
    rf"\b(?:{STARTERS}|And|Of|In|Great|Old|Little|Good|Dear|Holy|Pope|Bishop|Mount|Port|Fort|Blessed)\s$"
)
"""Words before the St. of a saint rather than of a street: How St. Piran came."""

_ON_STREET = re.compile(
    r"\b(?:[Oo]n|[Oo]nto|[Aa]t|along|down|off|near|to|up|past|via|[Tt]ake|[Cc]ross|between|of|and) "
    r"(?:[A-Z][\w'.]* ){1,3}$"
    r"|\b(?:Main|High|Elm|Oak|Pine|Maple|Cedar|Wall|Market|Park|Broad|State|Bond|Baker|Fleet|\d+(?:st|nd|rd|th)) $"
)
"""Before a St. or Dr. of a street that another word with a capital follows."""

_EAST, _CITY = re.compile(r"\b(?:East|West|North|South|Downtown)\s$"), re.compile(r"\.? (?:Louis|Paul|Petersburg)\b")
"""What stands around the St. of a city's part: East St. Louis."""

_SIDE = re.compile(r"(?P<side>[NSEW])\.?(?=\s\d{1,3}(?:st|nd|rd|th)\s(?:St|Ave|Street|Avenue)\b)")
_SIDE_NAME = re.compile(
    r"(?P<side>[NSEW])\.(?=\s[A-Z][a-z]+\s(?:St|Ave|Rd|Blvd|Dr|Ln|Street|Avenue|Road|Boulevard|Drive|Lane)\b)"
)
_SIDE_OF = re.compile(r"(?P<side>[NSEW]{1,2})\.?(?= of\b)")
_AFTER_WAY = re.compile(r"\d ?(?:mi|miles?|km|kilomet(?:er|re)s?|blocks?|m|ft|feet|yds?)\.? $")
"""Which way so many miles lead: 30 mi. W. of Dallas."""

_PARTY = re.compile(r"(?P<party>[DRI])-(?P<state>[A-Z]{2})(?=\))")
_STATES = pairs(
    "AL = Alabama | AK = Alaska | AZ = Arizona | AR = Arkansas | CA = California | CO = Colorado | CT = Connecticut | "
    "DE = Delaware | FL = Florida | GA = Georgia | HI = Hawaii | ID = Idaho | IL = Illinois | IN = Indiana | "
    "IA = Iowa | KS = Kansas | KY = Kentucky | LA = Louisiana | ME = Maine | MD = Maryland | MA = Massachusetts | "
    "MI = Michigan | MN = Minnesota | MS = Mississippi | MO = Missouri | MT = Montana | NE = Nebraska | NV = Nevada | "
    "NH = New Hampshire | NJ = New Jersey | NM = New Mexico | NY = New York | NC = North Carolina | "
    "ND = North Dakota | OH = Ohio | OK = Oklahoma | OR = Oregon | PA = Pennsylvania | RI = Rhode Island | "
    "SC = South Carolina | SD = South Dakota | TN = Tennessee | TX = Texas | UT = Utah | VT = Vermont | "
    "VA = Virginia | WA = Washington | WV = West Virginia | WI = Wisconsin | WY = Wyoming | DC = D C"
)
_UNSURE = frozenset(["HI", "ID", "IN", "LA", "MA", "ME", "OH", "OK", "OR", "PA"])
_STATE = re.compile(
    rf"(?P<state>{'|'.join(_STATES)})(?![A-Za-z]|\.[A-Za-z])"
    r"(?:(?P<comma>,?) (?P<zip>\d{5})(?P<more>-\d{4})?(?!\d))?"
)
_ZIP = re.compile(r"(?P<word>(?i:zip(?: code)?):?) (?P<zip>\d{5})(?P<more>-\d{4})?(?!\d)")
_POSTCODE = re.compile(r"[A-Z]{1,2}\d[A-Z\d]? \d[A-Z]{2}(?![\w])")
_PRESS = pairs(
    "Ala = Alabama | Ariz = Arizona | Ark = Arkansas | Calif = California | Colo = Colorado | Conn = Connecticut | "
    "Del = Delaware | Fla = Florida | Ga = Georgia | Ill = Illinois | Ind = Indiana | Kan = Kansas | Ky = Kentucky | "
    "La = Louisiana | Md = Maryland | Mass = Massachusetts | Mich = Michigan | Minn = Minnesota | Miss = Mississippi | "
    "Mo = Missouri | Mont = Montana | Neb = Nebraska | Nev = Nevada | Okla = Oklahoma | Ore = Oregon | "
    "Pa = Pennsylvania | Tenn = Tennessee | Tex = Texas | Va = Virginia | Vt = Vermont | Wash = Washington | "
    "Wis = Wisconsin | Wyo = Wyoming"
)
"""The states as newspapers abbreviate them, behind a place: Miami, Fla."""

_PRESS_STATE = re.compile(rf"(?P<state>{'|'.join(_PRESS)})\.(?P<comma>,?)(?!\w)(?<!Miss\.(?= [A-Z]))")
_ROADS = {"Hwy": "Highway", "Rte": "Route"}
_ROUTE = re.compile(
    r"(?P<road>Hwy|Highway|Route|Rte|Interstate|I|US|SR)(?:\.? |-)(?P<number>\d{1,3}) (?P<side>[NSEW])(?=[\s.,;)]|$)"
)
_SIDE_BEHIND = re.compile(r"(?P<side>[NSEW])(?=[,;.)\n]|$| (?:Apt|Ste|Suite|Unit)\b)")
_STREET_BEFORE = re.compile(rf"\b(?:{_KINDS}|{_FULL})\.? $")
_PHYSICIAN = re.compile(
    r"(?:[A-Z][a-z]+ [A-Z]\. |(?:(?:^|[.!?;] )|\b(?:[Bb]y|with|and|says?|said|is|was|author|Dr\.) )[A-Z][a-z]+ )"
    r"(?!Spring|Park|City|Hill|Height|Beach|Grove|Town|Fall|Church|Point|Creek|Harbor|Mill|Island|Valley)"
    r"[A-Z][\w'-]+, $"
)
WORDS = frozenset([*_STREETS, *_PRESS, "zip"])
_JOINED = re.compile(r"[\w.,$£€#/-]$")
_AFTER_PLACE = re.compile(r"[a-z]\.?, $")
_AFTER_CITY = re.compile(r"\b(?!Well|Yes|No|Oh|Hey|Hello|Hi|Sorry|Please|Thanks|Dear)[A-Z][a-z]+, $")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    context = before(text, at)
    if _JOINED.search(context):
        return
    if (found := _STREET.match(text, at)) and not found["name"].endswith((". ", " the ", " of ")):
        yield _street(text, found)
    if text[at] <= "9" and (first := _FIRST.match(text, at)) and (found := _STREET.match(text, first.end())):
        made = _street(text, found)
        to = "slash" if first["joint"] == "/" else "to" if int(first["first"]) < int(found["number"]) else ""
        unit = Piece(f"{grouped(first['first'])} {to}".strip(), *first.span("first"))
        yield Candidate(made.end, made.cost, (unit, *made.pieces))
    if (found := _AFTER_NAME.match(text, at)) and _NAME_BEFORE.search(context) and _is_street(text, found):
        yield whole(
            found, SURE / 4, _STREETS[found["kind"]], mark="." * (bool(found["dot"]) and _ends(text, found.end()))
        )
    if (found := _PARTY.match(text, at)) and found["state"] in _STATES:
        yield pieces(found, SURE / 2, (found["party"], "party"), (_STATES[found["state"]], "state"))
    if found := _SIDE.match(text, at) or _SIDE_NAME.match(text, at):
        yield pieces(found, SURE / 2, (_COMPASS[found["side"]], "side"))
    if found := _ROUTE.match(text, at):
        road = spell(found["road"]) if found["road"].isupper() else _ROADS.get(found["road"], found["road"])
        number, side = grouped(found["number"]), _COMPASS[found["side"]]
        yield pieces(found, SURE / 4, (road, "road"), (number, "number"), (side, "side"))
    if (found := _SIDE_BEHIND.match(text, at)) and _STREET_BEFORE.search(context):
        yield whole(found, SURE / 2, _COMPASS[found["side"]])
    if (found := _SIDE_OF.match(text, at)) and found["side"] in _COMPASS and _AFTER_WAY.search(context):
        yield whole(found, SURE / 4, _COMPASS[found["side"]].lower())
    if (found := _PRESS_STATE.match(text, at)) and _AFTER_CITY.search(context):
        is_end = not found["comma"] and before_capital(text, found.end())
        yield whole(found, SURE / 4, _PRESS[found["state"]], mark="." if is_end else found["comma"])
    if (found := _STATE.match(text, at)) and not (found["state"] == "MD" and _is_physician(text, found)):
        is_placed = _AFTER_PLACE.search(context) and re.match(r"\s*(?:[.,;)\n]|$)", after(text, found.end()))
        if found["zip"] and (found["state"] not in _UNSURE or _AFTER_PLACE.search(context)):
            more = f", {digits(found['more'])}" if found["more"] else ""
            yield whole(found, SURE, f"{_STATES[found['state']]} {digits(found['zip'])}{more}")
        elif is_placed and found["state"] not in _UNSURE:
            yield whole(found, SURE / 2, _STATES[found["state"]])
    if found := _ZIP.match(text, at):
        yield whole(
            found, SURE, f"zip code {digits(found['zip'])}" + (f", {digits(found['more'])}" if found["more"] else "")
        )
    if found := _POSTCODE.match(text, at):
        yield whole(
            found, SURE, " ".join(digits(sign) if sign.isdecimal() else spell(sign) for sign in found[0] if sign != " ")
        )


def _is_physician(text: str, found: re.Match[str]) -> bool:
    """Whether MD is a degree behind a name, rather than Maryland behind a place."""
    is_person = _PHYSICIAN.search(before(text, found.start())) is not None
    return not found["zip"] and (is_person or re.match(r", (?:PhD|[A-Z]{3,})\b", after(text, found.end())) is not None)


def _street(text: str, found: re.Match[str]) -> Candidate:
    made = [Piece(grouped(found["number"]), *found.span("number"))]
    if found["letter"]:
        made.append(Piece(found["letter"], *found.span("letter")))
    if found["side"]:
        made.append(Piece(_COMPASS[found["side"]], *found.span("side")))
    for word in re.finditer(r"\S+", found["name"]):
        start, end = word.start() + found.start("name"), word.end() + found.start("name")
        number = re.fullmatch(r"(\d+)(?:st|nd|rd|th)", word[0])
        said = (
            ordinal(number[1])
            if number
            else "Saint"
            if word[0] in ("St", "St.")
            else _COMPASS.get(word[0].rstrip("."), word[0].rstrip("."))
        )
        made.append(Piece(said, start, end))
    kind = found["kind"]
    made.append(Piece(_STREETS.get(kind.capitalize(), kind), *found.span("kind")))
    if found["dot"] and _ends(text, found.end()):
        made.append(Piece(".", *found.span("dot")))
    return Candidate(found.end(), SURE, tuple(made))


def _is_street(text: str, found: re.Match[str]) -> bool:
    if found["kind"] in ("St", "Dr", "Ct", "Pl", "Ter", "Cir", "Sq"):
        if found["kind"] == "St" and _EAST.search(before(text, found.start())) and _CITY.match(text, found.end()):
            return False
        if found["kind"] in ("St", "Dr") and _COMMON_BEFORE.search(before(text, found.start())):
            return False
        follows = after(text, found.end())
        if found["dot"] and re.match(r"\s[a-z]", follows):
            return found["kind"] != "Dr" or not re.search(r"(?:^|[.!?]\s)[A-Z]\w+ $", before(text, found.start()))
        if found["kind"] in ("St", "Dr") and re.match(r"\. [A-Z]", text[found.end() - 1 : found.end() + 2]):
            return ends_sentence(text, found.end()) or bool(_ON_STREET.search(before(text, found.start())))
        return re.match(
            r"\s*(?:[,;:.!?)|\n]|$)| (?:Apt|Suite|Ste|Unit|and|in|at|near|is|was)\b| &", follows
        ) is not None or (bool(found["dot"]) and _ends(text, found.end()))
    return True


def _ends(text: str, at: int) -> bool:
    return (
        re.match(r"\s*$|\s+(?!Apt|Ste\b|Suite|Unit|Floor|Bldg|Rm\b|[NS]?[EW]\b|[NS]\b)[\"'(]*[A-Z]", after(text, at))
        is not None
    )


EXAMPLES = (
    ("Nancy lived at 1428 Elm St. It was strange.", "Nancy lived at fourteen twenty eight Elm Street. It was strange."),
    ("708 N 1st St, San City", "seven oh eight North first Street, San City."),
    (
        "2788 San Tomas Expy, Santa Clara, CA 95051",
        "twenty seven eighty eight San Tomas Expressway, Santa Clara, California nine five zero five one.",
    ),
    ("42nd St. & W. 34th St.", "forty second Street and West thirty fourth Street."),
    ("123 Smth St, City, NY", "one twenty three Smth Street, City, New York."),
    (
        "How St. Piran came to Elm St. Good St. Ann. St. Ann is",
        "How Saint Piran came to Elm Street. Good Saint Ann. Saint Ann is.",
    ),
    (
        "123-125 Main Rd, 12/3 Oak St, 5 mi. N of it",
        "one twenty three to one twenty five Main Road, twelve slash three Oak Street, five miles north of it.",
    ),
    ("on N. Main St., NY; Lee (D-MA)", "on North Main Street, New York, Lee, D Massachusetts."),
    ("Doctor Smith lives on Elm Dr.", "Doctor Smith lives on Elm Drive."),
)
