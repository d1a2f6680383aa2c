"""The command line on tiny random checkpoints: it speaks in every variant, and refuses bad input in one line."""

import functools
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from processes import Run, assert_refused, sonoro
from safetensors.torch import load_file, save_file
from sine_models import ErringModel, ShownSineModel
from tiny_checkpoint import write_checkpoint

from sonoro.api import TTS
from sonoro.audio.files import write_audio
from sonoro.audio.pcm import from_pcm16
from sonoro.cli import say as cli_say
from sonoro.core.errors import EngineError
from sonoro.core.types import SamplingParams, SpeechRequest
from sonoro.engine import word_heads
from sonoro.models.base import LoadedModel
from sonoro.words import heads

__all__ = ["sonoro"]

SUMMARY = re.compile(r"^(\d+\.\d) s of speech(?: in (.+))?, made in \d+\.\d s(; cut.*)?$")
SHORT = ["--max-frames", "6"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of each variant."""
    folder = tmp_path_factory.mktemp("models")
    write_checkpoint(folder / "custom_voice", variant="custom_voice", topology="0.6b")
    write_checkpoint(folder / "big_custom_voice", variant="custom_voice", topology="1.7b")
    write_checkpoint(folder / "voice_design", variant="voice_design", topology="1.7b")
    write_checkpoint(folder / "base", variant="base", topology="1.7b")
    return folder


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Reference recordings, good and bad."""
    folder = tmp_path_factory.mktemp("recordings")
    tone = (0.3 * np.sin(np.arange(24000) / 9)).astype(np.float32)
    write_audio(folder / "good.wav", tone, 24000)
    write_audio(folder / "short.wav", tone[:2400], 24000)
    write_audio(folder / "long.wav", np.tile(tone, 61), 24000)
    write_audio(folder / "silent.wav", 0 * tone, 24000)
    (folder / "text.wav").write_text("This is not audio.")
    return folder


def is_same(samples: np.ndarray, others: np.ndarray) -> bool:
    """Bit by bit: `say` cuts its chunks by rule, so nothing is rounded differently."""
    return np.array_equal(samples, others)


def spoken(file: str | io.BytesIO = "out.wav") -> np.ndarray:
    """The samples of a file, float32."""
    return soundfile.read(file, dtype="float32")[0]


def test_say_writes_a_mono_wav_and_one_line(sonoro: Run, models: Path) -> None:
    code, out, err = sonoro("say", "Hello there.", "--model", models / "custom_voice", *SHORT)
    assert (code, err) == (0, "")
    info = soundfile.info("out.wav")
    assert (info.samplerate, info.channels, info.frames, info.subtype) == (24000, 1, 6 * 1920, "PCM_16")
    found = SUMMARY.match(out.rstrip("\n"))
    assert found
    assert found.groups() == ("0.5", "out.wav", "; cut at --max-frames")


def test_the_codecs_dtype_is_heard_40_db_below_the_speech(sonoro: Run, models: Path) -> None:
    heard = {}
    for dtype in ("auto", "float32", "float16"):
        code, _, err = sonoro("say", "Hello.", "--model", models / "custom_voice", *SHORT, "--codec-dtype", dtype)
        assert (code, err) == (0, "")
        heard[dtype] = spoken()
    assert is_same(heard["auto"], heard["float32"])
    apart = heard["float16"] - heard["float32"]
    assert 0 < np.square(apart).mean() < 1e-4 * np.square(heard["float32"]).mean()


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        ("custom_voice", []),
        ("custom_voice", ["--voice", "ryan", "--language", "english"]),
        ("big_custom_voice", ["--voice", "Eric", "--language", "Chinese", "--instructions", "Speak softly."]),
        ("voice_design", ["--instructions", "A calm, low voice."]),
        ("voice_design", ["--instructions", "A calm, low voice.", "--option", "non_streaming_mode=false"]),
        ("base", ["--ref-audio", "good.wav", "--ref-text", "A tone."]),
        ("base", ["--ref-audio", "good.wav", "--ref-text", "A tone.", "--option", "non_streaming_mode=true"]),
        ("base", ["--ref-audio", "good.wav", "--x-vector-only"]),
    ],
)
def test_say_speaks_in_every_variant(
    sonoro: Run, models: Path, recordings: Path, model: str, arguments: list[str]
) -> None:
    given = [recordings / argument if argument == "good.wav" else argument for argument in arguments]
    code, _, err = sonoro("say", "Hello there.", "--model", models / model, *given, *SHORT)
    assert (code, err) == (0, "")
    first = spoken()
    assert np.isfinite(first).all()
    assert first.std() > 0
    sonoro("say", "Hello there.", "--model", models / model, *given, *SHORT)
    assert is_same(spoken(), first), "the same seed gives the same speech"
    sonoro("say", "Hello there.", "--model", models / model, *given, *SHORT, "--seed", "1")
    assert not is_same(spoken(), first)


