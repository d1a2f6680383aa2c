"""What `benchmarks/attempts.py` holds to be wrong with a reading."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

import attempts
from builtin_voice.judges import Judges
from builtin_voice.mixed import mixed_texts
from builtin_voice.moonshine import Moonshine
from words import Aligner


@dataclass
class Hearer:
    """Hears the same whatever is said."""

    words: str

    def hear(self, audio: np.ndarray) -> str:
        return self.words


@dataclass
class Told:
    """Agrees with what it is asked about, or not."""

    agrees: bool

    def ending(self, audio: bytes, text: str) -> tuple[int, bool]:
        return 1, self.agrees

    def is_longer(self, audio: bytes, text: str, longer: list[str]) -> bool:
        # Which of the two is the reading's own depends on whether words are missing or added.
        is_heard_longer = len(longer) > len(text.split())
        return self.agrees == (is_heard_longer and text == self.text)

    text: str = ""


@dataclass
class Words:
    """Finds each word where it is told."""

    found: list[tuple[float, float]] | None

    def align(self, samples: np.ndarray, rate: int, words: list[str]) -> list[tuple[float, float]] | None:
        return self.found


def judged(text: str, heard: str, *, agrees: bool = True, **changed: Any) -> list[str]:
    """What is wrong with a reading of `text` that Moonshine hears so."""
    found = changed.pop("found", [(0.0, 0.4), (0.4, 0.9)])
    samples = changed.pop("samples", np.full(24000, 0.1, np.float32))
    judges = Judges(cast(Moonshine, Hearer(heard)), cast(Any, None), Told(agrees, text))
    row = attempts.hear(judges, cast(Aligner, Words(found)), text, samples, 16000)
    return attempts.wrong({"reason": "stop", "duration_s": 3.0} | row | changed, 3.0)


TEXT = "the birch canoe slid on the smooth planks"


@pytest.mark.parametrize(
    ("heard", "wrong"),
    [
        (TEXT, []),
        ("the birch canoe lid on the smooth planks", []),
        ("the birch slid on the smooth planks", []),
        ("the birch slid the smooth planks", []),
        ("the birch the smooth planks", ["left_out"]),
        ("the birch canoe slid on the", ["cut", "left_out"]),
        ("the birch canoe the birch canoe slid on the smooth planks", ["added", "invented"]),
        ("the birch canoe slid on the smooth planks and then he ran", ["added", "invented"]),
    ],
)
def test_runs_of_words_count_where_both_agree(heard: str, wrong: list[str]) -> None:
    assert judged(TEXT, heard) == wrong
    assert judged(TEXT, heard, agrees=False) == []


@pytest.mark.parametrize("heard", ["The ceo paid with a Usb key.", "The C.E.O. paid with a USB key."])
def test_letters_are_the_same_however_they_are_written(heard: str) -> None:
    assert judged("The CEO paid with a USB key.", heard) == []


def test_letters_that_were_left_out_are_missed() -> None:
    assert judged("The CEO paid with a USB key.", "The ceo paid with a key.") == ["left_out"]
    assert attempts.spelled_as(["the", "c", "i", "ay", "told", "us"], ["the", "cia", "told", "us"]) == [
        *("the", "c", "i", "ay", "told", "us"),
    ]


def test_a_contraction_is_one_word() -> None:
    """Of "hostess", heard "Host isn't.", no word is repeated, and none invented."""
    assert judged("the hostess slid", "The host isn't slid") == []
    assert judged("the hostess slid", "The host is a slid") == ["added"]
    assert judged("it isn't the host", "It the host") == []


def test_numbers_are_the_same_however_they_are_grouped() -> None:
    assert judged("98, 7808, 1815, 59.", "98,7808, 1815, 59.") == []
    assert judged("98, 7808, 1815, 59.", "98, 1815, 59.") == ["left_out"]
    assert judged("Call 555-1560 at 1:08.", "Cool 5551560 at 108.") == []
    assert judged("Call 555-1774 at 3:30.", "Call 555-174 at 3:30.") == []
    assert judged("Call 555-1774 at 3:30.", "Call at 3:30.") == ["left_out"]
    assert judged("Call 555-1774 at 3:30.", "Call 555-1774, call 555-1774 at 3:30.") == ["added", "invented"]
    assert judged("Box 555 in 1774.", "Box 5551774.") == ["added"]
    assert attempts.grouped_as("It cost $1.5, or 20.", "It cost $15, or 20") == "It cost $15, or 20"


def test_silence_after_a_word_is_not_the_words() -> None:
    samples = np.full(24000, 0.1, np.float32)
    samples[int(0.9 * 16000) :] = 1e-4
    assert judged(TEXT, TEXT, found=[(0.0, 0.4), (0.4, 1.45)], samples=samples) == []
    assert judged(TEXT, TEXT, found=[(0.0, 0.4), (0.4, 1.45)]) == ["stuck"]
    assert judged(TEXT, TEXT, found=[(0.0, 0.2), (0.2, 1.45)], samples=samples[: int(1.45 * 16000)]) == []
    samples[int(0.3 * 16000) :] = 1e-4
    assert judged(TEXT, TEXT, found=[(0.0, 0.2), (0.2, 1.45)], samples=samples) == ["stuck"]


def test_nothing_is_added_to_one_word_without_time_for_it() -> None:
    row = {"missing": 0, "extra": 3, "is_missing": False, "is_added": True, "longest_s": 0.4, "words": 1}
    row |= {"reason": "stop", "duration_s": 1.0, "sound_s": 0.8}
    teacher = row | {"extra": 0, "is_added": False, "sound_s": 0.7}
    assert attempts.wrong(row, 1.0) == ["added", "invented"]
    assert attempts.wrong(row, 1.0, teacher) == []
    assert attempts.wrong(row | {"sound_s": 0.95}, 1.0, teacher) == ["added", "invented"]
    assert attempts.wrong(row | {"words": 2}, 1.0, teacher) == ["added", "invented"]


def test_what_lasts_too_long_is_wrong() -> None:
    assert judged(TEXT, TEXT, found=[(0.0, 1.2), (1.2, 1.5)]) == ["stuck"]
    assert judged(TEXT, TEXT, found=[(0.0, 0.2), (1.3, 1.4)]) == ["stuck"]
    assert judged(TEXT, TEXT, found=[(0.0, 0.2), (0.2, 0.4)]) == ["stuck"]
    assert judged(TEXT, TEXT, found=None) == []
    assert judged(TEXT, TEXT, duration_s=5.0) == ["runaway"]
    assert judged(TEXT, TEXT, reason="length") == ["runaway"]
    assert judged(TEXT, TEXT, duration_s=1.9) == ["cut"]


def test_what_is_heard_of_the_teacher_too_is_the_judges_mistake() -> None:
    clean = {"missing": 0, "extra": 0, "is_missing": False, "is_added": False, "longest_s": 0.4, "words": 8}
    row = clean | {"reason": "stop", "duration_s": 3.0, "is_added": True}
    assert attempts.wrong(row, 3.0) == attempts.wrong(row, 3.0, clean) == ["added"]
    assert attempts.wrong(row, 3.0, clean | {"is_added": True}) == []
    assert attempts.wrong(row | {"missing": 1, "duration_s": 9.0}, 3.0, clean | {"is_added": True}) == [
        "cut",
        "runaway",
    ]
    rows = [row | {"layout": "text_first", "text": "a", "voice": "nora", "faults": [], "heard": "a b c"}]
    rows[0] |= {"missing_runs": [], "added_runs": ["b c"]}
    teacher = clean | {"layout": "teacher", "text": "a", "voice": "nora", "heard": "a b c", "is_added": True}
    assert attempts.figures("text_first", rows, lambda text, voice: 3.0)["wrong"] == 1
    found = attempts.figures("text_first", [*rows, teacher], lambda text, voice: 3.0)
    assert (found["texts"], found["wrong"], len(found["as_the_teacher"])) == (1, 0, 1)


def test_lengths_are_the_teachers() -> None:
    durations_s = json.loads(attempts.TEACHER.read_text("utf-8"))["mixed"]["durations_s"]
    expected_s = attempts.lengths(durations_s)
    texts = mixed_texts()
    shares = [
        duration_s / expected_s(text, attempts.VOICES[number % 4])
        for number, (text, duration_s) in enumerate(zip(texts, durations_s, strict=True))
    ]
    assert 0.98 < float(np.median(shares)) < 1.02
    assert np.mean([0.75 < share < 1.5 for share in shares]) > 0.98
    assert not set(texts) >= set(mixed_texts(6))
