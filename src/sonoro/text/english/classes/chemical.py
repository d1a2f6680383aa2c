"""Chemical formulas: H₂SO₄, CO2, C6H12O6."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import SURE, Candidate, Piece, before
from sonoro.text.english.numbers import cardinal

from .common import pieces
from .initialism import spell

STARTS = ("letter",)

_ELEMENTS = (
    "He|Li|Be|Ne|Na|Mg|Al|Si|Cl|Ar|Ca|Sc|Ti|Cr|Mn|Fe|Co|Ni|Cu|Zn|Ga|Ge|As|Se|Br|Kr|Rb|Sr|Zr|Nb|Mo|Ag|Cd|Sn|Sb|Te|Xe|Cs|Ba|Pt|Au|Hg|Pb|Bi|"
    "H|B|C|N|O|F|P|S|K|V|I|U|W"
)
_FORMULA = re.compile(
    rf"(?=[A-Za-z()]{{1,12}}[\d₀-₉])(?:(?:{_ELEMENTS})(?:[₀-₉]{{1,3}}|\d{{1,3}})?|[()](?:[₀-₉\d]{{1,2}})?){{2,24}}(?![\w-])"
)
_SALT = re.compile(rf"(?:{_ELEMENTS}){{2,5}}(?![\w'-])")
_ION = re.compile(rf"(?P<symbol>(?:{_ELEMENTS}){{1,2}})(?P<charge>[²³⁴])?(?P<sign>[+⁻])(?!\w)")
_PARTS = re.compile(rf"{_ELEMENTS}|[₀-₉\d]+")
_SUBSCRIPTS = {ord(sign): str(digit) for digit, sign in enumerate("₀₁₂₃₄₅₆₇₈₉")}
_JOINED = re.compile(r"[\w.-]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if _JOINED.search(before(text, at, 1)):
        return
    if found := _ION.match(text, at):
        charge = {"²": "two", "³": "three", "⁴": "four"}.get(found["charge"] or "", "")
        sign = "plus" if found["sign"] == "+" else "minus"
        yield pieces(found, SURE, (spell(found["symbol"]), "symbol"), (charge, "charge"), (sign, "sign"))
    found = _FORMULA.match(text, at)
    if found is None:
        found = _SALT.match(text, at)
        if found is None or not _is_salt(found[0]):
            return
    elif not re.search(r"[A-Z].*[A-Z]|[₀-₉]|^[HNOF]2$|^O3$", found[0]):
        return
    made = []
    for part in _PARTS.finditer(found[0]):
        number = part[0].translate(_SUBSCRIPTS)
        said = cardinal(number) if number.isdecimal() else spell(part[0])
        made.append(Piece(said, at + part.start(), at + part.end()))
    yield Candidate(found.end(), SURE, tuple(made))


def _is_salt(name: str) -> bool:
    """Whether symbols without a number are a formula: NaCl and KBr, not NaN, Co or HOW."""
    return not name.isupper() and sum(letter.isupper() for letter in name) > 1 and name not in ("NaN", "CoCo", "PhD")


EXAMPLES = (
    ("H₂SO₄ and H2O", "H two S O four and H two O."),
    ("NaCl and HCl", "N ay C l and H C l."),
    ("Fe³⁺ and Na+", "F e three plus and N ay plus."),
    ("CO2, C6H12O6", "C O two, C six H twelve O six."),
)
