"""Segments of any text: nothing spoken is lost, none is too long, and they end where a speaker would pause."""

import itertools
import random
import unicodedata

import pytest

from sonoro.text import read
from sonoro.text.splitting import (
    MIN_BOUND_S,
    SECONDS_PER_LETTER,
    Segment,
    SpokenText,
    cut_live,
    cut_sentence,
    frames_bound,
    join_text,
    joined,
    placed,
    split_text,
    spoken_length,
)

ALPHABETS = {
    "english": "aaabcdeI AB. Dr.,;: !?\"'()\n\t123 -— “”  ",
    "chinese": "你好世界天气很好。！？，、；“”「」 \u30003A.\n",
    "japanese": "こんにちは世界カタ。！？、「」 \u3000b\n",
    "auto": "aé한字か我हि\u0301\u0302.。!?,、…—\r\n\u2028\u3000\x85\u200d😀١A. ",
}


def split(text: str, language: str, max_letters: int) -> list[str]:
    return [part.text for part in split_text(SpokenText(text), language, max_letters)]


def spoken(text: str) -> str:
    """What a voice would make of it: letters and digits, in order."""
    return "".join(character for character in text if character.isalnum())


@pytest.mark.parametrize(
    "text", ["One of them. Another! And this?", "你好。世界！天气很好。", "Hello you. 你好。Hm? “Yes.” Well."]
)
def test_what_was_cut_is_joined_again(text: str) -> None:
    segments = split(text, "auto", 16)
    assert len(segments) > 1
    assert join_text(segments).replace(" ", "") == text.replace(" ", "")
    assert join_text(segments[:1]) == segments[0]


def test_sentences_in_latin_letters_are_joined_by_a_space() -> None:
    assert join_text(["One. Two.", "Three.", "你好。", "世界！", "Four."]) == "One. Two. Three. 你好。世界！Four."


@pytest.mark.parametrize("language", ALPHABETS)
@pytest.mark.parametrize("max_letters", [16, 40, 300])
def test_nothing_is_lost_and_nothing_is_too_long(language: str, max_letters: int) -> None:
    draw = random.Random(f"{language} {max_letters}")
    for _ in range(300):
        text = "".join(draw.choices(ALPHABETS[language], k=draw.randint(0, 400)))
        segments = split(text, language, max_letters)
        assert spoken("".join(segments)) == spoken(text)
        assert all(spoken_length(segment.strip()) <= max_letters for segment in segments), text
        assert all(spoken(segment) and segment == segment.rstrip() for segment in segments)
        assert all(segment == segment.lstrip() for segment in segments[1:])
        position = 0
        for segment in segments:
            position = text.index(segment, position) + len(segment)


@pytest.mark.parametrize(
    ("text", "language", "max_letters", "expected"),
    [
        ("Hello there.", "english", 100, ["Hello there."]),
        ("  Hello \n", "english", 100, ["  Hello"]),
        ("Hi. Yes. No.", "english", 100, ["Hi. Yes. No."]),
        (
            "Dr. Smith is 3.5 km away. He has left at 5 p.m. today. We wait.",
            "english",
            48,
            ["Dr. Smith is 3.5 km away.", "He has left at 5 p.m. today. We wait."],
        ),
        ("今天天气很好。我们去公园吧！好吗？", "chinese", 24, ["今天天气很好。", "我们去公园吧！", "好吗？"]),
        ("元気ですか？はい、元気です。", "japanese", 24, ["元気ですか？", "はい、元気です。"]),
        ("元気ですか？はい、元気です。", "auto", 24, ["元気ですか？", "はい、元気です。"]),
        # Too long for one segment: clauses, then words, then letters.
        ("One clause here, another clause there; the end", "english", 24,
         ["One clause here,", "another clause there;", "the end"]),
        ("one two three four five six", "english", 16, ["one two three", "four five six"]),
        ("a" * 40, "english", 16, ["a" * 16, "a" * 16, "a" * 8]),
        ("我们今天去公园散步，然后回家吃饭", "chinese", 36, ["我们今天去公园散步，", "然后回家吃饭"]),
        ("It costs 1,000,000.50 now", "english", 40, ["It costs", "1,000,000.50 now"]),
        # Nothing in it can be spoken.
        ("... !!", "english", 100, []),
        ("", "english", 100, []),
    ],
)  # fmt: skip
def test_splits(text: str, language: str, max_letters: int, expected: list[str]) -> None:
    assert split(text, language, max_letters) == expected


