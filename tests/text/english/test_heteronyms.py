"""Words that are written alike and said apart are told apart by their context, and spelled as a voice needs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sonoro.text import read
from sonoro.text.english.heteronyms import reading

LIST = Path(__file__).parents[3] / "tools" / "builtin_voice" / "heteronyms.txt"
MORE = Path(__file__).parents[2] / "assets" / "heteronyms.txt"
SPELLINGS = {"read:past": "red", "live:adjective": "ligh v", "use:noun": "youss", "polish:Poland": "poalish"}


def told(path: Path) -> list[tuple[str, str, str]]:
    """Each sentence of a list with the reading that is meant, and the one that is chosen."""
    found = []
    for line in path.read_text("utf-8").splitlines():
        key, text = line.split("\t")
        word, _, meant = key.partition(":")
        said = read(text).text
        place = re.search(rf"(?i)\b{word}\b", said)
        assert place is not None, text
        found.append((text, meant, reading(said, *place.span())))
    return found


@pytest.mark.parametrize("path", [LIST, MORE], ids=["judged", "more"])
def test_nearly_every_reading_is_chosen_as_meant(path: Path) -> None:
    sentences = told(path)
    wrong = [one for one in sentences if one[1] != one[2]]
    assert len(wrong) <= len(sentences) * 0.02, wrong


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("She has read 2 books. I read daily.", "She has red two books. I read daily."),
        ("We live near live music; no use, use it.", "We live near ligh v music, no youss, use it."),
        ("The band plays live. We live to play.", "The band plays ligh v. We live to play."),
        ("A Polish cook. Polish it.", "A poalish cook. Polish it."),
    ],
)
def test_a_reading_is_spelled_as_it_sounds(text: str, spoken: str) -> None:
    made = read(text, heteronyms=SPELLINGS)
    assert made.text == spoken
    assert len(made.origins) == len(made.text)
    at = made.text.find("red")
    if at >= 0:
        assert {text[start:end] for start, end in made.origins[at : at + 3]} == {"read"}


def test_the_context_around_a_piece_decides() -> None:
    assert read("read the book.", heteronyms=SPELLINGS).text == "read the book."
    assert read("read the book.", heteronyms=SPELLINGS, context=("They have ", "")).text == "red the book."
    assert read("I read it", heteronyms=SPELLINGS, context=("", " yesterday at home.")).text == "I red it."


def test_without_spellings_words_stand_as_they_are() -> None:
    assert read("She has read it.").text == "She has read it."
