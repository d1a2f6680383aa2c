"""Judge a voice by ear of a machine: Harvard sentences read aloud and recognised offline with pocketsphinx.

Word error rate with the recogniser's general English, closed-set recognition (which of the sentences was it), and the
length of each reading beside the teacher's. The teacher's own figures come from `--teacher` and are kept in a file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import pocketsphinx
import soxr
import torch

from builtin_voice.flite import SAMPLE_RATE, VOICES, Flite
from builtin_voice.text import read_harvard
from sonoro import TTS
from sonoro.core.normalize import normalize_english

TEACHER = Path(__file__).with_name("teacher.json")
_RECOGNISER_HZ = 16000
_DURATION_TOLERANCE = 0.25
_SURROUNDING_SILENCE_S = 0.3


@dataclass(frozen=True, slots=True)
class Reading:
    """One sentence as it was read: `samples` [S] float32 in [-1, 1]; `stopped` if the voice ended by itself."""

    samples: np.ndarray
    sample_rate: int
    stopped: bool


@dataclass(frozen=True, slots=True)
class Score:
    """What was heard of all sentences of one voice. Durations in seconds, in the order of the sentences."""

    voice: str
    sentences: int
    wer: float
    closed_set_correct: int
    stopped: int
    durations_s: list[float]
    wall_s: float
    heard: list[str]


Reader = Callable[[str], Reading]


def words_of(text: str) -> str:
    """Lower-case words alone, as the recogniser writes them."""
    return " ".join(re.findall(r"[a-z']+", normalize_english(text, lowercase=True).text))


class Recogniser:
    """pocketsphinx with its packaged English, listening freely or for one of `sentences`."""

    def __init__(self, sentences: list[str]) -> None:
        self._sentences = [words_of(sentence) for sentence in sentences]
        self._free = self._decoder()
        self._closed = self._decoder()
        missing = sorted(
            {word for text in self._sentences for word in text.split() if not self._free.lookup_word(word)}
        )
        if missing:
            raise ValueError(f"sentences: {', '.join(missing)} are not in the recogniser's dictionary")
        self._closed.add_jsgf_string(
            "closed", f"#JSGF V1.0; grammar closed; public <s> = {' | '.join(self._sentences)};"
        )
        self._closed.activate_search("closed")

    @staticmethod
    def _decoder() -> pocketsphinx.Decoder:
        # Cepstral means over the whole utterance: what was heard before cannot change what is heard now.
        return pocketsphinx.Decoder(samprate=_RECOGNISER_HZ, cmn="batch", loglevel="FATAL")

    @staticmethod
    def _heard(decoder: pocketsphinx.Decoder, audio: bytes) -> str:
        decoder.start_utt()
        decoder.process_raw(audio, no_search=False, full_utt=True)
        decoder.end_utt()
        hypothesis = decoder.hyp()
        return hypothesis.hypstr if hypothesis else ""

    def listen(self, reading: Reading) -> tuple[str, int | None]:
        """The words heard, and the index of the sentence they fit best out of the closed set (None: no fit)."""
        samples = soxr.resample(reading.samples, reading.sample_rate, _RECOGNISER_HZ)
        # Out of silence it recognises 100 of 100 in the closed set for every teacher voice; without, 98 to 100.
        samples = np.pad(np.clip(samples, -1, 1), round(_SURROUNDING_SILENCE_S * _RECOGNISER_HZ))
        audio = (samples * 32767).astype("<i2").tobytes()
        closed = self._heard(self._closed, audio)
        return self._heard(self._free, audio), self._sentences.index(closed) if closed in self._sentences else None


def score(voice: str, read: Reader, sentences: list[str], recogniser: Recogniser) -> Score:
    """Have `read` read every sentence and listen to it; `wall_s` counts the reading alone."""
    heard, correct, stopped, durations, wall_s = [], 0, 0, [], 0.0
    for index, sentence in enumerate(sentences):
        began = time.perf_counter()
        reading = read(sentence)
        wall_s += time.perf_counter() - began
        text, choice = recogniser.listen(reading)
        heard.append(text)
        correct += choice == index
        stopped += reading.stopped
        durations.append(round(len(reading.samples) / reading.sample_rate, 3))
    wer = jiwer.wer([words_of(sentence) for sentence in sentences], heard)
    return Score(voice, len(sentences), round(wer, 4), correct, stopped, durations, round(wall_s, 3), heard)


def teacher_reader(flite: Flite, voice: str) -> Reader:
    """Flite reading as it does for training: text written out, ends trimmed, loudness evened."""

    def read(sentence: str) -> Reading:
        samples = flite.speak(normalize_english(sentence, lowercase=True).text, voice)
        return Reading(samples.astype(np.float32) / 32768, SAMPLE_RATE, stopped=True)

    return read


def model_reader(speech: TTS, voice: str, seed: int) -> Reader:
    """`speech` reading as `voice` through the public interface, warmed up so that no wall time is loading."""
    speech.generate("Ready.", voice=voice, seed=seed)

    def read(sentence: str) -> Reading:
        audio = speech.generate(sentence, voice=voice, seed=seed)
        return Reading(np.asarray(audio.samples, np.float32), audio.sample_rate, audio.finish_reason == "stop")

    return read


def against_teacher(result: Score, teacher: dict[str, Any]) -> dict[str, Any]:
    """The row of benchmarks/results/speech-builtin.json for `result`, beside the stored figures of its teacher."""
    count = result.sentences
    durations = teacher["durations_s"][:count]
    ratios = [mine / theirs for mine, theirs in zip(result.durations_s, durations, strict=True)]
    sentences = [words_of(sentence) for sentence in read_harvard()[:count]]
    return {
        "voice": result.voice,
        "sentences": count,
        "wer": result.wer,
        "teacher_wer": round(jiwer.wer(sentences, teacher["heard"][:count]), 4),
        "closed_set_correct": result.closed_set_correct,
        "stopped": result.stopped,
        "duration_within_25pct": sum(abs(ratio - 1) <= _DURATION_TOLERANCE for ratio in ratios),
        "rtf_cpu": round(result.wall_s / sum(result.durations_s), 3),
    }


def processor() -> str:
    """What this machine calls its processor."""
    listing = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:\s*(.+)$", listing.read_text("utf-8"), re.M) if listing.exists() else []
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """The commit of the checkout this file lies in, marked `-dirty` when files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    return subprocess.run(command, cwd=TEACHER.parent, check=True, capture_output=True, text=True).stdout.strip()


