"""Text normalisation for English: writes numbers, money, times, addresses, abbreviations and symbols out in letters.

For voices that read letters only. The rules are simple: a bare number from 1100 to 2099 is read as a year. Knows no
voice, no tokenizer and no sentence splitting.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from num2words import num2words

from sonoro.core.errors import InvalidRequest
from sonoro.text.english.roman import ROMAN_RULES, Rule
from sonoro.text.english.tables import (
    ABBREVIATIONS,
    BEFORE_NUMBER,
    CAPITAL_WORDS,
    COMPASS,
    DAYS,
    DOMAINS,
    DOTTED_BEFORE_NUMBER,
    FILES,
    INITIALISMS,
    MAGNITUDES,
    MARKS,
    MONEY,
    MONTHS,
    PERIODS,
    SHORT_MONTHS,
    SHORT_WORDS,
    SPELLED_LABELS,
    STATES,
    STREETS,
    UNITS,
    UNSURE_STATES,
)


@dataclass(frozen=True, slots=True)
class NormalizedText:
    """`text` has only letters, spaces and . , ? ! ' and ends in one of . ? ! unless it is empty. `dropped` has each
    character that could not be spoken, once, in order of appearance."""

    text: str
    dropped: str


_FOLDED = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛`´ʼ′", "'"),
        **dict.fromkeys('“”„‟«»‹›″"', " "),
        **dict.fromkeys("‐‑", "-"),
        **{
            "−": " minus ",
            "→": " to ",
            "⇒": " to ",
            "·": " ",
            "¿": " ",
            "¡": " ",
            "∞": " infinity ",
            "√": " the square root of ",
        },
        **dict.fromkeys("—―", " -- "),
        "–": "--",
        **{"ß": "ss", "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "ı": "i"},
        **{"đ": "d", "Đ": "D", "þ": "th", "Þ": "Th", "ð": "d", "Ð": "D", "×": " times ", "÷": " divided by "},
        # Signs whose meaning would be lost in ASCII.
        **{"≠": " is not equal to ", "≤": " is at most ", "≥": " is at least ", "≈": " is about "},
        **{"±": " plus or minus ", "№": "number ", "§": " section ", "©": " copyright ", "®": " registered "},
        "™": " trademark ",
    }
)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
Table = list[tuple[str, str | Callable[[re.Match[str]], str]]]

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_LARGEST_SPELLED_DIGITS = 15


def _spell_letters(letters: str) -> str:
    # A lone "a" reads as the article, so the letter is written as it sounds.
    return " ".join("ay" if letter in "aA" else letter for letter in letters if letter.isalpha())


def _label(label: str) -> str:
    """A part of an address, spelled out if it is not a word."""
    letters = label.rstrip("0123456789")
    is_spelled = letters.lower() in SPELLED_LABELS or (
        1 < len(letters) <= 5 and not set(letters.lower()) & set("aeiouy")
    )
    return f"{_spell_letters(letters.upper())} {label[len(letters) :]}" if is_spelled else label


def _address(match: re.Match[str]) -> str:
    """A URL, domain or e-mail address with its punctuation named."""
    whole = re.sub(r"^(?:https?://)?(?:www\.)?", "", match[0])
    address = whole.rstrip(".,;:!?)]}'*/")
    parts = re.findall(r"[A-Za-z]+\d*|\d+|[^A-Za-z\d]", address)
    spoken = " ".join(MARKS.get(part, _label(part)) for part in parts)
    return f" {spoken} {whole[len(address) :].lstrip('/')}"


def _digit_groups(match: re.Match[str]) -> str:
    groups = ", ".join(_spell_digits(group) for group in re.findall(r"\d+", match[0]))
    return f" {'plus ' * match[0].startswith('+')}{groups} "


def _state(match: re.Match[str]) -> str:
    return match[0] if match[1] in UNSURE_STATES else STATES[match[1]]


def _postcode(match: re.Match[str]) -> str:
    return " ".join(_spell_digits(sign) if sign.isdigit() else _spell_letters(sign) for sign in match[0])


def _before_number(match: re.Match[str]) -> str:
    word = (BEFORE_NUMBER | DOTTED_BEFORE_NUMBER)[match[1].lower()]
    return (word.capitalize() if match[1][0].isupper() else word) + " "


def _expression(match: re.Match[str]) -> str:
    """Numbers joined by signs; a hyphen here means minus, not a range."""
    signs = {"-": " minus ", "*": " times ", "/": " divided by ", "+": " plus "}
    return re.sub(r"\s?([-+*/])\s?", lambda sign: signs[sign[1]], match[0])


def _nth(number: str) -> str:
    return str(num2words(int(number), to="ordinal"))


def _slashed_date(match: re.Match[str]) -> str:
    """A date, month first as in the United States, unless that is impossible."""
    month, day, year = int(match[1]), int(match[2]), match[3]
    if month > 12:
        month, day = day, month
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return match[0]
    spoken = f"{MONTHS[month - 1]} {num2words(day, to='ordinal')}"
    return f"{spoken}, {_year(year) if len(year) == 4 else _cardinal(year)}"


def _feet(match: re.Match[str]) -> str:
    feet, inches = match[1], match[2]
    return f"{feet} {'foot' if feet == '1' else 'feet'} {inches} {'inch' if inches == '1' else 'inches'}"


def _capitals(match: re.Match[str]) -> str:
    """A lone word of two or three capitals: spelled out unless it is in `CAPITAL_WORDS`."""
    return match[0] if match[1] in CAPITAL_WORDS else _initialism(match)


def _initialism(match: re.Match[str]) -> str:
    return _spell_letters(match[1]) + ("'s" if match[2] else "")


def _spell_digits(digits: str) -> str:
    return " ".join(num2words(int(digit)) for digit in digits if digit.isdigit())


def _cardinal(number: str) -> str:
    whole, _, decimals = number.replace(",", "").partition(".")
    is_code = (whole.startswith("0") and len(whole) > 1) or len(whole) > _LARGEST_SPELLED_DIGITS
    words = _spell_digits(whole) if is_code else num2words(int(whole)).replace(",", "")
    return f"{words} point {_spell_digits(decimals)}" if decimals else words


def _ordinal(match: re.Match[str]) -> str:
    digits, ending = match[1].replace(",", ""), match[2]
    if not ending:
        return match[0]
    return _spell_digits(digits) + ending if len(digits) > _LARGEST_SPELLED_DIGITS else _nth(digits)


def _year(number: str) -> str:
    return str(num2words(int(number), to="year"))


def _money(match: re.Match[str]) -> str:
    one, many, small, smalls = MONEY[match["sign"]]
    amount, magnitude = match["amount"], match["magnitude"]
    if magnitude:
        return f" {_cardinal(amount)} {MAGNITUDES.get(magnitude.lower(), magnitude)} {many} "
    whole, _, decimals = amount.partition(".")
    if len(decimals) != 2:
        return f" {_cardinal(amount)} {one if amount == '1' else many} "
    parts = [f"{_cardinal(whole)} {one if whole == '1' else many}"] if whole != "0" or decimals == "00" else []
    if decimals != "00":
        parts.append(f"{num2words(int(decimals))} {small if decimals == '01' else smalls}")
    return f" {' and '.join(parts)} "


def _time(match: re.Match[str]) -> str:
    hour, minute, half = int(match["hour"]), match["minute"] or "00", match["half"]
    if minute != "00":
        minutes = f"oh {num2words(int(minute))}" if minute.startswith("0") else num2words(int(minute))
    elif half:
        minutes = ""
    else:
        minutes = "o'clock" if 1 <= hour <= 12 else "hundred"
    second = match["second"]
    seconds = f"and {num2words(int(second))} second{'' if second == '01' else 's'}" if second else ""
    return f" {num2words(hour)} {minutes} {seconds} {_spell_letters(half) if half else ''} "


def _power(match: re.Match[str]) -> str:
    exponent = next(filter(None, match.groups())).translate(
        {ord(sign): str(digit) for digit, sign in enumerate(_SUPERSCRIPTS)}
    )
    return {"2": " squared ", "3": " cubed "}.get(exponent, f" to the power of {exponent} ")


def _scientific(match: re.Match[str]) -> str:
    return f"{match[1]} times 10 to the power of {'minus ' * (match[2] == '-')}{match[3]} "


def _greek(match: re.Match[str]) -> str:
    name = unicodedata.name(match[0], "")
    return f" {name.split()[-1].lower()} " if name.startswith("GREEK ") and " LETTER " in name else match[0]


def _iso_date(match: re.Match[str]) -> str:
    return f"{MONTHS[int(match['month']) - 1]} {_nth(match['day'])}, {_year(match['year'])}"


def _decade(match: re.Match[str]) -> str:
    number = match[1]
    words = _year(number) if len(number) == 4 else num2words(int(number))
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def _unit(match: re.Match[str]) -> str:
    one, many = UNITS[match["unit"]]
    return f"{match['amount']} {one if match['amount'] == '1' else many}"


def _fraction(match: re.Match[str]) -> str:
    top, bottom = int(match[1]), int(match[2])
    if bottom == 2:
        name, names = "half", "halves"
    elif 3 <= bottom <= 100:
        name = "quarter" if bottom == 4 else num2words(bottom, to="ordinal")
        names = name + "s"
    else:
        return f" {num2words(top)} over {num2words(bottom)} "
    return f" {num2words(top)} {name if top == 1 else names} "


def _number(match: re.Match[str]) -> str:
    number = match[0]
    is_year = len(number) == 4 and number.isdigit() and 1100 <= int(number) <= 2099
    return f" {_year(number) if is_year else _cardinal(number)} "


def _ending(match: re.Match[str]) -> str:
    marks = match[0]
    return next(mark for mark in "?!." if mark in marks) + " "


def _any(names: Iterable[str]) -> str:
    """A pattern that matches the longest of `names`."""
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))


def _compiled(table: Table) -> list[Rule]:
    return [(re.compile(pattern), replacement) for pattern, replacement in table]


_HALF = r"(?P<half>[aApP]\.?\s?[mM]\b\.?)"
_CLOCK = rf"\b(?P<hour>[01]?\d|2[0-3]):(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d))?(?!\d)(?:\s?{_HALF})?"
_MONTH = _any(MONTHS)
_SHORT_MONTH = _any(SHORT_MONTHS)
_DAY = _any(DAYS)
_STATE = _any(STATES)
_TERM = r"\d[\d.,]*+"

_MARKUP: Table = [
    (r"'''\w*", " "),
    (r"!?\[([^\]\[]*+)\]\(([^()\s]*+)[^()]*+\)", r"\1"),
    (r"(?<![\w*_~])(\*{1,3}|_{1,3}|~~)(?=\S)([^*_~\n]++)(?<=\S)\1(?!\w)", r"\2"),
    (
        r"(?m)^[ \t]*+#{1,6}[ \t]++([^\n]*+)$",
        lambda match: match[1] + "." * (not match[1].endswith((".", "?", "!", ":"))),
    ),
    (r"(?m)^[ \t]*+>[ \t]", ""),
    (r"(?m)^[ \t]*+\|[-:| \t]*+(?:\n|\Z)", ""),
    (r"\|", ", "),
    (r"(?m)^\s*+([-*•]\s+)?", lambda match: "" if match[1] else match[0]),
    (r"•", ", "),
    (r"(?:[.,;:]|(?<![.,;: \t]))[ \t]*+\n\s*\n\s*", ". "),
]
_ADDRESSES: Table = [
    (r"(?<![\w.+-])[\w.+-]++@(?:[\w-]++\.)+[A-Za-z]{2,}", _address),
    (r"(?:\bhttps?://|\bwww\.(?=\w))[^\s<>]++", _address),
    (rf"(?<![\w.@-])(?:[A-Za-z0-9-]++\.)+(?:{DOMAINS})\b(?:/[^\s<>]*+)?", _address),
    (rf"(?<=\w)\.({FILES})\b", lambda match: f" dot {_label(match[1])} "),
    (r"\b([A-G])#(?!\w)", r"\1 sharp"),
    (r"(?<!\w)\.(?=NET\b)", "dot "),
    (r"#(?=[A-Za-z])", " hashtag "),
    (r"\b([A-Z]{1,3})&([A-Z]{1,3})\b", lambda match: f"{_spell_letters(match[1])} and {_spell_letters(match[2])}"),
]
_PLACES: Table = [
    (r"\b1-8\d\d-(?=[A-Z]{3})", _digit_groups),
    (r"(?<![\w.])\+\d(?:[ .()-]{0,2}\d){6,14}(?!\d)", _digit_groups),
    (r"(?<![\w.,$£€¥-])(?:1[ .-])?(?:\(\d{3}\) ?|\d{3}[ .-])\d{3}[ .-]\d{4}(?![\d-])", _digit_groups),
    (r"\b97[89]-\d{1,5}-\d{2,7}-\d{1,6}-[\dX]\b", _digit_groups),
    (r"\b\d{3}-\d{2}-\d{4}\b|\b\d{4}([ -])\d{4}\1\d{4}\1\d{4}\b", _digit_groups),
    (rf"\b({_STATE}),? \d{{5}}(?:-\d{{4}})?\b", lambda match: STATES[match[1]] + _digit_groups(match)),
    (r"\b(?i:zip(?: code)?):? \d{5}(?:-\d{4})?\b", lambda match: "zip code" + _digit_groups(match)),
    (rf"(?<=[a-z], )({_STATE})(?=[.,;)]|\s*$)", _state),
    (r"\b[A-Z]{1,2}\d[A-Z\d]? \d[A-Z]{2}\b", _postcode),
    (
        rf"(?<=\d )([NSEW])\.? (?=(?:[A-Z][a-z]+ ){{1,3}}(?:{_any(STREETS)}|{_any(STREETS.values())}|Dr|Drive|Way)\b)",
        lambda match: COMPASS[match[1]] + " ",
    ),
    (
        rf"(?<=[a-z] )({_any(STREETS)})\b(?!\.)(?<!St)|(?<=[a-z] )(St)\b(?!\.| (?!Apt|Suite|Ste|Unit)[A-Z][a-z])",
        lambda match: STREETS[match[1] or match[2]],
    ),
]
_SHORT: Table = [
    (r"\be\.g\.,?", "for example,"),
    (r"\bi\.e\.,?", "that is,"),
    (r"\ba\.k\.a\b\.?", "also known as"),
    (r"(?<![A-Za-z])(?i:vs)(?![A-Za-z])\.?", "versus"),
    (
        rf"(?<![A-Za-z/])(?i:{_any(word for word in SHORT_WORDS if word.islower())})(?![A-Za-z/])",
        lambda match: SHORT_WORDS[match[0].lower()],
    ),
    (rf"(?<![\w/])(?:{_any(SHORT_WORDS)})(?![\w/])", lambda match: SHORT_WORDS[match[0]]),
    (r"(?<!\w)w/\s?(?=\w)", "with "),
    (rf"\b((?i:{_any(BEFORE_NUMBER)}))\b\.?\s?(?=#?\d)", _before_number),
    (
        rf"\b((?i:{_any(DOTTED_BEFORE_NUMBER)}))\.\s?(?=\d)|\bv(?=\d)",
        lambda match: _before_number(match) if match[1] else "version ",
    ),
    (
        rf"\b({_any(ABBREVIATIONS)})\.(?=\s+[A-Z]|\s*$)",
        lambda match: ABBREVIATIONS[match[1]] + ("" if match[1] != "etc" else "."),
    ),
    (rf"\b({_any(ABBREVIATIONS)})\.", lambda match: ABBREVIATIONS[match[1]]),
    (r"\b(Mr|Mrs|Ms|Prof)(?= [A-Z])", lambda match: ABBREVIATIONS[match[1]]),
    (r"\bPh\.?D\b\.?", "P H D"),
    (r"\bDr\.?(?= [A-Z])", "Doctor"),
    (r"\bDr\.", "Drive"),
    (r"\bSt\.(?= [A-Z])", "Saint"),
    (r"\bSt\.", "Street"),
    (r"\bNo\. ?(?=\d)|#(?=\d)", "number "),
]
_DATES: Table = [
    (
        rf"\b({_SHORT_MONTH})\b\.?(?= \d)|(?<=\d )({_SHORT_MONTH})\b\.?",
        lambda match: SHORT_MONTHS[match[1] or match[2]],
    ),
    (
        rf"\b({_DAY})\b\.?(?=,? (?:{_MONTH}|\d)|\s?--?\s?(?:{_DAY})\b)|(?<=-)({_DAY})\b\.?",
        lambda match: DAYS[match[1] or match[2]],
    ),
    (rf"(?<=day)\s?--?\s?(?={_any(set(DAYS.values()))})", " to "),
    (rf"(?<![\d.:,])(0?[1-9]|[12]\d|3[01]) ({_MONTH})\b", lambda match: f"the {_nth(match[1])} of {match[2]}"),
    (
        rf"\b({_MONTH}) (0?[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?\b(?![:%]|[.,]\d)",
        lambda match: f"{match[1]} {_nth(match[2])}",
    ),
    (r"(?<![\d/])(\d{1,2})/(\d{1,2})/((?:19|20)?\d\d)(?![\d/])", _slashed_date),
    (
        r"(?<![\d.])(0?[1-9]|[12]\d|3[01])\.(0?[1-9]|1[0-2])\.((?:19|20)\d\d)(?!\.?\d)",
        lambda match: f"the {_nth(match[1])} of {MONTHS[int(match[2]) - 1]}, {_year(match[3])}",
    ),
    (r"(?<=\d-\d\d)T(?=\d\d:\d\d)", " at "),
    (r"(?<=:\d\d)(?:\.\d++)?Z\b", " U T C"),
    (r"\b(?P<year>1[1-9]\d\d|20\d\d)([-/])(?P<month>0[1-9]|1[0-2])\2(?P<day>0[1-9]|[12]\d|3[01])\b", _iso_date),
    (
        r"(?i)(?<=\d)(\s?[ap]\.?m\b\.?)?\s?--?\s?(?=\d{1,2}(?::\d\d)?\s?[ap]\.?m\b)",
        lambda match: f"{match[1] or ''} to ",
    ),
    (r"(?<=:\d\d)\s?--?\s?(?=\d{1,2}:\d\d)", " to "),
    (_CLOCK, _time),
    (rf"\b(?P<hour>1[0-2]|[1-9])(?P<minute>)(?P<second>)\s?{_HALF}", _time),
    (r"\b(?:[A-Za-z]\.){2,}", lambda match: _spell_letters(match[0]) + " "),
]
_AMOUNTS: Table = [
    (r"(?<![\w.,-])(\d++(?:\.\d++)?)(?:e|(?:(?<=\.\d)|(?<=\.\d\d))E|E(?=[+-]))([+-]?)(\d{1,3})(?![\w-])", _scientific),
    (
        r"(€\s?\d{1,3}(?:\.\d{3})++)(?![.,]?\d)|(?<![\d.,])(\d{1,3}(?:\.\d{3})++)(?=\s?€)",
        lambda match: match[0].replace(".", ""),
    ),
    # Thousands and decimals as on the Continent, where they can be nothing else.
    (
        r"(?<![\d.,])(\d{1,3}(?:\.\d{3})++),(\d\d)(?![\d.,]\d|\d)",
        lambda match: f"{match[1].replace('.', '')}.{match[2]}",
    ),
    (r"(?<=[$£€¥₹])(\s?\d++),(?=\d\d(?![\d.,]\d|\d))", r"\1."),
    (r"(?<![\d.,])(\d++),(?=\d\d\s?(?:[£€¥₹](?!\d)|EUR\b))", r"\1."),
    (r"([$£€¥₹])-(?=\d)", r"-\1"),
    (r"(?<![\w.,])\.(?=\d)", "0."),
    (r"(?<=\d)'S\b", "'s"),
    (r"\b((?:1[1-9]|20)\d0|(?<=THE )\d0)S\b", r"\1s"),
    (
        rf"(?<![\d.,+*/-])(?<![-+*/]\s){_TERM}(?:\s?[-+*/]\s?{_TERM})++(?=\s?=)|(?<==)\s?{_TERM}(?:\s[-+*/]\s{_TERM})++",
        _expression,
    ),
    (
        rf"(?<![\d.,])([$£€¥₹]?{_TERM}\s?[A-Za-z%]{{0,5}})/({_any(PERIODS)})\b",
        lambda match: f"{match[1]} per {PERIODS[match[2]]}",
    ),
    (rf"(?<![\d.,])({_NUMBER})\s?([£€¥₹])(?!\d)", r"\2\1"),
    (r"(?<=[\d%°])\s?--?\s?(?=[$£€¥₹]\d)|(?<=[%°])\s?--?\s?(?=\d)", " to "),
    (r"([$£€¥₹])(\d[\d,]*+(?:\.\d++)?)\s?--?\s?(?=\d)", r"\1\2 to \1"),
    (r"(?<![\w.)-])-(?=[$£€¥₹]\d)", " minus "),
    (
        rf"(?P<sign>[$£€¥₹])\s?(?P<amount>{_NUMBER})(?:\s?(?P<magnitude>thousand|million|billion|trillion|[kKmMBT]|bn)\b)?",
        _money,
    ),
    (r"\b\d{3}-\d{4}\b", _digit_groups),
    (
        r"(?<=\d)(\s?)(in|ft|yd|lbs?|oz|mi|hrs?|mins?|secs?|yrs?|gal|tsp|tbsp)\.(?=\s+[a-z\d(]|[,;])",
        lambda match: " inches" if match[2] == "in" else f"{match[1]}{match[2]}",
    ),
    (r"(?<=\d)\s?x\s?(?=\d)", " by "),
    (r"(?<=\d)\s?\*\s?(?=\d)", " times "),
    (r"(?<=\d)\s/\s(?=\d)", " divided by "),
    (r"(?<![\d:])(\d{1,4}):(\d{1,4})(?![\d:])", r"\1 to \2"),
    (r"(?<=\d)°\s([CF])\b", r"°\1"),
    (r"(?<=\d)[kK]\b", " thousand"),
    (r"(?<=\d)M\b", " million"),
    # A capital before a name is an initial, not a unit: in 2005 W. Smith.
    (rf"(?P<amount>(?<![\d.]){_NUMBER})\s?(?P<unit>{_any(UNITS)})(?![A-Za-z])(?!(?<= [A-Z])\.? [A-Z])", _unit),
    (r"(?<=\d)\s?--?\s?(?=\d)", " to "),
    (r"(?<![\w.-])-(?=\d)", " minus "),
    (r"(?<=\d) (?=\d{1,2}[/⁄]\d{1,2}(?![\d/]))", " and "),
    (r"(?<![\d/])(\d{1,3})[/⁄](\d{1,3})(?![\d/])", _fraction),
    (r"~\s?(?=\d)", "about "),
    (r"(?<=\w)\^(?=\w)", " to the power of "),
    (r"'?\b((?:1[1-9]|20)?\d0)'?s\b", _decade),
    (r"\b(\d[\d,]*+)((?:st|nd|rd|th|ST|ND|RD|TH)\b)?", _ordinal),
    (r"(?<!\d)\d++(?:\.\d+){2,}", lambda match: " point ".join(_cardinal(part) for part in match[0].split("."))),
    (r"(?<=[A-Za-z])(?=\d)", " "),
    (_NUMBER, _number),
]
_SIGNS: Table = [
    (rf"\b({'|'.join(INITIALISMS)}|[B-DF-HJ-NP-TV-XZ]{{2,5}})(s?)\b", _initialism),
    (r"(?<![A-Z] )(?<![A-Z]\. )\b([A-Z]{2,3})(s?)\b(?! [A-Z]{2})", _capitals),
    (r"(?<=\w)@(?=\w)|@", " at "),
    (r"&", " and "),
    (r"\+", " plus "),
    (r"<=", " is at most "),
    (r">=", " is at least "),
    (r"[-=]+>", " to "),
    (r"(?<=[\w ])<(?=[\w ])", " is less than "),
    (r"(?<=[\w ])>(?=[\w ])", " is greater than "),
    (r"=", " equals "),
    (r"%", " percent "),
    (r"\.{2,}(?=\s*[a-z])", ","),
    (r"(?<=[A-Za-z])\.(?=[a-z])", " dot "),
    (r"--+|\s-\s|[;:()\[\]{}]", " , "),
    (r"[-_/]", " "),
    (r"[Ͱ-Ͽ]", _greek),
    (r"(?<![A-Za-z])'|'(?![A-Za-z])", " "),
]
_RULES = [*_compiled(_MARKUP), *ROMAN_RULES, *_compiled(_ADDRESSES + _PLACES + _SHORT + _DATES + _AMOUNTS + _SIGNS)]
"""The substitutions in their required order: specific before general, numbers before punctuation.

