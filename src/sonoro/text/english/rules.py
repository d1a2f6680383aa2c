"""The rules of English text normalisation: how numbers, money, times, addresses, abbreviations and signs are read.

Each is a pattern and what replaces its matches. They are simple: a bare number from 1100 to 2099 is read as a year."""

import re
import unicodedata
from collections.abc import Callable, Iterable

from num2words import num2words

from sonoro.text.english import tables
from sonoro.text.english.roman import ROMAN_RULES, Rule

Table = list[tuple[str, str | Callable[[re.Match[str]], str]]]


SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹"
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?"
_LARGEST_SPELLED_DIGITS = 15


def _spell_letters(letters: str) -> str:
    # A lone "a" reads as the article, so the letter is written as it sounds.
    return " ".join("ay" if letter in "aA" else letter for letter in letters if letter.isalpha())


def _label(label: str) -> str:
    """A part of an address, spelled out if it is not a word."""
    letters = label.rstrip("0123456789")
    is_spelled = letters.lower() in tables.SPELLED_LABELS or (
        1 < len(letters) <= 5 and not set(letters.lower()) & set("aeiouy")
    )
    return f"{_spell_letters(letters.upper())} {label[len(letters) :]}" if is_spelled else label


def _address(match: re.Match[str]) -> str:
    """A URL, domain or e-mail address with its punctuation named."""
    whole = re.sub(r"^(?:https?://)?(?:www\.)?", "", match[0])
    address = whole.rstrip(".,;:!?)]}'*/")
    parts = re.findall(r"[A-Za-z]+\d*|\d+|[^A-Za-z\d]", address)
    spoken = " ".join(tables.MARKS.get(part, _label(part)) for part in parts)
    return f" {spoken} {whole[len(address) :].lstrip('/')}"


def _digit_groups(match: re.Match[str]) -> str:
    groups = ", ".join(_spell_digits(group) for group in re.findall(r"\d+", match[0]))
    return f" {'plus ' * match[0].startswith('+')}{groups} "


def _state(match: re.Match[str]) -> str:
    return match[0] if match[1] in tables.UNSURE_STATES else tables.STATES[match[1]]


def _postcode(match: re.Match[str]) -> str:
    return " ".join(_spell_digits(sign) if sign.isdigit() else _spell_letters(sign) for sign in match[0])


def _before_number(match: re.Match[str]) -> str:
    word = (tables.BEFORE_NUMBER | tables.DOTTED_BEFORE_NUMBER)[match[1].lower()]
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
    spoken = f"{tables.MONTHS[month - 1]} {num2words(day, to='ordinal')}"
    return f"{spoken}, {_year(year) if len(year) == 4 else _cardinal(year)}"


def feet(match: re.Match[str]) -> str:
    feet, inches = match[1], match[2]
    return f"{feet} {'foot' if feet == '1' else 'feet'} {inches} {'inch' if inches == '1' else 'inches'}"


def _capitals(match: re.Match[str]) -> str:
    """A lone word of two or three capitals: spelled out unless it is in `tables.CAPITAL_WORDS`."""
    return match[0] if match[1] in tables.CAPITAL_WORDS else _initialism(match)


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
    one, many, small, smalls = tables.MONEY[match["sign"]]
    amount, magnitude = match["amount"], match["magnitude"]
    if magnitude:
        return f" {_cardinal(amount)} {tables.MAGNITUDES.get(magnitude.lower(), magnitude)} {many} "
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


def power(match: re.Match[str]) -> str:
    exponent = next(filter(None, match.groups())).translate(
        {ord(sign): str(digit) for digit, sign in enumerate(SUPERSCRIPTS)}
    )
    return {"2": " squared ", "3": " cubed "}.get(exponent, f" to the power of {exponent} ")


def _scientific(match: re.Match[str]) -> str:
    return f"{match[1]} times 10 to the power of {'minus ' * (match[2] == '-')}{match[3]} "


def _greek(match: re.Match[str]) -> str:
    name = unicodedata.name(match[0], "")
    return f" {name.split()[-1].lower()} " if name.startswith("GREEK ") and " LETTER " in name else match[0]


def _iso_date(match: re.Match[str]) -> str:
    return f"{tables.MONTHS[int(match['month']) - 1]} {_nth(match['day'])}, {_year(match['year'])}"


def _decade(match: re.Match[str]) -> str:
    number = match[1]
    words = _year(number) if len(number) == 4 else num2words(int(number))
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def _unit(match: re.Match[str]) -> str:
    one, many = tables.UNITS[match["unit"]]
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


def _any(names: Iterable[str]) -> str:
    """A pattern that matches the longest of `names`."""
    return "|".join(re.escape(name) for name in sorted(names, key=len, reverse=True))


def compiled(table: Table) -> list[Rule]:
    return [(re.compile(pattern), replacement) for pattern, replacement in table]


