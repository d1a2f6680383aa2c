"""What is left that was not spoken as it is written where faulty segments are spoken again, by the ears of others.

`python benchmarks/attempts.py speak --first 0 --count 50 --judges FOLDER --raw FILE.jsonl` speaks mixed texts with two
attempts in both layouts, and has Moonshine and pocketsphinx hear them: `tools/builtin_voice/prepare_judges.sh` fetches
those. `report FILE.jsonl ... --out RESULT.json` makes the figures. Needs the extra `align`, and tools on the path.
"""

from __future__ import annotations

import argparse
import difflib
import json
from pathlib import Path
from typing import Any

import numpy as np

from builtin_voice.hearing import to_judge
from builtin_voice.judges import INVENTED_WORDS, Judges, to_told
from builtin_voice.mixed import is_runaway, is_short, mixed_texts
from builtin_voice.readings import Scored, Spoken
from builtin_voice.word_errors import parted, spelled_words, words_of
from sonoro import TTS
from two_steps import Steps, add_lines, finish, read_lines  # type: ignore[import-not-found]
from words import LAYOUTS  # type: ignore[import-not-found]

TEACHER = Path(__file__).parent.parent / "tools" / "builtin_voice" / "teacher.json"
BATCH, ATTEMPTS, LEAST_WORDS = 8, 2, 2


def runs(text: str, heard: str) -> tuple[list[str], list[str]]:
    """Runs of words of `text` that were not heard, and of words heard that are not there: words in place of others
    count on neither side."""
    words, others = words_of(text).split(), words_of(heard).split()
    missing, added = [], []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, words, others, autojunk=False).get_opcodes():
        if kind != "equal" and (b - a) - (d - c) >= LEAST_WORDS:
            missing.append(" ".join(words[a:b]))
        if kind != "equal" and (d - c) - (b - a) >= LEAST_WORDS:
            added.append(" ".join(others[c:d]))
    return missing, added


def hear(judges: Judges, text: str, samples: np.ndarray, rate: int, reason: str) -> dict[str, Any]:
    """What the judges make of one reading. A run of words that Moonshine misses or adds counts where pocketsphinx,
    which is told both, agrees."""
    heard = judges.judge(Spoken(samples, rate, reason), text, Scored.NOT)
    missing, added = runs(text, heard.words)
    told = to_told(to_judge(samples, rate))
    words, others = spelled_words(text), parted(spelled_words(heard.words))
    is_missing = bool(missing) and bool(others) and not judges.told.is_longer(told, " ".join(others), words)
    is_added = bool(added) and judges.told.is_longer(told, text, others)
    facts = {"heard": heard.words, "missing": heard.missing, "extra": heard.extra}
    return facts | {"missing_runs": missing, "added_runs": added, "is_missing": is_missing, "is_added": is_added}


def speak(options: argparse.Namespace) -> None:
    """Speak and judge some texts, and add a line for each to the file; what a file of its folder has is passed over."""
    texts = mixed_texts()
    done = {(row["number"], row["layout"]) for row in read_lines(options.raw.parent.glob("*.jsonl"))}
    judges = Judges.load(options.judges)
    numbers = range(len(texts))[options.first :: options.every][: options.count]
    with TTS(None, device="cpu", config={"slots": BATCH, "max_positions": 1024, "max_frames": 800}) as tts:
        for layout in options.layouts or LAYOUTS:
            wanted = [number for number in numbers if (number, layout) not in done]
            for begin in range(0, len(wanted), BATCH):
                batch = wanted[begin : begin + BATCH]
                items: list[Any] = [
                    {
                        "text": texts[number],
                        "voice": tts.voices[number % len(tts.voices)],
                        "seed": number,
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
                    heard = hear(judges, item["text"], audio.samples, audio.sample_rate, audio.finish_reason)
                    made.append(facts | heard)
                add_lines(options.raw, made)


def wrong(row: dict[str, Any], teacher: dict[str, Any]) -> list[str]:
    """What is wrong with a reading. What the judges hear in the teacher's reading as well, as far as there is one, is
    their own mistake."""
    number = row["number"]
    lengths_s = teacher["durations_s"][number : number + 1]
    found = {
        "cut": any(is_short(row["duration_s"], each) for each in lengths_s)
        or (row["missing"] and number not in teacher["missing"]),
        "runaway": any(is_runaway(row["duration_s"], each) for each in lengths_s) or row["reason"] != "stop",
        "invented": row["extra"] >= INVENTED_WORDS and number not in teacher["extra"],
        "left_out": row["is_missing"] and number not in teacher["missing"],
        "added": row["is_added"] and number not in teacher["extra"],
    }
    return [name for name, is_so in found.items() if is_so]


def figures(layout: str, rows: list[dict[str, Any]], teacher: dict[str, Any]) -> dict[str, Any]:
    """The figures of one layout."""
    own = [row for row in rows if row["layout"] == layout]
    judged = [(row, wrong(row, teacher)) for row in own]
    named = ("text", "voice", "heard", "faults", "missing_runs", "added_runs", "duration_s")
    return {
        "layout": layout,
        "texts": len(own),
        "spoken_again": sum(any(fault[3] for fault in row["faults"]) for row in own),
        "flagged_at_the_end": sum(any(not fault[3] for fault in row["faults"]) for row in own),
        "wrong": sum(bool(kinds) for _, kinds in judged),
        "readings": [{"wrong": kinds} | {name: row[name] for name in named} for row, kinds in judged if kinds],
    }


def report(options: argparse.Namespace) -> None:
    """Make the results of all raw lines."""
    rows = read_lines(options.raw)
    teacher = json.loads(TEACHER.read_text(encoding="utf-8"))["mixed"]
    settings = {"texts": "mixed", "attempts": ATTEMPTS, "judges": "moonshine-base 0.1.9, pocketsphinx 5.0.4"}
    finish(options, "attempts", settings=settings, rows=[figures(layout, rows, teacher) for layout in LAYOUTS])


def main() -> None:
    """Speak or report, as the command line says."""
    steps = Steps(__doc__, report, speak=speak)
    steps.take_some(50)
    steps.making.add_argument("--every", type=int, default=1, help="of so many texts one: several processes share them")
    steps.making.add_argument("--layouts", nargs="*", choices=LAYOUTS)
    steps.making.add_argument("--judges", type=Path, required=True)
    steps.run()


if __name__ == "__main__":
    main()