def test_wide_white_space_beside_a_period_is_no_trap() -> None:
    for space in "\u3000\u2028\u2009\x85\xa0":
        assert spoken("".join(split(f"C{space}.(a) B{space}. 你好。", "english", 100))) == "CaB你好"


def test_a_letter_is_not_parted_from_its_marks() -> None:
    for segment in split("e\u0301" * 60, "english", 17):
        assert unicodedata.combining(segment[0]) == 0


def test_iso_codes_and_unknown_languages_are_accepted() -> None:
    text = "Das ist z. B. ein Satz. Und noch einer."
    assert split(text, "de", 30) == split(text, "German", 30)
    assert split("One. Two.", "some_dialect", 100) == ["One. Two."]


def test_spoken_length_counts_what_takes_long() -> None:
    assert spoken_length("abc, d") == 6
    assert spoken_length("你好") == spoken_length("12") == spoken_length("BB") == 6
    assert spoken_length("안녕") == spoken_length("カナ") == 6


def test_frames_bound_is_generous_and_grows_with_the_text() -> None:
    frame_s = 0.08
    assert frames_bound("Hi.", frame_s) == MIN_BOUND_S / frame_s + 0.5
    sentence = "the birch canoe slid on the smooth planks. " * 5
    # Ordinary speech runs at 15 letters a second; the bound allows three times that.
    ordinary = len(sentence) / 15 / frame_s
    assert 2.9 * ordinary < frames_bound(sentence, frame_s) < 3.1 * ordinary
    # Mandarin runs at 4 to 5 syllables a second.
    chinese = "今天天气很好" * 10
    assert 2.3 * len(chinese) / 4.5 < frames_bound(chinese, frame_s) * frame_s < 3 * len(chinese) / 4.5
    assert frames_bound(sentence, 0.01) == pytest.approx(SECONDS_PER_LETTER * len(sentence) / 0.01, rel=0.02)


SENTENCES = ["The first one is here. ", "Another comes after it. ", "And a third!"]


def cuts_of(text: str) -> list[tuple[int, bool]]:
    """What `cut_live` allows as `text` comes letter by letter, its end included, until the segment ends."""
    cuts: list[tuple[int, bool]] = [(0, False)]
    for stop in range(1, len(text) + 1):
        cuts.append(cut_live(text[:stop], cuts[-1][0], "english", 66, is_last=stop == len(text)))
        if cuts[-1][1]:
            break
    return cuts[1:]


def test_a_live_text_that_fits_is_one_segment_and_allowed_letter_by_letter_to_its_middle() -> None:
    text = "".join(SENTENCES)
    cuts = cuts_of(text)
    assert cuts[-1] == (len(text), True)
    assert [given for given, _ in cuts[:47]] == list(range(1, 48))
    # Past the middle the next sentence is given only when it is known to fit.
    assert {given for given, _ in cuts[47:-1]} == {47}