_HALF = r"(?P<half>[aApP]\.?\s?[mM]\b\.?)"
_CLOCK = rf"\b(?P<hour>[01]?\d|2[0-3]):(?P<minute>[0-5]\d)(?::(?P<second>[0-5]\d))?(?!\d)(?:\s?{_HALF})?"
_MONTH = _any(tables.MONTHS)
_SHORT_MONTH = _any(tables.SHORT_MONTHS)
_DAY = _any(tables.DAYS)
_STATE = _any(tables.STATES)
_STREET = _any(tables.STREETS)
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
    (r"(?m)^(?:\s*+[-*•]\s+|(\s*+))", r"\1"),
    (r"•", ", "),
    (r"(?:[.,;:]|(?<![.,;: \t]))[ \t]*+\n\s*\n\s*", ". "),
]
_ADDRESSES: Table = [
    (r"(?<![\w.+-])[\w.+-]++@(?:[\w-]++\.)+[A-Za-z]{2,}", _address),
    (r"(?:\bhttps?://|\bwww\.(?=\w))[^\s<>]++", _address),
    (rf"(?<![\w.@-])(?:[A-Za-z0-9-]++\.)+(?:{tables.DOMAINS})\b(?:/[^\s<>]*+)?", _address),
    (rf"(?<=\w)\.({tables.FILES})\b", lambda match: f" dot {_label(match[1])} "),
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
    (rf"\b({_STATE}),? \d{{5}}(?:-\d{{4}})?\b", lambda match: tables.STATES[match[1]] + _digit_groups(match)),
    (r"\b(?i:zip(?: code)?):? \d{5}(?:-\d{4})?\b", lambda match: "zip code" + _digit_groups(match)),
    (rf"(?<=[a-z], )({_STATE})(?=[.,;)]|\s*$)", _state),
    (r"\b[A-Z]{1,2}\d[A-Z\d]? \d[A-Z]{2}\b", _postcode),
    (
        rf"(?<=\d )([NSEW])\.? (?=(?:[A-Z][a-z]+ ){{1,3}}(?:{_STREET}|{_any(tables.STREETS.values())}|Dr|Drive|Way)\b)",
        lambda match: tables.COMPASS[match[1]] + " ",
    ),
    (
        rf"(?<=[a-z] )({_STREET})\b(?!\.)(?<!St)|(?<=[a-z] )(St)\b(?!\.| (?!Apt|Suite|Ste|Unit)[A-Z][a-z])",
        lambda match: tables.STREETS[match[1] or match[2]],
    ),
]
_SHORT: Table = [
    (r"\be\.g\.,?", "for example,"),
    (r"\bi\.e\.,?", "that is,"),
    (r"\ba\.k\.a\b\.?", "also known as"),
    (r"(?<![A-Za-z])(?i:vs)(?![A-Za-z])\.?", "versus"),
    (
        rf"(?<![A-Za-z/])(?i:{_any(word for word in tables.SHORT_WORDS if word.islower())})(?![A-Za-z/])",
        lambda match: tables.SHORT_WORDS[match[0].lower()],
    ),
    (rf"(?<![\w/])(?:{_any(tables.SHORT_WORDS)})(?![\w/])", lambda match: tables.SHORT_WORDS[match[0]]),
    (r"(?<!\w)w/\s?(?=\w)", "with "),
    (rf"\b((?i:{_any(tables.BEFORE_NUMBER)}))\b\.?\s?(?=#?\d)", _before_number),
    (
        rf"\b((?i:{_any(tables.DOTTED_BEFORE_NUMBER)}))\.\s?(?=\d)|\bv(?=\d)",
        lambda match: _before_number(match) if match[1] else "version ",
    ),
    (
        rf"\b({_any(tables.ABBREVIATIONS)})\.(?=\s+[A-Z]|\s*$)",
        lambda match: tables.ABBREVIATIONS[match[1]] + ("" if match[1] != "etc" else "."),
    ),
    (rf"\b({_any(tables.ABBREVIATIONS)})\.", lambda match: tables.ABBREVIATIONS[match[1]]),
    (r"\b(Mr|Mrs|Ms|Prof)(?= [A-Z])", lambda match: tables.ABBREVIATIONS[match[1]]),
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
        lambda match: tables.SHORT_MONTHS[match[1] or match[2]],
    ),
    (
        rf"\b({_DAY})\b\.?(?=,? (?:{_MONTH}|\d)|\s?--?\s?(?:{_DAY})\b)|(?<=-)({_DAY})\b\.?",
        lambda match: tables.DAYS[match[1] or match[2]],
    ),
    (rf"(?<=day)\s?--?\s?(?={_any(set(tables.DAYS.values()))})", " to "),
    (rf"(?<![\d.:,])(0?[1-9]|[12]\d|3[01]) ({_MONTH})\b", lambda match: f"the {_nth(match[1])} of {match[2]}"),
    (
        rf"\b({_MONTH}) (0?[1-9]|[12]\d|3[01])(?:st|nd|rd|th)?\b(?![:%]|[.,]\d)",
        lambda match: f"{match[1]} {_nth(match[2])}",
    ),
    (r"(?<![\d/])(\d{1,2})/(\d{1,2})/((?:19|20)?\d\d)(?![\d/])", _slashed_date),
    (
        r"(?<![\d.])(0?[1-9]|[12]\d|3[01])\.(0?[1-9]|1[0-2])\.((?:19|20)\d\d)(?!\.?\d)",
        lambda match: f"the {_nth(match[1])} of {tables.MONTHS[int(match[2]) - 1]}, {_year(match[3])}",
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
        rf"(?<![\d.,])([$£€¥₹]?{_TERM}\s?[A-Za-z%]{{0,5}})/({_any(tables.PERIODS)})\b",
        lambda match: f"{match[1]} per {tables.PERIODS[match[2]]}",
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
    (rf"(?P<amount>(?<![\d.]){_NUMBER})\s?(?P<unit>{_any(tables.UNITS)})(?![A-Za-z])(?!(?<= [A-Z])\.? [A-Z])", _unit),
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
    (rf"\b({'|'.join(tables.INITIALISMS)}|[B-DF-HJ-NP-TV-XZ]{{2,5}})(s?)\b", _initialism),
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
RULES = [*compiled(_MARKUP), *ROMAN_RULES, *compiled(_ADDRESSES + _PLACES + _SHORT + _DATES + _AMOUNTS + _SIGNS)]
"""The substitutions in their required order: specific before general, numbers before punctuation.
Each takes linear time for any text: patterns enter a run of one kind of character only at its start, or match it whole.
"""
