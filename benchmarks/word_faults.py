"""What the guards of word times catch: faults spliced from real codes of the built-in voice, and its good readings.

`python benchmarks/word_faults.py judge --first 0 --count 50 --raw FILE.jsonl` speaks texts in both layouts, splices six
faults of the codes of each, runs the talker over them as if it had made them, and adds a line for each that says what
its guards find; texts that are in the file already are passed over, so it may be broken off. `report FILE.jsonl ...`
makes the figures and the curve of the limit on straying. Needs the extra `align`: faults are cut where pocketsphinx
hears words begin.
"""

from __future__ import annotations

import argparse
import random
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from sonoro.core.config import EngineConfig
from sonoro.core.types import AudioChunk, Finished, SpeechRequest
from sonoro.engine.engine import Engine
from sonoro.models import registry
from sonoro.nn.transformer import causal_attention
from sonoro.text import read
from sonoro.text.splitting import Segment
from sonoro.words.heads import read_heads
from sonoro.words.request import RequestWords
from sonoro.words.spans import spoken_words, word_spans
from sonoro.words.tracking import Limits
from two_steps import Steps, add_lines, finish, read_lines  # type: ignore[import-not-found]
from words import LAYOUTS, Aligner  # type: ignore[import-not-found]

TEXTS = Path(__file__).parent.parent / "tools" / "builtin_voice"
HEADS = Path(registry.__file__).parent.parent / "builtin_voice"
BATCH, FRAME_S, MOST_FRAMES = 8, 0.08, 400
LEAST_WORDS = 6
HARVARD, TOGETHER, APART = 720, 3, (181, 263, 97)
CURVE = (0.3, 0.4, 0.45, 0.5, 0.55, 0.6, 0.65, 0.7, 0.8, 0.9, 1.0, 1.3)


class Reading:
    """A text as it was spoken, in one segment: its request, codes [F, K] and when its words begin, in frames."""

    def __init__(self, request: SpeechRequest, codes: np.ndarray, begins: list[int]) -> None:
        self.request, self.codes, self.begins = request, codes, begins


