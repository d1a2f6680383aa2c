"""Speak texts in compiled code and in torch on a CPU, in float32 with the same seeds, and compare the codes.

`PYTHONPATH=src:tools python benchmarks/compiled_codes.py speak --raw FILE` speaks the thousand mixed texts once and a
hundred Harvard sentences with five seeds, the voices in turn, without the codec: compiled code in batches, torch in the
same batches and, with `--alone N`, every Nth segment by itself. It resumes from FILE. `report FILE --judges FOLDER`
counts the segments whose codes differ, and has both readings of these judged: torch first, then compiled code.
Sums are in another order, so a near tie may be decided otherwise, in torch with another batch as well.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from builtin_voice import evaluate, settings
from builtin_voice.judges import INVENTED_WORDS, listen
from builtin_voice.mixed import mixed_texts
from builtin_voice.readings import Scored, Spoken
from builtin_voice.word_errors import spelled_words, word_errors
from quantization import Compared, verdict
from sonoro.core.types import SpeechRequest
from sonoro.models import registry
from sonoro.models.base import Capacity, Pages
from sonoro.text.splitting import frames_bound
from two_steps import Steps, add_lines, finish, read_lines

BATCH, POSITIONS, FRAMES, PAGE = 16, 1024, 640, 32
SENTENCES, SEEDS = 100, 5


class Job(NamedTuple):
    """A segment of a text."""

    key: str
    text: str
    voice: str
    seed: int
    index: int


def jobs(model: Any) -> list[Job]:
    """All segments to speak, the shortest first."""
    names = [name for name in settings.voices() if name in model.spec.voices]
    wanted = [(f"mixed {number}", 0, number, text) for number, text in enumerate(mixed_texts())]
    for seed in range(SEEDS):
        wanted += [
            (f"harvard {number} {seed}", seed, number, text)
            for number, text in enumerate(evaluate.read_harvard()[:SENTENCES])
        ]
    made = [
        Job(f"{key} {index}", segment.text, names[(number + seed) % len(names)], 1000 * seed + number, index)
        for key, seed, number, text in wanted
        for index, segment in enumerate(model.segments(text, "auto"))
    ]
    return sorted(made, key=lambda job: (len(job.text), job.key))


@torch.inference_mode()
def spoken(model: Any, batch: Sequence[Job], *, is_compiled: bool) -> list[list[list[int]]]:
    """The codes of each of `batch`, frame by frame."""
    slots, pages = len(batch), POSITIONS // PAGE
    state = model.allocate(Capacity(slots, POSITIONS, FRAMES, FRAMES, PAGE, slots * pages, slots * POSITIONS))
    prompts = []
    for job in batch:
        most = frames_bound(job.text, model.spec.frame_s)
        request = SpeechRequest(id=job.key, text=job.text, voice=job.voice, seed=job.seed, max_frames=most)
        prompts.append(model.prepare(model.spec.resolve(request), job.text, job.index, [], None))
    numbers = torch.arange(slots)
    own = [Pages([*range(slot * pages, (slot + 1) * pages)]) for slot in range(slots)]
    tokens = torch.arange(model.stage(state, prompts, numbers.tolist(), own))
    model.admit(state, numbers)
    if is_compiled:
        steps = model.compiled_steps(state)
        assert steps is not None, "there is no compiled code on this machine"
        prefill, frame = steps.prefill, steps.frame
    else:
        prefill, frame = (lambda given: model.prefill(state, given)), (lambda given: model.frame(state, given))
    prefill(tokens)
    while len(running := numbers[~state.done[:slots]]):
        frame(running)
    return [state.frames[slot, : state.length[slot]].tolist() for slot in range(slots)]


def speak(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    model = registry.load(device="cpu").model
    known = {row["key"] for row in read_lines([options.raw])}
    left = [job for job in jobs(model) if job.key not in known]
    # The shares of all lengths stay the same wherever a run stops.
    batches = [left[first : first + BATCH] for first in range(0, len(left), BATCH)]
    for number, batch in enumerate(sorted(batches, key=lambda batch: zlib.crc32(batch[0].key.encode()))):
        ours = spoken(model, batch, is_compiled=True)
        theirs = spoken(model, batch, is_compiled=False)
        rows = []
        for job, compiled, eager in zip(batch, ours, theirs, strict=True):
            row: dict[str, Any] = {**job._asdict(), "is_equal": compiled == eager, "frames": len(eager)}
            if options.alone and zlib.crc32(job.key.encode()) % options.alone == 0:
                row["is_equal_alone"] = eager == spoken(model, [job], is_compiled=False)[0]
            if compiled != eager:
                row |= {"compiled": compiled, "torch": eager}
            rows.append(row)
        add_lines(options.raw, rows)
        print(number, sum(row["is_equal"] for row in rows), len(rows), flush=True)


def compared(codec: Any, rows: Sequence[dict[str, Any]], judges: Path) -> Iterator[Compared]:
    """Those with the same codes are the same reading; the others are judged."""
    for row in rows:
        words = len(spelled_words(row["text"]))
        if row["is_equal"]:
            yield Compared(row["key"], words, (0, 0), None, (False, False), (False, False))
            continue
        heard = []
        for arm in ("torch", "compiled"):
            with torch.inference_mode():
                samples = codec.decode(torch.tensor([row[arm]]))[0].clamp(-1, 1).numpy()
            heard.append(listen(judges, Spoken(samples, codec.sample_rate, "stop"), row["text"], Scored.P808))
        plain, made = heard
        most = frames_bound(row["text"], codec.hop / codec.sample_rate)
        yield Compared(
            row["key"], words,
            (word_errors(row["text"], plain.words), word_errors(row["text"], made.words)),
            None if plain.p808 is None or made.p808 is None else (plain.p808, made.p808),
            (len(row["torch"]) >= most, len(row["compiled"]) >= most),
            (plain.extra >= INVENTED_WORDS, made.extra >= INVENTED_WORDS),
        )  # fmt: skip


def report(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rows = read_lines(options.raw)
    codec = registry.load(device="cpu").model.codec
    readings = [*compared(codec, rows, options.judges)]
    differing = [row for row in rows if not row["is_equal"]]
    alone = [row["is_equal_alone"] for row in rows if "is_equal_alone" in row]
    facts = {
        "segments": len(rows),
        "frames": sum(row["frames"] for row in rows),
        "differ": len(differing),
        "torch_alone": {"segments": len(alone), "differ": alone.count(False)},
    }
    if differing:
        judged = [one for one, row in zip(readings, rows, strict=True) if not row["is_equal"]]
        facts |= {
            "judged": [one._asdict() for one in judged],
            "word_errors_of_all": verdict(readings)["wer_difference"],
        }
    finish(options, "compiled-codes", **facts)


def main() -> None:
    steps = Steps(__doc__, report, speak=speak)
    steps.making.add_argument("--raw", type=Path, required=True)
    steps.making.add_argument("--alone", type=int, default=0)
    steps.reporting.add_argument("--judges", type=Path, required=True)
    steps.run()


if __name__ == "__main__":
    main()