def test_text_comes_from_the_argument_stdin_or_a_file(
    sonoro: Run, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("text.txt").write_text("Grüße, 你好.", encoding="utf-8")
    common = ["--model", models / "custom_voice", *SHORT]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("Grüße, 你好.".encode())))
    for source, out in ((["Grüße, 你好."], "a.wav"), (["-"], "b.wav"), (["--file", "text.txt"], "c.wav")):
        assert sonoro("say", *source, "-o", out, *common)[0] == 0
    assert is_same(spoken("a.wav"), spoken("b.wav"))
    assert is_same(spoken("a.wav"), spoken("c.wav"))


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus", "pcm"])
def test_every_format_by_suffix_and_by_name(sonoro: Run, models: Path, format: str) -> None:
    common = ["say", "Hello.", "--model", models / "custom_voice", *SHORT]
    assert sonoro(*common, "-o", f"a.{format}")[0] == 0
    assert sonoro(*common, "-o", "b", "--format", format)[0] == 0
    assert abs(Path("b").stat().st_size - Path(f"a.{format}").stat().st_size) < 100
    if format != "pcm":
        assert soundfile.info(f"a.{format}").samplerate == 24000


def test_streamed_to_a_file_or_stdout_it_is_the_same_audio(sonoro: Run, models: Path) -> None:
    common = ["say", "Hello there.", "--model", models / "custom_voice", *SHORT]
    sonoro(*common, "-o", "whole.wav")
    whole = spoken("whole.wav")
    sonoro(*common, "-o", "streamed.wav", "--stream")
    assert is_same(spoken("streamed.wav"), whole)
    assert Path("streamed.wav").read_bytes()[:44] == Path("whole.wav").read_bytes()[:44]
    code, out, err = sonoro(*common, "-o", "-", "--stream")
    assert code == 0
    assert SUMMARY.match(err.rstrip("\n")), "with the audio on stdout the line goes to stderr"
    assert is_same(spoken(io.BytesIO(out.encode("latin-1"))), whole)
    out = sonoro(*common, "-o", "-", "--stream", "--format", "pcm")[1]
    assert is_same(from_pcm16(out.encode("latin-1")), whole)
    assert sonoro(*common, "-o", "-", "--format", "flac")[1].startswith("fLaC")


def test_sampling_options_reach_the_model(sonoro: Run, models: Path) -> None:
    common = ["say", "Hello there.", "--model", models / "custom_voice", *SHORT]
    greedy = ["--temperature", "0", "--option", "subtalker_dosample=false"]
    sonoro(*common, *greedy)
    first = spoken()
    sonoro(*common, *greedy, "--seed", "5")
    assert is_same(spoken(), first), "greedy speech does not depend on the seed"
    for arguments in (["--top-k", "1"], ["--top-p", "0.001"]):
        sonoro(*common, *arguments, "--option", "subtalker_top_k=1", "--seed", "6")
        assert is_same(spoken(), first)


