"""Ranges, scores and ratios of plain numbers: pages 10-20, won 3-2, 16:9, 5 - 3."""

import re
from collections.abc import Iterator

from sonoro.text.english.line import LIKELY, POSSIBLE, SURE, Candidate, after, before
from sonoro.text.english.numbers import cardinal, decimal, grouped, year

from .common import NUMBER, before_capital, is_between, pieces, whole
from .initialism import spell

STARTS = ("digit", "letter")

_RANGE = re.compile(rf"(?P<low>{NUMBER})(?P<to>-|–|—|--)(?P<high>{NUMBER})(?![\w%]|[-–.]\d)")
_SPACED = re.compile(rf"(?P<low>{NUMBER})(?P<to>\s(?:-|–|—|--)\s)(?P<high>{NUMBER})(?![\w]|[.,]\d|\s?[-=+*/])")
_SCALED = re.compile(r"1:(?P<high>\d{1,3}(?:,\d{3}){1,3})(?![\d:]|[.,]\d)")
_RATIO = re.compile(r"(?P<low>\d{1,4}):(?P<high>\d{1,4})(?::(?P<third>\d{1,4}))?(?![\d:]|[.,]\d)")
_EDITION = re.compile(r"(?P<low>\d{3,5}):(?P<high>(?:19|20)\d\d)(?![\d:]|[.,]\d)")
_PART = re.compile(r"(?P<low>\d{3,5})-(?P<part>\d{1,2})(?![\w]|[-.,]\d)")
_OF_STANDARD = re.compile(r"\b(?:ISO|IEC|EN|BS|DIN|ANSI|ASTM|IEEE|MIL-STD|NIST SP|SP)[ -]$")
_STANDARD = re.compile(r"\b[A-Z]{2,5}[ -]$")
_TIMES = re.compile(
    rf"(?P<low>{NUMBER})\s?(?P<by>[x×])\s?(?P<high>{NUMBER})(?:\s?(?P<by2>[x×])\s?(?P<third>{NUMBER}))?(?P<s>s)?(?![\w])"
)
_SCREEN = re.compile(r"(?!\d00|\d+000)\d{3,4}\s?[x×]\s?\d{3,4}")
_FACTOR = re.compile(rf"(?:(?P<low>{NUMBER})[x×]?(?P<to>-|–))?(?P<number>{NUMBER})(?P<x>[x×])(?![\w])")
_LETTERS = re.compile(r"(?P<low>[A-Z])(?P<to>[-–])(?P<high>[A-Z])(?![\w-])")
_NUMBERED = re.compile(r"(?P<letter>[A-Z])(?P<low>\d{1,2})(?P<to>[-–])(?P=letter)(?P<high>\d{1,2})(?![\w-])")
_LETTERED = re.compile(
    r"(?i)\b(?:columns|rows|sections|groups|grades|letters|names|levels|volumes|parts|types|classes|exhibits|gates|zones|"
    r"units|blocks|teams|options) $"
)
_WICKETS = re.compile(
    r"(?:(?P<low>\d{2,3})(?P<to>[/–-])(?P<high>10|\d)|(?P<taken>10|\d)(?P<for>/)(?P<runs>\d{2,3}))"
    r"(?:\s?(?P<declared>dec)\b\.?)?(?![\w/%]|[-–.,]\d)"
)
_CRICKET = re.compile(r"\b(?:overs|wickets?|wkts|all out|not out|stumps|batsm[ae]n)\b|\d dec\b")
FAR = rf"{_CRICKET.pattern}|\d[/–-]\d"
_SENTENCE_END = re.compile(r"[.;]\s")
_BEFORE_SCORE = re.compile(r"\b[A-Z][a-z.]+ $")
_IN_FORMULA = re.compile(r"(?:[\w)\]]|[-+*/=×]\s?)\($")
NEAR = "record"
_OF_RECORD = re.compile(r"\b(?:[Ww]ent|record (?:of|is|was)) $")
_AFTER_RECORD = re.compile(r"\s*(?:[.,;:)!?]|$)| (?:and|but|in|on|at|this|last|with|overall|against|during|as)\b")
"""Games won and lost: went 7-10."""

_COMPARED = re.compile(
    r"/(?:d|day|h|hr|hour|wk|week|month|yr|year|s|min)\b| (?:the|its|their|your|"
    r"daily|weekly|a (?:day|week|month|year)|as|"
    r"more|less|better|worse|EBITDA?|earnings|revenues?|sales|(?!over|under|after|ever|her)[a-z]+er)\b"
)
_IN_NUMBER = re.compile(r"[\d$£€]$|\d[.,/:]$|\w-$")


