"""Functions and what they are of: f'(x), O(n log n), ∑_(i=1)^n, lim_(x→0), |x|."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, SURE, Candidate, Piece, before
from sonoro.text.english.numbers import cardinal
from sonoro.text.english.tables import pairs

from .common import NUMBER, pieces
from .math import LETTERS, NAMES, letter_of, read_formula

STARTS = ("letter", "sign")

_OF = re.compile(rf"(?P<name>(?:{NAMES})|[fghFGHPOΘΩ])(?P<primes>'{{0,2}})(?P<open>\()(?=[\w(\\{LETTERS}|-])")
"""A function before its bracket: O(n log n), P(A and B)."""

_BOUNDS = re.compile(
    r"(?P<sign>[∑∏∫])(?:_(?:\((?P<low>[^()]{1,24})\)|(?P<under>\w)))?(?:\^(?:\((?P<high>[^()]{1,16})\)|(?P<over>\w+|∞)))?"
)
_LIMIT = re.compile(r"lim ?_\((?P<what>[^()→]{1,8})→(?P<to>[^()]{1,8})\)")
_INTEGRAL = re.compile(r"∫(?P<low>[₀-₉]{1,2})(?P<high>[⁰¹²³⁴-⁹∞]{1,2})")
_PLACES = str.maketrans("₀₁₂₃₄₅₆₇₈₉⁰¹²³⁴⁵⁶⁷⁸⁹", "01234567890123456789")
_SUMS = pairs("∑ = the sum | ∏ = the product | ∫ = the integral")
_ABSOLUTE = re.compile(
    rf"\|(?=-?(?:{NUMBER}|[A-Za-z](?![A-Za-z])|[{LETTERS}])"
    rf"(?:[^|\n]{{0,24}}[\w)]\||\|(?=\s?[-+*/=<>≤≥^]))|[A-Za-z]\|)"
)
_BY = re.compile(r"[x×](?= \()")
_PRIME = re.compile(r"[fghuvy](?P<prime>'{1,2})(?=\(| ?=)")
_SIMPLE = re.compile(r"\((?P<of>[a-z])\)")
_JOINED = re.compile(r"[\w.$£€'@#]$|\w-$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    context = before(text, at, 2)
    if _JOINED.search(context):
        return
    if (found := _OF.match(text, at)) and not (found["primes"] and _SIMPLE.match(text, found.start("open"))):
        prime = Piece(" ".join(["prime"] * len(found["primes"])), *found.span("primes"))
        made = Piece(letter_of(found["name"]), *found.span("name")), prime, Piece("of", *found.span("open"))
        yield Candidate(found.end(), LIKELY, tuple(piece for piece in made if piece.said))
    if found := _BOUNDS.match(text, at):
        yield from _bounded(found)
    if found := _INTEGRAL.match(text, at):
        low = cardinal(found["low"].translate(_PLACES))
        high = "infinity" if found["high"] == "∞" else cardinal(found["high"].translate(_PLACES))
        yield pieces(found, SURE / 2, ("the integral from", 0), (low, "low"), (f"to {high} of", "high"))
    if found := _LIMIT.match(text, at):
        yield _limit(found)
    if _ABSOLUTE.match(text, at) and not re.search(r"[\w)]$", context):
        yield Candidate(at + 1, SURE / 2, (Piece("the absolute value of", at, at + 1),))
    if _BY.match(text, at) and context == ") ":
        yield Candidate(at + 1, SURE, (Piece("by", at, at + 1),))
    if found := _PRIME.match(text, at):
        yield from _primed(text, found)


def _limit(found: re.Match[str]) -> Candidate:
    what, to = (tuple(read_formula(found[name], found.start(name))) for name in ("what", "to"))
    goes = Piece("goes to", found.end("what"), found.start("to"))
    begin = Piece("the limit as", found.start(), found.start() + 3)
    return Candidate(found.end(), SURE / 2, (begin, *what, goes, *to, Piece("of", found.end() - 1, found.end())))


def _bounded(found: re.Match[str]) -> Iterator[Candidate]:
    """A sum with its bounds: the sum from i equals one to n of."""
    low, high = "low" if found["low"] else "under", "high" if found["high"] else "over"
    if not found[low] and not found[high]:
        return
    made = [Piece(_SUMS[found["sign"]], *found.span("sign"))]
    if found[low]:
        made.append(Piece("from" if found[high] else "over", *[found.start(low) - 1] * 2))
        made += read_formula(found[low], found.start(low))
    if found[high]:
        made.append(Piece("to", *[found.start(high) - 1] * 2))
        made += read_formula(found[high], found.start(high))
    yield Candidate(found.end(), SURE / 2, (*made, Piece("of", *[found.end()] * 2)))


def _primed(text: str, found: re.Match[str]) -> Iterator[Candidate]:
    """A derivative, and what it is of: f'(x)."""
    said = Piece("prime " * (len(found["prime"]) - 1) + "prime", *found.span("prime"))
    letter = Piece(letter_of(found[0][0]), found.start(), found.start() + 1)
    call = _SIMPLE.match(text, found.end())
    if call is None:
        yield Candidate(found.end(), SURE, (letter, said))
        return
    of = Piece(f"of {letter_of(call['of'])}", call.start(), call.end())
    yield Candidate(call.end(), SURE, (letter, said, of))


EXAMPLES = (
    ("f'(x) = 2x and n!", "f prime of x equals two x and n factorial."),
    ("O(log(n)), P(A and B)", "O of log of n, P of A and B."),
    ("∑_(i=1)^n x_i, |x| < 5", "the sum from i equals one to n of x i, the absolute value of x, is less than five."),
    ("in: |2016| out", "in, twenty sixteen, out."),
    ("∫₀¹ x, log₂ 8, x·y", "the integral from zero to one of x, log base two of eight, x times y."),
    ("|-4| = 4, E = hf", "the absolute value of minus four, equals four, E equals h f."),
    ("lim_(x→0) f(x)", "the limit as x goes to zero of f of x."),
)
