"""Numbers keep their value and unit: what is read, in words, is taken back to a value by a reader of its own."""

from __future__ import annotations

import calendar
import itertools
import random
from collections.abc import Callable
from decimal import Decimal

import pytest
from spoken_values import decimal, digits, integer, ordinal, split, year

from sonoro.text import read

Case = tuple[str, Callable[[list[str]], object], object]
"""A written text, what takes its words to a value, and the value."""

UNITS = {
    "kg": "kilogram",
    "km": "kilometer",
    "mg": "milligram",
    "cm": "centimeter",
    "lb": "pound",
    "oz": "ounce",
    "mph": "mile",
    "kHz": "kilohertz",
    "GB": "gigabyte",
    "ml": "milliliter",
    "kW": "kilowatt",
    "mi": "mile",
    "°C": "degree",
    "%": "percent",
}
MONEY = {"$": ("dollar", "cent"), "£": ("pound", "pence"), "€": ("euro", "cent")}


def _number(draw: random.Random, most_digits: int = 9) -> int:
    return draw.randrange(10 ** draw.randint(1, most_digits))


def cardinal_case(draw: random.Random) -> Case:
    value = _number(draw, 12)
    value = value if value > 2200 or value < 1000 else value + 9000
    form = draw.choice(["{0:,}", "{0:,} things", "about {0:,}"] + ["{0}"] * (value < 10**6))
    skip = form.startswith("about")
    return form.format(value), lambda words: integer([w for w in words[skip:] if w != "things"]), value


def decimal_case(draw: random.Random) -> Case:
    places = draw.randint(1, 4)
    value = f"{_number(draw, 6)}.{draw.randrange(10**places):0{places}}"
    sign = draw.choice(["", "-"])
    return f"it is {sign}{value} now", lambda words: decimal(words[2:-1]), Decimal(sign + value)


def ordinal_case(draw: random.Random) -> Case:
    value = draw.randint(1, 9999)
    ending = "th" if value % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(value % 10, "th")
    return f"the {value}{ending} time", lambda words: ordinal(words[1:-1]), value


def year_case(draw: random.Random) -> Case:
    value = draw.randint(1100, 2099)
    form = draw.choice(["in {}", "since {}", "of {}"])
    return form.format(value), lambda words: year(words[1:]), value


def date_case(draw: random.Random) -> Case:
    y, month = draw.randint(1900, 2099), draw.randint(1, 12)
    day = draw.randint(1, calendar.monthrange(y, month)[1])
    name = calendar.month_name[month]
    forms = [
        f"{y}-{month:02}-{day:02}", f"{month}/{day}/{y}", f"{day:02}.{month:02}.{y}", f"{name} {day}, {y}",
        f"{day} {name} {y}", f"{calendar.month_abbr[month]}. {day}, {y}", f"{day} {calendar.month_abbr[month]} {y}",
    ]  # fmt: skip

    def back(words: list[str]) -> tuple[int, int, int]:
        words = [word for word in words if word not in ("the", "of")]
        [at] = [n for n, word in enumerate(words) if word in list(calendar.month_name)]
        spoken_month = list(calendar.month_name).index(words[at])
        before, after = words[:at], words[at + 1 :]
        if before:
            return year(after), spoken_month, ordinal(before)
        for cut in range(1, len(after)):
            try:
                return year(after[cut:]), spoken_month, ordinal(after[:cut])
            except ValueError:
                continue
        raise ValueError(words)

    return draw.choice(forms), back, (y, month, day)


def time_case(draw: random.Random) -> Case:
    hour, minute = draw.randint(1, 12), draw.randint(0, 59)
    half = draw.choice(["am", "pm"])
    written = draw.choice(
        [f"{hour}:{minute:02}{half}", f"{hour}:{minute:02} {half[0]}.m.", f"{hour}:{minute:02} {half.upper()}"]
    )

    def back(words: list[str]) -> tuple[int, int, str]:
        words = [word.lower() for word in words]
        spoken_half = {"ay": "a", "a": "a", "p": "p"}[words[-2]] + words[-1]
        words = words[:-2]
        for cut in range(1, len(words) + 1):
            rest = words[cut:]
            try:
                minutes = (int(digits(rest)) if rest[0] == "oh" else integer(rest)) if rest else 0
                return integer(words[:cut]), minutes, spoken_half
            except (ValueError, KeyError):
                continue
        raise ValueError(words)

    return f"{written}", back, (hour, minute, half)


def money_case(draw: random.Random) -> Case:
    sign = draw.choice(list(MONEY))
    main, small = _number(draw, 6), draw.randint(0, 99)
    main = max(main, 1)
    written = f"{sign}{main:,}" + (f".{small:02}" if small else "")
    big, little = MONEY[sign]

    def back(words: list[str]) -> int:
        at = next(n for n, word in enumerate(words) if word.rstrip("s") == big)
        rest = words[at + 1 :]
        if rest and rest[-1].rstrip("s") not in (little, "penny"):
            raise ValueError(words)
        return 100 * integer(words[:at]) + (integer(rest[:-1]) if rest else 0)

    return written, back, 100 * main + small