def test_a_live_text_that_does_not_fit_ends_where_a_sentence_does() -> None:
    text = "".join(SENTENCES[:2]) + "And a third that is a little longer than the rest."
    cuts = cuts_of(text)
    assert cuts[-1] == (len("".join(SENTENCES[:2])), True)
    assert split(text, "english", 66)[0] == "".join(SENTENCES[:2]).strip()
    assert cut_live(text, 0, "english", 66, is_last=True) == cuts[-1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one two three four, five six seven eight nine ten eleven twelve, and more", "one two three four, "),
        ("one two three four five six seven eight nine ten eleven twelve and more of it", None),
        ("x" * 80, "x" * 60),
        ("字" * 30, "字" * 20),
    ],
)
def test_a_live_sentence_that_is_too_long_is_cut_after_a_clause_or_a_word(text: str, expected: str | None) -> None:
    given, is_cut = cut_live(text, 0, "english", 60, is_last=False)
    assert is_cut
    assert spoken_length(text[:given].strip()) <= 60
    if expected is None:
        assert text[given - 1] == " "
        assert given > 50
    else:
        assert text[:given] == expected


@pytest.mark.parametrize("seed", range(20))
def test_what_a_live_text_was_given_is_never_taken_back(seed: int) -> None:
    draw = random.Random(seed)
    text = "".join(draw.choice(["a", "bc ", "字", ". ", "! ", "12", ", ", "\n", "Word"]) for _ in range(150))
    cuts = cuts_of(text)
    assert cuts[-1][1]
    for (before, _), (after, _) in itertools.pairwise(cuts):
        assert before <= after
    assert spoken_length(text[: cuts[-1][0]].strip()) <= 66


def test_a_live_sentence_is_complete_once_another_has_begun() -> None:
    assert cut_sentence("The first one is here. ", "english", 60, is_last=False) == 0
    assert cut_sentence("The first one is here. A", "english", 60, is_last=False) == len("The first one is here. ")
    assert cut_sentence("The first one", "english", 60, is_last=True) == len("The first one")
    assert 50 < cut_sentence("word " * 30, "english", 60, is_last=False) <= 60


def test_segments_are_placed_where_they_were_written() -> None:
    def ends(text: str, *starts: str) -> list[int]:
        normal = read(text)
        cuts = [*map(normal.text.index, starts), len(normal.text)]
        parts = [normal.part(start, end).stripped() for start, end in itertools.pairwise(cuts)]
        segments = placed(parts, 0, len(text))
        assert [segment.start for segment in segments] == [0, *(segment.end for segment in segments[:-1])]
        return [segment.end for segment in segments]

    text = "".join(SENTENCES)
    parts = split_text(SpokenText(text), "english", 32)
    assert [segment.end for segment in placed(parts, 0, len(text))] == [22, 46, len(text)]
    assert ends("It has 5 $. It is.", "It has", "It is") == [11, 18]
    assert ends("STOP. And stop. ", "STOP", "And") == [5, 16]
    assert placed([], 0, 3) == []


def test_parts_of_a_text_know_their_origins_when_joined_and_moved() -> None:
    text = SpokenText("One  two three.")
    words = joined([text.part(0, 3), text.part(5, 8), text.part(8, 15).stripped()], " ").moved(10)
    assert words.text == "One two three."
    assert list(words.origins[2:9]) == [(12, 13), (13, 13), (15, 16), (16, 17), (17, 18), (18, 18), (19, 20)]


@pytest.mark.parametrize(
    ("text", "halves"),
    [
        (
            "One is short. Two is quite a bit longer than that. Three.",
            ["One is short.", "Two is quite a bit longer than that. Three."],
        ),
        ("Only one sentence, however long it may be.", None),
        ("A sentence. ...", None),
        ("今天天气很好。我们去公园。", ["今天天气很好。", "我们去公园。"]),
    ],
)
def test_a_segment_is_halved_where_a_sentence_ends(text: str, halves: list[str] | None) -> None:
    segment = Segment(SpokenText(text).moved(5), 5, 5 + len(text))
    rest = segment.halve("auto")
    if halves is None:
        assert rest is None
        assert (segment.text, segment.start, segment.end) == (text, 5, 5 + len(text))
        return
    assert [segment.text, rest.text] == halves
    assert (segment.start, segment.end, rest.end) == (5, rest.start, 5 + len(text))
    assert segment.end == pytest.approx(5 + text.index(halves[1]), abs=1)
