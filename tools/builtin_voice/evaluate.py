"""Evaluate a voice: word errors by Moonshine, quality by DNSMOS, endings by pocketsphinx with the known text.

sentences  a hundred Harvard sentences (sound) and two hundred everyday ones (words) in each voice
words      common words that small voices garble, each in a carrier sentence, in each voice
mixed      a thousand texts of every kind, spread over the voices: none cut, none run away, nothing invented at an end
paths      everyday sentences on every path through the engine: alone, streamed, in a batch, with text that streams
speed      on two cores, in a process of its own: wall time over audio time, time to the first packet, memory

All beside the teacher, whose own figures come from `--teacher` and are kept in a file.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import lzma
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch

import sonoro
from builtin_voice import settings
from builtin_voice.judged import JUDGED_HARVARD, read_carriers, read_everyday, read_harvard
from builtin_voice.judges import INVENTED_WORDS, JUDGE, high_band_db, listen
from builtin_voice.kokoro.teacher import ACCENTS, Teacher
from builtin_voice.mixed import is_runaway, is_short, judged_texts, mixed_texts, pieces_of
from builtin_voice.readings import Ears, Heard, Job, Journal, Scored, Spoken
from builtin_voice.word_errors import word_error_rate
from sonoro import TTS, api
from sonoro.api import Audio, AudioPiece
from sonoro.bench.machine import commit_of_checkout, gpu_driver, processor
from sonoro.core.config import EngineConfig, usable_cores

TEACHER = Path(__file__).with_name("teacher.json")
SECTIONS = ("sentences", "words", "mixed", "paths", "speed")
ROW = ["voice", "teacher", "sentences", "wer", "teacher_wer", "p808", "teacher_p808", "ovrl", "teacher_ovrl"]
ROW += ["cut", "runaway", "invented", "rtf", "first_packet_ms", "high_band_db", "judge"]
"""What a whole row says of a voice, in this order: words of the everyday sentences, sound of the Harvard ones."""
BATCH = 16
TEACHERS_HZ = 24_000
_TEACHER_BATCH = 256
_KEPT = ("rows", "words", "mixed", "paths", "harvard", "teacher_sentences", "memory_mb")
_LENGTH_TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Subject:
    """The voices to evaluate: `voices` of `speech` by name with their teachers', and `seed` of the first text. `reader`
    names the weights, where they run and `sampling`, what is not the checkpoint's own of it."""

    speech: TTS
    reader: str
    voices: dict[str, str]
    seed: int
    sampling: dict[str, float]

    def jobs(self, path: str, voice: str, texts: list[str], scored: Scored = Scored.NOT) -> list[Job]:
        """The texts on one path, each with a seed of its own."""
        return [Job(self.reader, path, voice, self.seed + index, text, scored) for index, text in enumerate(texts)]

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


def read_sentences(count: int) -> list[str]:
    """The first `count` of the judged Harvard sentences, and twice as many everyday ones."""
    return read_harvard()[:count] + read_everyday()[: 2 * count]


def scored_first(count: int, jobs: list[Job]) -> list[Job]:
    """`jobs`, of which the first `count` get all quality scores."""
    return [replace(job, scored=Scored.ALL) for job in jobs[:count]] + jobs[count:]


def figures(sentences: list[str], heard: list[Heard]) -> dict[str, Any]:
    """Word errors of the everyday sentences, the last two thirds; quality scores of the Harvard ones before them."""
    harvard = len(sentences) // 3
    return {
        "wer": round(word_error_rate(sentences[harvard:], [ear.words for ear in heard[harvard:]]), 4),
        "harvard_wer": round(word_error_rate(sentences[:harvard], [ear.words for ear in heard[:harvard]]), 4),
        "p808": round(float(np.mean([ear.p808 for ear in heard[:harvard]])), 3),
        "ovrl": round(float(np.mean([ear.ovrl for ear in heard[:harvard]])), 3),
        "high_band_db": round(high_band_db([ear.highs or 0.0 for ear in heard[:harvard]]), 2),
    }


