"""Numbers as English words. Knows no class and no context.

Numbers arrive as written: ASCII digits, with commas between groups and a decimal point where they have one.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from importlib import import_module

LARGEST_DIGITS = 33
"""Longer runs of digits are read digit by digit; num2words names no larger number."""

LARGEST_BARE_DIGITS = 15
"""A longer run without commas is a code rather than a quantity."""

_DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def digits(number: str, zero: str = "zero") -> str:
    """Read each digit by itself; other characters are left out."""
    return " ".join(zero if digit == "0" else _DIGITS[int(digit)] for digit in number if digit.isdecimal())


@lru_cache(4096)
def cardinal(number: str) -> str:
    """Read a whole number, with commas or without. A leading zero, or too many digits, make it a code."""
    plain = number.replace(",", "")
    longest = LARGEST_DIGITS if "," in number else LARGEST_BARE_DIGITS
    if (plain.startswith("0") and len(plain) > 1) or len(plain) > longest:
        return digits(plain)
    return _words(int(plain))


def decimal(number: str) -> str:
    """Read a number with or without a decimal point; `.5` begins with "point"."""
    whole, point, fraction = number.partition(".")
    if not point or not fraction:
        return cardinal(whole)
    return f"{cardinal(whole)} point {digits(fraction)}" if whole else f"point {digits(fraction)}"


@lru_cache(4096)
def ordinal(number: str) -> str:
    """Read a whole number as an ordinal."""
    plain = number.replace(",", "")
    if len(plain) > LARGEST_BARE_DIGITS:
        return digits(plain) + "th"
    return _words(int(plain), "ordinal")


@lru_cache(1024)
def year(number: str) -> str:
    """Read a year of one to four digits: 1905 is nineteen oh five."""
    value = int(number)
    if len(number) == 2:
        return f"oh {_DIGITS[value]}" if number[0] == "0" else cardinal(number)
    if value < 1000 and value >= 100:
        return grouped(str(value))
    return _words(value, "year").replace("oh-", "oh ")


def decade(number: str) -> str:
    """Read a decade, `number` without its s: 1980 is nineteen eighties."""
    words = year(number) if len(number) == 4 else cardinal(number if number != "00" else "2000")
    return words[:-1] + "ies" if words.endswith("y") else words + "s"


def grouped(number: str) -> str:
    """Read a label of up to four digits in pairs, as house numbers and flights are: 1428 is fourteen twenty eight, 404
    four oh four, 7000 seven thousand. Longer ones and those with a leading zero are read digit by digit."""
    if not number.isdecimal() or not 3 <= len(number) <= 4 or number[0] == "0":
        return cardinal(number) if len(number) < 3 and not number.startswith("0") else digits(number, "oh")
    if number[1:3] == "00" and number[0] != "1":
        return cardinal(number)
    if int(number) % 100 == 0:
        return cardinal(number) if int(number) % 1000 == 0 or len(number) == 3 else f"{cardinal(number[:-2])} hundred"
    tail = f"oh {_DIGITS[int(number[-1])]}" if number[-2] == "0" else cardinal(number[-2:])
    return f"{cardinal(number[:-2])} {tail}"


def count(number: str, one: str, many: str) -> str:
    """Read `number` and a noun in the right form: one for "1" alone."""
    return f"{decimal(number)} {one if number == '1' else many}"


@cache
def _num2words() -> Callable[..., str]:
    # Imported when the first number is read: it loads every language it has.
    made: Callable[..., str] = import_module("num2words").num2words
    return made


def _words(value: int, to: str = "cardinal") -> str:
    return _num2words()(value, to=to).replace(",", "").replace("-", " ")
