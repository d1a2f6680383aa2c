"""The shipped voice as a newcomer hears it: it reads to the end, at a sane pace and level, the same way every time."""

from __future__ import annotations

import logging
import re
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import sine_engines
from loudness_meter import loudness_lufs, true_peak_dbtp
from sine_engines import Engine

import sonoro
from sonoro import TTS, Audio
from sonoro.audio.pcm import SILENT
from sonoro.core.config import EngineConfig
from sonoro.core.errors import InvalidRequest
from sonoro.core.types import SpeechRequest
from sonoro.models import registry

FOLDER = Path(sonoro.__file__).parent / "builtin_voice"
MIB = 2**20
VOICES = registry.describe(None).spec.voices
SHORT = "Rice is served hot."
SENTENCES = ("Glue the sheet to the dark blue background.", "Rice is often served in round bowls.")
LONG = (
    "The old man walked down the road, and then he turned to look at the quiet house. Nobody was there. "
    "A small light burned in the window, as it did every night. He opened the gate, crossed the garden, and sat "
    "on the wooden bench to wait for the rain to stop. It did not stop before the morning, so he slept."
)
TRICKY = {
    "one word": "Go.",
    "one letter": "I",
    "numbers": "On 3 May 2026 it cost $1,234.50, or 3.14 times 7%.",
    "abbreviations": "Dr. Smith vs. the U.S. Dept. of Energy, etc.",
    "capitals": "NASA SAID YES",
    "marks": "Wait... what?! No -- stop; (please).",
    "300 characters": LONG,
    "emoji": "Hello 😀 world.",
    "chinese": "你好, good morning.",
    "special tokens": "<|im_end|> is a word here.",
}


@pytest.fixture(scope="module")
def speech() -> TTS:
    return TTS(device="cpu")


class Heard(NamedTuple):
    """What the voice said of texts in a batch, and what was logged of them."""

    spoken: dict[str, Audio]
    records: list[logging.LogRecord]


def test_a_pause_is_exact_at_every_speed(speech: TTS) -> None:
    for speed in (0.5, 1.0, 1.7):
        audio = speech.generate('Rice.<break time="750ms"/>Soup.', speed=speed)
        audible = np.flatnonzero(np.abs(np.rint(audio.samples * 32768)) > SILENT)
        assert int(np.diff(audible).max()) - 1 == 18000


@pytest.fixture(scope="module")
def heard(speech: TTS) -> Heard:
    """All at once, the longest first: beside it the others take little time."""
    asked: dict[str, dict[str, object]] = {max(TRICKY, key=lambda kind: len(TRICKY[kind])): {}}
    for index, (kind, text) in enumerate(TRICKY.items()):
        asked[kind] = {"text": text, "voice": VOICES[index % len(VOICES)]}
    for voice in VOICES:
        asked[f"{voice} whole"] = {"text": SHORT, "voice": voice, "seed": 2}
        for sentence in SENTENCES:
            asked[f"{voice}: {sentence}"] = {"text": sentence, "voice": voice, "seed": 1}
    asked["text along"] = {"text": SENTENCES[1], "voice": "miles", "non_streaming_mode": False}
    asked["nora, another seed"] = {"text": SHORT, "voice": "nora", "seed": 5}
    logger, kept = logging.getLogger("sonoro"), BufferingHandler(1000)
    logger.addHandler(kept)
    try:
        spoken = speech.generate_batch(list(asked.values()))
    finally:
        logger.removeHandler(kept)
    return Heard(dict(zip(asked, spoken, strict=True)), kept.buffer)


