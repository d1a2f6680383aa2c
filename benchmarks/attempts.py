"""Faulty readings that remain with two attempts per segment, found by speech recognition and forced alignment.

`python benchmarks/attempts.py speak --first 0 --count 50 --judges FOLDER --raw FILE.jsonl` synthesizes mixed texts with
two attempts in both layouts and recognizes them with Moonshine and pocketsphinx, which
`tools/builtin_voice/prepare_judges.sh` fetches. `--texts SEED` generates other texts of the same kinds.
`report FILE.jsonl ... --out RESULT.json` writes the results. Needs the extra `align`, and `tools` on the path.

A reading is wrong if it has one of six faults; the engine's own fault detection is not used:
- cut: Moonshine misses words at the end of the text, and pocketsphinx, aligned to the text, finds none of them there;
- left out: Moonshine misses two or more consecutive words, and pocketsphinx prefers its transcript to the text;
- added: Moonshine inserts two or more consecutive words, such as a repeated clause, and pocketsphinx prefers them (a
  contraction is one word);
- invented: the same with three or more words around the end of the text;
- stuck: by forced alignment a word, or a pause anywhere, lasts more than a second;
- runaway: it reached its limit, or is longer than 1.5 times the predicted duration of the teacher's reading. Shorter
  than .75 times that counts as cut.
Substituted words are no fault here: `builtin_voice.evaluate` counts those, and single words are often misrecognized (of
30 words in four voices Moonshine recognizes 55 of the teacher's own 120 readings). Spelling is none either: "ceo" is
"C E O" where the text is spelled so, "98,7808" is "98, 7808", and "5551774" is "555-1774". A fault that the judges also
find in the teacher's reading of the same text is theirs; so are words added to a text of one word without time for
them: Moonshine often hears several in one. `speak --teacher WEIGHTS PHONEMES --numbers ...` adds readings by the
teacher, and the report subtracts their faults from those of the voice (`PHONEMES` of the pieces of those texts, by
`builtin_voice.phonemize`).
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from builtin_voice import settings
from builtin_voice.evaluate import teacher_reader
from builtin_voice.hearing import to_judge
from builtin_voice.judges import INVENTED_WORDS, Judges, to_told
from builtin_voice.kokoro.teacher import Teacher
from builtin_voice.mixed import SEED, TEXTS, is_runaway, is_short, mixed_texts, pieces_of
from builtin_voice.readings import Job, Scored
from builtin_voice.word_errors import ending_of, parted, spelled_words, words_of
from sonoro import TTS
from two_steps import Steps, add_lines, finish, read_lines  # type: ignore[import-not-found]
from words import LAYOUTS, Aligner  # type: ignore[import-not-found]

TEACHER = Path(__file__).parent.parent / "tools" / "builtin_voice" / "teacher.json"
VOICES = ("nora", "miles", "edith", "hugh")
BATCH, ATTEMPTS, LEAST_WORDS = 8, 2, 2
LONGEST_S = 1.0
"""Of 780 words of good readings none lasted longer than .72 s, no pause longer than .5; of 25 where one frame was
repeated 12 to 25 times none was within the limit."""
SOUND_DB = 40
"""Sound is within this of the loudest 10 ms of a reading. The aligner counts silence after a word as the word's."""
ADDED_S = 0.2
"""Least duration of two added words. Of 61 single words in four voices and both layouts all readings but four of one
voice, whose ends are soft, last at most .13 s longer than the teacher's."""
_TELEPHONE, _HEARD_TELEPHONE = re.compile(r"\b\d{3}-\d{4}\b"), re.compile(r"\b\d{3}[- ]?\d{3,5}\b")
_NUMBERS = re.compile(r"\d(?:[\d., ]*\d)?")


def spelled_as(words: list[str], others: list[str]) -> list[str]:
    """`others` with each word that `words` spell letter by letter spelled likewise: "usb" as "u s b"."""
    letters = [word == "ay" or len(word) == 1 for word in words]
    spelled = dict[str, list[str]]()
    for begin, end in itertools.combinations(range(len(words) + 1), 2):
        if end - begin > 1 and all(letters[begin:end]):
            spelled["".join(word[0] for word in words[begin:end])] = words[begin:end]
    return [piece for other in others for piece in (spelled.get(other, [other]) if other not in words else [other])]


