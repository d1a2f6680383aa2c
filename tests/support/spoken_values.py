"""An independent reader of spoken numbers: words back to values. Knows nothing of the code that wrote them."""

from __future__ import annotations

from decimal import Decimal

_SMALL = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
UNITS = {word: number for number, word in enumerate(_SMALL.split())}
TENS = {word: 10 * number for number, word in enumerate(_TENS.split(), 2)}
SCALES = {"thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
ORDINALS = {
    **{"first": "one", "second": "two", "third": "three", "fifth": "five", "eighth": "eight", "ninth": "nine"},
    **{"twelfth": "twelve", "hundredth": "hundred"},
}


def split(text: str) -> list[str]:
    """The words of a reading, without its marks and without "and"."""
    return [word for word in "".join(" " if c in ",.?!" else c for c in text).split() if word != "and"]


def integer(words: list[str]) -> int:
    """The value of a whole number in words. Raises `ValueError` for what is none."""
    total, group, last = 0, 0, 10**15
    if not words:
        raise ValueError("no words")
    for at, word in enumerate(words):
        if word in UNITS:
            if group % 10 or (group % 100 and UNITS[word] > 9) or (UNITS[word] == 0 and len(words) > 1):
                raise ValueError(words)
            group += UNITS[word]
        elif word in TENS:
            if group % 100:
                raise ValueError(words)
            group += TENS[word]
        elif word == "hundred" and 0 < group < 100:
            group *= 100
        elif word in SCALES and at and SCALES[word] < last and group:
            total, group, last = total + group * SCALES[word], 0, SCALES[word]
        else:
            raise ValueError(words)
    return total + group


def decimal(words: list[str]) -> Decimal:
    """The value of a number with or without "minus" and "point"."""
    sign = -1 if words[0] == "minus" else 1
    words = words[1:] if words[0] == "minus" else words
    if "point" not in words:
        return Decimal(sign * integer(words))
    at = words.index("point")
    whole = integer(words[:at]) if at else 0
    return sign * Decimal(f"{whole}.{digits(words[at + 1 :])}")


def digits(words: list[str]) -> str:
    """Digits read one by one; "oh" is zero."""
    named = {"oh": 0, **{word: value for word, value in UNITS.items() if value < 10}}
    return "".join(str(named[word]) for word in words)


def ordinal(words: list[str]) -> int:
    """The value of an ordinal."""
    last = words[-1]
    if last in ORDINALS:
        plain = ORDINALS[last]
    elif last.endswith("ieth"):
        plain = last[:-4] + "y"
    elif last.endswith("th"):
        plain = last[:-2]
    else:
        raise ValueError(words)
    return integer([*words[:-1], plain])


def year(words: list[str]) -> int:
    """The value of a year: by its centuries and the rest, or as a number."""
    try:
        return integer(words)
    except ValueError:
        pass
    for at in range(1, len(words)):
        rest = words[at:]
        try:
            century = integer(words[:at])
            tail = int(digits(rest)) if rest[0] == "oh" else integer(rest)
        except (ValueError, KeyError):
            continue
        if 10 <= century < 100 and tail < 100 and (tail > 9 or rest[0] == "oh"):
            return 100 * century + tail
    raise ValueError(words)
