"""Patterns and helpers that several classes share."""

import re

from sonoro.text.english.line import Candidate, Piece

INTEGER = r"(?>\d{1,3}(?:,\d{3}){1,10}(?!\d)|[1-9]\d?(?:,\d\d){1,4},\d{3}(?!\d)|\d+)"
NUMBER = rf"(?>{INTEGER}(?:\.\d+)?|\.\d+)"
"""With groups of three digits, or India's of two.

Atomic: a number is never matched in part, so a pattern with several takes linear time over a long run of digits."""

SCALE = r"(?:hundred|thousand|million|billion|trillion|quadrillion)"

SENTENCE = r"[^.;]*+(?:\.\d[^.;]*+)*+"
"""What stands between a number and a word of the same sentence that decides how it is read."""

TO = r"\s?(?:-|–|—|--|to|through)\s?"
DASH = r"\s?(?:-|–|—|--)\s?"

STARTERS = (
    "A|After|All|Also|An|And|Are|As|At|Before|Both|But|By|Can|Did|Do|Does|Each|Even|For|From|Has|Have|He|Her|Here|His|How|"
    "However|I|If|In|Is|It|Its|Later|Let|Many|Maybe|Meanwhile|More|Most|My|No|Nobody|Not|Now|On|Once|One|Only|Or|Our|"
    "Perhaps|Please|She|Since|So|Some|Soon|Still|That|The|Their|Then|There|These|They|This|Those|Though|Thus|To|Today|"
    "Was|We|Were|What|When|Where|While|Who|Why|Will|With|Yes|Yet|You|Your|Although|Always|Another|Any|Because|Could|"
    "Don't|Everyone|Everything|Finally|Instead|Never|Nothing|Should|Someone|Such|Until|Whatever|Whether|Which|Would"
)
"""Words that begin a sentence more often than they follow an abbreviation in one."""

LABELS = (
    "(?i:appendix|building|category|chapter|class|column|deck|dock|exhibit|figure|gate|grade|group|hepatitis|item|level|line|"
    "model|option|page|part|phase|plan|point|position|row|room|schedule|seat|section|series|step|table|team|terminal|"
    "type|unit|vitamin|wing|apartment|number)"
)
"""Nouns before a letter or a number that labels them."""

_ARTICLE = re.compile(r"\b(?:a|an|A|An)\s(?:~|about\s|whole\s|full\s|mere\s|single\s|new\s|further\s)?$")
_DEFINITE = re.compile(rf"{_ARTICLE.pattern}|\b(?i:the|this|that|my|your|our|his|her|their) $")
_VERB = re.compile(
    r" (?:took|takes?|went|came|left|ran|flew|felt|ha[ds]|have|were|are|did|does|do|will|would|can|could|may|might|"
    r"must|shall|should|you|we|they|he|she|it|I|so|not|also|just|only|apart|away|back|bought|got|made|paid|cost|lost|spent|won|sent|gave|who|which|where|today|last|before|after|until|[a-z]+ed|[a-z]+ly)\b"
)
_NOUN = re.compile(
    r" (?:f/\d|(?!of|or|and|to|in|for|per|an?\b|"
    r"more|less|each|every|is|was|as|at|on|from|by|if|but|with|than|when|that)[a-z]{2}|[A-Z\d]*[A-Z]{2}|Series\b)"
)


def is_attributive(text: str, start: int, end: int, *, is_close: bool = False) -> bool:
    """Whether an amount stands between an article and a noun, so that its unit is singular: a five dollar bill.

    With its unit `is_close`, behind "the" or an owner too: the 50mm lens."""
    article = _DEFINITE if is_close and not _VERB.match(text, end) else _ARTICLE
    return article.search(text, max(0, start - 12), start) is not None and _NOUN.match(text, end) is not None


_BETWEEN = re.compile(r"\b[Bb]etween $")
_SECOND = re.compile(r"\s?(?:and|or)\b")


def is_between(text: str, found: re.Match[str]) -> bool:
    """Whether "between" stands before a range, and no second end behind it: its dash is "and"."""
    return bool(_BETWEEN.search(text, max(0, found.start() - 10), found.start())) and not _SECOND.match(
        text, found.end()
    )


_ENDS = re.compile(rf"\s*(?:[\"')\]]*\s*)?(?:$|\n|(?:{STARTERS})\b)")
_CAPITAL = re.compile(r"[\"')\]]*\s+[\"'(]*[A-Z]")


def ends_sentence(text: str, at: int) -> bool:
    """Whether a sentence ends with the dot of an abbreviation before `at`: at the end, or before a usual first word."""
    return _ENDS.match(text, at) is not None


def before_capital(text: str, at: int) -> bool:
    """Whether a word with a capital follows, or nothing."""
    return ends_sentence(text, at) or _CAPITAL.match(text, at) is not None


def whole(found: re.Match[str], cost: float, said: str, *, end: int | None = None, mark: str = "") -> Candidate:
    """A candidate of one piece for all that `found` matched, with a `mark` at its end."""
    start, stop = found.start(), found.end() if end is None else end
    pieces = [Piece(said, start, stop)]
    if mark:
        pieces.append(Piece(mark, stop - 1, stop))
    return Candidate(stop, cost, tuple(pieces))


def pieces(found: re.Match[str], cost: float, *parts: tuple[str, str | int], mark: str = "") -> Candidate:
    """A candidate of several pieces, each the words and the group of `found` that they are said for."""
    made = [Piece(said, *found.span(group)) for said, group in parts if said]
    if mark:
        made.append(Piece(mark, found.end() - 1, found.end()))
    return Candidate(found.end(), cost, tuple(made))
