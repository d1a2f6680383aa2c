"""Formulas: x^2 + 2x - 1, 2a - 3 = x - 1, f(x) = 5, 1-2=5, x², √2, 2*8."""

import re
import unicodedata
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, SURE, Candidate, Piece, before
from sonoro.text.english.numbers import cardinal, decimal
from sonoro.text.english.tables import pairs

from .common import NUMBER, pieces, whole
from .fraction import simple
from .initialism import spell

STARTS = ("letter", "digit", "sign")

LETTERS = "α-ωΓΔΘΛΞΠΣΦΨΩ"
NAMES = "sin|cos|tan|log|ln|exp|lim|max|min|mod|det"
_PRODUCT = (
    r"(?!(?:is|or|in|as|to|if|at|by|an|be|it|of|on|we|no|so|me|my|us|up|he|do|go)[^a-z])[a-z]{2}"
    r"(?:(?=[²³⁰-⁹^]|\s?[-+*/=])|(?<=\b[A-Z] = [a-z]{2})(?![\w']))"
    r"|(?<=\d)[a-z]{2}(?=\))"
)
_TERM = rf"(?:{NUMBER}|{_PRODUCT}|(?:{NAMES})(?![A-Za-z])|[A-Za-z](?![A-Za-z'])|[{LETTERS}]|√)"
_SUPER = r"⁻?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,6}"
_SUB = r"[₀-₉]{1,4}"
_OPERATOR = r"(?:<=|>=|==|!=|[-+*/=<>^×÷·±≠≤≥≈−–])"
_FOLLOWING = (
    rf"{_TERM}|{_SUPER}|{_SUB}|_[A-Za-z\d]{{1,2}}(?![A-Za-z\d])|_\([\w+=−-]{{1,10}}\)|[()](?=[\w\s()=+*/^.,;:-])|!(?=\s?[=+*/-])"
    rf"|\s?{_OPERATOR}\s?[-(]{{0,2}}(?=\w|√|\.\d|[{LETTERS}])"
)
_FORMULA = re.compile(rf"[-(]{{0,3}}{_TERM}(?:(?>{_FOLLOWING})){{1,80}}\)?(?![\w'])")
"""A term and what can follow one: each step has one way to match, so a formula that fails at its end fails quickly."""

_PIECES = re.compile(
    rf"(?<![\d/.])[1-9]\d?/[1-9]\d?(?![\d/.])|log(?:10|2|₁₀|₂)(?=\()|{NUMBER}|(?:{NAMES})(?![A-Za-z])|[A-Za-z{LETTERS}]|{_SUPER}|{_SUB}|<=|>=|==|!=|[^\w\s]"
)
_POWER = re.compile(
    rf"(?P<base>[A-Za-z]{{1,2}}|[{LETTERS}]|{NUMBER})(?P<power>{_SUPER}|(?:\^|\*\*)-?\d{{1,4}}|\^[A-Za-z](?![A-Za-z]))"
)
_CALL = re.compile(
    rf"(?:{NAMES}|log(?:10|2|₁₀|₂)|[fghFGHP])\((?:[a-z]|{NUMBER}|[θφ])(?:,\s?(?:[a-z]|{NUMBER})){{0,3}}\)(?![\w])"
)
_STEP = re.compile(
    r"(?=[a-z-]{1,8}\d)[ijkmnxyt](?:-(?:[1-9]\d?|[ijkmnxyt])){1,4}(?![\w-])|[nxyzk]/\d{1,3}(?!\w)|\d{1,3}/[nxyzk](?!\w)"
)
"""n-1, x/2, 1/x: small letters that name a number."""

