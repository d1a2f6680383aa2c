"""Markup and lexicons in Python and on the command line, over a model that speaks sine waves."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from processes import Run, sonoro
from sine_models import ShownSineModel, VoicedSineModel

from sonoro import TTS
from sonoro.api import speech_request
from sonoro.cli import say as cli_say
from sonoro.core.errors import InvalidRequest
from sonoro.models.base import LoadedModel
from sonoro.text.script import Cue, dialogue

__all__ = ["sonoro"]

TEXT = "Good morning[pause:1s]friend"
RATE = 8000


def sine_model() -> LoadedModel:
    return LoadedModel(ShownSineModel(), torch.device("cpu"), torch.float32, {})


def longest_silence(samples: np.ndarray) -> int:
    return int(np.diff(np.flatnonzero(np.abs(samples) > 32 / 32768)).max()) - 1


def test_every_way_of_speaking_plays_the_pause() -> None:
    with TTS(sine_model(), config={"slots": 2}) as tts:
        whole = tts.generate(TEXT)
        assert longest_silence(whole.samples) == RATE
        assert np.array_equal(tts.generate(speech_request(TEXT)).samples, whole.samples)
        pieces = list(tts.stream(TEXT))
        assert [piece.pause_s for piece in pieces if piece.pause_s] == [1.0]
        assert longest_silence(np.concatenate([piece.samples for piece in pieces])) == RATE
        assert [word.text for word in whole.words or ()] == ["Good", "morning", "friend"]
        assert [TEXT[word.start : word.end] for word in whole.words or ()] == ["Good", "morning", "friend"]
        faster = tts.generate(TEXT, speed=2.0)
        assert len(faster.samples) == RATE + len(tts.generate("Good morning,", speed=2.0)) + len(
            tts.generate("friend", speed=2.0)
        )


def test_lexicons_are_those_of_the_call_then_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("# names\nSQL=sequel\nXYZ = x y and z\n")
    with TTS(sine_model(), config={"slots": 2}, lexicons=[tmp_path / "words.txt"]) as tts:
        of_model, of_call = tts.generate("SQL"), tts.generate("SQL", lexicons=[{"SQL": "s q l"}])
        assert (len(of_model), len(of_call)) == (80 * len("sequel"), 80 * len("s q l"))
        assert len(tts.generate("XYZ", lexicons=[{"SQL": "s q l"}])) == 80 * len("x y and z")
        with pytest.raises(InvalidRequest, match="lexicons"):
            tts.generate("SQL", lexicons=[tmp_path / "none.txt"])


def test_what_is_not_honoured_is_refused_or_listed() -> None:
    with TTS(sine_model(), config={"slots": 2}) as tts:
        with pytest.raises(InvalidRequest, match=r"emphasis.*line 1, column 8"):
            tts.generate("<speak><emphasis>Now</emphasis></speak>")
        audio = tts.generate("<speak><emphasis>Now</emphasis></speak>", on_markup="plain")
        assert audio.warnings == ("emphasis (line 1, column 8)",)


def test_say_takes_markup_and_lexicons(sonoro: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_say, "_load", lambda options, quantization: sine_model())
    Path("words.txt").write_text("W3C=world wide web\n")
    text = "<speak>W3C <emphasis>rules</emphasis>.<break time='1s'/>Yes</speak>"
    arguments = ["--lexicon", "words.txt", "--on-markup", "plain", "--srt", "out.srt", "--out", "out.wav"]
    code, out, err = sonoro("say", text, *arguments)
    assert (code, err) == (0, "warning: not honoured: emphasis (line 1, column 12)\n"), out
    captions = Path("out.srt").read_text()
    assert "W3C rules." in captions
    assert "<" not in captions
    code, _, err = sonoro("say", text, "--out", "out.wav", "--force")
    assert code != 0
    assert "emphasis" in err


CAST = {"ALICE": "nora", "BOB": "hugh", "CAROL": "edith", "DAN": "miles"}
LINES = [(name, f"Line {number}.") for number in range(10) for name in CAST]
"""A dialogue of four voices in forty lines."""


def cast_model() -> LoadedModel:
    return LoadedModel(ShownSineModel(("nora", "miles", "edith", "hugh")), torch.device("cpu"), torch.float32, {})


def test_a_dialogue_of_four_voices_in_forty_lines() -> None:
    cues = [Cue(text, CAST[name]) for name, text in LINES]
    with TTS(cast_model(), config={"slots": 4}) as tts:
        audio = tts.generate(dialogue(cues), markup="voices")
        assert abs(len(audio) - 80 * sum(len(text) for _, text in LINES) - 39 * 2400) <= 40 * 3
        streamed = list(tts.stream(dialogue(cues), markup="voices"))
        assert np.array_equal(np.concatenate([piece.samples for piece in streamed]), audio.samples)
        assert [piece.pause_s for piece in streamed if piece.pause_s] == [0.3] * 39
        beside = tts.generate(dialogue(cues), markup="voices", parallel=4)
        assert len(beside) == len(audio)
        for told in (audio.words, beside.words):
            assert [(word.text, word.voice) for word in told or ()] == [
                (word, cue.voice) for cue in cues for word in cue.text.rstrip(".").split()
            ]


def test_a_play_is_spoken_by_its_cast(sonoro: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_say, "_load", lambda options, quantization: cast_model())
    Path("play.txt").write_text("\n".join(f"{name}: {text}" for name, text in LINES))
    cast = ",".join(f"{name}={voice}" for name, voice in CAST.items())
    code, out, err = sonoro("say", "--file", "play.txt", "--cast", cast, "--words", "words.json", "--out", "out.wav")
    assert (code, err) == (0, ""), out
    letters = sum(len(text) for _, text in LINES)
    assert abs(len(soundfile.read("out.wav")[0]) - 80 * letters - 39 * 2400) <= 40 * 3
    told = json.loads(Path("words.json").read_text())
    assert [(word["text"], word["voice"]) for word in told] == [
        (word, CAST[name]) for name, text in LINES for word in text.rstrip(".").split()
    ]
    code, _, err = sonoro("say", "EVE: Hi.", "--cast", "ALICE=nora")
    assert code != 0
    assert "EVE" in err


def test_a_play_is_spoken_by_recordings(sonoro: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadedModel(VoicedSineModel(), torch.device("cpu"), torch.float32, {})
    monkeypatch.setattr(cli_say, "_load", lambda options, quantization: model)
    soundfile.write("alice.wav", np.sin(np.arange(8000) / 10), 8000)
    code, out, err = sonoro(
        "say", "ALICE: Good day.\nBOB: And you.", "--cast", "alice=alice.wav,BOB=low", "-o", "out.wav"
    )
    assert (code, err) == (0, ""), out
    with TTS(model, config={"slots": 1}) as tts:
        audio = tts.generate(
            dialogue([Cue("Good day.", "alice"), Cue("And you.", "low")]), markup="voices", cast={"alice": "alice.wav"}
        )
    assert np.array_equal(soundfile.read("out.wav")[0].astype(np.float32), audio.samples)
    code, _, err = sonoro("say", "ALICE: Hi.", "--cast", "ALICE=none.wav", "-o", "out.wav", "--force")
    assert code != 0
    assert "none.wav" in err


def test_each_line_is_read_as_its_own_voice_reads() -> None:
    asked: list[tuple[str, str | None]] = []

    class Noting(ShownSineModel):
        def segments(self, text, language, text_format="auto", voice=None):  # type: ignore[no-untyped-def]
            asked.append((text, voice))
            return super().segments(text, language, text_format, voice)

    with TTS(LoadedModel(Noting(), torch.device("cpu"), torch.float32, {}), config={"slots": 2}) as tts:
        asked.clear()
        tts.generate("One. [voice:high]Two. [voice:low]Three.", "high", markup="voices")
        assert [voice for _, voice in asked] == ["high", "high", "low"]
