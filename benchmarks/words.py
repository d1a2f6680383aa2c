"""Accuracy of word times: `Audio.words` against forced alignment by pocketsphinx.

`python benchmarks/words.py speak TEXTS --first 0 --count 50 --raw FILE.jsonl` speaks texts, one a line, in both prompt
layouts and all voices in turn, whole in batches and streamed one by one, and appends a line of times for each; texts
that are in the file already are skipped, so it may take several runs.
`python benchmarks/words.py report FILE.jsonl --out RESULT.json` computes the figures of all lines, and prints them.
Needs the extra `align`. The aligner itself is 8 to 10 ms (median) from exact times of phones, 37 to 39 at p95.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import soxr
import torch

from sonoro import TTS
from sonoro.api import Audio, AudioPiece, listen
from sonoro.text import read
from sonoro.words.spans import SpokenWord, spoken_words, word_spans
from two_steps import Steps, add_lines, finish, read_lines  # type: ignore[import-not-found]

ALIGNER_HZ, PAD_S = 16000, 0.1
LAYOUTS = {"text_first": True, "text_along": False}
BATCH = 8
PAUSE_S = 0.05


class Aligner:
    """Forced alignment of spoken words."""

    def __init__(self) -> None:
        import pocketsphinx  # noqa: PLC0415

        self._decoder = pocketsphinx.Decoder(
            samprate=ALIGNER_HZ, cmn="batch", loglevel="FATAL", beam=1e-80, wbeam=1e-60, pbeam=1e-80
        )

    def knows(self, text: str) -> bool:
        """Whether the dictionary has all words of `text`."""
        words = re.findall(r"[a-z']+", read(text, lowercase=True).text)
        return all(self._decoder.lookup_word(word) is not None for word in words)

    def align(self, samples: np.ndarray, rate: int, words: list[str]) -> list[tuple[float, float]] | None:
        """Start and end of each of `words` in seconds; None for an unknown word, or if alignment fails."""
        if any(self._decoder.lookup_word(word) is None for word in words):
            return None
        heard = soxr.resample(samples, rate, ALIGNER_HZ)
        pad = np.zeros(round(PAD_S * ALIGNER_HZ), np.float32)
        # A little noise: the aligner takes digital silence for speech.
        noise = 1e-4 * np.random.default_rng(0).standard_normal(len(heard) + 2 * len(pad))
        pcm = ((np.concatenate([pad, heard, pad]) + noise) * 32768).clip(-32768, 32767).astype("<i2").tobytes()
        self._decoder.set_align_text(" ".join(words))
        self._decoder.start_utt()
        self._decoder.process_raw(pcm, full_utt=True)
        self._decoder.end_utt()
        found = [seg for seg in self._decoder.seg() or () if not seg.word.startswith(("<", "["))]
        if [seg.word.split("(")[0] for seg in found] != words:
            return None
        return [(seg.start_frame / 100 - PAD_S, (seg.end_frame + 1) / 100 - PAD_S) for seg in found]


def speak(options: argparse.Namespace) -> None:
    """Speak some texts, and append reported and aligned times to the file of raw times."""
    texts = [line.strip() for line in options.texts.read_text(encoding="utf-8").splitlines() if line.strip()]
    texts = texts[options.first : options.first + options.count]
    done = {(row["layout"], row["path"], row["text"]) for row in read_lines([options.raw])}
    aligner = Aligner()
    with TTS(options.model, config={"slots": BATCH, "max_positions": 1024, "max_frames": 400}) as tts:
        for (name, is_first), path in itertools.product(LAYOUTS.items(), PATHS):
            for begin in range(0, len(texts), BATCH):
                items: list[Any] = [
                    {
                        "text": text,
                        "voice": tts.voices[(options.first + begin + number) % len(tts.voices)],
                        "seed": options.first + begin + number,
                        "non_streaming_mode": is_first,
                    }
                    for number, text in enumerate(texts[begin : begin + BATCH])
                    if (name, path, text) not in done
                ]
                for item, audio in zip(items, PATHS[path](tts, items), strict=True):
                    facts = {"layout": name, "path": path, "voice": item["voice"], "text": item["text"]}
                    add_lines(options.raw, [facts | compared(aligner, item["text"], audio)])


def streamed(tts: TTS, items: list[Any]) -> Iterator[Audio]:
    """Speak each of `items` by itself, as a stream whose chunks follow the listener's lead."""
    for item in items:
        pieces: list[AudioPiece] = []
        finished = listen(tts.stream(**item), pieces.append)
        words = [word for told in (*(piece.words for piece in pieces), finished.words) for word in told or ()]
        yield Audio(
            samples=np.concatenate([piece.samples for piece in pieces]),
            sample_rate=tts.sample_rate,
            finish_reason=finished.reason,
            frames=finished.frames,
            time_to_first_audio_s=finished.timings.first_audio_s,
            total_s=finished.timings.total_s,
            words=tuple(words) if finished.words is not None else None,
            faults=finished.faults,
        )


