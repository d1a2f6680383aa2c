"""What English text becomes before a voice that reads letters alone."""

from __future__ import annotations

import itertools
import json
import random
import re
import string
import time
from collections import ChainMap
from pathlib import Path

import pytest

from sonoro.text import read

ENGLISH = dict(
    ChainMap(*json.loads((Path(__file__).parents[2] / "assets" / "english.json").read_text("utf-8")).values())
)
SPOKEN = {
    "Dr. Smith lives on Elm Dr.": "Doctor Smith lives on Elm Drive.",
    "Mrs. O'Brien, 12 St. James St., St. Louis": "Missus O'Brien, twelve Saint James Street, Saint Louis.",
    "nuts, e.g. figs, i.e. fruit, etc.": "nuts, for example, figs, that is, fruit, et cetera.",
    "Cats vs. dogs & mice": "Cats versus dogs and mice.",
    "$3.50 or £2.01 or €1": "three dollars and fifty cents or two pounds and one penny or one euro.",
    "$0.99, $1, $1,200": "ninety nine cents, one dollar, one thousand two hundred dollars.",
    "$5 million and $100k": "five million dollars and one hundred thousand dollars.",
    "It rose 2.5%.": "It rose two point five percent.",
    "Meet at 3:05 p.m.": "Meet at three oh five p m.",
    "Meet at 9:00, 15:30 or 7am": "Meet at nine o'clock, fifteen thirty or seven ay m.",
    "the 1st, 23rd and 101st": "the first, twenty third and one hundred and first.",
    "born in 1984, in the '80s or 1990s": "born in nineteen eighty four, in the eighties or nineteen nineties.",
    "in 2005, 2010 and 1100": "in two thousand and five, twenty ten and eleven hundred.",
    "2100 and 1,984": "two thousand one hundred and one thousand nine hundred and eighty four.",
    "on 2024-03-15": "on March fifteenth, twenty twenty four.",
    "pi is 3.14, not -3": "pi is three point one four, not minus three.",
    "part #: 7, part # 8": "part number, seven, part number eight.",
    "it is ≈45, x ≈ 2": "it is about forty five, x is about two.",
    "pages 10-20, 1914–1918": "pages ten to twenty, nineteen fourteen to nineteen eighteen.",
    "1/2 a cup, 3/4 of it, 2/3": "one half a cup, three quarters of it, two thirds.",
    "version 1.2.3": "version one point two point three.",
    "Call 555-1234.": "Call five five five, one two three four.",
    "agent 007": "agent zero zero seven.",
    "25°C for 1 km": "twenty five degrees Celsius for one kilometer.",
    "me@example.com": "me at example dot com.",
    "the FBI and the U.S. use TVs": "the F B I and the U S use T V's.",
    "“Smart” ‘quotes’ — here…": "Smart quotes, here.",
    "Wait... what?! No!!!": "Wait, what? No!",
    "well-known; (really): yes": "well known, really, yes.",
    "one\ntwo\n\nthree": "one two. three.",
    "Café naïve Straße Łódź": "Cafe naive Strasse Lodz.",
    "10:30:15 and 9:05:01 a.m.": (
        "ten hours thirty minutes and fifteen seconds and nine hours five minutes and one second ay m."
    ),
    "7½ or 3 1/2 cups": "seven and a half or three and a half cups.",
    "5², x³, 10⁶ and 2^8": ("five squared, x cubed, ten to the power of six and two to the power of eight."),
    "a word¹ and 12 m²": "a word and twelve square meters.",
    "E = mc², 10 km² or 4 cm³, he said²": (
        "E equals m c squared, ten square kilometers or four cubic centimeters, he said."
    ),
    "√2, 1e6 and 1.5E-3": (
        "the square root of two, one times ten to the power of six and "
        "one point five times ten to the power of minus three."
    ),
    "6.02e+23 and 1e6a-7e3b": (
        "six point zero two times ten to the power of twenty three and one e six ay seven e three b."
    ),
    "2.500,00 € or 1.234,56": (
        "two thousand five hundred euros or one thousand two hundred and thirty four point five six."
    ),
    "12,99€ or $3,50, not 12,990 €": (
        "twelve euros and ninety nine cents or three dollars and fifty cents, "
        "not twelve thousand nine hundred and ninety euros."
    ),
    "1.5E6, 2E-3, but room 1E6": (
        "one point five times ten to the power of six, two times ten to the power of minus three, but room one E six."
    ),
    "2.500 €, € 12.500, 19,99 EUR, but $2.499": (
        "two thousand five hundred euros, twelve thousand five hundred euros, "
        "nineteen point nine nine euros, but two point four nine nine dollars."
    ),
    "2026-11-24T14:30:00Z": (
        "November twenty fourth, twenty twenty six at fourteen hours thirty minutes and zero seconds U T C."
    ),
    "$-5 and -$5": "minus five dollars and minus five dollars.",
    "ISBN 978-3-16-148410-0": "I S B N nine seven eight, three, one six, one four eight four one zero, zero.",
    "x ≠ y, ~5 ± 2": "x is not equal to y, about five plus or minus two.",
    "¥500, ₹10.50, 50 € and 6£": "five hundred yen, ten rupees and fifty paise, fifty euros and six pounds.",
    "№ 5, § 3, 5 µm of α": "number five, section three, five micrometers of alpha.",
    "Jan 3rd, a Ph.D.": "January third, a P H D.",
    "the dog's bone isn't 'here'": "the dog's bone isn't here.",
}


