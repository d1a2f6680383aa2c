"""Judge a voice by ear of a machine: texts read aloud, and recognised offline with pocketsphinx.

sentences  a hundred Harvard sentences in each voice: word error rate, which of the hundred it was, ends, lengths
paths      the same sentences on every path through the engine: alone, streamed, in a batch, with text that streams
mixed      a thousand texts of every kind, spread over the voices: none may be cut, none may run away
speed      on two cores, in a process of its own: wall time over audio time, and time to the first packet

All beside the teacher, whose own figures come from `--teacher` and are kept in a file.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import sonoro
from builtin_voice import settings
from builtin_voice.flite import SAMPLE_RATE, VOICES, Flite
from builtin_voice.mixed import is_runaway, is_short, mixed_texts
from builtin_voice.readings import Ears, Job, Journal, Reading, Spoken
from builtin_voice.recogniser import CLOSED_SET, listen
from builtin_voice.text import read_harvard
from builtin_voice.word_errors import word_error_rate
from sonoro import TTS, api
from sonoro.api import Audio, AudioPiece
from sonoro.core.config import EngineConfig
from sonoro.core.machine import commit_of_checkout, gpu_driver, processor, usable_cores
from sonoro.core.normalize import normalize_english

TEACHER = Path(__file__).with_name("teacher.json")
SECTIONS = ("sentences", "paths", "mixed", "speed")
BATCH = 16
_DURATION_TOLERANCE = 0.25


@dataclass(frozen=True, slots=True)
class Subject:
    """What is judged: `voices` of `speech` by name, with those of Flite that taught them, and `seed` of the first
    sentence. `reader` names the weights, where they run and `sampling`, what is not the checkpoint's own of it."""

    speech: TTS
    reader: str
    voices: dict[str, str]
    seed: int
    sampling: dict[str, float]

    def jobs(self, path: str, voice: str, texts: list[str], *, is_sentence: bool) -> list[Job]:
        """The texts on one path, each with a seed of its own."""
        return [Job(self.reader, path, voice, self.seed + index, text, is_sentence) for index, text in enumerate(texts)]

    def request(self, job: Job) -> dict[str, Any]:
        return {"text": job.text, "voice": job.voice, "seed": job.seed} | self.sampling


def _whole(audio: Audio) -> Spoken:
    return Spoken(audio.samples, audio.sample_rate, audio.finish_reason)


def _alone(subject: Subject, jobs: list[Job]) -> Iterator[Spoken]:
    for job in jobs:
        yield _whole(subject.speech.generate(**subject.request(job)))


def _streamed(subject: Subject, jobs: list[Job]) -> Iterator[Spoken]:
    for job in jobs:
        pieces: list[AudioPiece] = []
        finished = api.listen(subject.speech.stream(**subject.request(job)), pieces.append)
        yield Spoken(np.concatenate([piece.samples for piece in pieces]), pieces[0].sample_rate, finished.reason)


def _together(subject: Subject, jobs: list[Job], **options: bool) -> Iterator[Spoken]:
    # Twice as many as run at once: short texts make room for the next.
    for first in range(0, len(jobs), 2 * BATCH):
        items = [subject.request(job) | options for job in jobs[first : first + 2 * BATCH]]
        yield from map(_whole, subject.speech.generate_batch(items))


PATHS = {
    "alone": _alone,
    "streamed": _streamed,
    "batch": _together,
    "streaming text": partial(_together, non_streaming_mode=False),
}