def grouped_as(text: str, heard: str) -> str:
    """`heard` with its numbers grouped as in `text`: "98,7808" as "98, 7808" where all digits are the same. Where the
    text has a telephone number, which is read digit by digit, so are "5551774" and "555-174"."""
    numbers = _NUMBERS.findall(text)
    if [_joined(number) for number in numbers] == [_joined(number) for number in _NUMBERS.findall(heard)]:
        each = iter(numbers)
        heard = _NUMBERS.sub(lambda _: next(each), heard)
    return (
        _HEARD_TELEPHONE.sub(lambda match: " ".join(re.findall(r"\d", match[0])), heard)
        if _TELEPHONE.search(text)
        else heard
    )


def _joined(number: str) -> str:
    return re.sub("[, ]", "", number)


def runs(words: list[str], others: list[str]) -> tuple[list[str], list[str]]:
    """Deletions and insertions of `LEAST_WORDS` or more consecutive words in the transcript `others` of `words`, net of
    substitutions."""
    missing, added = [], []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, words, others, autojunk=False).get_opcodes():
        if kind != "equal" and (b - a) - (d - c) >= LEAST_WORDS:
            missing.append(" ".join(words[a:b]))
        if kind != "equal" and (d - c) - (b - a) >= LEAST_WORDS:
            added.append(" ".join(others[c:d]))
    return missing, added