def recognise(text: str, at: int) -> Iterator[Candidate]:
    if _IN_NUMBER.search(before(text, at, 2)):
        return
    if not text[at].isdecimal():
        if (found := _NUMBERED.match(text, at)) and int(found["low"]) < int(found["high"]):
            one, two = (f"{spell(found['letter'])} {cardinal(found[end])}" for end in ("low", "high"))
            yield pieces(found, SURE, (one, "low"), ("to", "to"), (two, "high"))
        found = _LETTERS.match(text, at)
        if found and found["low"] < found["high"] and _LETTERED.search(before(text, at)):
            yield pieces(found, SURE, (spell(found["low"]), "low"), ("to", "to"), (spell(found["high"]), "high"))
        return
    if (found := _WICKETS.match(text, at)) and _is_cricket(text, found):
        yield _wickets(found)
    if found := _RANGE.match(text, at):
        is_padded = re.match(r"0\d", found["low"]) or re.match(r"0\d", found["high"])
        if not is_padded:
            is_record = _OF_RECORD.search(before(text, at)) and _AFTER_RECORD.match(after(text, found.end()))
            yield _joined(found, POSSIBLE, "and" if is_record or is_between(text, found) else "to")
    if found := _SPACED.match(text, at):
        is_rising = float(found["low"].replace(",", "")) < float(found["high"].replace(",", ""))
        is_range = (is_rising or "-" not in found["to"]) and not _IN_FORMULA.search(before(text, at))
        is_score = _BEFORE_SCORE.search(before(text, at)) and re.match(r" [A-Z][a-z]", after(text, found.end()))
        yield _joined(found, POSSIBLE, "to" if is_range or is_score else "minus")
    if found := _SCALED.match(text, at):
        yield whole(found, SURE, f"one to {decimal(found['high'])}")
    if found := _RATIO.match(text, at):
        last = [(f"to {decimal(found['third'])}", "third")] if found["third"] else []
        yield pieces(found, LIKELY, (f"{decimal(found['low'])} to", "low"), (decimal(found["high"]), "high"), *last)
    if (found := _EDITION.match(text, at)) and _STANDARD.search(before(text, at)):
        yield pieces(found, SURE, (grouped(found["low"]), "low"), (year(found["high"]), "high"))
    if (found := _PART.match(text, at)) and _OF_STANDARD.search(before(text, at)):
        yield whole(found, SURE, f"{grouped(found['low'])} dash {cardinal(found['part'])}")
    if (found := _TIMES.match(text, at)) and found["low"] != "0":
        is_screen = _SCREEN.fullmatch(found[0]) is not None
        say = grouped if is_screen else decimal
        by = "times" if re.match(r"\s?=", text[found.end() : found.end() + 2]) else "by"
        third = ((by, "by2"), (decimal(found["third"]), "third")) if found["third"] else ()
        yield pieces(
            found,
            SURE / 2 if by == "times" else SURE,
            (say(found["low"]), "low"),
            (by, "by"),
            (say(found["high"]) + "s" * bool(found["s"]), "high"),
            *third,
        )
    if found := _FACTOR.match(text, at):
        said = "times" if _COMPARED.match(after(text, found.end())) else "x"
        low = [(decimal(found["low"]), "low"), ("to", "to")] if found["low"] else []
        yield pieces(found, SURE, *low, (decimal(found["number"]), "number"), (said, "x"))


def _is_cricket(text: str, found: re.Match[str]) -> bool:
    """Whether the sentence, as far as 60 characters around, tells of cricket."""
    said = _SENTENCE_END.split(before(text, found.start(), 60))[-1] + found[0]
    return _CRICKET.search(said + _SENTENCE_END.split(after(text, found.end(), 60))[0]) is not None


def _wickets(found: re.Match[str]) -> Candidate:
    """Runs for wickets, or a bowler's wickets for runs."""
    one, to, two = ("low", "to", "high") if found["low"] else ("taken", "for", "runs")
    ends = [("declared", "declared")] if found["declared"] else []
    is_end = found[0].endswith(".") and before_capital(found.string, found.end())
    return pieces(
        found, SURE, (decimal(found[one]), one), ("for", to), (decimal(found[two]), two), *ends, mark="." * is_end
    )


def _joined(found: re.Match[str], cost: float, said: str) -> Candidate:
    return pieces(found, cost, (decimal(found["low"]), "low"), (said, "to"), (decimal(found["high"]), "high"))


EXAMPLES = (
    ("pages 10-20", "pages ten to twenty."),
    ("170 - 200 or 5 - 3", "one hundred and seventy to two hundred or five minus three."),
    ("ISO 9001:2015", "I S O nine thousand and one twenty fifteen."),
    ("a ratio of 16:9", "a ratio of sixteen to nine."),
    ("1:50,000", "one to fifty thousand."),
    ("a 2x8 board, 2.5x or 2-3x faster", "a two by eight board, two point five x or two to three times faster."),
    ("1920x1080", "nineteen twenty by ten eighty."),
    ("6 x 6 = 36, 5(1 - 3)", "six times six equals thirty six, five, one minus three."),
    ("two 2x4s", "two two by fours."),
    ("Real 2 - 1 City", "Real two to one City."),
    ("They went 7-10; take it 3x/day.", "They went seven and ten, take it three times per day."),
    ("columns A–F", "columns ay to F."),
)
