"""Captions are valid, in order and complete, whatever the text."""

import json
import re

import pytest

from sonoro.core.events import Word
from sonoro.words.captions import MAX_LINE, MAX_LINES, cues, srt, vtt, words_json
from sonoro.words.spans import word_spans

CHAPTER = (
    "“Well,” said Dr. Smith—who had come in late—“I <b>never</b> saw $5 & 20% of it!” It was true. "
    "Nobody, as far as anybody knew, had ever walked all the way from the old harbour to the northern lighthouse; "
    "why should they? Some-extraordinarily-long-word-that-goes-on-and-on-beyond-what-a-line-can-hold stood there. "
) * 20
TEXTS = [CHAPTER, "Hi", "「你好，世界。」今天天气很好！" * 9, "(a) b... c"]


def spoken(text: str, each_s: float = 0.31) -> list[Word]:
    return [
        Word(text=text[start:end], start_s=number * each_s, end_s=number * each_s + 0.25, start=start, end=end)
        for number, (start, end) in enumerate(word_spans(text))
    ]


def seconds(clock: str) -> float:
    hours, minutes, rest = clock.replace(",", ".").split(":")
    return int(hours) * 3600 + int(minutes) * 60 + float(rest)


@pytest.mark.parametrize("text", TEXTS)
def test_captions_hold_all_of_the_text_in_order(text: str) -> None:
    made = cues(text, spoken(text))
    said = "".join("".join(cue.lines) for cue in made)
    assert re.sub(r"\s", "", said) == re.sub(r"\s", "", text)
    times = [at_s for cue in made for at_s in (cue.start_s, cue.end_s)]
    assert times == sorted(times)
    assert all(len(cue.lines) <= MAX_LINES or max(map(len, cue.lines)) == MAX_LINE for cue in made)
    assert all(len(line) <= MAX_LINE for cue in made for line in cue.lines)
    assert all(cue.end_s - cue.start_s <= 8 for cue in made)


@pytest.mark.parametrize("text", TEXTS)
def test_files_are_valid(text: str) -> None:
    words = spoken(text)
    clock = r"\d\d:[0-5]\d:[0-5]\d"
    blocks = srt(text, words).removesuffix("\n\n").split("\n\n")
    for number, block in enumerate(blocks, start=1):
        first, times, *lines = block.split("\n")
        assert first == str(number)
        assert re.fullmatch(rf"{clock},\d{{3}} --> {clock},\d{{3}}", times)
        assert all(lines)
    header, *blocks = vtt(text, words).removesuffix("\n\n").split("\n\n")
    assert header == "WEBVTT"
    starts = []
    for block in blocks:
        times, *lines = block.split("\n")
        assert re.fullmatch(rf"{clock}\.\d{{3}} --> {clock}\.\d{{3}}", times)
        assert not any("<" in line or "-->" in line for line in lines)
        starts.append(seconds(times.split(" --> ")[0]))
    assert starts == sorted(starts)
    assert len(json.loads(words_json(words))) == len(words)


def test_a_caption_ends_with_its_sentence_and_times_pass_an_hour() -> None:
    words = [Word(text="Yes", start_s=3725.5, end_s=3725.6, start=0, end=3)]
    assert srt("Yes.", words) == "1\n01:02:05,500 --> 01:02:06,000\nYes.\n\n"
    assert [cue.lines for cue in cues("Go. Come here, now! Why", spoken("Go. Come here, now! Why"))] == [
        ["Go."],
        ["Come here, now!"],
        ["Why"],
    ]
    assert (srt("", []), vtt("", []), words_json([])) == ("", "WEBVTT\n\n", "[]\n")


def test_a_sentence_that_fits_one_caption_is_not_parted_after_a_clause() -> None:
    text = "Your order number is seven, four, four, one, nine. Thank you."
    made = cues(text, spoken(text))
    assert [" ".join(cue.lines) for cue in made] == ["Your order number is seven, four, four, one, nine.", "Thank you."]


@pytest.mark.parametrize(
    ("text", "read", "shown"),
    [
        ("See the [docs](http://x.com/a) now.", "See the docs now", "See the docs now."),
        ("Here is [the guide of it](http://x.com 'a title').", "Here is the guide of it", "Here is the guide of it."),
        ("**Bold**, *stuff* and `code`: ~~gone~~.", "Bold stuff and code gone", "Bold, stuff and code: gone."),
        ("# Title\nHello there <b>you</b>!", "Title Hello there you", "Title Hello there you!"),
        ("![a cat](cat.png) (so [sic] it is)", "a cat so sic it is", "a cat (so [sic] it is)"),
        ("What nobody reads 你好, and [1].", "What nobody reads and 1", "What nobody reads, and [1]."),
    ],
)
def test_captions_show_what_is_read(text: str, read: str, shown: str) -> None:
    at, unread = 0, set(range(len(text)))
    for word in read.split():
        at = text.index(word, at)
        unread -= set(range(at, at + len(word)))
        at += len(word)
    words = [
        Word(text=text[start:end], start_s=number, end_s=number + 0.5, start=start, end=end)
        for number, (start, end) in enumerate(word_spans(text, unread))
    ]
    assert [word.text for word in words] == read.split()
    assert " ".join(line for cue in cues(text, words) for line in cue.lines) == shown