Each takes linear time for any text: patterns enter a run of one kind of character only at its start, or match it whole.
"""
_TIDY: list[Rule] = [
    (re.compile(r"\s+"), " "),
    (re.compile(r"(?<![ ,])[ ,]*[.?!][ .,?!]*"), _ending),
    (re.compile(r" ?,[ ,]*"), ", "),
    (re.compile(r"^[ ,.?!]+|(?<![ ,])[ ,]+$"), ""),
]


def _fold_character(match: re.Match[str]) -> str:
    decomposed = unicodedata.normalize("NFKD", match[0].translate(_FOLDED)).translate(_FOLDED)
    return "".join(c for c in decomposed if c in "\n\t" or unicodedata.category(c) not in ("Mn", "Cf", "Cc", "Me"))


_FOLD: list[Rule] = _compiled(
    [
        (r"(?<![\d.])(\d{1,2})\s?['′’]\s?(\d{1,2})\s?(?:[\"″”]|'')", _feet),
        # Superscript digits are not part of the number before them.
        # Behind longer words they mark a note, but for squares and cubes of two letters: km², mc².
        (rf"(?<=\d)([{_SUPERSCRIPTS}]+)|(?<=\b[A-Za-z])([{_SUPERSCRIPTS}]+)|(?<=\b[A-Za-z]{{2}})([²³])(?!\w)", _power),
        (rf"(?<=\w)(?=[{_SUPERSCRIPTS}])|(?<=\d)(?=[¼-¾⅐-⅞])", " "),
        (r"[^\n\t -~]|[\"`]", _fold_character),
    ]
)
_UNREAD = re.compile(r"[^A-Za-z.,?!'\s]")
_LAST: list[Rule] = [(_UNREAD, " "), *_TIDY, *_compiled([(r"^\s+|\s+$", ""), (r"(?s)(?<=[^.?!])\Z", ".")])]


class _Written:
    """A text being normalised."""

    def __init__(self, text: str) -> None:
        self.text = text

    def apply(self, rules: Iterable[Rule]) -> None:
        """Apply `rules` in order, each at every match."""
        for pattern, replacement in rules:
            self._apply(pattern, replacement)

    def _apply(self, pattern: re.Pattern[str], replacement: str | Callable[[re.Match[str]], str]) -> None:
        self.text = pattern.sub(replacement, self.text)


class _Traced(_Written):
    """A text being normalised with `origins`, the span of the original text that each character comes from.

    Words that a match and its replacement share keep their spans; the text between them gets the span between.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.origins = [(at, at + 1) for at in range(len(text))]

    def _apply(self, pattern: re.Pattern[str], replacement: str | Callable[[re.Match[str]], str]) -> None:
        text: list[str] = []
        origins: list[tuple[int, int]] = []
        at = 0
        for match in pattern.finditer(self.text):
            new = match.expand(replacement) if isinstance(replacement, str) else replacement(match)
            text += self.text[at : match.start()], new
            origins += self.origins[at : match.start()]
            for old_start, old_end, start, end in _matching(match[0], new):
                old = slice(match.start() + old_start, match.start() + old_end)
                is_kept = self.text[old] == new[start:end]
                origins += self.origins[old] if is_kept else [self._origin(old)] * (end - start)
            at = match.end()
        self.text = "".join([*text, self.text[at:]])
        self.origins = origins + self.origins[at:]

    def _origin(self, old: slice) -> tuple[int, int]:
        spans = self.origins[old]
        if spans:
            return spans[0][0], max(end for _, end in spans)
        end = self.origins[old.start - 1][1] if old.start else 0
        return end, end