def test_a_configuration_file_is_used(sonoro: Run, models: Path) -> None:
    Path("engine.yaml").write_text("max_frames: 4\nchunk_frames: [1, 2, 4]\nslots: 2\n")
    text = "A text without end"
    code, out, _ = sonoro("say", text, "--model", models / "custom_voice", "--config", "engine.yaml")
    first = spoken()
    assert code == 1, "what ran away is not all of the text"
    duration_s, name, how = SUMMARY.match(out.rstrip("\n")).groups()
    assert (name, duration_s) == ("out.wav", "0.3")
    assert "where it ran away" in how
    assert len(spoken()) == 4 * 1920
    again = sonoro("say", text, "--model", models / "custom_voice", "--config", "engine.yaml", "--attempts", "3")
    assert again[0] == 1
    assert not is_same(spoken(), first), "the last attempt has another seed"


def test_speed_makes_the_file_shorter(sonoro: Run, models: Path) -> None:
    sonoro("say", "Hello there.", "--model", models / "custom_voice", *SHORT, "--speed", "1.5")
    assert len(spoken()) == pytest.approx(6 * 1920 / 1.5, rel=0.03)


def test_captions_and_words_are_written_beside_the_audio(sonoro: Run) -> None:
    files = ["--srt", "a.srt", "--vtt", "a.vtt", "--words", "a.json"]
    assert sonoro("say", "Good morning. It is 9:30.", "--speed", "2", *files)[0] == 0
    assert Path("a.srt").read_text().startswith("1\n00:00:00,")
    assert Path("a.vtt").read_text().splitlines()[3::3] == ["Good morning.", "It is 9:30."]
    words = json.loads(Path("a.json").read_text())
    assert [word["text"] for word in words] == ["Good", "morning", "It", "is", "9:30"]
    heard_s = len(spoken()) / 24000
    assert 0.6 * heard_s < words[-1]["end_s"] <= heard_s + 0.1


def test_captions_and_words_show_what_is_read(sonoro: Run) -> None:
    code, _, _ = sonoro("say", "See the [docs](http://x.com/a) of **it** now.", "--srt", "a.srt", "--words", "a.json")
    assert code == 0
    assert Path("a.srt").read_text().splitlines()[2] == "See the docs of it now."
    words = [word["text"] for word in json.loads(Path("a.json").read_text())]
    assert words == ["See", "the", "docs", "of", "it", "now"]


def test_captions_of_a_model_that_shows_no_words_are_refused(sonoro: Run, models: Path) -> None:
    asked = sonoro("say", "Hello.", "--model", models / "custom_voice", "--srt", "a.srt")
    assert_refused(*asked, ["a.srt", "word times"])
    assert not Path("a.srt").exists()


def loaded(model: Any) -> LoadedModel:
    return LoadedModel(model, torch.device("cpu"), torch.float32, {})


def test_captions_that_cannot_be_written_are_refused_before_it_speaks(sonoro: Run) -> None:
    assert_refused(*sonoro("say", "Hello.", "--vtt", "none/a.vtt"), ["none/a.vtt", "no folder"])
    Path("a.json").mkdir()
    assert_refused(*sonoro("say", "Hello.", "--words", "a.json"), ["a.json", "folder"])
    assert not Path("out.wav").exists()


def test_no_output_takes_the_file_of_another_or_an_older_one(sonoro: Run) -> None:
    for same in (["--srt", "x.wav"], ["--words", "./x.wav"], ["--srt", "a.srt", "--vtt", "a.srt"]):
        assert_refused(*sonoro("say", "Hello.", "-o", "x.wav", *same), ["same file"])
    Path("x.wav").write_text("mine")
    Path("link.wav").symlink_to("x.wav")
    assert_refused(*sonoro("say", "Hello.", "-o", "x.wav"), ["x.wav", "--force"])
    assert_refused(*sonoro("say", "Hello.", "--srt", "x.wav"), ["x.wav", "--force"])
    assert_refused(*sonoro("say", "Hello.", "-o", "x.wav", "--words", "link.wav", "--force"), ["same file"])
    assert Path("x.wav").read_text() == "mine"
    assert not Path("out.wav").exists()
    code, out, _ = sonoro("say", "Hello.", "-o", "x.wav", "--force")
    assert (code, out.rstrip().endswith("; it replaces an older file")) == (0, True)
    assert "replaces" not in sonoro("say", "Hello.")[1]
    assert "replaces" in sonoro("say", "Hello.")[1]


