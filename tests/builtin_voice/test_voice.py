"""The shipped voice as a newcomer hears it: it reads to the end, at a sane pace and level, the same way every time."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest

import listening
import sonoro
from resolving import Engine
from sonoro import TTS, Audio
from sonoro.core.config import EngineConfig
from sonoro.core.errors import InvalidRequest
from sonoro.core.types import SpeechRequest
from sonoro.models import registry

FOLDER = Path(sonoro.__file__).parent / "voices" / "builtin"
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


@pytest.fixture(scope="module")
def sentences(speech: TTS) -> dict[str, list[Audio]]:
    """By voice, how it reads `SENTENCES`: all of them at once, as a batch takes little longer than one."""
    items = [{"text": sentence, "voice": voice, "seed": 1} for voice in VOICES for sentence in SENTENCES]
    read = iter(speech.generate_batch(items))
    return {voice: [next(read) for _ in SENTENCES] for voice in VOICES}


@pytest.mark.parametrize("voice", VOICES)
def test_reads_sentences_to_the_end(sentences: dict[str, list[Audio]], voice: str) -> None:
    for audio, sentence in zip(sentences[voice], SENTENCES, strict=True):
        assert audio.finish_reason == "stop"
        assert audio.sample_rate == 24_000
        assert len(audio.samples) == audio.frames * 1920 - 1200
        # The teachers take .04 to .08 s a character over such sentences.
        assert 0.03 < audio.duration_s / len(sentence) < 0.11
        assert 0.1 < np.abs(audio.samples).max() < 0.99
        levels = np.sqrt(np.square(audio.samples[: len(audio.samples) // 480 * 480].reshape(-1, 480)).mean(axis=1))
        assert (levels > 0.01).mean() > 0.4
        assert audio.samples.std() > 0.02


def test_a_seed_says_how_it_is_read(speech: TTS) -> None:
    first, again, other = (speech.generate(SHORT, voice="nora", seed=seed) for seed in (4, 4, 5))
    # Chunk lengths follow the clock, and other lengths round differently: by no more than one step of 16 bits.
    np.testing.assert_allclose(first.samples, again.samples, atol=1.01 / 32768, rtol=0)
    assert len(first.samples) != len(other.samples) or not np.allclose(first.samples, other.samples, atol=0.01)


@pytest.mark.parametrize("voice", VOICES)
def test_pieces_of_a_stream_are_the_whole(speech: TTS, voice: str) -> None:
    whole = speech.generate(SHORT, voice=voice, seed=2)
    pieces = list(speech.stream(SHORT, voice=voice, seed=2))
    assert len(pieces) >= 3
    joined = np.concatenate([piece.samples for piece in pieces])
    # Stored in 16 bits, whose steps are 3e-5.
    np.testing.assert_allclose(joined, whole.samples, atol=1e-4, rtol=0)


def test_any_text_ends_by_itself_and_a_long_one_keeps_its_pace(speech: TTS, caplog: pytest.LogCaptureFixture) -> None:
    assert 290 <= len(LONG) <= 310
    with caplog.at_level(logging.DEBUG, logger="sonoro"):
        spoken = speech.generate_batch(
            [{"text": text, "voice": VOICES[index % len(VOICES)]} for index, text in enumerate(TRICKY.values())]
        )
    assert {kind: audio.finish_reason for kind, audio in zip(TRICKY, spoken, strict=True)} == dict.fromkeys(
        TRICKY, "stop"
    )
    lengths_s = {kind: audio.duration_s for kind, audio in zip(TRICKY, spoken, strict=True)}
    assert all(length > 0.2 for length in lengths_s.values()), lengths_s
    assert lengths_s["one word"] < 2
    # .057 s a character, as its teachers read, would be 17 s.
    assert 12 < lengths_s["300 characters"] < 26
    warned = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warned
    assert all(re.fullmatch(r"\d+ characters? cannot be spoken and will be left out: .+", line) for line in warned)
    assert all(character in " ".join(warned) for character in "😀你好")


@pytest.mark.parametrize("text", ["😀😀", "你好", "???"])
def test_a_text_without_anything_to_say_is_refused(speech: TTS, text: str) -> None:
    with pytest.raises(InvalidRequest, match="text") as refused:
        speech.generate(text)
    assert text in str(refused.value)


def test_both_layouts_are_read(speech: TTS) -> None:
    asked = {"text": SENTENCES[1], "voice": "miles"}
    layouts = [{**asked, "non_streaming_mode": non_streaming} for non_streaming in (True, False)]
    for audio in speech.generate_batch(layouts):
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
    expected = listening.drain(engine)
    engine.submit(SpeechRequest(id="a", text="", seed=1, is_live=True))
    events, is_early = [], False
    for word in text.split(" "):
        engine.append("a", word + " ")
        while engine.has_work:
            events += engine.tick()
        is_early = is_early or bool(events)
    assert is_early
    engine.end_text("a")
    events += listening.drain(engine)
    ended = listening.end(events, "a")
    assert (ended.reason, ended.characters) == ("stop", len(text) + 1)
    np.testing.assert_allclose(
        listening.audio(events, "a"), listening.audio(expected, "whole"), atol=1.01 / 32768, rtol=0
    )