PATHS: dict[str, Callable[[TTS, list[Any]], Iterable[Audio]]] = {
    "batch": lambda tts, items: tts.generate_batch(items),
    "stream": streamed,
}


def found_words(
    aligner: Aligner, text: str, samples: np.ndarray, rate: int
) -> tuple[list[SpokenWord], list[tuple[float, float]] | None]:
    """The words of `text` as written, and the aligned start and end of each in seconds; None if alignment fails."""
    normal = read(text, lowercase=True)
    spoken = normal.text
    places = [found.span() for found in re.finditer(r"[a-z']+", spoken)]
    truth = aligner.align(samples, rate, [spoken[start:end] for start, end in places])
    written = spoken_words(word_spans(text), spoken, normal.origins, places)
    if truth is None:
        return written, None
    return written, [(truth[int(word.first)][0], truth[int(word.last) - 1][1]) for word in written]


def compared(aligner: Aligner, text: str, audio: Audio) -> dict[str, Any]:
    """One reading: reported and aligned times, by word as written."""
    written, found = found_words(aligner, text, audio.samples, audio.sample_rate)
    told = None if audio.words is None else [(word.start_s, word.end_s) for word in audio.words]
    is_same = [(word.start, word.end) for word in audio.words or ()] == [(word.start, word.end) for word in written]
    facts = {"audio_s": audio.duration_s, "reason": audio.finish_reason, "faults": len(audio.faults)}
    return facts | {"told": told, "found": found, "is_same": is_same}


def figures(errors_s: list[float]) -> dict[str, float]:
    """Median and high percentiles of absolute errors, and the median error itself, in ms."""
    ms = 1000 * np.array(errors_s or [np.nan])
    high = {f"p{rank}_ms": round(float(np.percentile(abs(ms), rank)), 1) for rank in (50, 90, 95)}
    return {"count": len(errors_s), **high, "bias_ms": round(float(np.median(ms)), 1)}


def row(layout: str, path: str, readings: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one layout on one path."""
    kept = [one for one in readings if one["found"] is not None and one["is_same"]]
    starts, ends, firsts, lasts, pauses = ([] for _ in range(5))
    for one in kept:
        pairs = list(zip(one["told"], one["found"], strict=True))
        starts += [told[0] - found[0] for told, found in pairs]
        ends += [told[1] - found[1] for told, found in pairs]
        firsts.append(pairs[0][0][0] - pairs[0][1][0])
        lasts.append(pairs[-1][0][1] - pairs[-1][1][1])
        for (told, found), (next_told, next_found) in itertools.pairwise(pairs):
            if next_found[0] - found[1] >= PAUSE_S:
                pauses += [told[1] - found[1], next_told[0] - next_found[0]]
    return {
        "layout": layout,
        "path": path,
        "texts": len(readings),
        "aligned": sum(one["found"] is not None for one in readings),
        "compared": len(kept),
        "without_times": sum(one["told"] is None for one in readings),
        "lookahead_frames": 0,
        "starts": figures(starts),
        "ends": figures(ends),
        "first_starts": figures(firsts),
        "last_ends": figures(lasts),
        "edges_of_pauses": figures(pauses),
    }


def report(options: argparse.Namespace) -> None:
    """Write the results of all raw times."""
    readings = read_lines(options.raw)
    finish(
        options,
        "words",
        arm="eager",
        torch=torch.__version__,
        dtype="float32",
        settings={"texts": options.name, "aligner": "pocketsphinx", "batch": BATCH},
        rows=[
            row(layout, path, [one for one in readings if (one["layout"], one["path"]) == (layout, path)])
            for layout, path in itertools.product(LAYOUTS, PATHS)
        ],
    )


def main() -> None:
    """Run the step given on the command line."""
    steps = Steps(__doc__, report, speak=speak)
    steps.making.add_argument("texts", type=Path)
    steps.making.add_argument("--model")
    steps.take_some(20)
    steps.reporting.add_argument("--name", default="everyday.txt")
    steps.run()


if __name__ == "__main__":
    main()
