"""Markup and lexicons in Python and on the command line, over a model that speaks sine waves."""

from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from processes import Run, sonoro
from sine_models import ShownSineModel

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


def test_a_play_is_spoken_by_its_cast(sonoro: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli_say, "_load", lambda options, quantization: sine_model())
    Path("play.txt").write_text("ALICE: Good day.\nBOB: And you.\n" * 20)
    code, out, err = sonoro("say", "--file", "play.txt", "--cast", "ALICE=high,BOB=low", "--out", "out.wav")
    assert (code, err) == (0, ""), out
    with TTS(sine_model(), config={"slots": 2}) as tts:
        cues = [Cue("Good day.", "high"), Cue("And you.", "low")] * 20
        audio = tts.generate(dialogue(cues), markup="voices")
    assert abs(len(soundfile.read("out.wav")[0]) - len(audio)) == 0
    assert abs(len(audio) - 80 * 17 * 20 - 39 * 2400) <= 40 * 3
    code, _, err = sonoro("say", "EVE: Hi.", "--cast", "ALICE=high")
    assert code != 0
    assert "EVE" in err