@pytest.mark.parametrize(("text", "spoken"), [*SPOKEN.items(), *ENGLISH.items()])
def test_is_written_out_as_spoken(text: str, spoken: str) -> None:
    result = read(text)
    assert result.text == spoken
    assert result.dropped == ""


def test_lowercase_is_the_same_words() -> None:
    text = "Dr. Smith met Mr. T at the FBI."
    assert read(text, lowercase=True).text == read(text).text.lower()


def test_what_cannot_be_spoken_is_reported_once_in_order() -> None:
    result = read("Tokyo is 東京, 東 ☃ ok")
    assert result.text == "Tokyo is, ok."
    assert result.dropped == "東京☃"


@pytest.mark.parametrize("text", ["", "  \n", "?!", "...", "—", "☃"])
def test_nothing_speakable_gives_empty_text(text: str) -> None:
    assert read(text).text == ""


def test_any_input_gives_the_alphabet_alone() -> None:
    """So does what is read of it: a word beside signs may be an abbreviation once they are gone."""
    draw = random.Random(3)
    characters = string.printable + "éß東€£½’“—–…²⁹≠µλ€¥\u200b\u0301"
    for _ in range(2000):
        text = "".join(draw.choices(characters, k=draw.randint(1, 40)))
        once = read(text, lowercase=True).text
        for said in (once, read(once, lowercase=True).text):
            assert re.fullmatch(r"(?:[a-z][a-z.,?!' ]*[.?!])?", said), (text, said)


def test_long_numbers_and_long_texts_are_quick_and_whole() -> None:
    assert read("9" * 40).text.split().count("nine") == 39
    words = read("It cost $12.50 at 10:15, he said. " * 2000).text
    assert words.count("twelve dollars and fifty cents at ten fifteen") == 2000


def test_numbers_too_long_for_words_are_read_digit_by_digit() -> None:
    assert read("the 999,999,999,999,999th").text.startswith("the nine hundred and ninety nine trillion")
    assert read("the " + "1" * 16 + "th").text == "the" + " one" * 16 + "th."
    for text in ("1" * 5000 + "th", "1," * 5000 + "1st", "$" + "1" * 5000 + "m", "1" * 5000 + "0s", "1" * 5000 + "€"):
        assert "one" in re.findall(r"\w+", read(text).text)


@pytest.mark.parametrize(
    "run",
    [
        *(
            "(",
            ",",
            " ,",
            "1",
            "1,",
            "1,111,",
            "\n ",
            " \n",
            "1.",
            "- ",
            "²",
            "1/1 ",
            "1-",
            "1  - ",
            "+1",
            "1*1",
            "=1 - ",
        ),
        *(
            "a@",
            "a.",
            "*a",
            "_a",
            "[",
            "|",
            "http://",
            "#a",
            "$1-",
            "1:",
            "II ",
            "Part I, ",
            "Mon-",
            "St ",
            "'1",
            "1 May ",
        ),
    ],
)
def test_any_run_takes_time_in_proportion_to_its_length(run: str) -> None:
    """Eight times the length takes 8 times as long of a processor; by rules that try each place of a run against its
    end, 22 times and more."""

    numbers = itertools.count()  # a text is new each time: the last ones are kept

    def taken_s(length: int) -> float:
        text, began_s = run * (length // len(run)) + f"a {next(numbers)}", time.process_time()
        read(text)
        return time.process_time() - began_s

    def growth() -> float:
        return taken_s(10_000) / min(taken_s(1_250) for _ in range(3))

    # Again, where others had the processor's caches meanwhile.
    assert any(growth() < 15 for _ in range(3))


AMERICAN = {
    "2005, 1905 and 3,005 people": "two thousand five, nineteen oh five and three thousand five people.",
    "the 101st, 103rd and 124th": "the one hundred first, one hundred third and one hundred twenty fourth.",
    "110% of 1,234,567": "one hundred ten percent of one million two hundred thirty four thousand five hundred sixty "
    "seven.",
    "$100.50 for 105 3/4 lb": "one hundred dollars and fifty cents for one hundred five and three quarters pounds.",
    # Of these no "and" stands within a number that is written in figures.
    "100 3/4 cups, 100\N{VULGAR FRACTION ONE HALF}": "one hundred and three quarters cups, one hundred and a half.",
    "100 1/8 in": "one hundred and one eighth in.",
    "a hundred and one, 100 and 5": "a hundred and one, one hundred and five.",
    "2100 and 1,984": "two thousand one hundred and one thousand nine hundred eighty four.",
}


@pytest.mark.parametrize("text", AMERICAN)
def test_american_numbers_have_no_and(text: str) -> None:
    american, british = read(text, locale="en-US"), read(text, locale="en-GB")
    assert american.text == AMERICAN[text]
    assert british.text == read(text).text
    assert len(american.origins) == len(american.text)
    spans = [british.origins[at] for at, letter in enumerate(british.text) if letter != " "]
    assert {american.origins[at] for at, letter in enumerate(american.text) if letter != " "} == set(spans)