def sound_of(samples: np.ndarray, rate: int) -> np.ndarray:
    """The times in seconds at which 10 ms of sound begin."""
    size = rate // 100
    power = np.square(samples[: len(samples) // size * size].reshape(-1, size)).mean(axis=1)
    return np.flatnonzero(power > power.max() * 10 ** (-SOUND_DB / 10)) / 100


def longest_s(aligner: Aligner, text: str, samples: np.ndarray, rate: int) -> float | None:
    """Duration of the longest word or pause by forced alignment; None if the alignment fails. A word ends with its
    sound."""
    found = aligner.align(samples, rate, spelled_words(text))
    if not found:
        return None
    sound, times_s = sound_of(samples, rate), [0.0]
    for begin, end in found:
        inside = sound[(sound >= begin) & (sound < end)]
        times_s += [begin, min(end, float(inside[-1]) + 0.01) if len(inside) else begin]
    times_s.append(len(samples) / rate)
    return round(max(after - before for before, after in itertools.pairwise(times_s)), 2)


def hear(judges: Judges, aligner: Aligner, text: str, samples: np.ndarray, rate: int) -> dict[str, Any]:
    """The judges' findings on one reading. A deletion or insertion by Moonshine counts if pocketsphinx, given both
    word sequences, agrees."""
    audio = to_judge(samples, rate)
    heard, told, words = judges.moonshine.hear(audio), to_told(audio), spelled_words(text)
    others, plain = (
        spelled_as(words, written.split())
        for written in (" ".join(spelled_words(grouped_as(text, heard))), words_of(grouped_as(text, heard)))
    )
    ending, (missing, added) = ending_of(text, " ".join(plain)), runs(words_of(text).split(), plain)
    # A contraction is one word as it is written, and two as its words are compared: what counts is a run in both.
    missing, added = (
        found if written else [] for found, written in zip((missing, added), runs(words, others), strict=True)
    )
    others, sound = parted(others), sound_of(samples, rate)
    return {
        "words": len(words),
        "heard": heard,
        "missing": ending.missing if ending.missing and judges.told.ending(told, text)[1] else 0,
        "extra": ending.extra if ending.extra and judges.told.is_longer(told, text, others) else 0,
        "missing_runs": missing,
        "added_runs": added,
        "is_missing": bool(missing) and bool(others) and not judges.told.is_longer(told, " ".join(others), words),
        "is_added": bool(added) and judges.told.is_longer(told, text, others),
        "longest_s": longest_s(aligner, text, samples, rate),
        "sound_s": round(float(sound[-1] - sound[0]) + 0.01, 2) if len(sound) else 0.0,
    }


def teach(options: argparse.Namespace) -> None:
    """Synthesize the texts `options.numbers` with the teacher, and judge its readings as those of the voice."""
    weights, phonemes = options.teacher
    with lzma.open(phonemes, "rt", encoding="utf-8") as file:
        lines = map(json.loads, file)
        texts = mixed_texts(options.texts)
        pieces = {texts[number]: [next(lines) for _ in pieces_of(texts[number])] for number in options.numbers}
    voices = [number % len(VOICES) for number in options.numbers]
    jobs = [
        Job("kokoro", "batch", settings.voices()[VOICES[voice]], 0, text, Scored.NOT)
        for voice, text in zip(voices, pieces, strict=True)
    ]
    judges, aligner = Judges.load(options.judges), Aligner()
    readings = teacher_reader(Teacher.load(weights, "cpu"), pieces, jobs)
    for number, voice, text, spoken in zip(options.numbers, voices, pieces, readings, strict=True):
        facts = {"number": number, "layout": "teacher", "voice": VOICES[voice], "text": text}
        heard = hear(judges, aligner, text, spoken.samples, spoken.sample_rate)
        add_lines(options.raw, [facts | heard])


def speak(options: argparse.Namespace) -> None:
    """Synthesize and judge texts, appending a line for each to `options.raw`; skips those in any file of its folder."""
    if options.teacher:
        teach(options)
        return
    texts = mixed_texts(options.texts)
    done = {(row["number"], row["layout"]) for row in read_lines(options.raw.parent.glob("*.jsonl"))}
    judges, aligner = Judges.load(options.judges), Aligner()
    numbers = range(len(texts))[options.first :: options.every][: options.count]
    seed = 0 if options.texts == SEED else options.texts * TEXTS
    with TTS(None, device="cpu", config={"slots": BATCH, "max_positions": 1024, "max_frames": 800}) as tts:
        for begin in range(0, len(numbers), BATCH):
            for layout in options.layouts or LAYOUTS:
                batch = [number for number in numbers[begin : begin + BATCH] if (number, layout) not in done]
                items: list[Any] = [
                    {
                        "text": texts[number],
                        "voice": tts.voices[number % len(tts.voices)],
                        "seed": seed + number,
                        "attempts": ATTEMPTS,
                        "non_streaming_mode": LAYOUTS[layout],
                    }
                    for number in batch
                ]
                made = []
                for number, item, audio in zip(batch, items, tts.generate_batch(items), strict=True):
                    facts = {"number": number, "layout": layout, "voice": item["voice"], "text": item["text"]}
                    facts |= {"reason": audio.finish_reason, "duration_s": round(audio.duration_s, 3)}
                    facts["faults"] = [
                        [fault.kind, item["text"][fault.start : fault.end], fault.attempt, fault.spoken_again]
                        for fault in audio.faults
                    ]
                    heard = hear(judges, aligner, item["text"], audio.samples, audio.sample_rate)
                    made.append(facts | heard)
                add_lines(options.raw, made)


def measures(text: str, voice: str) -> list[float]:
    """Features of the duration model: voice (one-hot), numbers of words, letters, spelled letters and pauses."""
    words = spelled_words(text)
    pauses = [len(re.findall(mark, text)) for mark in (r"[,;:—–]|--|\.\.\.", r"[.!?](?=\s)")]
    counts = [len(words), sum(map(len, words)), sum(len(word) == 1 for word in words), len(words) == 1, *pauses]
    return [float(count) for count in (*(voice == each for each in VOICES), *counts)]


def lengths(durations_s: list[float]) -> Callable[[str, str], float]:
    """A linear model of the duration in seconds of the teacher's reading of (text, voice), fitted by weighted least
    squares to its readings of the mixed texts: 998 of those 1,000 are within .71 and 1.57 times the prediction."""
    spoken = [measures(text, VOICES[number % len(VOICES)]) for number, text in enumerate(mixed_texts())]
    weights = 1 / np.sqrt(durations_s)
    factors = np.linalg.lstsq(np.array(spoken) * weights[:, None], durations_s * weights, rcond=None)[0]
    return lambda text, voice: float(factors @ measures(text, voice))


def heard_wrong(row: dict[str, Any]) -> set[str]:
    """The faults that the judges find in a reading."""
    found = {
        "cut": row["missing"] > 0,
        "invented": row["extra"] >= INVENTED_WORDS,
        "left_out": row["is_missing"],
        "added": row["is_added"],
        "stuck": (row["longest_s"] or 0.0) > LONGEST_S,
    }
    return {name for name, is_so in found.items() if is_so}


def wrong(row: dict[str, Any], teachers_s: float, teacher: dict[str, Any] | None = None) -> list[str]:
    """The faults of a reading: those the judges find, except those of the `teacher`'s reading of the same text; and
    those of its duration against the predicted `teachers_s`."""
    found = heard_wrong(row) - (set() if teacher is None else heard_wrong(teacher))
    if teacher is not None and row["words"] == 1 and row["sound_s"] - teacher["sound_s"] < ADDED_S:
        found -= {"added", "invented"}
    if is_short(row["duration_s"], teachers_s):
        found.add("cut")
    if is_runaway(row["duration_s"], teachers_s) or row["reason"] != "stop":
        found.add("runaway")
    return sorted(found)


def figures(layout: str, rows: list[dict[str, Any]], teachers_s: Callable[[str, str], float]) -> dict[str, Any]:
    """The result row of one layout."""
    own = [row for row in rows if row["layout"] == layout]
    teacher = {(row["text"], row["voice"]): row for row in rows if row["layout"] == "teacher"}
    named = ("text", "voice", "heard", "faults", "missing_runs", "added_runs", "duration_s", "longest_s")
    wrongs, excused = list[dict[str, Any]](), list[dict[str, Any]]()
    for row in own:
        other = teacher.get((row["text"], row["voice"]))
        kinds, heard = wrong(row, teachers_s(row["text"], row["voice"]), other), sorted(heard_wrong(row))
        if kinds:
            wrongs.append({"wrong": kinds} | {name: row[name] for name in named})
        elif heard and other is not None:
            excused.append(
                {"heard_wrong": heard, "of_the_teacher": other["heard"]} | {name: row[name] for name in named}
            )
    return {
        "layout": layout,
        "texts": len(own),
        "aligned": sum(row["longest_s"] is not None for row in own),
        "spoken_again": sum(any(fault[3] for fault in row["faults"]) for row in own),
        "flagged_at_the_end": sum(any(not fault[3] for fault in row["faults"]) for row in own),
        "wrong": len(wrongs),
        "readings": wrongs,
        "as_the_teacher": excused,
    }


def report(options: argparse.Namespace) -> None:
    """Write the results file from raw lines."""
    rows = read_lines(options.raw)
    teachers_s = lengths(json.loads(TEACHER.read_text(encoding="utf-8"))["mixed"]["durations_s"])
    facts = {"texts": options.name, "attempts": ATTEMPTS, "judges": "moonshine-base 0.1.9, pocketsphinx 5.0.4"}
    finish(options, "attempts", settings=facts, rows=[figures(layout, rows, teachers_s) for layout in LAYOUTS])


def main() -> None:
    """Run the step that the command line names."""
    steps = Steps(__doc__, report, speak=speak)
    steps.take_some(50)
    steps.making.add_argument("--every", type=int, default=1, help="take every n-th text, for several processes")
    steps.making.add_argument("--layouts", nargs="*", choices=LAYOUTS)
    steps.making.add_argument("--judges", type=Path, required=True)
    steps.making.add_argument("--texts", type=int, default=SEED, metavar="SEED", help="seed of the mixed texts")
    steps.making.add_argument("--teacher", nargs=2, type=Path, metavar=("WEIGHTS", "PHONEMES"))
    steps.making.add_argument("--numbers", nargs="*", type=int, default=[], help="numbers of the texts for the teacher")
    steps.reporting.add_argument("--name", default="mixed", help="name of the texts")
    steps.run()


if __name__ == "__main__":
    main()
