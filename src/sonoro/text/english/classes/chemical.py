"""Chemical formulas: H₂SO₄, CO2, C6H12O6."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import SURE, Candidate, Piece, before
from sonoro.text.english.numbers import cardinal, grouped

from .common import pieces
from .initialism import spell

STARTS = ("letter", "sign", "digit")

_ELEMENTS = (
    "He|Li|Be|Ne|Na|Mg|Al|Si|Cl|Ar|Ca|Sc|Ti|Cr|Mn|Fe|Co|Ni|Cu|Zn|Ga|Ge|As|Se|Br|Kr|Rb|Sr|Zr|Nb|Mo|Ag|Cd|Sn|Sb|Te|Xe|Cs|Ba|Pt|Au|Hg|Pb|Bi|"
    "H|B|C|N|O|F|P|S|K|V|I|U|W"
)
_FORMULA = re.compile(
    rf"(?=[A-Za-z()]{{1,12}}[\d₀-₉])(?:(?:{_ELEMENTS})(?:[₀-₉]{{1,3}}|\d{{1,3}})?|[()](?:[₀-₉\d]{{1,2}})?){{2,24}}(?P<charge>[²³⁴]?[+⁻]|(?:\^[2-4]?)?[+-](?!\s?\d))?(?![\w-])"
)
_ISOTOPE = re.compile(rf"(?P<mass>[⁰¹²³⁴⁵⁶⁷⁸⁹]{{1,3}})(?P<symbol>{_ELEMENTS})(?![\w])")
_MASSES = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹", "0123456789")
_SALT = re.compile(rf"(?:{_ELEMENTS}){{2,5}}(?![\w'-])")
_ION = re.compile(
    rf"(?P<symbol>(?:{_ELEMENTS}){{1,2}})(?P<charge>[²³⁴]|\^[2-4]|(?<=[a-z])[2-4])?"
    r"(?P<sign>[+⁻]|(?<=Cl|Br)-)(?![\w-])"
)
_NUCLIDE = re.compile(
    r"(?P<symbol>Am|Co|Cs|Po|Pu|Ra|Sr|Tc|Th|U|I|(?:ur|pluto|po|tech)[a-z]+ium|americium|strontium|radium|thorium|"
    r"ca?esium|cobalt|iodine)"
    r"-(?P<mass>\d{2,3})(?![\w-]|[.,]\d)",
    re.IGNORECASE,
)
_CHARGES = {
    **dict.fromkeys("²2", "two"),
    **dict.fromkeys("³3", "three"),
    **dict.fromkeys("⁴4", "four"),
    "+": "plus",
    **dict.fromkeys("⁻-", "minus"),
    "^": "",
}
_PARTS = re.compile(rf"{_ELEMENTS}|[₀-₉\d]+")
_SUBSCRIPTS = {ord(sign): str(digit) for digit, sign in enumerate("₀₁₂₃₄₅₆₇₈₉")}
_COEFFICIENT = re.compile(r"(?P<count>[1-9]\d?)(?=[A-Z][A-Za-z()\d]{0,11}[₀-₉])")
_ELEMENT = re.compile(rf"(?:{_ELEMENTS})[₀-₉]{{1,3}}(?!\w)")
_JOINED = re.compile(r"[\w.-]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if "0" <= text[at] <= "9" and not ("A" <= text[at + 1 : at + 2] <= "Z" or "A" <= text[at + 2 : at + 3] <= "Z"):
        return
    if _JOINED.search(before(text, at, 1)):
        return
    if text[at].isdecimal():
        found = _COEFFICIENT.match(text, at)
        if found and (formula := _FORMULA.match(text, found.end()) or _ELEMENT.match(text, found.end())):
            count = Piece(cardinal(found["count"]), *found.span())
            yield Candidate(formula.end(), SURE / 2, (count, *_formula(formula, formula.start()).pieces))
        return
    if not text[at].isalpha():
        if found := _ISOTOPE.match(text, at):
            mass = grouped(found["mass"].translate(_MASSES))
            yield pieces(found, SURE, (mass, "mass"), (spell(found["symbol"]), "symbol"))
        return
    if found := _ION.match(text, at):
        charge = _CHARGES.get((found["charge"] or "").lstrip("^"), "")
        sign = "plus" if found["sign"] == "+" else "minus"
        yield pieces(found, SURE, (spell(found["symbol"]), "symbol"), (charge, "charge"), (sign, "sign"))
    if (found := _NUCLIDE.match(text, at)) and (len(found["symbol"]) > 2 or found["symbol"].istitle()):
        symbol = found["symbol"] if len(found["symbol"]) > 2 else spell(found["symbol"])
        yield pieces(found, SURE / 2, (symbol, "symbol"), (grouped(found["mass"]), "mass"))
    found = _FORMULA.match(text, at)
    if found is None:
        found = _SALT.match(text, at)
        if found is None or not _is_salt(found[0]):
            return
    elif not re.search(r"[A-Z].*[A-Z]|[₀-₉]|^[HNOF]2$|^O3$", found[0]):
        return
    yield _formula(found, at)


def _formula(found: re.Match[str], at: int) -> Candidate:
    made = []
    charge = found.groupdict().get("charge") or ""
    for part in _PARTS.finditer(found[0].removesuffix(charge)):
        number = part[0].translate(_SUBSCRIPTS)
        said = cardinal(number) if number.isdecimal() else spell(part[0])
        made.append(Piece(said, at + part.start(), at + part.end()))
    made += [Piece(_CHARGES[sign], end - 1, end) for end, sign in enumerate(charge, found.end() - len(charge) + 1)]
    return Candidate(found.end(), SURE, tuple(made))


def _is_salt(name: str) -> bool:
    """Whether symbols without a number are a formula: NaCl and KBr, not NaN, Co or HOW."""
    return not name.isupper() and sum(letter.isupper() for letter in name) > 1 and name not in ("NaN", "CoCo", "PhD")


EXAMPLES = (
    ("H₂SO₄ and H2O", "H two S O four and H two O."),
    ("NaCl and HCl", "N ay C l and H C l."),
    ("Fe³⁺, Na+ and Ca2+", "F e three plus, N ay plus and C ay two plus."),
    ("SO₄²⁻, ²³⁵U", "S O four two minus, two thirty five U."),
    ("2H₂ + O₂ → 2H₂O", "two H two plus O two to two H two O."),
    ("CO2, C6H12O6", "C O two, C six H twelve O six."),
)
