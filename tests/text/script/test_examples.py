"""The examples of docs/markup.md are said as that page says."""

import re
from pathlib import Path

import pytest
from scripts import spoken

PAGE = (Path(__file__).parents[3] / "docs" / "markup.md").read_text(encoding="utf-8")
SAID = {
    'Hello.<break time="750ms"/>Nice.': "hello. |750| nice.",
    "Hello. [pause:1.5s] Nice.": "hello. |1500| nice.",
    '<speak>One<break strength="strong"/>two</speak>': "one. |1000| two.",
    '<speak><sub alias="World Wide Web">W3C</sub></speak>': "world wide web.",
    '<speak><say-as interpret-as="characters">ABC-123</say-as></speak>': "ay b c, one two three.",
    '<speak><say-as interpret-as="cardinal">1984</say-as></speak>': "one thousand nine hundred and eighty four.",
    '<speak><say-as interpret-as="ordinal">3rd</say-as></speak>': "third.",
    '<speak><say-as interpret-as="digits">4711</say-as></speak>': "four seven one one.",
    '<speak><say-as interpret-as="date" format="dmy">10-12-2016</say-as></speak>': "december tenth, twenty sixteen.",
    '<speak><say-as interpret-as="time">1:30pm</say-as></speak>': "one thirty p m.",
    '<speak><say-as interpret-as="telephone">(555) 010-2030</say-as></speak>': (
        "five five five, zero one zero, two zero three zero."
    ),
    '<speak><say-as interpret-as="fraction">3/8</say-as></speak>': "three eighths.",
    '<speak><say-as interpret-as="currency">$42.01</say-as></speak>': "forty two dollars and one cent.",
    '<speak><prosody rate="80%">slowly</prosody> now</speak>': "rate 0.8: slowly. now.",
    '<speak><prosody volume="-6dB">softly</prosody></speak>': "gain 0.501: softly.",
    "<speak><p>One</p><p>Two</p></speak>": "one. two.",
    '<speak><voice name="nora">Hi.</voice><voice name="hugh">Yes.</voice></speak>': "nora: hi. hugh: yes.",
    "[voice:nora] Hi [voice:hugh] Yes": "nora: hi. hugh: yes.",
    "<spell>Bob</spell>": "b o b.",
    '<speed ratio="1.5"/>fast <speed ratio="1"/>not': "rate 1.5: fast. not.",
    '<speak>One <mark name="m"/>two</speak>': "one two.",
    '<emotion value="angry"/>No': "no. w: emotion",
    "Wait [long pause] now": "wait. |1000| now.",
    r"\[pause:1s]": "pause, one second.",
}


def examples() -> dict[str, str]:
    """The texts in the table of examples, each with its markup."""
    table = PAGE.partition("## Examples")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)`(?: \(`(\w+)`\))?(?:,| \|)", table, re.MULTILINE)
    return {text: markup or "auto" for text, markup in rows}


def test_every_example_is_run() -> None:
    assert examples().keys() == SAID.keys()
    assert len(SAID) >= 20


@pytest.mark.parametrize(("text", "markup"), examples().items())
def test_an_example_says_what_the_page_says(text: str, markup: str) -> None:
    assert spoken(text, markup=markup, on_markup="plain") == SAID[text]
