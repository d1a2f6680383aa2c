"""Formulas of TeX to one line of signs: \\frac{a}{b} is a/b, x_{1} is x₁, \\alpha is α. Knows no language.

A formula is taken out of the text before it is parsed, as its signs mean other things to Markdown: `hidden` puts a word
of the same length in its place, and `shown` the formula's signs in the place of that word.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator

from .blocks import Block

_MATH = re.compile(
    r"\\\((?P<round>(?:(?!\\\)|\n\n).){1,400}?)\\\)|\\\[(?P<square>(?:(?!\\\]|\n\n).){1,1500}?)\\\]"
    r"|(?<![\\$\w])\$\$(?P<display>(?:(?!\n\n)[^$]){1,1500})\$\$|(?<![\\$\w])\$(?P<inline>[^$\n]{1,400})\$(?![\d$])",
    re.DOTALL,
)
_WORDS = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}")
_PLACES = "\ue000\ue001"
"""Private characters that stand for the formulas in turn."""

_RUN = re.compile(f"([{_PLACES}])\\1*")
_TOKEN = re.compile(r"\\(?:left|right)\.|\\[A-Za-z]+\*?|\\.|\s+|\d+(?:\.\d+)?|.", re.DOTALL)
_DEEPEST = 20
"""Groups within groups that are followed; of deeper ones the braces are dropped."""

_SIGN_TABLE = (
    "times:× cdot:· div:÷ pm:± mp:± le:≤ leq:≤ leqslant:≤ ge:≥ geq:≥ geqslant:≥ ne:≠ neq:≠ approx:≈ sim:∼ simeq:≈ "
    "to:→ rightarrow:→ longrightarrow:→ mapsto:→ Rightarrow:⇒ implies:⇒ infty:∞ in:∈ notin:∉ subset:⊂ subseteq:⊆ "
    "cup:∪ cap:∩ forall:∀ exists:∃ partial:∂ nabla:∇ sum:∑ prod:∏ int:∫ mid:| equiv:≡ propto:∝ wedge:∧ land:∧ "
    "vee:∨ lor:∨ neg:¬ lnot:¬ circ:° prime:' lt:< gt:> ell:l ldots:… cdots:… dots:… ast:* "
    "lvert:| rvert:| vert:| lbrace:( rbrace:) %:% $:$ _:_ #:# &:&"
)
_SIGNS = dict(pair.split(":") for pair in _SIGN_TABLE.split())
_SILENT_NAMES = (
    "left right left. right. big Big bigg Bigg bigl bigr displaystyle textstyle limits nolimits quad qquad , ; ! : > "
    "mathbb mathcal mathbf mathrm mathit mathsf mathfrak boldsymbol bm operatorname text textbf textit textrm mbox "
    "hat bar tilde vec dot ddot overline underline widehat widetilde boxed mathop nonumber notag"
)
_SILENT = frozenset(_SILENT_NAMES.split())
"""Commands of which only the argument is read."""

_DIGITS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
Token = tuple[str, int, int]


def hidden(text: str) -> str:
    """`text` with a word of private characters in the place of each formula, as long as that."""
    if "$" not in text and "\\" not in text:
        return text
    made, at = [], 0
    for number, found in enumerate(_MATH.finditer(text)):
        inside = found["inline"] or found["display"]
        if inside is not None and not _is_math(inside, is_display=found["inline"] is None):
            continue
        made += [text[at : found.start()], _PLACES[number % 2] * len(found[0])]
        at = found.end()
    return "".join([*made, text[at:]])


def _is_math(inside: str, *, is_display: bool) -> bool:
    """Whether what stands between dollar signs is a formula, not what costs so many of them."""
    if inside != inside.strip() and not is_display:
        return False
    if inside[0].isdecimal() and not re.search(r"[\\^_{=]", inside):
        return False
    is_short = re.fullmatch(r"[A-Za-z]{1,2}'?|[A-Z]{3}", inside) is not None
    return bool(is_short or re.search(r"[\\^_=+*/<>(|-]", inside)) and len(_WORDS.findall(inside)) < 3


def shown(block: Block, text: str) -> Block:
    """`block` of `text` with the signs of the formulas that `hidden` has taken out."""
    if not any(place in block.text for place in _PLACES):
        return block
    made, at = Block(block.kind), 0
    for found in _RUN.finditer(block.text):
        start, end = block.origins[found.start()][0], block.origins[found.end() - 1][1]
        written = text[start:end]
        if not written.startswith(("$", "\\")):
            continue
        made.take(block, at, found.start())
        _add_formula(
            made, written, start, is_line=re.search(r"(?:^|\n)[ \t]*$", text[max(0, start - 20) : start]) is not None
        )
        at = found.end()
    made.take(block, at, len(block.text))
    return made


def _add_formula(block: Block, written: str, start: int, *, is_line: bool) -> None:
    """Append the signs of a formula, between pauses if it stands on a line of its own."""
    marks = 1 if written[0] == "$" != written[1:2] else 2
    pauses = (start, start + len(written)) if is_line and marks == 2 else ()
    for at in pauses[:1]:
        block.add(", ", at, at)
    for said, first, last in _line(written[marks:-marks]):
        block.add(said, start + marks + first, start + marks + last)
    for at in pauses[1:]:
        block.add(", ", at, at)


def _line(formula: str) -> Iterator[Token]:
    """The signs of `formula`, each with its place in it."""
    tokens = [(found[0], *found.span()) for found in _TOKEN.finditer(formula)]
    return _Reader(tokens).read()


class _Reader:
    """Goes through the tokens of a formula once, from the first to the last."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = self._depth = 0

    def read(self, until: str = "") -> Iterator[Token]:
        """The signs up to the token `until`, which is read too."""
        while self._at < len(self._tokens):
            token = self._tokens[self._at]
            self._at += 1
            if token[0] == until:
                return
            yield from self._signs(token)

    def _argument(self) -> list[Token]:
        """The next group in braces, or the next token."""
        while self._at < len(self._tokens) and self._tokens[self._at][0].isspace():
            self._at += 1
        if self._at == len(self._tokens):
            return []
        token = self._tokens[self._at]
        self._at += 1
        return list(self._signs(token))

    def _signs(self, token: Token) -> Iterator[Token]:
        sign, start, end = token
        if sign[0] not in "{}&_^~\\":
            yield token
        elif sign == "~":
            yield " ", start, end
        elif sign not in "}&" and self._depth <= _DEEPEST:
            self._depth += 1
            yield from self._command(sign, start, end) if sign[0] == "\\" else self._group(sign, start, end)
            self._depth -= 1

    def _group(self, sign: str, start: int, end: int) -> Iterable[Token]:
        if sign == "{":
            return self.read("}")
        return (_lowered if sign == "_" else _raised)(self._argument(), start, end)

    def _command(self, sign: str, start: int, end: int) -> Iterable[Token]:
        name = sign[1:].rstrip("*") or " "
        if name in _SILENT:
            return ()
        if name in ("frac", "dfrac", "tfrac", "cfrac"):
            return [*_closed(self._argument()), ("/", start, end), *_closed(self._argument())]
        if name == "binom":
            return [*self._argument(), (" choose ", start, end), *self._argument()]
        if name == "sqrt":
            return [("√", start, end), *_closed(self._argument())]
        if name in ("begin", "end"):
            self._argument()
            return ()
        if name == "\\":
            return ((", ", start, end),)
        is_apart = self._at < len(self._tokens) and self._tokens[self._at][0].isalnum()
        return ((_SIGNS.get(name) or _greek(name) or f" {name}{' ' * is_apart}", start, end),)


