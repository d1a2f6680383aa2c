"""Check the captions of a long chapter: parsed by other libraries, complete, in order and on time.

`python benchmarks/captions.py speak --layout text_first --folder FOLDER` composes a chapter of the judged sentences,
runs `sonoro say` to write its captions, and aligns each sentence's start and end with pocketsphinx.
`report FOLDER ... --judges FOLDER --out RESULT.json` parses the captions with `srt` and `webvtt-py` and computes the
figures. Needs the extra `align`, for Moonshine the judges of `tools/builtin_voice/prepare_judges.sh` and tools on the
path.

The truth is the sound within what the aligner takes for a sentence, as the aligner alone now and then counts the pause
beside a sentence, or a breath in it, as a part of its first or last word. `disputed` lists where the aligner alone is
more than 150 ms from what was told: how loud it is between the two, what Moonshine, a recogniser that aligns nothing,
hears there, and as a control what it hears in as long a piece of the sentence, from what was told inwards.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import soundfile

from two_steps import Steps, finish  # type: ignore[import-not-found]
from words import LAYOUTS, Aligner, figures, found_words  # type: ignore[import-not-found]

TEXTS = Path(__file__).parent.parent / "tools" / "builtin_voice"
WORDS, PARAGRAPH, ATTEMPTS = 2000, 4, 2
MOST_S, INSIDE_S, AROUND_S = 0.15, 0.03, 0.2
QUIET_DB, STEP_S = -40, 0.01
"""Level below a paragraph's peak that counts as silence, and its step: the aligner may take a breath for part of a
word, so a sentence's edges are those of its sound. Set on 100 sentences that are not in the chapter."""
Hear = Callable[[np.ndarray, int], str]
"""The words heard in samples [S] float32 of a sample rate in Hz."""
_SENTENCE = re.compile(r".+?[.!?](?=\s|$)", re.DOTALL)


def chapter(aligner: Aligner, words: int, first: int = 0) -> str:
    """Paragraphs of about `words` words: everyday and Harvard sentences from number `first` on, whose words the aligner
    knows."""
    lines = [
        line for name in ("everyday.txt", "harvard.txt") for line in (TEXTS / name).read_text("utf-8").splitlines()
    ]
    kept, count = list[str](), 0
    for line in lines[first:]:
        if count >= words:
            break
        if aligner.knows(line) and len(_SENTENCE.findall(line)) == 1:
            kept.append(line.strip())
            count += len(line.split())
    return "\n\n".join(" ".join(kept[at : at + PARAGRAPH]) for at in range(0, len(kept), PARAGRAPH)) + "\n"


@functools.cache
def aligner_of_process() -> Aligner:
    """The aligner of this process."""
    return Aligner()


