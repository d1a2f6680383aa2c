"""Roman numerals where the context shows one: Henry VIII, World War II, Chapter IV, the XIX century, Ⅲ."""

import itertools
import re
from collections.abc import Iterator

from sonoro.text.english.line import SURE, Candidate, Piece, after, before
from sonoro.text.english.numbers import cardinal, ordinal, year
from sonoro.text.english.tables import listed

from .common import whole

STARTS = ("letter", "sign")

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
    "Andrew|Anthony|Arthur|Benjamin|Daniel|David|Donald|Douglas|Frank|Franklin|Harold|Howard|Joseph|Kenneth|Lawrence|Martin|Michael|"
    "Raymond|Ronald|Sam|Samuel|Theodore|Thomas|Walter"
)
_NUMBERED = (
    "Act|Annex|Apollo|Appendix|Article|Book|Canto|Chapter|Class|Division|Episode|Figure|Grade|Group|Level|Mark|Module|Part|Phase|Round|"
    "Scene|Schedule|Season|Section|Stage|Super Bowl|WrestleMania|Table|Tier|Title|Type|Unit|Vatican|Volume|"
    r"Vol\.?|Ch\.?|Sec\.?|Art\.?|Fig\.?|Pt\.?|Mk\.?|Zone|pp?\.|Bk\.?|World War|Page|Chap\.?"
)
_NUMERAL = r"(?=[IVXLC])(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})"
_TOKEN = re.compile(
    rf"(?P<numeral>M{{0,3}}(?:CM|CD|D?C{{0,3}}){_NUMERAL}|[MDCLXVI]{{1,15}}|[ivxlc]{{2,7}})(?P<th>th)?(?![\w])"
)
_SIGNS = re.compile(r"(?P<numeral>[Ⅰ-Ⅿⅰ-ⅿ]+)")
_RULER = re.compile(rf"\b(?:(?:{_TITLES}) [A-Z][a-z]+|{_RULERS})\s$")
_NAMED = re.compile(rf"\b(?:{_RULERS}|{_FIRST_NAMES})(?: [A-Z]\.?)?(?: [A-Z][a-z]+)?,?\s$")
FAR = rf"\b(?:{_NUMBERED})s? {_NUMERAL}\b"
_COUNTED = re.compile(rf"\b(?:(?i:{_NUMBERED})s?)\s(?:{_NUMERAL}(?:, (?:and |or )?| and | or | to | & |--?|–))*$")
_TITLED = re.compile(r"\b(?:Mrs?|Ms|Dr|Prof|Sen|Gov|Rep|Capt|Sir|Judge|Justice)\.? (?:[A-Z][\w'.-]+ ){1,3}$")
_ANY_NAME = re.compile(r"\b[A-Z][a-z]+\s$")
_CLEAR = re.compile(r"III?|VIII?|IX|XI{1,3}|XI?V|XVI{1,3}|XIX|XXI{1,3}|XXI?V|XXVI{1,3}|XXIX|IV|VI")
_I_ENDS = re.compile(
    r"\s*(?:[.,;:!?)\]-]|$|'s\b)|\s(?:of|and|or|to|in|is|was|the|had|has|by|from|died|ruled|reigned|errors?|diabetes)\b"
)
WORDS = listed("ii iii iv vi vii viii ix xi xii xiii xiv xv xvi xvii xviii xix xx xxi xxx xl lx xc ci cx cc ll")
_JOINED = re.compile(r"[\w'.&-]$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if found := _SIGNS.match(text, at):
        yield whole(found, SURE, cardinal(str(_value(_ascii(found["numeral"])))))
        return
    found = _TOKEN.match(text, at)
    if (
        found is None
        or _JOINED.search(before(text, at, 1))
        or not _is_valid(found["numeral"])
        or found[0] in ("C", "D", "L", "M")
    ):
        return
    numeral, context = found["numeral"], before(text, at, 60)
    value = str(_value(numeral))
    if at == 0 and numeral.isupper() and len(value) < 4 and not text[found.end() :].strip(" .\n"):
        # The number of a chapter, alone on its line.
        yield whole(found, SURE / 2, cardinal(value))
        return
    if numeral == "I" and re.match(r"(?:, | and | or | to |[-–])II\b", after(text, found.end())):
        yield whole(found, SURE, "one")
    if numeral == "I" and not _I_ENDS.match(text, found.end()) and not context.endswith("World War "):
        return
    is_named = numeral not in ("IV", "VI") and _CLEAR.fullmatch(numeral) and context.lower().endswith("the ")
    is_ordinal = is_named and re.match(r" [A-Z][a-z]", after(text, found.end()))
    if is_ordinal or re.match(r"(?:\s|-)centur", after(text, found.end())) or found["th"]:
        yield whole(found, SURE / 2, ordinal(value))
    elif (numeral.isupper() and _RULER.search(context)) or (
        numeral in ("I", "II", "III", "IV") and (_NAMED.search(context) or _TITLED.search(context))
    ):
        # Older books write a dot behind the number, which ends no sentence.
        end = found.end() + (re.match(r"\.\s+[a-z]", after(text, found.end(), 4)) is not None)
        yield whole(found, SURE / 2, f"the {ordinal(value)}", end=end)
    elif _COUNTED.search(context) or (
        numeral.isupper() and _CLEAR.fullmatch(numeral) and (numeral not in ("IV", "VI") or _ANY_NAME.search(context))
    ):
        yield whole(found, SURE / 2, cardinal(value))
    elif len(numeral) >= 4 and numeral[0] == "M" and numeral.isupper():
        yield whole(found, SURE, year(value))
    elif re.match(r"\. [A-Z]", after(text, found.end())) and (at == 0 or text[at - 1] == "\n") and len(numeral) > 1:
        yield Candidate(found.end(), SURE, (Piece(cardinal(value), at, found.end()),))


def _is_valid(numeral: str) -> bool:
    return re.fullmatch(r"M{0,3}(?:CM|CD|D?C{0,3})(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})", numeral.upper()) is not None


def _ascii(signs: str) -> str:
    values = ["I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX", "X", "XI", "XII", "L", "C", "D", "M"]
    return "".join(values[(ord(sign) - 0x2160) % 16] for sign in signs)


def _value(numeral: str) -> int:
    values = [_VALUES[letter] for letter in numeral.upper()]
    return sum(-one if one < after else one for one, after in itertools.pairwise([*values, 0]))


EXAMPLES = (
    ("Henry VIII and World War II", "Henry the eighth and World War two."),
    ("Chapter IV, PART XL", "Chapter four, PART forty."),
    ("Sam II, Sam and I", "Sam the second, Sam and I."),
    ("Charles II. was crowned", "Charles the second was crowned."),
    ("in the XIX century, the XXI Olympiad", "in the nineteenth century, the twenty first Olympiad."),
    ("MCMXCIV", "nineteen ninety four."),
    ("section Ⅲ", "section three."),
)
