"""Each semiotic class by its own table of examples."""

from __future__ import annotations

import pytest

from sonoro.text.english.classes import CLASSES
from sonoro.text.english.reader import read

EXAMPLES = [
    pytest.param(text, spoken, id=f"{module.__name__.rpartition('.')[2]}: {text}")
    for module in CLASSES
    for text, spoken in module.EXAMPLES
]


@pytest.mark.parametrize(("text", "spoken"), EXAMPLES)
def test_an_example_is_read_as_its_class_says(text: str, spoken: str) -> None:
    assert read(text, "plain").text == spoken


@pytest.mark.parametrize(("text", "spoken"), EXAMPLES)
def test_every_letter_and_digit_is_spoken_or_dropped(text: str, spoken: str) -> None:
    reading = read(text, "plain")
    covered = {at for start, end in reading.origins for at in range(start, end)}
    left = [sign for at, sign in enumerate(text) if sign.isalnum() and at not in covered]
    assert not set(left) - set(reading.dropped)
    assert len(reading.origins) == len(reading.text)
