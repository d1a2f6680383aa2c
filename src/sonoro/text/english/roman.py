"""Rules that write Roman numerals in English text as spoken: Henry the eighth, World War two, the nineteenth century.

They apply only where the context shows a numeral: a lone I, V, X, MD or XL is left as it is."""

import itertools
import re
from collections.abc import Callable

from num2words import num2words

_VALUES = {"I": 1, "V": 5, "X": 10, "L": 50, "C": 100, "D": 500, "M": 1000}

_RULERS = (
    "Adrian|Albert|Alexander|Alfonso|Artaxerxes|Baldwin|Benedict|Boniface|Carl|Catherine|Charles|Christian|Clement|"
    "Cleopatra|Constantine|Darius|Edward|Elizabeth|Ferdinand|Francis|Frederick|George|Gregory|Gustav|Haakon|Harald|"
    "Henry|Innocent|Ivan|James|John Paul|John|Juan Carlos|Julius|Leo|Leopold|Louis|Ludwig|Margrethe|Mary|Maximilian|"
    "Mehmed|Napoleon|Nicholas|Olav|Oscar|Otto|Paul|Pedro|Peter|Philip|Pius|Ptolemy|Rama|Ramses|Richard|Robert|Rudolf|"
    "Selim|Sixtus|Stephen|Suleiman|Umberto|Urban|Victor Emmanuel|Wilhelm|William|Xerxes"
)
_TITLES = "King|Queen|Pope|Emperor|Empress|Tsar|Czar|Kaiser|Sultan|Pharaoh|Prince|Princess|Archduke"
_FIRST_NAMES = (
    "Andrew|Anthony|Arthur|Benjamin|Daniel|David|Donald|Douglas|Frank|Franklin|Harold|Howard|Joseph|Kenneth|Lawrence|"
    "Martin|Michael|Raymond|Ronald|Samuel|Theodore|Thomas|Walter"
)
_NUMBERED = (
    "Act|Annex|Apollo|Appendix|Article|Book|Canto|Chapter|Class|Division|Episode|Figure|Grade|Group|Level|Mark|Module|"
    "Part|Phase|Round|Scene|Schedule|Season|Section|Stage|Super Bowl|Table|Tier|Title|Type|Unit|Vatican|Volume|Zone"
)
_NUMERAL = r"(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})(?<=[IVXLC])"
_LONG = r"X{0,3}(?:IX|IV|V?I{0,3})(?<=[IVX]{2})"
_LONG_LOWER = r"x{0,3}(?:ix|iv|v?i{0,3})(?<=[ivx]{2})"
_YEAR = r"M{1,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})"
_I_ENDS = (
    r"(?:(?<! I)|(?=\s*(?:[.,;:!?)\]-]|$)|'s\b|\s(?:of|and|or|to|in|is|was|the|had|has|by|from|died|ruled|reigned)\b))"
)
"""What follows a lone I that is a numeral rather than the pronoun."""

Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]


def _value(numeral: str) -> int:
    values = [_VALUES[letter] for letter in numeral.upper()]
    return sum(-one if one < after else one for one, after in itertools.pairwise([*values, 0]))


def _ordinal(match: re.Match[str]) -> str:
    return f"{match[1]} the {num2words(_value(match[2]), to='ordinal')}"


def _cardinals(match: re.Match[str]) -> str:
    return match[1] + re.sub(r"\b[IVXLCivxlc]+\b", lambda numeral: num2words(_value(numeral[0])), match[2])


_JOINED = r"(?:, (?:and |or )?| and | or | to | & |--?)"

ROMAN_RULES: list[Rule] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (rf"\b((?:{_TITLES}) [A-Z][a-z]+|{_RULERS}) ({_NUMERAL})\b{_I_ENDS}", _ordinal),
        (rf"\b((?:{_RULERS}|{_FIRST_NAMES})(?: [A-Z]\.)? [A-Z][a-z]+),? (II|III|IV)\b", _ordinal),
        (r"\b(World War)( II?)\b", _cardinals),
        (rf"\b((?i:{_NUMBERED})s?)( {_NUMERAL}\b(?:{_JOINED}{_NUMERAL}\b)*){_I_ENDS}", _cardinals),
        (rf"\b((?i:{_NUMBERED})s?)( {_LONG_LOWER})\b", _cardinals),
        # After any other name, but not IV, VI or XL, which may be a drip, an editor or a size.
        (r"\b([A-Z][a-z]+)( (?:III?|VIII?|IX|XI{1,3}|XI?V|XVI{1,3}|XIX))\b", _cardinals),
        (r"\b([IVX]+)(?:th)?(?= centur)", lambda match: str(num2words(_value(match[1]), to="ordinal"))),
        (rf"\b(?=[MDCLXVI]{{4}}){_YEAR}\b", lambda match: str(num2words(_value(match[0]), to="year"))),
        (rf"(?m)^()({_LONG})(?=\. [A-Z])", _cardinals),
    )
]