def setting(model: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The top level of a results file, rows left out. The model speaks on the CPU: no graph, no driver, float32."""
    return {
        "bench": "speech",
        "model": model,
        "arm": "eager",
        "cpu": processor(),
        "driver": None,
        "torch": torch.__version__,
        "dtype": "float32",
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "settings": settings | {"threads": torch.get_num_threads()},
    }


def judge_teacher(options: argparse.Namespace, sentences: list[str], recogniser: Recogniser) -> dict[str, Any]:
    """Flite's own figures in each of the voices, with what was heard and how long each reading was."""
    rows = []
    for name in options.voices.split(","):
        row = asdict(score(name, teacher_reader(Flite(options.libraries), name), sentences, recogniser))
        row["wer_first_20"] = round(
            jiwer.wer([words_of(sentence) for sentence in sentences[:20]], row["heard"][:20]), 4
        )
        rows.append(row)
        print(json.dumps({key: value for key, value in row.items() if not isinstance(value, list)}), flush=True)
    settings = {"voices": options.voices, "sentences": options.sentences}
    return {"bench": "speech", "model": "teacher", "settings": settings, "rows": rows}


def judge_model(options: argparse.Namespace, sentences: list[str], recogniser: Recogniser) -> dict[str, Any]:
    """The figures of a model's voices on the CPU, beside the stored ones of their teachers."""
    teachers = {row["voice"]: row for row in json.loads(TEACHER.read_text("utf-8"))["rows"]}
    speech = TTS(model=options.model, device="cpu", dtype="float32")
    settings = {"voices": options.voices, "sentences": options.sentences, "seed": options.seed}
    # Before the minutes of reading, in which a commit may come.
    report = setting(speech.spec.name, settings)
    rows = []
    for name, _, teacher in (pair.partition("=") for pair in options.voices.split(",")):
        result = score(name, model_reader(speech, name, options.seed), sentences, recogniser)
        rows.append(against_teacher(result, teachers[teacher or name]))
        print(json.dumps(rows[-1]), flush=True)
    return report | {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--model", help="what to judge: builtin, or a checkpoint folder")
    subject.add_argument("--teacher", action="store_true", help="judge Flite itself")
    parser.add_argument(
        "--voices", default=",".join(VOICES), help="voices to judge; NAME=TEACHER where the names differ"
    )
    parser.add_argument("--sentences", type=int, default=100, help="the first so many Harvard sentences, 100 at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--libraries", type=Path, help="folder of libflite*.so.1, for --teacher")
    parser.add_argument("--output", type=Path, help=f"JSON to write; with --teacher {TEACHER.name} where left out")
    options = parser.parse_args()
    if not 1 <= options.sentences <= 100:
        parser.error(f"--sentences: {options.sentences} is not allowed; 1 to 100")
    sentences = read_harvard()[: options.sentences]
    # The closed set is always the hundred, however many of them are read.
    recogniser = Recogniser(read_harvard()[:100])
    judge = judge_teacher if options.teacher else judge_model
    report = judge(options, sentences, recogniser)
    output = options.output or (TEACHER if options.teacher else None)
    if output:
        # One line for figures with long lists in them, legible lines for the few of a results file.
        layout: dict[str, Any] = {"separators": (",", ":")} if options.teacher else {"indent": 2}
        output.write_text(json.dumps(report, **layout) + "\n", "utf-8")
    if not options.teacher:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
