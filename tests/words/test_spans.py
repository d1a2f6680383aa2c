"""Words as written, and the tokens that speak them, whatever is spelled out in between."""

import itertools
import json
import re
from collections import ChainMap
from pathlib import Path

import pytest

from sonoro.text import read
from sonoro.words.spans import spoken_words, word_spans

SPOKEN = ChainMap(*json.loads((Path(__file__).parents[1] / "assets" / "english.json").read_text("utf-8")).values())


def words_of(text: str) -> list[str]:
    return [text[start:end] for start, end in word_spans(text)]


def heard(text: str) -> dict[str, str]:
    """What is said for each word of English `text`, by a token for each word and mark."""
    made = read(text, lowercase=True)
    spoken, origins = made.text, made.origins
    tokens = [found.span() for found in re.finditer(r" ?\w+| ?[^\w\s]", spoken)]
    made = spoken_words(word_spans(text), spoken, origins, tokens)
    assert all(before.last <= after.first for before, after in itertools.pairwise(made))
    return {
        text[word.start : word.end]: spoken[tokens[int(word.first)][0] : tokens[int(word.last) - 1][1]].strip()
        for word in made
    }


@pytest.mark.parametrize("text", SPOKEN)
def test_a_traced_text_is_the_normalised_one_and_every_character_has_its_origin(text: str) -> None:
    made = read(text)
    spoken, origins = made.text, made.origins
    assert spoken == read(text).text
    assert len(origins) == len(spoken)
    assert all(0 <= start <= end <= len(text) for start, end in origins)


def test_a_respelled_word_comes_from_the_written_one() -> None:
    text, respellings = "A sauté pan, ballet!", {"saute": "sawtay", "ballet": "ballay"}
    made = read(text, respellings=respellings)
    spoken, origins = made.text, made.origins
    assert spoken == read(text, respellings=respellings).text == "A sawtay pan, ballay!"
    for word, respelled in (("sauté", "sawtay"), ("ballet", "ballay")):
        at, start = spoken.index(respelled), text.index(word)
        assert set(origins[at : at + len(respelled)]) == {(start, start + len(word))}
    assert text[slice(*origins[spoken.index("pan")])] == "pan"


def test_a_letter_is_respelled_where_it_begins_an_initialism() -> None:
    text, respellings = "It's the FBI's US office, F. Smith's SUV.", {"f": "ef", "s": "ess"}
    made = read(text, respellings=respellings)
    spoken, origins = made.text, made.origins
    assert spoken == "It's the ef B I's U S office, ef Smith's ess U V."
    at = spoken.index("ess")
    assert [text[slice(*origin)] for origin in origins[at : at + 3]] == ["SUV"] * 3


@pytest.mark.parametrize(
    "text", ["the 747's wing", "item(s)", "girl 's", "$5's", "U.S.'s", "the f word", "IT'S", "THE 747'S"]
)
def test_no_other_letter_is_respelled(text: str) -> None:
    assert read(text, respellings={"f": "ef", "s": "ess"}) == read(text)


def test_words_stand_between_spaces_and_dashes_without_their_marks() -> None:
    assert words_of("“Well,” he said—it's 5%... (a+b)!") == ["Well", "he", "said", "it's", "5%", "a+b"]
    assert words_of("… ! --") == []


def test_scripts_without_spaces_go_by_character_with_its_marks() -> None:
    assert words_of("你好，ok。") == ["你", "好", "ok"]
    assert words_of("か\u3099です") == ["か\u3099", "で", "す"]


def test_what_is_spelled_out_belongs_to_the_word_it_was_written_as() -> None:
    assert heard("Dr. Smith paid $5 million on July 4, 1999, i.e. at 9:30 p.m.!") == {
        **{"Dr": "doctor", "Smith": "smith", "paid": "paid", "$5": "five", "million": "million dollars", "on": "on"},
        **{"July": "july", "4": "fourth", "1999": "nineteen ninety nine", "i.e": "that is", "at": "at"},
        **{"9:30": "nine thirty", "p.m": "p m"},
    }
    assert heard("10 km/h & 5°C, see www.bbc.com/b now") == {
        **{"10": "ten", "km/h": "kilometers per hour", "&": "and", "5°C": "five degrees celsius", "see": "see"},
        **{"www.bbc.com/b": "b b c dot com slash b", "now": "now"},
    }


def test_every_word_with_a_letter_is_heard() -> None:
    for text in SPOKEN:
        missing = {text[start:end] for start, end in word_spans(text)} - heard(text).keys()
        # What is not read at all: marks of Markdown, and names of what they mark.
        assert not any(word.isalpha() and word.isascii() and not text.startswith("```") for word in missing), text


def test_characters_of_one_token_share_it() -> None:
    text = "世界好"
    words = spoken_words(word_spans(text), text, [(at, at + 1) for at in range(3)], [(0, 2), (2, 3)])
    assert [(word.first, word.last) for word in words] == [(0.0, 0.5), (0.5, 1.0), (1.0, 2.0)]


def test_a_character_of_several_tokens_is_all_of_them() -> None:
    (word,) = spoken_words([(0, 1)], "龘", [(0, 1)], [(0, 1), (0, 1), (0, 1)])
    assert (word.first, word.last) == (0.0, 3.0)