def _closed(inside: list[Token]) -> list[Token]:
    """What stands above or under a line: in brackets unless it is one term."""
    if not inside or re.fullmatch(r"\w+|\w[₀-₉]", "".join(sign for sign, _, _ in inside).strip()):
        return inside
    return [("(", inside[0][1], inside[0][1]), *inside, (")", inside[-1][2], inside[-1][2])]


def _lowered(inside: list[Token], start: int, end: int) -> list[Token]:
    written = "".join(sign for sign, _, _ in inside).strip()
    if written.isdecimal():
        return [(sign.translate(_DIGITS), first, last) for sign, first, last in inside]
    if written.isalnum():
        return [("_", start, end), *inside]
    return [("_(", start, end), *inside, (")", end, end)]


def _raised(inside: list[Token], start: int, end: int) -> list[Token]:
    written = "".join(sign for sign, _, _ in inside).strip()
    if written in ("°", "'", "''", "*"):
        return [] if written == "*" else inside
    if re.fullmatch(r"-?\d+|[A-Za-z]", written):
        return [("^", start, end), *inside]
    return [("^(", start, end), *inside, (")", end, end)]


def _greek(name: str) -> str:
    case = "CAPITAL" if name[0].isupper() else "SMALL"
    try:
        return unicodedata.lookup(f"GREEK {case} LETTER {name.removeprefix('var').upper()}")
    except KeyError:
        return ""
