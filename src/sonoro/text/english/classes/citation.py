"""Citations of law: 410 U.S. 113, 42 U.S.C. § 1983, 9th Cir., Fed. R. Civ. P. 12(b)(6)."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import SURE, Candidate, Piece, before
from sonoro.text.english.numbers import cardinal, grouped, ordinal
from sonoro.text.english.tables import pairs

from .common import pieces
from .initialism import spell

STARTS = ("digit", "letter")

_REPORTER = (
    r"(?P<name>U\.\s?S\. ?C\.|C\.\s?F\.\s?R\.|U\.\s?S\.(?= \d|, at)|S\. ?Ct\.|L\. ?Ed\.|Fed\. Reg\.|Stat\.(?= \d)"
    r"|F\. ?Supp\.|F\. ?App'x|F\.(?= ?\d|\d)|Cal\. ?App\.|Cal\.(?= ?\d)|[NS]\.\s?[EW]\.|"
    r"A\.(?=\dd)|P\.(?=\dd)|So\.(?= ?\dd))"
)
_CITED = re.compile(
    rf"(?P<volume>\d{{1,4}}) {_REPORTER}"
    r"(?: ?(?P<series>\d)(?P<th>d|th))?,?(?P<sign> §{1,2})? (?P<page>\d{1,5})"
    r"(?:(?P<to>[-–])(?P<last>\d{1,5}))?(?![\d,]*\d)"
)
_SERIES = {"2": "second", "3": "third"}
_NAMES = pairs(
    "S. Ct. = Supreme Court | L. Ed. = Lawyers Edition | Fed. Reg. = Federal Register | Stat. = Statutes | "
    "F. Supp. = Federal Supplement | F. App'x = Federal Appendix | F. = F | Cal. App. = California Appellate | "
    "Cal. = California | So. = Southern | A. = ay | P. = P"
)
_COURT = re.compile(r"(?P<number>\d{1,2})(?:st|nd|rd|th|d) (?P<name>Cir)\.")
_WORDS = pairs(
    "Fed. = Federal | Civ. = Civil | Crim. = Criminal | App. = Appellate | Bankr. = Bankruptcy | R. = Rule | "
    "P. = Procedure | Evid. = Evidence | Const. = Constitution"
)
_RULES = re.compile(
    r"(?:(?P<land>Fed|[A-Z][a-z]{1,5})\.\s)?(?P<rule>R\.)\s"
    r"(?:(?P<kind>Civ|Crim|App|Bankr)\.\s(?P<of>P)\.|(?P<evidence>Evid)\.)(?=\s?\d|\s[a-z(]|[,;)]|$)"
)
_NUMBER = re.compile(
    r"(?P<title>\d{1,4})(?P<point>\.)(?P<part>\d{1,4})(?P<letter>[a-z](?!\w))?(?:-(?P<rule>\d{1,2}))?(?![\w]|\.\d)"
)
_CODES = ("§", "§ ", "CFR ", "F.R. ")
"""Before the number of a code's section: § 1798.100, § 240.10b-5."""

_PROCEDURE = re.compile(r"(?P<kind>Civ|Crim|App|Bankr)\.\s(?P<of>P)\.(?=\s?\d)")
_CONSTITUTION = re.compile(r"(?P<land>U\.\s?S\.)\s(?P<word>Const)\.")
WORDS = frozenset(["Fed", "Civ", "Crim", "App", "Bankr"])
_JOINED = re.compile(r"[\w.,$£€-]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if _JOINED.search(before(text, at, 1)):
        return
    if found := _CITED.match(text, at):
        yield _cited(found)
    if (
        text[at] <= "9"
        and "." in text[at + 1 : at + 5]
        and text[max(0, at - 5) : at].endswith(_CODES)
        and (found := _NUMBER.match(text, at))
    ):
        parts = ((_number(found["title"]), "title"), ("point", "point"), (grouped(found["part"]), "part"))
        last = (spell(found["letter"] or ""), "letter"), (cardinal(found["rule"]) if found["rule"] else "", "rule")
        yield pieces(found, SURE / 2, *parts, *last)
    if found := _COURT.match(text, at):
        yield pieces(found, SURE / 2, (ordinal(found["number"]), "number"), ("Circuit", "name"))
    if found := _RULES.match(text, at):
        yield pieces(found, SURE / 4, *_rules(found))
    if found := _PROCEDURE.match(text, at):
        yield pieces(found, SURE / 4, (_WORDS[found["kind"] + "."], "kind"), ("Procedure", "of"))
    if found := _CONSTITUTION.match(text, at):
        yield pieces(found, SURE / 4, ("U S", "land"), ("Constitution", "word"))


def _rules(found: re.Match[str]) -> Iterator[tuple[str, str]]:
    if land := found["land"]:
        yield _WORDS.get(land + ".", land), "land"
    yield "Rule of", "rule"
    if found["kind"]:
        yield _WORDS[found["kind"] + "."], "kind"
        yield "Procedure", "of"
    else:
        yield "Evidence", "evidence"


def _cited(found: re.Match[str]) -> Candidate:
    name = re.sub(r"(?<=\w\.)(?=[A-Z][a-z])", " ", found["name"])
    said = _NAMES.get(name) or spell(found["name"])
    made = [Piece(_number(found["volume"]), *found.span("volume")), Piece(said, *found.span("name"))]
    if found["series"]:
        series = _SERIES.get(found["series"]) or ordinal(found["series"])
        made.append(Piece(series, found.start("series"), found.end("th")))
    if found["sign"]:
        made.append(Piece("sections" if "§§" in found["sign"] else "section", *found.span("sign")))
    made.append(Piece(_number(found["page"]), *found.span("page")))
    if found["last"]:
        made += Piece("to", *found.span("to")), Piece(_number(found["last"]), *found.span("last"))
    return Candidate(found.end(), SURE / 4, tuple(made))


def _number(number: str) -> str:
    return grouped(number) if len(number) in (3, 4) else cardinal(number)


EXAMPLES = (
    (
        "Brown v. Board, 347 U.S. 483 (1954)",
        "Brown versus Board, three forty seven U S four eighty three, nineteen fifty four.",
    ),
    (
        "28 U.S.C. §§ 1331-1332, § 240.10b-5",
        "twenty eight U S C sections thirteen thirty one to thirteen thirty two, section two forty point ten b five.",
    ),
    ("42 U.S.C. § 1983", "forty two U S C section nineteen eighty three."),
    ("123 F.3d 456, 9th Cir. 1999", "one twenty three F third four fifty six, ninth Circuit nineteen ninety nine."),
    (
        "Fed. R. Civ. P. 12 and Fed. R. Evid. 403",
        "Federal Rule of Civil Procedure twelve and Federal Rule of Evidence four hundred and three.",
    ),
)