_RUN = re.compile(r"\w+")


def _matching(old: str, new: str) -> Iterator[tuple[int, int, int, int]]:
    """Align `old` and `new`: pairs of corresponding spans that cover both, of shared words and of what is between."""
    if old == new:
        yield 0, len(old), 0, len(new)
        return
    olds, news = ([(found[0], *found.span()) for found in _RUN.finditer(text)] for text in (old, new))
    blocks = difflib.SequenceMatcher(None, [w for w, *_ in olds], [w for w, *_ in news], autojunk=False)
    old_at = new_at = 0
    for first, second, length in blocks.get_matching_blocks():
        for (_, old_start, old_end), (_, start, end) in zip(
            olds[first : first + length], news[second : second + length], strict=True
        ):
            yield old_at, old_start, new_at, start
            yield old_start, old_end, start, end
            old_at, new_at = old_end, end
    yield old_at, len(old), new_at, len(new)


def check_readable(text: str) -> None:
    """Raise `InvalidRequest`, naming the script, if more letters of `text` are unreadable than readable."""
    written = _Written(text)
    written.apply(_FOLD)
    folded = written.text
    # A single Greek letter is read by its name.
    words = re.findall(r"[^\W\d_a-zA-Z]{2,}|[^\W\d_a-zA-ZͰ-Ͽ]", folded)
    foreign = Counter(_script(letter) for word in words for letter in word)
    if foreign.total() > sum(letter.isascii() and letter.isalpha() for letter in folded):
        [(script, _)] = foreign.most_common(1)
        raise InvalidRequest("text", text, f"it is written in {script}; this voice reads English, in Latin letters")