def measure_case(draw: random.Random) -> Case:
    symbol = draw.choice(list(UNITS))
    places = draw.randint(0, 2)
    value = f"{max(_number(draw, 4), 1)}" + (f".{draw.randrange(10**places):0{places}}" if places else "")
    written = f"{value}{draw.choice(['', ' ']) if symbol != '%' else ''}{symbol}"
    name = UNITS[symbol]

    def back(words: list[str]) -> Decimal:
        at = next(n for n, word in enumerate(words) if word.removesuffix("s") == name)
        return decimal(words[:at])

    return written, back, Decimal(value)


def fraction_case(draw: random.Random) -> Case:
    bottom = draw.randint(2, 20)
    top = draw.randint(1, bottom - 1)
    top = top - 1 if (top, bottom) == (9, 11) else top  # the day of the attack
    whole = draw.choice([0, draw.randint(1, 20)])

    def back(words: list[str]) -> tuple[int, int, int]:
        if words[-1] in ("half", "halves"):
            low, rest = 2, words[:-1]
        elif words[-1] in ("quarter", "quarters"):
            low, rest = 4, words[:-1]
        else:
            last = words[-1].removesuffix("s") if words[-1] != "s" else words[-1]
            low, rest = ordinal([last]), words[:-1]
        rest = [{"a": "one"}.get(word, word) for word in rest]
        return (integer(rest[:-1]) if rest[:-1] else 0, integer(rest[-1:]), low) if top < 20 else (0, 0, 0)

    return f"{whole} {top}/{bottom}" if whole else f"{top}/{bottom}", back, (whole, top, bottom)


def telephone_case(draw: random.Random) -> Case:
    parts = draw.randint(200, 999), draw.randint(200, 999), draw.randint(0, 9999)
    form = draw.choice(["({}) {}-{:04}", "{}-{}-{:04}", "{}.{}.{:04}", "+1 {} {} {:04}"])
    value = ("1" if form[0] == "+" else "") + "{}{}{:04}".format(*parts)
    return f"call {form.format(*parts)}", lambda words: digits([w for w in words[1:] if w != "plus"]), value


def range_case(draw: random.Random) -> Case:
    low = draw.randint(1, 900)
    high = low + draw.randint(1, 99)

    def back(words: list[str]) -> tuple[int, int]:
        at = words.index("to")
        return integer(words[1:at]), integer(words[at + 1 :])

    return f"pages {low}{draw.choice('-–')}{high}", back, (low, high)


def duration_case(draw: random.Random) -> Case:
    hours, minutes, seconds = draw.randint(2, 23), draw.randint(2, 59), draw.randint(2, 59)
    written = draw.choice([f"{hours}:{minutes:02}:{seconds:02}", f"{hours}h {minutes}m {seconds}s"])
    return written, lambda words: _counted(words, "hours", "minutes", "seconds"), [hours, minutes, seconds]


def _counted(words: list[str], *names: str) -> list[int]:
    """The numbers before each of `names`, in order."""
    cuts = [-1, *(words.index(name) for name in names)]
    return [integer(words[one + 1 : two]) for one, two in itertools.pairwise(cuts)]


def roman_case(draw: random.Random) -> Case:
    value = draw.randint(2, 39)
    numeral = "X" * (value // 10) + ["", "I", "II", "III", "IV", "V", "VI", "VII", "VIII", "IX"][value % 10]
    if draw.random() < 0.5:
        return f"Chapter {numeral}", lambda words: integer(words[1:]), value
    return f"Louis {numeral}", lambda words: ordinal(words[2:]), value


def version_case(draw: random.Random) -> Case:
    parts = [draw.randrange(100) for _ in range(3)]
    written = draw.choice(["v", "version "]) + ".".join(map(str, parts))

    def back(words: list[str]) -> list[int]:
        return [integer(part.split()) for part in " ".join(words[1:]).split(" point ")]

    return written, back, parts


def code_case(draw: random.Random) -> Case:
    value = "".join(draw.choices("0123456789", k=draw.randint(4, 8)))
    form, skip = draw.choice([("code {}", 1), ("card ending in {}", 3), ("PIN: {}", 1), ("order number {}", 2)])
    return form.format(value), lambda words: digits(words[skip:]), value


def coordinate_case(draw: random.Random) -> Case:
    parts = [draw.randint(2, 89), draw.randint(2, 59), draw.randint(2, 59)]
    side = draw.choice(["north", "south", "east", "west"])

    def back(words: list[str]) -> tuple[list[int], str]:
        return _counted(words, "degrees", "minutes", "seconds"), words[-1]

    return "{}°{}′{}″".format(*parts) + side[0].upper(), back, (parts, side)


def score_case(draw: random.Random) -> Case:
    low, high = draw.randint(0, 20), draw.randint(0, 20)

    def back(words: list[str]) -> tuple[int, int]:
        at = words.index("to")
        return integer(words[1:at]), integer(words[at + 1 :])

    return draw.choice([f"won {low}-{high}", f"lost {low}–{high}"]), back, (low, high)


CASES = {case.__name__.removesuffix("_case"): case for case in (
    cardinal_case, decimal_case, ordinal_case, year_case, date_case, time_case, money_case, measure_case, fraction_case,
    telephone_case, range_case, duration_case, roman_case, version_case, code_case, coordinate_case, score_case,
)}  # fmt: skip


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_value_is_read_as_itself(kind: str, count: int) -> None:
    draw = random.Random(f"{kind} {count}")
    for _ in range(count):
        written, back, value = CASES[kind](draw)
        spoken = read(written, "plain").text
        assert back(split(spoken)) == value, (written, spoken)
