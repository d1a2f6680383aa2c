"""English text as it is spoken: numbers, money, times, abbreviations and symbols written out in plain letters.

For voices that read letters only. Rules are plain ones (a bare number from 1100 to 2099 reads as a year); it knows
no voice, no tokenizer and no sentence splitting.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from num2words import num2words

__all__ = ["NormalizedText", "fold", "normalize_english"]


@dataclass(frozen=True, slots=True)
class NormalizedText:
    """`text` holds letters, spaces and . , ? ! ' alone and is empty or ends in one of . ? !
    `dropped` holds each character that could not be spoken, once, in order of appearance."""

    text: str
    dropped: str


Rule = tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]

_FOLDED = str.maketrans(
    {
        **dict.fromkeys("‘’‚‛`´ʼ′", "'"),
        **dict.fromkeys('“”„‟«»‹›″"', " "),
        **dict.fromkeys("‐‑−", "-"),
        **dict.fromkeys("—―", " -- "),
        "–": "--",
        **{"ß": "ss", "æ": "ae", "Æ": "Ae", "œ": "oe", "Œ": "Oe", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "ı": "i"},
        **{"đ": "d", "Đ": "D", "þ": "th", "Þ": "Th", "ð": "d", "Ð": "D", "×": " times ", "÷": " divided by "},
        # Signs that would otherwise lose what they mean on the way to ASCII.
        **{"≠": " is not equal to ", "≤": " is at most ", "≥": " is at least ", "≈": " is about "},
        **{"±": " plus or minus ", "№": "number ", "§": " section ", "©": " copyright ", "®": " registered "},
        "™": " trademark ",
    }
)
_SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_ABBREVIATIONS = {
    **{"Mr": "Mister", "Mrs": "Missus", "Ms": "Miz", "Prof": "Professor", "Jr": "Junior", "Sr": "Senior"},
    **{"Capt": "Captain", "Gen": "General", "Sgt": "Sergeant", "Lt": "Lieutenant", "Col": "Colonel", "Rev": "Reverend"},
    **{"Gov": "Governor", "Sen": "Senator", "Mt": "Mount", "Ave": "Avenue", "Rd": "Road", "Blvd": "Boulevard"},
    **{"Inc": "Incorporated", "Ltd": "Limited", "Corp": "Corporation", "Dept": "Department", "approx": "approximately"},
    **{"vs": "versus", "etc": "et cetera", "Jan": "January", "Feb": "February", "Aug": "August", "Sept": "September"},
    **{"Oct": "October", "Nov": "November", "Dec": "December"},
}
_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
_UNITS = {
    **{"km": ("kilometer", "kilometers"), "cm": ("centimeter", "centimeters"), "mm": ("millimeter", "millimeters")},
    **{"m": ("meter", "meters"), "kg": ("kilogram", "kilograms"), "g": ("gram", "grams"), "ft": ("foot", "feet")},
    **{"lb": ("pound", "pounds"), "lbs": ("pound", "pounds"), "oz": ("ounce", "ounces")},
    **{"GB": ("gigabyte", "gigabytes"), "MB": ("megabyte", "megabytes"), "kB": ("kilobyte", "kilobytes")},
    **{"Hz": ("hertz", "hertz"), "kHz": ("kilohertz", "kilohertz"), "ms": ("millisecond", "milliseconds")},
    **{"km/h": ("kilometer per hour", "kilometers per hour"), "mph": ("mile per hour", "miles per hour")},
    **{"μm": ("micrometer", "micrometers"), "μg": ("microgram", "micrograms"), "μs": ("microsecond", "microseconds")},
    **{"°C": ("degree Celsius", "degrees Celsius"), "°F": ("degree Fahrenheit", "degrees Fahrenheit")},
    **{"°": ("degree", "degrees"), "¢": ("cent", "cents"), "%": ("percent", "percent")},
}
_MONEY = {
    **{"$": ("dollar", "dollars", "cent", "cents"), "£": ("pound", "pounds", "penny", "pence")},
    **{"€": ("euro", "euros", "cent", "cents"), "¥": ("yen", "yen", "sen", "sen")},
    "₹": ("rupee", "rupees", "paisa", "paise"),
}
_MAGNITUDES = {"k": "thousand", "m": "million", "bn": "billion"}
_INITIALISMS = (
    "USA",
    "US",
    "UK",
    "EU",
    "UN",
    "AI",
    "ID",
    "IQ",
    "UFO",
    "CEO",
    "CIA",
    "FBI",
    "USB",
    "API",
    "FAQ",
    "URL",
    "OK",
)
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_LARGEST_SPELLED_DIGITS = 15


def _spell_letters(letters: str) -> str:
    # A lone "a" reads as the article, so the letter is written as it sounds.
    return " ".join("ay" if letter in "aA" else letter for letter in letters if letter.isalpha())


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
    is_long = len(digits) > _LARGEST_SPELLED_DIGITS
    return _spell_digits(digits) + ending if is_long else str(num2words(int(digits), to="ordinal"))


def _year(number: str) -> str:
    return str(num2words(int(number), to="year"))


def _money(match: re.Match[str]) -> str:
    one, many, small, smalls = _MONEY[match["sign"]]
    amount, magnitude = match["amount"], match["magnitude"]
    if magnitude:
        return f" {_cardinal(amount)} {_MAGNITUDES.get(magnitude.lower(), magnitude)} {many} "
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
    exponent = (match[1] or match[2]).translate({ord(sign): str(digit) for digit, sign in enumerate(_SUPERSCRIPTS)})
    return {"2": " squared ", "3": " cubed "}.get(exponent, f" to the power of {exponent} ")


def _greek(match: re.Match[str]) -> str:
    name = unicodedata.name(match[0], "")
    return f" {name.split()[-1].lower()} " if name.startswith("GREEK ") and " LETTER " in name else match[0]


def _iso_date(match: re.Match[str]) -> str:
    day = num2words(int(match["day"]), to="ordinal")
    return f"{_MONTHS[int(match['month']) - 1]} {day}, {_year(match['year'])}"


def _decade(match: re.Match[str]) -> str:
    number = match[1]
    words = _year(number) if len(number) == 4 else num2words(int(number))
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def _unit(match: re.Match[str]) -> str:
    one, many = _UNITS[match["unit"]]
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


def _rules() -> list[Rule]:
    """The substitutions in the order in which they must run: specific before general, numbers before punctuation.

    Each runs in time proportional to the text, whatever that is: a run of one kind of character is entered at its
    beginning alone, or taken whole.
    """
    shorts = "|".join(sorted(_ABBREVIATIONS, key=len, reverse=True))
    units = "|".join(re.escape(unit) for unit in sorted(_UNITS, key=len, reverse=True))
    half = r"(?P<half>[aApP]\.?\s?[mM]\b\.?)"
    clock = rf"\b(?P<hour>[01]?\d|2[0-3]):(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d))?(?!\d)(?:\s?{half})?"
    table: list[tuple[str, str | Callable[[re.Match[str]], str]]] = [
        (r"https?://|www\.(?=\w)", ""),
        (r"(?m)^\s*+([-*•]\s+)?", lambda match: "" if match[1] else match[0]),
        (r"(?:[.,;:]|(?<![.,;: \t]))[ \t]*+\n\s*\n\s*", ". "),
        (r"\be\.g\.,?", "for example,"),
        (r"\bi\.e\.,?", "that is,"),
        (
            rf"\b({shorts})\.(?=\s+[A-Z]|\s*$)",
            lambda match: _ABBREVIATIONS[match[1]] + ("" if match[1] != "etc" else "."),
        ),
        (rf"\b({shorts})\.", lambda match: _ABBREVIATIONS[match[1]]),
        (r"\b(Mr|Mrs|Ms|Prof)(?= [A-Z])", lambda match: _ABBREVIATIONS[match[1]]),
        (r"\b(Jan|Feb|Aug|Sept|Oct|Nov|Dec)(?= \d)", lambda match: _ABBREVIATIONS[match[1]]),
        (r"\bPh\.?D\b\.?", "P H D"),
        (r"\bDr\.?(?= [A-Z])", "Doctor"),
        (r"\bDr\.", "Drive"),
        (r"\bSt\.(?= [A-Z])", "Saint"),
        (r"\bSt\.", "Street"),
        (r"\bNo\. ?(?=\d)|#(?=\d)", "number "),
        (clock, _time),
        (rf"\b(?P<hour>1[0-2]|[1-9])(?P<minute>)(?P<second>)\s?{half}", _time),
        (r"\b(?:[A-Za-z]\.){2,}", lambda match: _spell_letters(match[0]) + " "),
        (rf"(?<![\d.,])({_NUMBER})\s?([£€¥₹])(?!\d)", r"\2\1"),
        (
            rf"(?P<sign>[$£€¥₹])\s?(?P<amount>{_NUMBER})(?:\s?(?P<magnitude>thousand|million|billion|trillion|[kKmM]|bn)\b)?",
            _money,
        ),
        (r"\b(?P<year>1[1-9]\d\d|20\d\d)-(?P<month>0[1-9]|1[0-2])-(?P<day>0[1-9]|[12]\d|3[01])\b", _iso_date),
        (r"\b(?:\d{3}-)?\d{3}-\d{4}\b", lambda match: ", ".join(map(_spell_digits, match[0].split("-")))),
        (rf"(?P<amount>(?<![\d.]){_NUMBER})\s?(?P<unit>{units})(?![A-Za-z])", _unit),
        (r"(?<=\d)\s?--?\s?(?=\d)", " to "),
        (r"(?<![\w.-])-(?=\d)", " minus "),
        (r"(?<=\d) (?=\d{1,2}[/⁄]\d{1,2}(?![\d/]))", " and "),
        (r"(?<![\d/])(\d{1,3})[/⁄](\d{1,3})(?![\d/])", _fraction),
        (r"~\s?(?=\d)", "about "),
        (r"(?<=\w)\^(?=\w)", " to the power of "),
        (r"'?\b((?:1[1-9]|20)?\d0)'?s\b", _decade),
        (r"\b(\d[\d,]*+)((?:st|nd|rd|th)\b)?", _ordinal),
        (r"(?<!\d)\d++(?:\.\d+){2,}", lambda match: " point ".join(_cardinal(part) for part in match[0].split("."))),
        (r"(?<=[A-Za-z])(?=\d)", " "),
        (_NUMBER, _number),
        (rf"\b({'|'.join(_INITIALISMS)}|[B-DF-HJ-NP-TV-XZ]{{2,5}})(s?)\b", _initialism),
        (r"(?<=\w)@(?=\w)|@", " at "),
        (r"&", " and "),
        (r"\+", " plus "),
        (r"=", " equals "),
        (r"%", " percent "),
        (r"\.{2,}(?=\s*[a-z])", ","),
        (r"(?<=[A-Za-z])\.(?=[a-z])", " dot "),
        (r"--+|\s-\s|[;:()\[\]{}]", " , "),
        (r"[-_/]", " "),
        (r"[Ͱ-Ͽ]", _greek),
        (r"(?<![A-Za-z])'|'(?![A-Za-z])", " "),
    ]
    return [(re.compile(pattern), replacement) for pattern, replacement in table]


_RULES = _rules()
_TIDY: list[Rule] = [
    (re.compile(r"\s+"), " "),
    (re.compile(r"(?<![ ,])[ ,]*[.?!][ .,?!]*"), _ending),
    (re.compile(r" ?,[ ,]*"), ", "),
    (re.compile(r"^[ ,.?!]+|(?<![ ,])[ ,]+$"), ""),
]


def fold(text: str) -> str:
    """ASCII where a letter has one: quotes and dashes unified, accents and invisible characters gone."""
    # Small digits are no part of the number before them.
    text = re.sub(rf"(?<=\d)([{_SUPERSCRIPTS}]+)|(?<=\b[A-Za-z])([{_SUPERSCRIPTS}]+)", _power, text)
    text = re.sub(rf"(?<=\w)(?=[{_SUPERSCRIPTS}])|(?<=\d)(?=[¼-¾⅐-⅞])", " ", text)
    decomposed = unicodedata.normalize("NFKD", text.translate(_FOLDED)).translate(_FOLDED)
    return "".join(c for c in decomposed if c in "\n\t" or unicodedata.category(c) not in ("Mn", "Cf", "Cc", "Me"))


def normalize_english(text: str, *, lowercase: bool = False) -> NormalizedText:
    """Write `text` out as it is spoken; what has no spoken form is dropped and reported, never guessed.

    Idempotent on its own output. The text of the result is empty where nothing speakable is left."""
    spoken = fold(text)
    for pattern, replacement in _RULES:
        spoken = pattern.sub(replacement, spoken)
    dropped = "".join(dict.fromkeys(re.findall(r"[^A-Za-z.,?!'\s]", spoken)))
    spoken = re.sub(r"[^A-Za-z.,?!'\s]", " ", spoken)
    for pattern, replacement in _TIDY:
        spoken = pattern.sub(replacement, spoken)
    spoken = spoken.strip()
    if spoken and spoken[-1] not in ".?!":
        spoken += "."
    return NormalizedText(spoken.lower() if lowercase else spoken, dropped)
