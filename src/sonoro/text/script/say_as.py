"""Say-as: text of a stated kind to words, in English. None for a text that is not of its kind."""

import re
from collections.abc import Callable

from sonoro.text.english.numbers import decimal, digits, ordinal, year
from sonoro.text.english.reader import read
from sonoro.text.english.signs import read_sign
from sonoro.text.english.tables import MONTHS, pairs

_INTEGER = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+|\d{1,33})")
_NUMBER = re.compile(r"([+-]?)(\d[\d,]{0,40}(?:\.\d{1,33})?|\.\d{1,33})")
_FRACTION = re.compile(r"(?:\d{1,9}[\s+])?\d{1,9}\s?[/⁄]\s?\d{1,9}|(?:\d{1,9}\s?)?[½⅓⅔¼¾⅛⅜⅝⅞]")
_DATE_PARTS = {"m": r"(?P<m>\d{1,2})", "d": r"(?P<d>\d{1,2})", "y": r"(?P<y>\d{4}|\d{2})"}
_CLOCK = re.compile(r"\d{1,2}(?:[:.]\d{2}){0,2}\s?(?:[ap]\.?m\.?)?", re.IGNORECASE)
_TELEPHONE = re.compile(r"\+?[\d\s()./-]{3,40}")
_EXTENDED = re.compile(r"[\d\s()./-]{7,40},?\s?(?:ext\.?|x)\s?\d{1,6}|1-8\d\d-[A-Z\d-]{3,20}")
_LENGTH = re.compile(r"\d{1,3}'\s?[0-5]?\d\"")
_NAMED = pairs(". = dot | / = slash | _ = underscore | # = hash | * = star | : = colon")
"""Signs within a name or a code that are silent in a text."""

_DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]?")
_SIGNS = {"+": "plus ", "-": "minus ", "": ""}


def say(kind: str, text: str, form: str = "") -> str | None:
    """The words for `text` as a `kind` of `KINDS`, in `form`; None if it is none."""
    return KINDS[kind]("".join(text.split("\n")).strip(), form)


def _characters(text: str, form: str) -> str | None:
    """Letters in capitals, as in an initialism; a group of digits or letters is a phrase."""
    text = text.replace(".", "") if _DOTTED.fullmatch(text) else text.rstrip(".")
    groups = re.findall(r"[^\W\d_]+|\d+|[^\w\s]|_", text)
    said = [" ".join(group.upper()) if group[0].isalpha() else _signs(group) for group in groups]
    return ", ".join(part for part in said if part) or None


def _signs(group: str) -> str:
    if group[0].isdecimal() and group.isascii():
        return digits(group)
    # A hyphen between groups is silent.
    return "" if group in "-–" else _NAMED.get(group) or read_sign(group, 0, 1) or ""


def _cardinal(text: str, _: str) -> str | None:
    found = _NUMBER.fullmatch(text)
    return None if found is None else _SIGNS[found[1]] + decimal(found[2].replace(",", "").lstrip("0") or "0")


def _number(text: str, form: str) -> str | None:
    """A number, by its `form` of `KINDS` if it has one."""
    return KINDS.get(form if form != "number" else "", _cardinal)(text, "")


def _ordinal(text: str, _: str) -> str | None:
    found = _INTEGER.fullmatch(re.sub(r"(?i)(?<=\d)(?:st|nd|rd|th)$", "", text))
    return None if found is None or found[1] else ordinal(found[2])


def _digits(text: str, _: str) -> str | None:
    return digits(text) if re.fullmatch(r"[\d\s.,-]*\d[\d\s.,-]*", text) and text.isascii() else None


def _fraction(text: str, _: str) -> str | None:
    return _read(text.replace("+", " ")) if _FRACTION.fullmatch(text) else None


def _read(text: str, _: str = "") -> str | None:
    return read(text, "plain").text.rstrip(".") or None


def _amount(text: str, _: str) -> str | None:
    """Money or a measure, with its sign or unit."""
    return _read(text) if re.search(r"\d", text) and re.search(r"[^\d\s.,+-]", text) else None


def _date(text: str, form: str) -> str | None:
    """By `form`: the order of month, day and year, month first by default."""
    if not re.fullmatch(r"[mdyMDY]{0,8}|(?:[mdyMDY]{1,4}[-/. ]?){1,3}", form):
        return None
    # dd/mm/yyyy is dmy.
    form = re.sub(r"[^a-z]|(.)(?=\1)", "", form.lower()) or ("ymd" if re.match(r"\d{4}", text) else "mdy")
    if len(set(form)) < len(form):
        return None
    parts = [_DATE_PARTS[part] for part in form]
    found = re.fullmatch(r"\s?[-/.\s]\s?".join(parts), text)
    if found is None and len(text) == 8 and text.isdecimal():
        found = re.fullmatch("".join(part.replace("{1,2}", "{2}").replace(r"|\d{2}", "") for part in parts), text)
    if found is None:
        words = read(text, "plain").text.rstrip(".")
        return words if words and any(month in words for month in MONTHS) else None
    given = found.groupdict()
    month, day = int(given.get("m") or 1), int(given.get("d") or 1)
    if not (1 <= month <= 12 and 1 <= day <= 31):
        return None
    said = [MONTHS[month - 1]] * ("m" in given) + [ordinal(str(day))] * ("d" in given)
    return ", ".join([*([" ".join(said)] if said else []), *([year(given["y"])] if "y" in given else [])])


def _time(text: str, _: str) -> str | None:
    if _LENGTH.fullmatch(text):
        return _read(text)
    found = _CLOCK.fullmatch(text)
    if found is None or not any(sign in text.lower() for sign in (":", ".", "m")):
        return None
    hour, *rest = (int(part) for part in re.findall(r"\d+", text))
    return (
        read(text.replace(".", ":", text[:3].count(".")), "plain").text.rstrip(".")
        if hour <= 24 and all(part < 60 for part in rest)
        else None
    )


def _telephone(text: str, _: str) -> str | None:
    if _EXTENDED.fullmatch(text):
        return _read(text)
    if not _TELEPHONE.fullmatch(text):
        return None
    plus = "plus " if text.startswith("+") else ""
    return plus + ", ".join(digits(group) for group in re.findall(r"\d+", text)) or None


KINDS: dict[str, Callable[[str, str], str | None]] = {
    "characters": _characters,
    "spell-out": _characters,
    "verbatim": _characters,
    "cardinal": _cardinal,
    "number": _number,
    "ordinal": _ordinal,
    "number_digit": _digits,
    "digits": _digits,
    "fraction": _fraction,
    "date": _date,
    "time": _time,
    "telephone": _telephone,
    "currency": _amount,
    "unit": _amount,
    "measure": _amount,
    "address": _read,
}