def normalize_english(
    text: str, *, lowercase: bool = False, respellings: Mapping[str, str] = MappingProxyType({})
) -> NormalizedText:
    """Normalise `text` to its spoken form. What has none is dropped and reported, never guessed. `respellings` maps
    lower-case spoken words to the spelling to use; a letter's is used where its capital begins an initialism.

    Idempotent. The result's text is empty if nothing speakable is left."""
    return _normalize(_Written(text), lowercase, respellings)


def trace_english(
    text: str, *, lowercase: bool = False, respellings: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, list[tuple[int, int]]]:
    """The result of `normalize_english`, and for each of its characters the span of `text` it comes from: for an
    expansion all of the expanded text, for an addition an empty span. Takes twice the time."""
    traced = _Traced(text)
    return _normalize(traced, lowercase, respellings).text, traced.origins


def _normalize(written: _Written, lowercase: bool, respellings: Mapping[str, str]) -> NormalizedText:
    written.apply([*_FOLD, *_RULES])
    dropped = "".join(dict.fromkeys(_UNREAD.findall(written.text)))
    written.apply(_LAST)
    if respellings:
        # A letter only as a capital that begins an initialism: neither the s of "747's" nor that of "US".
        letter = r"(?<!\w')(?<!\b[A-Z] )"
        keys = [rf"{letter}{key.upper()}" if len(key) == 1 else f"(?i:{re.escape(key)})" for key in respellings]
        words = re.compile(rf"\b(?:{'|'.join(keys)})\b")
        written.apply([(words, lambda match: respellings[match[0].lower()])])
    return NormalizedText(written.text.lower() if lowercase else written.text, dropped)


def _script(letter: str) -> str:
    """The name of the script of `letter`, by Unicode."""
    name = unicodedata.name(letter, "an unknown script").split()[0]
    known = {"CJK": "Chinese characters", "HIRAGANA": "Japanese", "KATAKANA": "Japanese", "HANGUL": "Korean"}
    return known.get(name, name.title())