class Bench:
    """The built-in voice, an engine and an aligner."""

    def __init__(self) -> None:
        self.model: Any = registry.load(None, device="cpu").model
        self.engine = Engine(
            self.model,
            EngineConfig(slots=BATCH, max_positions=1024, max_frames=MOST_FRAMES, prefill_tokens=1024),
        )
        self._aligner = Aligner()

    def speak(self, requests: list[SpeechRequest]) -> list[Reading]:
        """Speak `requests`; returns the readings that ended by themselves and could be aligned."""
        frames: dict[str, Any] = {}
        pcm = {request.id: b"" for request in requests}
        ended, state = set(), self.engine.runner._state.state
        for request in requests:
            self.engine.submit(request)
        running = dict(self.engine.lifecycle.requests)
        while self.engine.has_work:
            events = self.engine.tick()
            for name, one in running.items():
                if one.allocation is not None:
                    frames[name] = state.frames[one.allocation.slot, : int(state.length[one.allocation.slot])].clone()
            for event in events:
                if isinstance(event, AudioChunk):
                    pcm[event.request_id] += event.pcm
                elif isinstance(event, Finished) and event.reason == "stop":
                    ended.add((event.request_id, event.frames))
        made = []
        for request in requests:
            codes = frames[request.id].numpy()
            # Of several segments the last one's codes are left.
            begins = self._begins(request.text, pcm[request.id]) if (request.id, len(codes)) in ended else None
            if begins is not None and len(begins) >= LEAST_WORDS:
                made.append(Reading(request, codes, begins))
        return made

    def _begins(self, text: str, pcm: bytes) -> list[int] | None:
        normal = read(text, lowercase=True)
        spoken = normal.text
        places = [found.span() for found in re.finditer(r"[a-z']+", spoken)]
        samples = np.frombuffer(pcm, "<i2").astype(np.float32) / 32768
        found = self._aligner.align(samples, self.model.spec.sample_rate, [spoken[a:b] for a, b in places])
        words = spoken_words(word_spans(text), spoken, normal.origins, places)
        return None if found is None else [round(found[int(word.first)][0] / FRAME_S) for word in words]

    @torch.inference_mode()
    def judge(self, request: SpeechRequest, codes: np.ndarray) -> dict[str, Any]:
        """The guards' findings for `codes` [F, K] as a reading of a resolved request's text."""
        model = self.model
        segment = model.segments(request.text, request.language)[0]
        prompt, pointing = model.prepare(request, segment.text, 0, (), None), model.pointing(request, None)
        words = RequestWords(model, model.spec, request.text)
        words.begin(Segment(segment, 0, len(request.text)), pointing, 0.0)
        assert words.clock is not None
        seen, add = list[np.ndarray](), words.clock.tracker.add

        def noted(attention: Any) -> None:
            seen.append(np.array(attention))
            add(attention)

        words.clock.tracker.add = noted  # type: ignore[method-assign]
        for frame, looked in enumerate(self._attention(prompt, pointing, codes), start=1):
            words.add_attention(looked, frame)
        words.clock.finish()
        last = words.clock.words[-1].last
        tracker = words.clock.tracker
        facts = {"fault": words.clock.fault, "strayed": round(tracker.strayed, 3), "jumped": round(tracker.jumped, 3)}
        return facts | {"last": last} | self._trace(tracker.path, seen)

    def _trace(self, path: list[int], seen: list[np.ndarray]) -> dict[str, Any]:
        """Of each frame, a character each: how far the path went, and of 40 parts of the attention those before and
        those after its position and the two beside it."""
        shares = [looked / max(float(looked.sum()), 1e-30) for looked in seen]
        before = [40 * each[: max(at - 1, 0)].sum() for at, each in zip(path, shares, strict=True)]
        after = [40 * each[at + 2 :].sum() for at, each in zip(path, shares, strict=True)]
        columns = {"steps": np.diff(path, prepend=0), "before": before, "after": after}
        return {name: "".join(chr(48 + round(float(one))) for one in each) for name, each in columns.items()}

    def _attention(self, prompt: Any, pointing: Any, codes: np.ndarray) -> Iterator[np.ndarray]:
        """Yield each frame's attention [watched heads, W] to the text."""
        talker, start = self.model._modules.lm.talker, prompt.positions
        ids = torch.full((len(codes),), self.model._configs.model.tts_pad_token_id)
        trail = prompt.trail[: len(codes)]
        ids[: len(trail)] = trail
        fed = talker.embed_frames(torch.from_numpy(codes).long()) + talker.embed_text(ids)
        hidden = torch.cat([talker.embed_rows(prompt.text_rows, prompt.code_rows), fed])[None]
        scores: list[torch.Tensor] = []

        def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            if layer == pointing.layer:
                key = keys[0, :, pointing.head // (queries.shape[2] // keys.shape[2])]
                scores.append(queries[0, start - 1 : -1, pointing.head] @ key.T / queries.shape[-1] ** 0.5)
            return causal_attention(layer, queries, keys, values)

        rotary = talker.model.config.rotary(torch.arange(hidden.shape[1]), hidden.dtype)
        for number, layer in enumerate(talker.model.layers[: pointing.layer + 1]):
            hidden = layer(hidden, number, rotary, attend)
        for frame in range(len(codes)):
            live = min(prompt.text_count, start + frame - prompt.text_start)
            looked = np.zeros((len(self.model.word_heads.places), 512), np.float32)
            looked[:, :live] = scores[0][frame, prompt.text_start : prompt.text_start + live].softmax(-1).numpy()
            yield looked


def faults(reading: Reading, other: Reading, few: int, chance: random.Random) -> dict[str, np.ndarray]:
    """Six kinds of them by name: codes [F, K]. So `few` words are repeated, or skipped."""
    codes, begins, words = reading.codes, reading.begins, len(reading.begins)
    frames, length = len(codes), chance.randint(12, 25)
    first = chance.randint(0, words - few - 1)
    skipped = chance.randint(1, words - few - 1)
    stuck = chance.randint(frames // 4, 3 * frames // 4)
    half = other.begins[len(other.begins) // 2]
    beyond = other.codes[5 : 5 + length] if chance.random() < 0.5 else np.tile(codes[-length // 2 :], (2, 1))
    return {
        "past_end": np.concatenate([codes, beyond]),
        "cut": codes[: max(4, begins[words - chance.randint(1, 3)])],
        "repeated": np.concatenate([codes[: begins[first + few]], codes[begins[first] :]]),
        "skipped": np.concatenate([codes[: begins[skipped]], codes[begins[skipped + few] :]]),
        "stuck": np.concatenate([codes[:stuck], np.repeat(codes[stuck : stuck + 1], length, 0), codes[stuck:]]),
        "other_end": np.concatenate([codes[: begins[words // 2]], other.codes[half:]]),
    }


def texts_of() -> list[str]:
    """The texts: single sentences, texts of `TOGETHER` sentences in order, then pairs of sentences `APART`; a
    Harvard sentence is in all three."""
    files = ("everyday.txt", "carriers.txt", "harvard.txt")
    lines = [line.strip() for name in files for line in (TEXTS / name).read_text(encoding="utf-8").splitlines()]
    # A star marks the word that a carrier carries.
    single = [line.replace("*", "") for line in lines if line]
    harvard = single[-HARVARD:]
    groups = [" ".join(harvard[at : at + TOGETHER]) for at in range(0, HARVARD, TOGETHER)]
    return single + groups + [f"{harvard[at]} {harvard[at - apart]}" for apart in APART for at in range(HARVARD)]


def judge(options: argparse.Namespace) -> None:
    """Speak and judge those of `count` texts from number `first` on that are not in the file yet."""
    texts = texts_of()
    done = {row["number"] for row in read_lines([options.raw])}
    numbers = [number for number in range(len(texts))[options.first :][: options.count] if number not in done]
    bench = Bench()
    voices = bench.model.spec.voices
    for begin in range(0, len(numbers), BATCH):
        batch, rows = numbers[begin : begin + BATCH], []
        for layout in options.layouts:
            requests = [
                bench.model.spec.resolve(
                    SpeechRequest(
                        id=str(number),
                        text=texts[number],
                        voice=voices[(number + options.seed) % len(voices)],
                        seed=number + options.seed,
                        max_frames=MOST_FRAMES,
                        options={"non_streaming_mode": LAYOUTS[layout]},
                    )
                )
                for number in batch
            ]
            made = bench.speak(requests)
            for at, reading in enumerate(made):
                number = int(reading.request.id)
                chance = random.Random(reading.request.seed)
                few = chance.randint(2, 4)
                spliced = {"good": reading.codes}
                if not options.good:
                    spliced |= faults(reading, made[at - 1], few, chance)
                facts = {"number": number, "seed": reading.request.seed, "layout": layout, "few": few}
                rows += [
                    facts | {"kind": kind, **bench.judge(reading.request, codes)} for kind, codes in spliced.items()
                ]
        # Of one that could not be compared it is said that it was tried.
        rows += [{"number": number, "layout": "", "kind": "tried"} for number in batch]
        add_lines(options.raw, rows)


def is_flagged(row: dict[str, Any], limits: Limits) -> bool:
    """Whether a reading is flagged with these limits on straying: those it was judged with may have been others."""
    return row["fault"] not in (None, "straying") or row["strayed"] + row["jumped"] > limits.most_strayed(row["last"])


def shares_flagged(rows: list[dict[str, Any]], limits: Limits) -> dict[str, float]:
    """Of all faults and of the good readings, then of each kind and, where some words are repeated or skipped, of so
    many, the share that is flagged."""
    groups: dict[str, list[bool]] = {"caught": [], "flagged_of_good": []}
    for row in rows:
        is_good, flagged = row["kind"] == "good", is_flagged(row, limits)
        names = ["flagged_of_good"] if is_good else ["caught", row["kind"]]
        if row["kind"] in ("repeated", "skipped"):
            names.append(f"{row['kind']}_{row['few']}_words")
        for name in names:
            groups.setdefault(name, []).append(flagged)
    return {name: round(float(np.mean(each)), 4) for name, each in sorted(groups.items())}


def _ranges(numbers: set[int]) -> list[str]:
    """`numbers` as text ranges."""
    begins = sorted(number for number in numbers if number - 1 not in numbers)
    ends = sorted(number for number in numbers if number + 1 not in numbers)
    return [f"{begin}-{end}" for begin, end in zip(begins, ends, strict=True)]


def report(options: argparse.Namespace) -> None:
    """Of each layout the share of each kind that is flagged, and what other limits on straying would give."""
    rows, made = read_lines(options.raw), []
    heads = read_heads(HEADS)
    for layout in LAYOUTS:
        of = [row for row in rows if row["layout"] == layout]
        limits = getattr(heads, layout).limits
        curve = [
            {"strayed": strayed} | shares_flagged(of, msgspec.structs.replace(limits, strayed=strayed))
            for strayed in sorted({*CURVE, limits.strayed})
        ]
        counts = Counter(row["kind"] for row in of)
        at = {"layout": layout, "limits": msgspec.to_builtins(limits), "counts": dict(sorted(counts.items()))}
        made.append(at | shares_flagged(of, limits) | {"curve": curve})
    settings = {"texts": _ranges({row["number"] for row in rows}), "aligner": "pocketsphinx", "note": options.note}
    finish(options, "word_faults", arm="eager", settings=settings, rows=made)


def main() -> None:
    """Run the step given on the command line."""
    steps = Steps(__doc__, report, judge=judge)
    steps.take_some(50)
    steps.making.add_argument("--seed", type=int, default=0, help="with another, others of the voices speak the texts")
    steps.making.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=list(LAYOUTS))
    steps.making.add_argument("--good", action="store_true", help="judge the good readings alone")
    steps.reporting.add_argument("--note", help="as, on which texts the limits were set")
    steps.run()


if __name__ == "__main__":
    main()