def test_a_byte_order_mark_is_no_text(sonoro: Run) -> None:
    Path("text.txt").write_bytes("\ufeffGood morning.".encode())
    assert sonoro("say", "--file", "text.txt", "--words", "a.json", "--srt", "a.srt")[0] == 0
    first = json.loads(Path("a.json").read_text())[0]
    assert (first["text"], first["start"], first["end"]) == ("Good", 0, 4)
    assert "\ufeff" not in Path("a.srt").read_text()


def test_options_that_are_given_together_all_reach_the_request(
    sonoro: Run, recordings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[SpeechRequest, float, float]] = []

    def stream(_: TTS, request: SpeechRequest, *, speed: float, loudness: float) -> None:
        asked.append((request, speed, loudness))
        raise EngineError("asked")

    monkeypatch.setattr(cli_say, "_load", lambda *_: loaded(ErringModel("unreached")))
    monkeypatch.setattr(cli_say.TTS, "stream", stream)
    speech = [
        "--voice",
        "Ryan",
        "--language",
        "german",
        "--instructions",
        "Calm.",
        "--speed",
        "1.5",
        "--seed",
        "7",
        "--loudness",
        "-16",
    ]
    clone = ["--ref-audio", recordings / "good.wav", "--ref-text", "A tone.", "--option", "strength=70"]
    retries = ["--attempts", "3", "--on-fault", "retry", "--check"]
    sampling = ["--temperature", "0.5", "--top-k", "9", "--top-p", "0.8", "--repetition-penalty", "1.2"]
    code, _, err = sonoro("say", "Hello.", *speech, *clone, *retries, *sampling, "--max-frames", "6")
    assert (code, err) == (1, "error: asked\n")
    ((request, speed, loudness),) = asked
    assert loudness == -16
    assert (speed, request.text, request.voice, request.language) == (1.5, "Hello.", "Ryan", "german")
    assert (request.instructions, request.seed, request.max_frames) == ("Calm.", 7, 6)
    assert [(one.text, one.use) for one in request.references] == [("A tone.", "prompt")]
    assert (request.attempts, request.on_fault, request.with_words) == (3, "retry", True)
    assert request.sampling == SamplingParams(temperature=0.5, top_k=9, top_p=0.8, repetition_penalty=1.2)
    assert request.options == {"strength": 70}