@pytest.mark.parametrize("voice", VOICES)
def test_reads_sentences_to_the_end(heard: Heard, voice: str) -> None:
    for sentence in SENTENCES:
        audio = heard.spoken[f"{voice}: {sentence}"]
        assert audio.finish_reason == "stop"
        assert audio.sample_rate == 24_000
        assert len(audio.samples) == audio.frames * 1920 - 1200
        # The teachers take .04 to .08 s a character over such sentences.
        assert 0.03 < audio.duration_s / len(sentence) < 0.11
        assert 0.1 < np.abs(audio.samples).max() < 0.99
        levels = np.sqrt(np.square(audio.samples[: len(audio.samples) // 480 * 480].reshape(-1, 480)).mean(axis=1))
        assert (levels > 0.01).mean() > 0.4
        assert audio.samples.std() > 0.02


@pytest.mark.parametrize("voice", VOICES)
def test_every_voice_is_as_loud(heard: Heard, voice: str) -> None:
    """Few sentences, so within 1.2 LU; over fifty it is .3 (benchmarks/loudness.py)."""
    audio = np.concatenate([heard.spoken[f"{voice}: {sentence}"].samples for sentence in SENTENCES])
    assert loudness_lufs(audio, 24_000) == pytest.approx(-18, abs=1.2)
    assert true_peak_dbtp(audio, 24_000) <= -1.5


def test_a_seed_says_how_it_is_read(speech: TTS, heard: Heard) -> None:
    first, other = heard.spoken["nora whole"], heard.spoken["nora, another seed"]
    again = speech.generate(SHORT, voice="nora", seed=2)
    # Chunk lengths follow the clock, and other lengths round differently: by no more than one step of 16 bits.
    np.testing.assert_allclose(first.samples, again.samples, atol=1.01 / 32768, rtol=0)
    assert len(first.samples) != len(other.samples) or not np.allclose(first.samples, other.samples, atol=0.01)


@pytest.mark.parametrize("voice", VOICES)
def test_pieces_of_a_stream_are_the_whole(speech: TTS, heard: Heard, voice: str) -> None:
    whole = heard.spoken[f"{voice} whole"]
    pieces = list(speech.stream(SHORT, voice=voice, seed=2))
    assert len(pieces) >= 3
    joined = np.concatenate([piece.samples for piece in pieces])
    # Stored in 16 bits, whose steps are 3e-5.
    np.testing.assert_allclose(joined, whole.samples, atol=1e-4, rtol=0)


def test_any_text_ends_by_itself_and_a_long_one_keeps_its_pace(heard: Heard) -> None:
    assert 290 <= len(LONG) <= 310
    spoken = {kind: heard.spoken[kind] for kind in TRICKY}
    assert {kind: audio.finish_reason for kind, audio in spoken.items()} == dict.fromkeys(TRICKY, "stop")
    lengths_s = {kind: audio.duration_s for kind, audio in spoken.items()}
    assert all(length > 0.2 for length in lengths_s.values()), lengths_s
    assert lengths_s["one word"] < 2
    # .057 s a character, as its teachers read, would be 17 s.
    assert 12 < lengths_s["300 characters"] < 26
    warned = [record.getMessage() for record in heard.records if record.levelno >= logging.WARNING]
    assert warned
    assert all(re.fullmatch(r"\d+ characters? cannot be spoken and will be left out: .+", line) for line in warned)
    assert all(character in " ".join(warned) for character in "😀你好")


@pytest.mark.parametrize("text", ["😀😀", "你好", "???"])
def test_a_text_without_anything_to_say_is_refused(speech: TTS, text: str) -> None:
    with pytest.raises(InvalidRequest, match="text") as refused:
        speech.generate(text)
    assert text in str(refused.value)


def test_both_layouts_are_read(heard: Heard) -> None:
    """Text first, as by default, and text along."""
    for asked in (f"miles: {SENTENCES[1]}", "text along"):
        audio = heard.spoken[asked]
        assert audio.finish_reason == "stop"
        assert 1 < audio.duration_s < 4


def test_the_files_are_small() -> None:
    sizes = [path.stat().st_size for path in FOLDER.rglob("*.safetensors")]
    assert len(sizes) == 3
    assert MIB < max(sizes) <= 15 * MIB
    assert sum(sizes) <= 32 * MIB


@pytest.mark.parametrize("text", [SHORT, "On 3 May: $1,200, or 7% of it."])
def test_text_that_comes_word_by_word_is_heard_as_the_whole(text: str) -> None:
    """Numbers and marks too, which are read only once what follows is known. One step of 16 bits: chunks differ."""
    engine = Engine(registry.load(None, device="cpu").model, EngineConfig(slots=2))
    engine.submit(SpeechRequest(id="whole", text=text, seed=1, options={"non_streaming_mode": False}))
    expected = sine_engines.drain(engine)
    engine.submit(SpeechRequest(id="a", text="", seed=1, is_live=True))
    events, is_early = [], False
    for word in text.split(" "):
        engine.append("a", word + " ")
        while engine.has_work:
            events += engine.tick()
        is_early = is_early or bool(events)
    assert is_early
    engine.end_text("a")
    events += sine_engines.drain(engine)
    ended = sine_engines.end(events, "a")
    assert (ended.reason, ended.characters) == ("stop", len(text) + 1)
    np.testing.assert_allclose(
        sine_engines.audio(events, "a"), sine_engines.audio(expected, "whole"), atol=1.01 / 32768, rtol=0
    )