_FACTORIAL = re.compile(r"(?P<of>[nkr])!(?!\w)")
_ROOT = re.compile(rf"√\s?(?P<of>{NUMBER}|[A-Za-z](?![A-Za-z]))")
_LOG = re.compile(r"log(?P<base>₁₀|[₂-₉])\s?(?=[\dA-Za-z])")
_PLAIN = re.compile(rf"-?{NUMBER}\s?(?:[+*×÷−]|\s/\s)\s?{NUMBER}(?:\s?[-+*/×÷−]\s?{NUMBER}){{0,20}}(?![\w])")
_SAID = pairs(
    "+ = plus | - = minus | − = minus | – = minus | * = times | × = times | · = times | / = over | ÷ = divided by | "
    "= = equals | == = equals | < = is less than | > = is greater than | <= = is at most | >= = is at least | "
    "!= = is not equal to | ≠ = is not equal to | ≤ = is at most | ≥ = is at least | ≈ = is about | "
    "± = plus or minus | √ = the square root of | ! = factorial | ( = , | ) = , | , = , | ^ = to the power of"
)
_DIGITS = {ord(sign): str(n % 10) for n, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹₀₁₂₃₄₅₆₇₈₉")} | {ord("⁻"): "-"}
_INDEXED = re.compile(rf"(?P<name>[A-Za-z{LETTERS}])(?P<index>{_SUB})(?![\w])")
_JOINED = re.compile(r"[\w.$£€'@#]$|\w-$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    context = before(text, at, 2)
    if _JOINED.search(context):
        return
    if (found := _FORMULA.match(text, at)) and _is_formula(text, found):
        yield Candidate(found.end(), SURE, tuple(read_formula(found[0], at)))
    if found := _PLAIN.match(text, at):
        yield Candidate(found.end(), LIKELY, tuple(read_formula(found[0], at, over="divided by")))
    if found := _STEP.match(text, at):
        yield Candidate(found.end(), SURE, tuple(read_formula(found[0], at)))
    if found := _POWER.match(text, at):
        yield whole(found, LIKELY, f"{_base(found['base'])} {_power(found['power'].lstrip('^*').translate(_DIGITS))}")
    if found := _INDEXED.match(text, at):
        yield Candidate(found.end(), SURE, tuple(read_formula(found[0], at)))
    if found := _CALL.match(text, at):
        yield Candidate(found.end(), LIKELY, tuple(read_formula(found[0], at)))
    if found := _FACTORIAL.match(text, at):
        yield whole(found, LIKELY, f"{found['of']} factorial")
    if found := _LOG.match(text, at):
        yield pieces(found, SURE / 2, ("log", 0), (f"base {cardinal(found['base'].translate(_DIGITS))} of", "base"))
    if found := _ROOT.match(text, at):
        yield whole(found, LIKELY, f"the square root of {_base(found['of'])}")


def _is_formula(text: str, found: re.Match[str]) -> bool:
    """Whether it holds an equation, a power or a variable between operators, rather than a hyphen or a list."""
    written = found[0]
    if re.search(r"[=^√≠≤≥≈]|[⁰¹²³⁴⁵⁶⁷⁸⁹]|<=|>=|\w\s?[<>]\s?\w|^\(\w \+ \w\)", written):
        return True
    if re.match(r"\s?[=≠≤≥≈]", text[found.end() : found.end() + 2]):
        return True
    if (
        not re.search(r"[a-z]", written)
        or re.search(r"\d[a-z]\d", written)
        or re.fullmatch(r"[\d.,]*[A-Za-z]?(?:-[A-Za-z\d]+)*", written)
    ):
        return False
    return re.search(
        r"[\w)]\s[-+*/]\s[\w(]|\d[a-z]\s?[-+*/]|[a-z]\s?[+*·]\s?\w", written
    ) is not None and not re.search(r"\b[aAI]\b", written)


def read_formula(written: str, at: int, *, over: str = "over") -> Iterator[Piece]:
    is_call = is_index = False
    for found in _PIECES.finditer(written):
        part, start, end = found[0], at + found.start(), at + found.end()
        if part[0] in "⁰¹²³⁴⁵⁶⁷⁸⁹⁻":
            yield Piece(_power(part.translate(_DIGITS)), start, end)
        elif part[0] in "₀₁₂₃₄₅₆₇₈₉":
            yield Piece(cardinal(part.translate(_DIGITS)), start, end)
        elif part == "^":
            if not re.match(r"\^[23](?![\w.])", written[found.start() :]):
                yield Piece("to the power of", start, end)
        elif part == "(" and written[: found.start()].endswith("_"):
            is_index = True
        elif part == ")" and is_index:
            is_index = False
        elif part in ("2", "3") and written[: found.start()].endswith("^") and not written[found.end() :][:1].isalnum():
            yield Piece("squared" if part == "2" else "cubed", start, end)
        elif part[:3] == "log" and part != "log":
            yield Piece(f"log base {cardinal(part[3:].translate(_DIGITS))}", start, end)
        elif part == "(" and re.search(r"[a-zA-Z]$|log\S{1,2}$", written[: found.start()]):
            is_call = True
            yield Piece("of", start, end)
        elif part == ")" and is_call:
            is_call = False
        elif part == "/":
            is_numeric = re.search(r"\d\s?$", written[: found.start()]) and re.match(r"\s?\d", written[found.end() :])
            yield Piece("divided by" if is_numeric else over, start, end)
        elif "/" in part:
            yield from _divided(part, start)
        elif part in _SAID:
            yield Piece(_SAID[part], start, end)
        elif part[0].isdecimal() or part[0] == ".":
            yield Piece(decimal(part), start, end)
        elif part[0].isalpha():
            yield Piece(letter_of(part), start, end)


def _divided(part: str, start: int) -> Iterator[Piece]:
    """Two small numbers with a slash: a fraction if it is less than one."""
    top, bottom = part.split("/")
    if int(top) < int(bottom):
        yield Piece(simple(top, bottom), start, start + len(part))
        return
    at = start + len(top)
    yield from (Piece(cardinal(top), start, at), Piece("divided by", at, at + 1))
    yield Piece(cardinal(bottom), at + 1, start + len(part))


def letter_of(name: str) -> str:
    """A variable by the name of its letter, a function by its own."""
    if not name.isascii():
        return unicodedata.name(name[0]).split()[-1].lower()
    return spell(name) if len(name) < 3 else name


def _base(base: str) -> str:
    return decimal(base) if base[0].isdecimal() or base[0] == "." else letter_of(base)


def _power(exponent: str) -> str:
    if exponent in ("2", "3"):
        return "squared" if exponent == "2" else "cubed"
    if exponent.isalpha():
        return f"to the power of {spell(exponent)}"
    return f"to the power of {'minus ' * exponent.startswith('-')}{cardinal(exponent.lstrip('-'))}"


EXAMPLES = (
    ("f(x) = x^2 + 2x - 1", "f of x equals x squared plus two x minus one."),
    ("Solve 2a - 3 = x - 1", "Solve two ay minus three equals x minus one."),
    ("1-2=5 and y=x +1", "one minus two equals five and y equals x plus one."),
    ("5², x³, 10⁶ and 2^8", "five squared, x cubed, ten to the power of six and two to the power of eight."),
    ("2*8, 2+3", "two times eight, two plus three."),
    ("y = mx + b; n-1 of 1/x", "y equals m x plus b, n minus one of one over x."),
    ("χ² and 10**6", "chi squared and ten to the power of six."),
    ("x₁ + x₂ = 3; 6−1, -5+3", "x one plus x two equals three, six minus one, minus five plus three."),
    ("(a + b)(a - b)", "ay plus b, ay minus b."),
    ("x_(n+1) = 2^(k-1), B[n-1-i]", "x n plus one equals two to the power of, k minus one, B, n minus one minus i."),
    ("n!, x_(n+1) = 2^(k-1)", "n factorial, x n plus one equals two to the power of, k minus one."),
    ("1/3 + 1/6 = 1/2; 10/2 = 5", "one third plus one sixth equals one half, ten divided by two equals five."),
    ("√2", "the square root of two."),
    ("E = mc²", "E equals m c squared."),
)