def judge_sentences(subject: Subject, count: int, ears: Ears, path: str = "batch") -> list[dict[str, Any]]:
    """The row of each voice beside the stored figures of its teacher, read in a batch unless told otherwise."""
    teachers = {row["voice"]: row for row in json.loads(TEACHER.read_text("utf-8"))["rows"]}
    sentences = read_harvard()[:count]
    rows = []
    for voice, taught_by in subject.voices.items():
        jobs = subject.jobs(path, voice, sentences, is_sentence=True)
        readings = ears.read(jobs, partial(PATHS[path], subject), f"{voice}, {path}")
        teacher = teachers[taught_by]
        ratios = [
            mine.duration_s / theirs for mine, theirs in zip(readings, teacher["durations_s"][:count], strict=True)
        ]
        rows.append(
            {
                "voice": voice,
                "teacher": taught_by,
                **figures(sentences, readings),
                "teacher_wer": round(word_error_rate(sentences, teacher["heard"][:count]), 4),
                "duration_within_25pct": sum(abs(ratio - 1) <= _DURATION_TOLERANCE for ratio in ratios),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def figures(sentences: list[str], readings: list[Reading]) -> dict[str, Any]:
    """What was heard of `sentences`, the first so many of the closed set."""
    return {
        "sentences": len(sentences),
        "wer": round(word_error_rate(sentences, [reading.heard.words or "" for reading in readings]), 4),
        "closed_set_correct": sum(reading.heard.choice == index for index, reading in enumerate(readings)),
        "stopped": sum(reading.reason == "stop" for reading in readings),
    }


def judge_paths(subject: Subject, count: int, ears: Ears) -> dict[str, Any]:
    """Word error rate on every path, of all voices together, and how many points lie between the best and the worst."""
    paths = {}
    for path in PATHS:
        rows = judge_sentences(subject, count, ears, path)
        rate = sum(row["wer"] for row in rows) / len(rows)
        paths[path] = {"wer": round(rate, 4), "stopped": sum(row["stopped"] for row in rows)}
    rates = [path["wer"] for path in paths.values()]
    return {"sentences": count * len(subject.voices), "spread": round(max(rates) - min(rates), 4), **paths}


def judge_mixed(subject: Subject, count: int, ears: Ears) -> dict[str, Any]:
    """Those of the first `count` mixed texts that a voice of `subject` is given, by length and by ear."""
    texts, teacher = mixed_texts()[:count], json.loads(TEACHER.read_text("utf-8"))["mixed"]
    if teacher["texts"] != digest(mixed_texts()):
        raise ValueError(f"{TEACHER.name}: its mixed texts are others; make it anew with --teacher")
    taught = {flite: voice for voice, flite in subject.voices.items()}
    chosen = [index for index in range(len(texts)) if VOICES[index % len(VOICES)] in taught]
    jobs = [
        Job(subject.reader, "batch", taught[VOICES[index % len(VOICES)]], subject.seed + index, texts[index], False)
        for index in chosen
    ]
    readings = ears.read(jobs, partial(_together, subject), "mixed")
    ratios, cut, runaway, unheard = [], [], [], []
    for index, reading in zip(chosen, readings, strict=True):
        length_s = teacher["durations_s"][index]
        ratios.append(reading.duration_s / length_s)
        if reading.heard.missing:
            unheard.append(texts[index])
        if is_short(reading.duration_s, length_s) or reading.heard.is_cut:
            cut.append(texts[index])
        if is_runaway(reading.duration_s, length_s) or reading.reason != "stop":
            runaway.append(texts[index])
    return {
        "texts": len(chosen),
        "stopped": sum(reading.reason == "stop" for reading in readings),
        "runaway": runaway,
        "cut": cut,
        "end_not_heard": unheard,
        "duration_ratio_min": round(min(ratios), 3),
        "duration_ratio_max": round(max(ratios), 3),
    }


def measure_speed(options: argparse.Namespace, subject: Subject) -> list[dict[str, Any]]:
    """`rtf_cpu` and `ttfp_cpu_ms` of each voice, measured in a process that does nothing else."""
    voices = ",".join(subject.voices)
    command = [sys.executable, "-m", "builtin_voice.speed", "--model", options.model, "--voices", voices]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    rows: list[dict[str, Any]] = json.loads(answer.stdout.splitlines()[-1])
    return rows


def digest(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def fingerprint(model: str) -> str:
    """What tells this checkpoint from any other: a hash of all its files."""
    folder = Path(sonoro.__file__).parent / "voices" / "builtin" if model == "builtin" else Path(model)
    weights = sorted(folder.rglob("*.safetensors")) + sorted(folder.rglob("*.json"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in weights)).hexdigest()[:16]


def teacher_reader(libraries: Path | None, jobs: list[Job]) -> Iterator[Spoken]:
    """Flite reading as it does for training: text written out, ends trimmed, loudness evened."""
    flite = Flite(libraries)
    for job in jobs:
        samples = flite.speak(normalize_english(job.text, lowercase=True).text, job.voice).samples
        yield Spoken(samples.astype(np.float32) / 32768, SAMPLE_RATE, "stop")


def judge_teacher(libraries: Path | None, ears: Ears) -> dict[str, Any]:
    """Flite's own figures in each of its voices, with what was heard and how long each reading was."""
    sentences, texts, rows = read_harvard()[:CLOSED_SET], mixed_texts(), []
    reader = partial(teacher_reader, libraries)
    for voice in VOICES:
        readings = ears.read([Job("flite", "alone", voice, 0, text, True) for text in sentences], reader, voice)
        row = {
            "voice": voice,
            **figures(sentences, readings),
            "wer_first_20": round(word_error_rate(sentences[:20], [r.heard.words or "" for r in readings[:20]]), 4),
        }
        print(json.dumps(row), flush=True)
        lists = {"durations_s": [r.duration_s for r in readings], "heard": [r.heard.words or "" for r in readings]}
        rows.append(row | lists)
    jobs = [Job("flite", "alone", VOICES[i % len(VOICES)], 0, text, False) for i, text in enumerate(texts)]
    readings = ears.read(jobs, reader, "mixed")
    mixed = {
        "texts": digest(texts),
        "durations_s": [reading.duration_s for reading in readings],
        # None: told the text, the recogniser hears the end of every one.
        "end_not_heard": [text for text, reading in zip(texts, readings, strict=True) if reading.heard.missing],
    }
    return {"bench": "speech", "model": "teacher", "rows": rows, "mixed": mixed}


def judge_model(options: argparse.Namespace, ears: Ears) -> dict[str, Any]:
    """The sections asked for, over those that the output already has of the same checkpoint; written after each."""
    report = header(options)
    kept = json.loads(options.output.read_text("utf-8")) if options.output and options.output.exists() else {}
    if kept.get("checkpoint") == report["checkpoint"]:
        report |= {name: kept[name] for name in ("rows", "paths", "mixed") if name in kept}
    subject = load(options, report["checkpoint"])
    rows = {row["voice"]: row for row in report.get("rows", [])}
    for section in options.sections:
        if section == "paths":
            report["paths"] = judge_paths(subject, options.sentences, ears)
        elif section == "mixed":
            report["mixed"] = judge_mixed(subject, options.texts, ears)
        else:
            is_read = section == "sentences"
            found = judge_sentences(subject, options.sentences, ears) if is_read else measure_speed(options, subject)
            rows |= {row["voice"]: rows.get(row["voice"], {}) | row for row in found}
        report["rows"] = list(rows.values())
        write(report, options.output, indent=2)
    return report


def load(options: argparse.Namespace, checkpoint: str) -> Subject:
    """The model with those of its voices that were asked for. Raises `ValueError` for a voice nobody taught."""
    speech = TTS(model=options.model, device=options.device, dtype=options.dtype, config=EngineConfig(slots=BATCH))
    teachers = settings.taught_by()
    wanted = options.voices or speech.voices
    unknown = [voice for voice in wanted if voice not in teachers or voice not in speech.voices]
    if unknown:
        known = ", ".join(voice for voice in speech.voices if voice in teachers)
        raise ValueError(f"voices: {', '.join(unknown)} cannot be judged; of this model: {known}")
    reader = " ".join([checkpoint, options.device, options.dtype or "", *options.sampling]).strip()
    sampling = {name: float(value) for name, value in (pair.split("=") for pair in options.sampling)}
    return Subject(speech, reader, {voice: teachers[voice] for voice in wanted}, options.seed, sampling)


def header(options: argparse.Namespace) -> dict[str, Any]:
    """The top level of a results file, sections left out; before the minutes of reading, in which a commit may come."""
    is_gpu = options.device.startswith("cuda")
    return {
        "bench": "speech",
        "model": "builtin",
        "checkpoint": fingerprint(options.model),
        "arm": "graph" if is_gpu else "eager",
        **({"gpu": torch.cuda.get_device_name()} if is_gpu else {"cpu": processor()}),
        "driver": gpu_driver(),
        "torch": torch.__version__,
        "dtype": options.dtype or ("bfloat16" if is_gpu else "float32"),
        "commit": commit_of_checkout(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "settings": {name: getattr(options, name) for name in ("sentences", "texts", "seed", "sampling")},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--model", help="what to judge: builtin, or a checkpoint folder")
    subject.add_argument("--teacher", action="store_true", help=f"judge Flite itself, into {TEACHER.name}")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument(
        "--voices", nargs="+", choices=sorted(settings.taught_by()), help="all of the model's if left out"
    )
    parser.add_argument("--sentences", type=int, default=CLOSED_SET, help="the first so many of a hundred")
    parser.add_argument("--texts", type=int, default=len(mixed_texts()), help="the first so many mixed texts")
    parser.add_argument("--seed", type=int, default=0, help="of the first text; the others count on from there")
    parser.add_argument(
        "--sampling", nargs="+", default=[], metavar="NAME=VALUE", help="in place of the checkpoint's own"
    )
    parser.add_argument("--device", default="cpu", help="where the model runs, cpu unless given")
    parser.add_argument("--dtype", help="float32 or bfloat16; what suits the device if left out")
    parser.add_argument("--processes", type=int, default=max(1, usable_cores() - 1), help="recognisers at once")
    parser.add_argument("--journal", type=Path, help="file of readings; an interrupted run goes on from it")
    parser.add_argument("--libraries", type=Path, help="folder of libflite*.so.1, for --teacher")
    parser.add_argument("--output", type=Path, help="JSON to write; sections that are not run anew are kept")
    options = parser.parse_args()
    for name, most in (("sentences", CLOSED_SET), ("texts", len(mixed_texts()))):
        if not 1 <= getattr(options, name) <= most:
            parser.error(f"--{name}: {getattr(options, name)} is not allowed; 1 to {most}")
    return options


def write(report: dict[str, Any], output: Path | None, **layout: Any) -> None:
    if output is not None:
        # An interrupted run reads it again.
        unfinished = output.with_suffix(".partial")
        unfinished.write_text(json.dumps(report, **layout) + "\n", "utf-8")
        unfinished.replace(output)


def main() -> None:
    options = _options()
    with Ears(options.processes, Journal(options.journal), listen) as ears:
        if options.teacher:
            # One line: most of it is long lists.
            write(judge_teacher(options.libraries, ears), options.output or TEACHER, separators=(",", ":"))
        else:
            print(json.dumps(judge_model(options, ears)))


if __name__ == "__main__":
    main()