def teachers_figures(teacher: dict[str, Any], count: int) -> dict[str, dict[str, Any]]:
    """By voice, the `figures` of the teacher's own readings of `read_sentences(count)`, or of as many of them as it has
    read, `teachers_sentences(teacher, count)`."""
    count = teachers_sentences(teacher, count)
    rows = {row["voice"]: row["harvard"][:count] + row["everyday"][: 2 * count] for row in teacher["rows"]}
    return {voice: figures(read_sentences(count), [Heard(**ear) for ear in row]) for voice, row in rows.items()}


def teachers_sentences(teacher: dict[str, Any], count: int) -> int:
    """For how many of the first `count` Harvard sentences and twice as many everyday ones there is the teacher."""
    read = [min(len(row["harvard"]), len(row["everyday"]) // 2) for row in teacher["rows"]]
    return min([count, *read])


def judge_sentences(subject: Subject, teacher: dict[str, Any], count: int, ears: Ears) -> list[dict[str, Any]]:
    """The row of each voice beside its teacher's figures, of `count` Harvard and twice as many everyday sentences."""
    sentences, teachers, rows = read_sentences(count), teachers_figures(teacher, count), []
    for voice, taught_by in subject.voices.items():
        jobs = scored_first(count, subject.jobs("batch", voice, sentences))
        readings = ears.read(jobs, partial(_together, subject), f"{voice}, sentences")
        found, theirs = figures(sentences, [reading.heard for reading in readings]), teachers[taught_by]
        rows.append(
            {
                "voice": voice,
                "teacher": taught_by,
                "sentences": len(sentences),
                **{name: found[name] for name in ("wer", "p808", "ovrl", "harvard_wer")},
                **{f"teacher_{name}": theirs[name] for name in ("wer", "p808", "ovrl")},
                "high_band_db": round(found["high_band_db"] - theirs["high_band_db"], 2),
                "judge": JUDGE,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def wrong_words(heard: list[Heard]) -> list[str]:
    """Words of carrier sentences that were misheard; homophones count as one word."""
    return [carrier.word for carrier, ear in zip(read_carriers(), heard, strict=True) if not carrier.is_in(ear.words)]


def judge_words(subject: Subject, ears: Ears) -> dict[str, Any]:
    """Share of the words in carrier sentences that each voice says right, and the others."""
    sentences, found = [carrier.sentence for carrier in read_carriers()], {}
    for voice in subject.voices:
        readings = ears.read(subject.jobs("batch", voice, sentences), partial(_together, subject), f"{voice}, words")
        wrong = wrong_words([reading.heard for reading in readings])
        found[voice] = {"right": round(1 - len(wrong) / len(sentences), 4), "wrong": wrong}
    return {"words": len(sentences), **found}


def judge_mixed(subject: Subject, teacher: dict[str, Any], count: int, ears: Ears) -> dict[str, Any]:
    """Those of the first `count` mixed texts that a voice of `subject` is given, by length and by ear; `by_voice` says
    how many of each are wrong. What is heard so of the teacher's own reading as well is the ear's mistake."""
    if count > len(teacher["durations_s"]):
        raise ValueError(f"--texts: {count} is not allowed; the teacher has read {len(teacher['durations_s'])}")
    texts, voices = mixed_texts()[:count], list(settings.voices())
    chosen = [index for index in range(len(texts)) if voices[index % len(voices)] in subject.voices]
    jobs = [
        Job(subject.reader, "batch", voices[index % len(voices)], subject.seed + index, texts[index], Scored.NOT)
        for index in chosen
    ]
    readings = ears.read(jobs, partial(_together, subject), "mixed")
    wrong: dict[str, list[int]] = {"cut": [], "runaway": [], "invented": []}
    for index, reading in zip(chosen, readings, strict=True):
        length_s = teacher["durations_s"][index]
        if is_short(reading.duration_s, length_s) or (reading.heard.missing and index not in teacher["missing"]):
            wrong["cut"].append(index)
        if is_runaway(reading.duration_s, length_s) or reading.reason != "stop":
            wrong["runaway"].append(index)
        if reading.heard.extra >= INVENTED_WORDS and index not in teacher["extra"]:
            wrong["invented"].append(index)
    pairs = zip(chosen, readings, strict=True)
    ratios = [reading.duration_s / teacher["durations_s"][index] for index, reading in pairs]
    by_voice = {
        voice: {name: sum(voices[index % len(voices)] == voice for index in found) for name, found in wrong.items()}
        for voice in subject.voices
    }
    return {
        "texts": len(chosen),
        "stopped": sum(reading.reason == "stop" for reading in readings),
        **{name: [texts[index] for index in found] for name, found in wrong.items()},
        "length_within_15pct": round(float(np.mean([abs(ratio - 1) <= _LENGTH_TOLERANCE for ratio in ratios])), 4),
        "length_ratio_mean": round(float(np.mean(ratios)), 3),
        "by_voice": by_voice,
    }


def judge_paths(subject: Subject, count: int, ears: Ears) -> dict[str, Any]:
    """Word errors and P.808 on every path, of all voices together, of `count` everyday sentences, and how far the best
    and the worst are apart."""
    texts, paths = read_everyday()[:count], {}
    for path, reader in PATHS.items():
        read = [
            reading
            for voice in subject.voices
            for reading in ears.read(
                subject.jobs(path, voice, texts, Scored.P808), partial(reader, subject), f"{voice}, {path}"
            )
        ]
        paths[path] = {
            "wer": round(word_error_rate(texts * len(subject.voices), [reading.heard.words for reading in read]), 4),
            "p808": round(float(np.mean([reading.heard.p808 for reading in read])), 3),
            "stopped": sum(reading.reason == "stop" for reading in read),
        }
    spread = {
        f"{name}_spread": round(
            max(path[name] for path in paths.values()) - min(path[name] for path in paths.values()), 4
        )
        for name in ("wer", "p808")
    }
    return {"sentences": count * len(subject.voices), **spread, **paths}


def measure_speed(options: argparse.Namespace, subject: Subject) -> dict[str, Any]:
    """What `builtin_voice.speed` measures, in a process that does nothing else."""
    voices = ",".join(subject.voices)
    command = [sys.executable, "-m", "builtin_voice.speed", "--model", options.model, "--voices", voices]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def digest(texts: list[str]) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def fingerprint(model: str) -> str:
    """A hash of all files of the checkpoint."""
    folder = Path(sonoro.__file__).parent / "builtin_voice" if model == "builtin" else Path(model)
    weights = sorted(folder.rglob("*.safetensors")) + sorted(folder.rglob("*.json"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in weights)).hexdigest()[:16]


def read_phonemes(path: Path) -> dict[str, list[dict[str, str]]]:
    """By judged text, of each of its pieces the phonemes in each accent: what `builtin_voice.phonemize` made of what
    `builtin_voice.mixed` wrote."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        rows = {row["row"]: row for row in map(json.loads, file)}
    numbers = count()
    numbered = {text: [next(numbers) for _ in pieces_of(text)] for text in judged_texts()}
    if missing := [text for text, pieces in numbered.items() if not rows.keys() >= set(pieces)]:
        raise ValueError(f"{path}: {len(missing)} of the judged texts are not in it: {missing[:3]}")
    return {text: [rows[piece] for piece in pieces] for text, pieces in numbered.items()}


def teacher_reader(teacher: Teacher, phonemes: dict[str, list[dict[str, str]]], jobs: list[Job]) -> Iterator[Spoken]:
    """The teacher reading as it does for training, the pieces of a text one after the other."""
    for first in range(0, len(jobs), _TEACHER_BATCH):
        batch = jobs[first : first + _TEACHER_BATCH]
        lines = [(at, piece[ACCENTS[job.voice]]) for at, job in enumerate(batch) for piece in phonemes[job.text]]
        spoken = teacher.synthesize([line for _, line in lines], [batch[at].voice for at, _ in lines])
        for at in range(len(batch)):
            samples = [part.samples for (of, _), part in zip(lines, spoken, strict=True) if of == at]
            yield Spoken(np.concatenate(samples).astype(np.float32) / 32768, TEACHERS_HZ, "stop")


def kept(reader: Any, folder: Path | None, jobs: list[Job]) -> Iterator[Spoken]:
    """What `reader` speaks, or has spoken into a file of `folder` before, if there is one."""
    if folder is None:
        yield from reader(jobs)
        return
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{job.voice}-{digest([job.text])}.flac" for job in jobs]
    missing = [(path, job) for path, job in zip(paths, jobs, strict=True) if not path.exists()]
    for (path, _), spoken in zip(missing, reader([job for _, job in missing]), strict=True):
        soundfile.write(path, spoken.samples, spoken.sample_rate)
    for path in paths:
        samples, sample_rate = soundfile.read(path, dtype="float32")
        yield Spoken(samples, sample_rate, "stop")


def judge_teacher(options: argparse.Namespace, ears: Ears) -> dict[str, Any]:
    """What was heard of the teacher in each of its voices, and how long each mixed text is in the voice that reads it.
    Mixed texts are spoken and heard if that section is asked for; else their lengths are what the model foretells."""
    teacher, phonemes = Teacher.load(options.weights, options.device), read_phonemes(options.phonemes)
    reader = partial(kept, partial(teacher_reader, teacher, phonemes), options.audio)
    sentences, voices = read_sentences(options.sentences), list(settings.voices().values())
    rows = []
    for voice in voices:
        jobs = scored_first(
            options.sentences, [Job("kokoro", "batch", voice, 0, text, Scored.NOT) for text in sentences]
        )
        heard = [asdict(reading.heard) for reading in ears.read(jobs, reader, f"{voice}, sentences")]
        rows.append({"voice": voice, "harvard": heard[: options.sentences], "everyday": heard[options.sentences :]})
    texts = mixed_texts()[: options.texts]
    jobs = [Job("kokoro", "batch", voices[at % len(voices)], 0, text, Scored.NOT) for at, text in enumerate(texts)]
    if "mixed" in options.sections:
        readings = ears.read(jobs, reader, "mixed")
        durations_s = [reading.duration_s for reading in readings]
        missing = [at for at, reading in enumerate(readings) if reading.heard.missing]
        extra = [at for at, reading in enumerate(readings) if reading.heard.extra >= INVENTED_WORDS]
    else:
        durations_s, missing, extra = foretold_s(teacher, phonemes, jobs), [], []
    mixed = {"durations_s": durations_s, "missing": missing, "extra": extra}
    return {"bench": "speech", "model": "teacher", "judge": JUDGE, "texts": digest(judged_texts()), "rows": rows} | {
        "mixed": mixed
    }


def foretold_s(teacher: Teacher, phonemes: dict[str, list[dict[str, str]]], jobs: list[Job]) -> list[float]:
    """Predicted durations of the teacher's readings, in seconds."""
    lines = [(at, job.voice, piece) for at, job in enumerate(jobs) for piece in phonemes[job.text]]
    found = [0.0] * len(jobs)
    for first in range(0, len(lines), _TEACHER_BATCH):
        batch = lines[first : first + _TEACHER_BATCH]
        seconds = teacher.foretell_s([piece[ACCENTS[voice]] for _, voice, piece in batch], [v for _, v, _ in batch])
        for (at, _, _), length_s in zip(batch, seconds, strict=True):
            found[at] = round(found[at] + length_s, 3)
    return found


def read_teacher() -> dict[str, Any]:
    """The stored figures of the teacher. Raises `ValueError` if they are of other texts or judges."""
    teacher: dict[str, Any] = json.loads(TEACHER.read_text("utf-8"))
    if (teacher.get("texts"), teacher.get("judge")) != (digest(judged_texts()), JUDGE):
        raise ValueError(f"{TEACHER.name}: its texts or judges are others; make it anew with --teacher")
    return teacher


def judge_model(options: argparse.Namespace, ears: Ears) -> dict[str, Any]:
    """The sections asked for, over those that the output already has of the same checkpoint; written after each."""
    report = header(options)
    had = json.loads(options.output.read_text("utf-8")) if options.output and options.output.exists() else {}
    if had.get("checkpoint") == report["checkpoint"]:
        report |= {name: had[name] for name in _KEPT if name in had}
    subject, teacher = load(options, report["checkpoint"]), read_teacher()
    rows = {row["voice"]: row for row in report.get("rows", [])}
    for section in options.sections:
        found: list[dict[str, Any]] = []
        if section == "sentences":
            found = judge_sentences(subject, teacher, options.sentences, ears)
            report["harvard"] = {row["voice"]: row.pop("harvard_wer") for row in found}
            report["teacher_sentences"] = 3 * teachers_sentences(teacher, options.sentences)
        elif section == "words":
            report["words"] = judge_words(subject, ears)
        elif section == "mixed":
            report["mixed"] = judge_mixed(subject, teacher["mixed"], options.texts, ears)
            found = [{"voice": voice, **counts} for voice, counts in report["mixed"]["by_voice"].items()]
        elif section == "paths":
            report["paths"] = judge_paths(subject, options.sentences, ears)
        else:
            speed = measure_speed(options, subject)
            found, report["memory_mb"] = speed["rows"], speed["memory_mb"]
        rows |= {row["voice"]: rows.get(row["voice"], {}) | row for row in found}
        report["rows"] = [{name: row[name] for name in ROW if name in row} for row in rows.values()]
        write(report, options.output, indent=2)
    return report


def load(options: argparse.Namespace, checkpoint: str) -> Subject:
    """The model with those of its voices that were asked for. Raises `ValueError` for a voice nobody taught."""
    speech = TTS(model=options.model, device=options.device, dtype=options.dtype, config=EngineConfig(slots=BATCH))
    teachers = settings.voices()
    wanted = options.voices or [voice for voice in speech.voices if voice in teachers]
    unknown = [voice for voice in wanted if voice not in teachers or voice not in speech.voices]
    if unknown or not wanted:
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
        "judge": JUDGE,
        "settings": {name: getattr(options, name) for name in ("sentences", "texts", "seed", "sampling")},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    subject = parser.add_mutually_exclusive_group(required=True)
    subject.add_argument("--model", help="what to judge: builtin, or a checkpoint folder")
    subject.add_argument("--teacher", action="store_true", help=f"judge the teacher itself, into {TEACHER.name}")
    parser.add_argument("--judges", type=Path, required=True, help="the folder that prepare_judges.sh filled")
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--voices", nargs="+", choices=sorted(settings.voices()), help="all of the model's if left out")
    parser.add_argument("--sentences", type=int, default=JUDGED_HARVARD, help="so many Harvard, twice as many everyday")
    parser.add_argument("--texts", type=int, default=len(mixed_texts()), help="the first so many mixed texts")
    parser.add_argument("--seed", type=int, default=0, help="of the first text; the others count on from there")
    parser.add_argument(
        "--sampling", nargs="+", default=[], metavar="NAME=VALUE", help="in place of the checkpoint's own"
    )
    parser.add_argument("--device", default="cpu", help="where the model runs, cpu unless given")
    parser.add_argument("--dtype", help="float32 or bfloat16; what suits the device if left out")
    parser.add_argument("--processes", type=int, default=max(1, usable_cores() - 1), help="judges at once")
    parser.add_argument("--journal", type=Path, help="file of readings; an interrupted run goes on from it")
    parser.add_argument("--weights", type=Path, help="of the teacher, as kokoro.prepare writes them; for --teacher")
    parser.add_argument("--phonemes", type=Path, help="of the judged texts, as phonemize writes them; for --teacher")
    parser.add_argument("--audio", type=Path, help="folder for what the teacher says; for --teacher")
    parser.add_argument("--output", type=Path, help="JSON to write; sections that are not run anew are kept")
    options = parser.parse_args()
    for name, most in (("sentences", JUDGED_HARVARD), ("texts", len(mixed_texts()))):
        if not 1 <= getattr(options, name) <= most:
            parser.error(f"--{name}: {getattr(options, name)} is not allowed; 1 to {most}")
    if options.teacher and not (options.weights and options.phonemes):
        parser.error("--teacher: needs --weights and --phonemes")
    return options


def write(report: dict[str, Any], output: Path | None, **layout: Any) -> None:
    if output is not None:
        # An interrupted run reads it again.
        unfinished = output.with_suffix(".partial")
        unfinished.write_text(json.dumps(report, **layout) + "\n", "utf-8")
        unfinished.replace(output)


def main() -> None:
    options = _options()
    with Ears(options.processes, Journal(options.journal, JUDGE), partial(listen, options.judges)) as ears:
        if options.teacher:
            # One line: most of it is long lists.
            write(judge_teacher(options, ears), options.output or TEACHER, separators=(",", ":"))
        else:
            print(json.dumps(judge_model(options, ears)))


if __name__ == "__main__":
    main()
