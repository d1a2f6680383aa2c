"""Each digit, and each letter outside markup, is accounted for: by the origin of a spoken word, or as dropped."""

from __future__ import annotations

import random

from sonoro.text import read

PARTS = (
    "the old man", "in", "January 5", "5 Jan 2020", "$3.50", "€5-10k", "12kg", "5 kg/m³", "10:30 p.m.",
    "21:51:31", "1/2", "2 1/2", "+44 20 7946 0018", "555-1234", "192.168.0.1:8080", "me@example.com",
    "https://a.org/b?c=1", "v1.2.3", "x86-64", "747-400", "40°26′46″N", "3-2", "Henry VIII", "Chapter IV",
    "x^2 + 2x - 1 = 0", "H₂SO₄", "FBI", "U.S.", "Dr. Smith", "e.g.", "1428 Elm St.", "#7", "@bob", "5'11\"",
    "20%", "1,000,000", "1.000.000", "1960s-80s", "750 BC", "½", "€", "東京", "Привет", "naïve", "☃", "🙂", "α",
    "ΔT", "(a)", "[b]", "&", "/", "-", "—", "a_b", "1e-5", "no. 5", "c++", "'90s", "007", "24/7",
)  # fmt: skip
JOINS = (" ", " ", " ", ", ", ". ", "; ", "\n", "\n\n", "-", "/", "")


def lost(text: str) -> list[str]:
    """Letters and digits of `text` that no spoken word comes from and that are not reported either."""
    reading = read(text, "plain")
    covered = {at for start, end in set(reading.origins) for at in range(start, end)}
    return [
        sign for at, sign in enumerate(text) if sign.isalnum() and at not in covered and sign not in reading.dropped
    ]


def test_nothing_of_a_mixture_is_lost() -> None:
    draw = random.Random(4)
    for _ in range(1500):
        text = "".join(draw.choice(PARTS) + draw.choice(JOINS) for _ in range(draw.randint(1, 8)))
        assert not lost(text), (text, lost(text), read(text, "plain").text)


def test_nothing_of_random_characters_is_lost() -> None:
    draw = random.Random(5)
    signs = "aAbIVx0123459.,:;/-–$€%°'\"()[]<>=+*^_ \n½²₂éß東"
    for _ in range(2000):
        text = "".join(draw.choices(signs, k=draw.randint(1, 30)))
        assert not lost(text), (text, lost(text), read(text, "plain").text)