class Piece(NamedTuple):
    """A part of the chapter: its text, and its audio, samples [S] float32 in [-1, 1] from `begin_s` on."""

    text: str
    samples: np.ndarray
    rate: int
    begin_s: float

    def edges(self, start_s: float, end_s: float) -> tuple[float, float]:
        """Start and end, in seconds, of the sound between two times."""
        step = round(STEP_S * self.rate)
        peaks = np.abs(self.samples[: len(self.samples) // step * step]).reshape(-1, step).max(1)
        first = max(0, round((start_s - self.begin_s) / STEP_S))
        last = round((end_s - self.begin_s) / STEP_S)
        inside = np.flatnonzero(peaks[first:last] > 10 ** (QUIET_DB / 20) * peaks.max())
        begin_s = self.begin_s + first * STEP_S
        return begin_s + inside[0] * STEP_S, begin_s + (inside[-1] + 1) * STEP_S


def pieces_of(text: str, samples: np.ndarray, rate: int, told: list[dict[str, Any]]) -> list[tuple[Piece, list[Piece]]]:
    """The paragraphs of the chapter, each with its sentences, cut in the middle of the pauses between reported
    words."""

    def piece(begin: int, end: int) -> Piece:
        inside = [at for at, word in enumerate(told) if begin <= word["start"] < end]
        first, last = inside[0], inside[-1]
        low_s = (told[first - 1]["end_s"] + told[first]["start_s"]) / 2 if first else 0.0
        high_s = (told[last]["end_s"] + told[last + 1]["start_s"]) / 2 if last + 1 < len(told) else len(samples) / rate
        return Piece(text[begin:end].strip(), samples[round(low_s * rate) : round(high_s * rate)], rate, low_s)

    made, begin = [], 0
    for paragraph in text.split("\n\n"):
        parts = [piece(begin + one.start(), begin + one.end()) for one in _SENTENCE.finditer(paragraph)]
        made.append((piece(begin, begin + len(paragraph)), parts))
        begin += len(paragraph) + 2
    return made


def aligned(piece: Piece) -> list[tuple[float, float]] | None:
    """Start and end, in seconds, of each sentence of `piece`; None if alignment fails."""
    written, found = found_words(aligner_of_process(), piece.text, piece.samples, piece.rate)
    if found is None:
        return None
    times = []
    for sentence in _SENTENCE.finditer(piece.text):
        own = [at for at, word in enumerate(written) if sentence.start() <= word.start < sentence.end()]
        times.append((piece.begin_s + found[own[0]][0], piece.begin_s + found[own[-1]][1]))
    return times


def sentences(paragraph: Piece, parts: list[Piece]) -> list[dict[str, Any]]:
    """The sentences of a paragraph, each with its aligned start and end, or None, and the edges of the sound within. If
    the paragraph cannot be aligned, its sentences are aligned one by one."""
    times = aligned(paragraph) or [time for part in parts for time in aligned(part) or [None]]
    return [
        {"text": part.text, "found": time, "edges": None if time is None else paragraph.edges(*time)}
        for part, time in zip(parts, times, strict=True)
    ]


def speak(options: argparse.Namespace) -> None:
    """Speak the chapter in one layout, and align its sentences."""
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    text = chapter(aligner_of_process(), options.words, options.first)
    (folder / "chapter.txt").write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "sonoro", "say", "--file", str(folder / "chapter.txt"), "--device", options.device]
    command += ["--option", f"non_streaming_mode={json.dumps(LAYOUTS[options.layout])}", "-o", str(folder / "all.wav")]
    command += ["--srt", str(folder / "all.srt"), "--vtt", str(folder / "all.vtt"), "--words", str(folder / "all.json")]
    subprocess.run([*command, "--seed", str(options.seed), "--attempts", str(ATTEMPTS)], check=True)
    samples, rate = soundfile.read(folder / "all.wav", dtype="float32")
    told = json.loads((folder / "all.json").read_text(encoding="utf-8"))
    pieces = pieces_of(text, samples, rate, told)
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        rows = [row for found in pool.starmap(sentences, pieces) for row in found]
    facts = {
        "layout": options.layout,
        "device": options.device,
        "first": options.first,
        "audio_s": len(samples) / rate,
        "words": len(text.split()),
        "told": len(told),
    }
    (folder / "found.json").write_text(json.dumps(facts | {"sentences": rows}), encoding="utf-8")


def loudest_db(samples: np.ndarray, rate: int, times: tuple[float, float], span: tuple[float, float]) -> float:
    """How loud it is between two `times`, less `INSIDE_S` at either, beside the peak of a sentence's `span`."""
    low_s, high_s = min(times) + INSIDE_S, max(times) - INSIDE_S
    between = np.abs(samples[round(low_s * rate) : round(high_s * rate)])
    peak = np.abs(samples[round(span[0] * rate) : round(span[1] * rate)]).max()
    return round(float(20 * np.log10(max(between.max(), 1e-6) / peak)), 1)


def heard_between(hear: Hear | None, samples: np.ndarray, rate: int, times: tuple[float, float]) -> str | None:
    """What `hear` makes of the sound between two `times`, less `INSIDE_S` at either; None without anybody to hear."""
    low_s, high_s = min(times) + INSIDE_S, max(times) - INSIDE_S
    silence = np.zeros(round(AROUND_S * rate), np.float32)
    between = samples[round(low_s * rate) : round(high_s * rate)]
    return None if hear is None else hear(np.concatenate([silence, between, silence]), rate)


def moonshine(judges: Path) -> Hear:
    """The recogniser of the judges in a folder."""
    from builtin_voice.hearing import to_judge  # noqa: PLC0415 - tools that only this needs
    from builtin_voice.judges import Judges  # noqa: PLC0415

    ears = Judges.load(judges).moonshine
    return lambda samples, rate: ears.hear(to_judge(samples, rate))


def parsed(folder: Path) -> dict[str, list[tuple[float, float, str]]]:
    """The captions of `folder` by format: start, end and text of each. Raises the parsers' errors."""
    import srt  # noqa: PLC0415 - only the report needs it
    import webvtt  # noqa: PLC0415

    blocks = list(srt.parse((folder / "all.srt").read_text(encoding="utf-8"), ignore_errors=False))
    assert [block.index for block in blocks] == list(range(1, len(blocks) + 1))
    return {
        "srt": [(block.start.total_seconds(), block.end.total_seconds(), block.content) for block in blocks],
        "vtt": [(_seconds(one.start), _seconds(one.end), one.text) for one in webvtt.read(folder / "all.vtt")],
    }


def _seconds(clock: str) -> float:
    hours, minutes, seconds = clock.split(":")
    return 3600 * int(hours) + 60 * int(minutes) + float(seconds)


def row(folder: Path, hear: Hear | None) -> dict[str, Any]:
    """The figures of one layout."""
    facts = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    text = (folder / "chapter.txt").read_text(encoding="utf-8")
    result = {name: facts[name] for name in ("layout", "device", "first", "audio_s", "words")}
    samples, rate = soundfile.read(folder / "all.wav", dtype="float32")
    for name, captions in parsed(folder).items():
        times = [at for start, end, _ in captions for at in (start, end)]
        starts, ends, missed, at = list[float](), list[float](), list[dict[str, Any]](), 0
        alone, disputed = {"starts": list[float](), "ends": list[float]()}, list[dict[str, Any]]()
        for sentence in facts["sentences"]:
            begin_s, said = captions[at][0], ""
            while said.split() != sentence["text"].split():
                said, end_s = f"{said} {captions[at][2]}", captions[at][1]
                at += 1
            if sentence["found"] is not None:
                starts.append(begin_s - sentence["edges"][0])
                ends.append(end_s - sentence["edges"][1])
                for edge, told_s, found_s in zip(alone, (begin_s, end_s), sentence["found"], strict=True):
                    alone[edge].append(told_s - found_s)
                    if abs(told_s - found_s) > MOST_S:
                        loudest = loudest_db(samples, rate, (told_s, found_s), sentence["found"])
                        late = {"edge": edge, "late_s": round(told_s - found_s, 3), "loudest_db": loudest}
                        inside_s = told_s + abs(told_s - found_s) * (1 if edge == "starts" else -1)
                        heard = {
                            name: heard_between(hear, samples, rate, (told_s, other_s))
                            for name, other_s in (("heard_between", found_s), ("heard_inside", inside_s))
                        }
                        disputed.append({"text": sentence["text"]} | late | heard)
                if max(abs(starts[-1]), abs(ends[-1])) > MOST_S:
                    missed.append({"text": said.strip(), "start_s": starts[-1], "end_s": ends[-1]})
        result[name] = {
            "captions": len(captions),
            "is_monotone": times == sorted(times),
            "is_complete": " ".join(said for _, _, said in captions).split() == text.split(),
            "sentences": len(facts["sentences"]),
            "aligned": len(starts),
            "starts": figures(starts),
            "ends": figures(ends),
            "starts_within_150_ms": sum(abs(each) <= MOST_S for each in starts),
            "ends_within_150_ms": sum(abs(each) <= MOST_S for each in ends),
            "missed": missed,
            "by_the_aligner_alone": {
                edge: figures(errors_s) | {"within_150_ms": sum(abs(each) <= MOST_S for each in errors_s)}
                for edge, errors_s in alone.items()
            }
            | {"disputed": disputed},
        }
    return result


def report(options: argparse.Namespace) -> None:
    """Write the results of all folders."""
    hear = None if options.judges is None else moonshine(options.judges)
    settings: dict[str, Any] = {"attempts": ATTEMPTS, "aligner": "pocketsphinx", "parsers": "srt, webvtt-py"}
    if hear is not None:
        settings["heard_between_by"] = "moonshine-base 0.1.9"
    finish(options, "captions", settings=settings, rows=[row(folder, hear) for folder in options.raw])


def main() -> None:
    """Run the step given on the command line."""
    steps = Steps(__doc__, report, speak=speak)
    steps.making.add_argument("--layout", choices=LAYOUTS, default="text_first")
    steps.making.add_argument("--words", type=int, default=WORDS)
    steps.making.add_argument("--first", type=int, default=0, help="sentence, of everyday and then Harvard sentences")
    steps.making.add_argument("--device", default="cpu")
    steps.making.add_argument("--processes", type=int, default=1)
    steps.making.add_argument("--seed", type=int, default=0)
    steps.making.add_argument("--folder", type=Path, required=True)
    steps.reporting.add_argument("--judges", type=Path, help="to have Moonshine hear the disputed edges")
    steps.run()


if __name__ == "__main__":
    main()
