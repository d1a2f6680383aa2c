"""Times of the characters of a text, between the words of a model, and the last word that was heard."""

import pytest

from sonoro.core.events import Word
from sonoro.server.timeline import character_times, last_played

TEXT = "Well, go on."
WORDS = (
    Word(text="Well", start_s=0.1, end_s=0.5, start=0, end=4),
    Word(text="go", start_s=0.9, end_s=1.1, start=6, end=8),
    Word(text="on", start_s=1.1, end_s=1.5, start=9, end=11),
)


def test_every_character_has_a_time_and_times_never_fall() -> None:
    characters, starts_s, ends_s = map(list, zip(*character_times(TEXT, WORDS, end_s=2.0), strict=True))
    assert "".join(characters) == TEXT
    assert ends_s == pytest.approx([*starts_s[1:], 2.0])
    assert starts_s == sorted(starts_s)
    assert starts_s[0] == pytest.approx(0.1)
    assert (starts_s[4], ends_s[5]) == pytest.approx((0.5, 0.9))  # the comma and the space fill the pause
    assert starts_s[6:8] == pytest.approx([0.9, 1.0])


def test_characters_told_of_bit_by_bit_are_those_told_of_at_once() -> None:
    whole = character_times(TEXT, WORDS, end_s=2.0)
    parts, start, start_s = [], 0, 0.0
    for number, word in enumerate(WORDS):
        end_s = 2.0 if number == len(WORDS) - 1 else None
        parts.extend(character_times(TEXT, [word], start=start, start_s=start_s, end_s=end_s))
        start, start_s = word.end, word.end_s
    assert parts == whole


def test_without_words_all_of_a_text_takes_all_of_the_time() -> None:
    assert character_times("ab", [], end_s=1.0) == [("a", 0.0, 0.5), ("b", 0.5, 1.0)]
    assert character_times("ab", []) == []


def test_the_last_word_heard_is_the_last_that_has_begun() -> None:
    assert last_played(WORDS, 0.05) is None
    assert last_played(WORDS, 0.8) is WORDS[0]
    assert last_played(WORDS, 9.0) is WORDS[2]