def test_what_was_not_spoken_as_written_is_listed_without_captions_too(
    sonoro: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fake goes wrong with seeds below 10."""
    monkeypatch.setattr(cli_say, "_load", lambda *_: loaded(ErringModel("unreached")))
    text = "It is the first one of them."
    assert sonoro("say", text, "--seed", "9")[::2] == (0, "")
    assert sonoro("say", text, "--seed", "9", "--check")[::2] == (1, f"unreached (attempt 1): {text!r}\n")
    assert sonoro("say", text, "--seed", "10", "--check")[::2] == (0, "")
    again = f"unreached (attempt 1, spoken again): {text!r}\n"
    assert sonoro("say", text, "--seed", "9", "--check", "--attempts", "2")[::2] == (0, again)


def test_a_check_by_a_model_that_cannot_tell_is_refused(
    sonoro: Run, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_refused(*sonoro("say", "Hello.", "--model", models / "custom_voice", "--check"), ["--check", "as written"])
    # Heads that were found without labels have times, but no limits.
    monkeypatch.setattr(cli_say, "_load", lambda *_: loaded(ShownSineModel()))
    assert_refused(*sonoro("say", "Hello.", "--check"), ["--check", "as written"])
    assert not Path("out.wav").exists()


def test_progress_is_lines_where_it_is_asked_for_and_no_terminal_is(sonoro: Run, models: Path) -> None:
    common = ["say", "Hello there. " * 9, "--model", models / "custom_voice", "--config", "engine.yaml"]
    Path("engine.yaml").write_text("max_frames: 4\nslots: 1\n")
    assert sonoro(*common)[2] == ""
    assert sonoro(*common, "--no-progress")[2] == ""
    err = sonoro("say", "Hi.", "--progress")[2]
    assert re.fullmatch(r"(\d+% of the text, \d+\.\d s of audio, \d+\.\d times as fast as it plays\n)+", err), err
    assert "100% of the text" in err


def test_what_the_voice_cannot_read_is_said_in_one_line(sonoro: Run) -> None:
    code, _, err = sonoro("say", "Tokyo is 東京. ☃!", "--max-frames", "4")
    assert (code, err) == (0, "warning: 3 characters cannot be spoken and will be left out: 東京☃\n")
    code, _, err = sonoro("say", "Das ist nicht gut, und ich weiß es.", "--max-frames", "4")
    assert code == 0
    assert re.fullmatch(r"warning: this looks like German; [^\n]+\n", err)
    Path("out.wav").unlink()
    assert_refused(*sonoro("say", "Привет, как дела? 5."), ["text", "Cyrillic", "English"])
    assert not Path("out.wav").exists()


def test_info_shows_what_a_model_is(sonoro: Run, models: Path) -> None:
    code, out, err = sonoro("info", models / "base")
    assert (code, err) == (0, "")
    stored = {
        name: sum(tensor.numel() for tensor in load_file(models / "base" / name).values())
        for name in ("model.safetensors", "speech_tokenizer/model.safetensors")
    }
    for name, count in {**stored, "total": sum(stored.values())}.items():
        assert re.search(rf"{name} +{count:,}\n", out)
    assert re.search(r"sample rate +24000 Hz\n", out)
    assert re.search(r"languages +auto, chinese, english, german, french\n", out)
    assert "subtalker_top_k" in out
    assert re.search(r"weights +[\d,.]+ MiB\n", out)


def test_info_says_what_an_engine_takes_part_by_part(sonoro: Run, models: Path) -> None:
    code, out, err = sonoro("info", models / "base", "--slots", "4", "--quantization", "int8")
    assert (code, err) == (0, "")
    title = r"memory of an engine on a GPU: slots=4 quantization=int8\n"
    _, _, table = out.partition(re.search(title, out)[0])
    counts = [int(count.replace(",", "")) for count in re.findall(r"([\d,]+) bytes", table)]
    assert len(counts) == 8
    assert sum(counts[:-1]) == counts[-1]
    assert_refused(*sonoro("info", models / "base", "--quantization", "int4"), ["quantization", "int4", "int8"])


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("qwen3-tts-0.6b-base", "914,643,008"),
        ("qwen3-tts-0.6b-customvoice", "905,788,672"),
        ("qwen3-tts-1.7b-base", "1,928,677,440"),
        ("qwen3-tts-1.7b-customvoice", "1,916,676,352"),
        ("qwen3-tts-1.7b-voicedesign", "1,916,676,352"),
    ],
)
def test_info_shows_the_official_counts_of_every_released_configuration(sonoro: Run, name: str, elements: str) -> None:
    code, out, err = sonoro("info", name)
    assert (code, err) == (0, "")
    assert out.startswith(f"{name}\n")
    assert re.search(rf"^  model\.safetensors +{elements}$", out, re.M)
    assert re.search(r"^  speech_tokenizer/model\.safetensors +170,557,441$", out, re.M)
    assert re.search(r"^  codec decoder +114,323,137$", out, re.M)
    assert re.search(r"^  codec encoder +56,234,304$", out, re.M)


def test_voices_are_listed_one_a_line(sonoro: Run, models: Path) -> None:
    code, out, err = sonoro("voices", models / "custom_voice")
    assert (code, [line.split()[0] for line in out.splitlines()], err) == (0, ["serena", "ryan", "eric", "dylan"], "")
    assert sonoro("voices")[1].splitlines()[1] == "miles  American, male: easy, friendly, low"
    assert "--ref-audio" in sonoro("voices", models / "base")[1]
    assert "--instructions" in sonoro("voices", models / "voice_design")[1]


def test_version_and_help(sonoro: Run) -> None:
    assert re.fullmatch(r"sonoro \d+\.\d+\.\d+\n", sonoro("--version")[1])
    for arguments in ([], ["--help"], ["say", "--help"], ["-h"], ["bench"], ["bench", "engine", "-h"]):
        code, out, err = sonoro(*arguments)
        assert (code, err) == (0, "")
        assert out.startswith("Usage:")
    examples = re.findall(r"^  (sonoro \S+ .*?)  ", sonoro()[1], re.MULTILINE)
    assert len(examples) == 3
    assert sonoro("-V") == sonoro("--version")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([""], ["text", "0 characters", "give at least one"]),
        (["  \n "], ["text", "white space"]),
        (["?!"], ["text", "letter or digit"]),
        ([], ["text", "--file"]),
        (["Hi", "--file", "text.txt"], ["text", "--file"]),
        (["--file", "none.txt"], ["file", "none.txt", "No such file"]),
        (["--file", "latin.txt"], ["text", "latin.txt", "UTF-8"]),
        (["Hi", "--voice", "nobody"], ["voice", "'nobody'", "serena, ryan, eric, dylan"]),
        (["Hi", "--language", "klingon"], ["language", "'klingon'", "auto, chinese, english"]),
        (["Hi", "--instructions", "Softly."], ["instructions", "does not follow"]),
        (["Hi", "--ref-audio", "good.wav", "--ref-text", "Hm."], ["ref_audio", "cannot clone"]),
        (["Hi", "--ref-audio", "good.wav"], ["ref_audio", "cannot clone", "name one of its own"]),
        (["Hi", "--ref-audio", "none.wav", "--x-vector-only"], ["ref_audio", "cannot clone"]),
        (["Hi", "--ref-text", "Hm."], ["ref_text", "cannot clone"]),
        (["Hi", "--x-vector-only"], ["x_vector_only", "cannot clone"]),
        (["Hi", "--seed", "abc"], ["seed", "'abc'", "whole number"]),
        (["Hi", "--top-k", "2.5"], ["top_k", "'2.5'", "whole number"]),
        (["Hi", "--max-frames", "1e3"], ["max_frames", "'1e3'", "whole number"]),
        (["Hi", "--seed", "-1"], ["seed", "-1", "at least 0"]),
        (["Hi", "--speed", "5"], ["speed", "5", "0.25 to 4"]),
        (["Hi", "--speed", "fast"], ["speed", "'fast'", "number"]),
        (["Hi", "--attempts", "0"], ["attempts", "0", "at least 1"]),
        (["Hi", "--on-fault", "stop"], ["on_fault", "'stop'", "mark, retry, continue"]),
        (["Hi", "--temperature", "warm"], ["temperature", "'warm'", "number"]),
        (["Hi", "--seed", str(2**63)], ["seed", str(2**63), f"at most {2**63 - 1}"]),
        (["Hi", "--voice", ""], ["voice", "''", "serena, ryan, eric, dylan"]),
        (["Hi", "--language", ""], ["language", "''", "auto, chinese, english"]),
        (["Hi", "--temperature", "nan"], ["temperature", "nan", "at most 10"]),
        (["Hi", "--temperature", "-0.5"], ["temperature", "-0.5", "at least 0"]),
        (["Hi", "--top-k", "-1"], ["top_k", "-1", "at least 0"]),
        (["Hi", "--top-p", "1.5"], ["top_p", "1.5", "at most 1"]),
        (["Hi", "--repetition-penalty", "0"], ["repetition_penalty", "0", "above 0"]),
        (["Hi", "--max-frames", "0"], ["max_frames", "0", "at least 1"]),
        (["Hi", "--max-frames", "5000"], ["max_frames", "5000", "at most 1024"]),
        (["Hi", "--option", "subtalker_top_k"], ["option", "NAME=VALUE"]),
        (["Hi", "--option", "wobble=1"], ["options.wobble", "subtalker_top_k"]),
        (["Hi", "--option", "seed=1"], ["options.seed", "subtalker_top_k"]),
        (["Hi", "--option", "subtalker_top_k=-1"], ["subtalker_top_k", "-1", ">= 0"]),
        (["Hi", "-o", "missing/a.wav"], ["missing/a.wav", "no folder"]),
        (["Hi", "-o", "a.xyz"], ["a.xyz", "suffix"]),
        (["Hi", "-o", "."], ["folder"]),
        (["Hi", "-o", "a" * 300 + ".wav"], ["aaa", "too long"]),
        (["Hi", "-o", "/proc/a.wav"], ["/proc/a.wav", "No such file"]),
        (["Hi", "-o", "/dev/full", "--format", "wav", *SHORT], ["/dev/full", "No space left"]),
        (["Hi", "-o", "/dev/full", "--format", "pcm", "--stream"], ["/dev/full", "No space left"]),
        (["Hi", "--format", "aac"], ["format", "'aac'", "wav, flac, mp3, opus, pcm"]),
        (["Hi", "-o", "a.mp3", "--stream"], ["--stream", "mp3", "wav or pcm"]),
        (["Hi", "--config", "none.yaml"], ["config", "none.yaml"]),
        (["Hi", "--config", "unknown.yaml"], ["slotz", "4", "known keys", "slots"]),
        (["Hi", "--config", "wrong.yaml"], ["slots", "0", "at least 1"]),
        (["Hi", "--device", "abacus"], ["device", "'abacus'"]),
        (["Hi", "--dtype", "int3"], ["dtype", "int3"]),
        (["Hi", "--codec-dtype", "int8"], ["codec_dtype", "'int8'", "auto or float16 or bfloat16 or float32"]),
        (["Hi", "--load-format", "magic"], ["load_format", "'magic'"]),
        (["Hi", "--louder"], ["--louder"]),
    ],
)
def test_bad_input_is_refused_in_one_line(
    sonoro: Run, models: Path, recordings: Path, arguments: list[str], words: list[str]
) -> None:
    Path("text.txt").write_text("Hi")
    Path("latin.txt").write_bytes("Grüße".encode("latin-1"))
    Path("unknown.yaml").write_text("slotz: 4\n")
    Path("wrong.yaml").write_text("slots: 0\n")
    given = [recordings / argument if argument == "good.wav" else argument for argument in arguments]
    code, out, err = sonoro("say", *given, "--model", models / "custom_voice")
    assert_refused(code, out, err, words)
    assert not Path("out.wav").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--ref-audio", "none.wav", "--ref-text", "Hm."], ["ref_audio", "no such file"]),
        (["--ref-audio", "text.wav", "--ref-text", "Hm."], ["ref_audio", "must be audio"]),
        (["--ref-audio", "short.wav", "--ref-text", "Hm."], ["ref_audio", "0.10 s", "at least 0.5 s"]),
        (["--ref-audio", "long.wav", "--ref-text", "Hm."], ["ref_audio", "more than 60 s", "at most 60 s"]),
        (["--ref-audio", "silent.wav", "--x-vector-only"], ["ref_audio", "silent"]),
        (["--ref-text", "Hm."], ["ref_text", "ref_audio"]),
        (["--ref-audio", "good.wav"], ["ref_text", "transcript"]),
        (["--ref-audio", "good.wav", "--ref-text", " "], ["ref_text", "transcript"]),
        (["--ref-audio", "good.wav", "--ref-text", "Hm.", "--voice", "ryan"], ["voice", "'ryan'"]),
        ([], ["ref_audio", "reference"]),
        (["--voice", "ryan"], ["voice", "'ryan'"]),
    ],
)
def test_bad_references_are_refused_in_one_line(
    sonoro: Run, models: Path, recordings: Path, arguments: list[str], words: list[str]
) -> None:
    given = [recordings / argument if argument.endswith(".wav") else argument for argument in arguments]
    assert_refused(*sonoro("say", "Hi", "--model", models / "base", *given), words)


def spoil(folder: Path, how: str) -> list[str]:
    """Damage a checkpoint; the words its refusal must hold."""
    weights, name = folder / "model.safetensors", "talker.model.norm.weight"
    if how == "gone":
        return [str(folder / "none")]
    if how == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
        return ["model.safetensors"]
    if how == "not json":
        (folder / "config.json").write_text("{")
        return ["config.json"]
    if how == "key wrong":
        values = json.loads((folder / "config.json").read_text())
        values["talker_config"]["hidden_size"] = "wide"
        (folder / "config.json").write_text(json.dumps(values))
        return ["config.json", "hidden_size"]
    tensors = load_file(weights)
    if how == "tensor missing":
        del tensors[name]
    elif how == "tensor misshapen":
        tensors[name] = tensors[name][:-1].clone()
    else:
        tensors["talker.surplus"] = torch.zeros(3)
        name = "talker.surplus"
    save_file(tensors, weights)
    return [name]


@pytest.mark.parametrize(
    "how", ["gone", "truncated", "not json", "key wrong", "tensor missing", "tensor misshapen", "tensor extra"]
)
@pytest.mark.parametrize("command", ["say", "info", "voices"])
def test_bad_models_are_refused_in_one_line(sonoro: Run, tmp_path: Path, how: str, command: str) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder, variant="custom_voice", topology="0.6b")
    words = spoil(folder, how)
    model = folder / "none" if how == "gone" else folder
    arguments = ["say", "Hi", "--model", model] if command == "say" else [command, model]
    assert_refused(*sonoro(*arguments), words)


def test_plans_are_measured_on_a_gpu_alone(sonoro: Run) -> None:
    assert_refused(*sonoro("tune", "--device", "here"), ["device", "'here'", "cuda:N"])
    assert_refused(*sonoro("tune", "--device", "cpu"), ["device", "'cpu'", "GPU"])


def test_a_table_that_cannot_be_written_is_refused(sonoro: Run, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("calibrate", models / "custom_voice", "--output")
    assert_refused(*sonoro(*asked, "none/heads.json"), ["none/heads.json", "no folder"])
    assert_refused(*sonoro(*asked, "."), ["it is a folder"])

    def is_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(heads, "write_heads", is_full)
    # What is written matters here, not whether it was found: one of the six sentences does.
    monkeypatch.setattr(word_heads, "calibrate", functools.partial(word_heads.calibrate, texts=word_heads.TEXTS[:1]))
    code, _, err = sonoro(*asked, "heads.json")
    assert (code, err) == (2, "error: cannot write heads.json: No space left on device\n")


def test_a_bad_log_level_and_an_unknown_command_are_refused(sonoro: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(*sonoro("voice"), ["'voice'", "sonoro voices", "sonoro say voice"])
    monkeypatch.setenv("SONORO_LOG_LEVEL", "loud")
    assert_refused(*sonoro("voices"), ["SONORO_LOG_LEVEL", "'loud'", "DEBUG"])


def test_a_small_model_gets_one_thread(models: Path, sonoro: Run) -> None:
    torch.set_num_threads(2)
    code, _, _ = sonoro("say", "Hello.", "--model", models / "custom_voice", "--max-frames", "2")
    assert code == 0
    assert torch.get_num_threads() == 1
