"""Read a corpus of phonemes aloud on a GPU: `builtin_voice.shards` of 2,048 utterances.

`python -m builtin_voice.kokoro.synthesize PHONEMES WEIGHTS OUTPUT`, as often at once as there are GPUs: they share the
shards by claims (`shard-NNNNN.claim` holds a process id; one whose process is gone must be removed first).
Row r is read by voice r modulo the number of voices, or by all of them with `--all-voices`.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from builtin_voice import shards
from builtin_voice.kokoro.teacher import ACCENTS, Teacher

SHARD_UTTERANCES = 2048


def read_phonemes(
    path: Path, voices: list[str], limit: int | None = None, *, is_all: bool = False
) -> list[tuple[str, str, str]]:
    """Texts, their phonemes and the voices to read them, of the first `limit` rows of what `phonemize` wrote."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for _, line in zip(range(limit or 1 << 62), file, strict=False)]
    return [
        (row["text"], row[ACCENTS[voice]], voice)
        for row in rows
        for voice in (voices if is_all else [voices[row["row"] % len(voices)]])
    ]


def claim(folder: Path, shard: int) -> Path | None:
    """A file that keeps others from the shard until it is removed; None if another has one, or the shard is there."""
    path = folder / f"shard-{shard:05d}.claim"
    try:
        with path.open("x", encoding="ascii") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return None
    if shards.is_written(folder, shard):
        path.unlink()
        return None
    return path


def synthesize(rows: list[tuple[str, str, str]], teacher: Teacher, output: Path, size: int = SHARD_UTTERANCES) -> None:
    """Write every shard of `rows`, each of `size` utterances, that `output` lacks and no other process has claimed."""
    output.mkdir(parents=True, exist_ok=True)
    began, audio_s = time.monotonic(), 0.0

    def write(claimed: Path, index: list[shards.Utterance], audio: list[np.ndarray]) -> None:
        shards.write(output, index, audio)
        claimed.unlink()

    with ThreadPoolExecutor(1) as writer:
        pending = None
        for shard in range(-(-len(rows) // size)):
            claimed = claim(output, shard)
            if claimed is None:
                continue
            texts, phonemes, voices = zip(*rows[shard * size : (shard + 1) * size], strict=True)
            spoken = teacher.synthesize(phonemes, voices, seed=shard)
            index, start = [], 0
            for text, voice, line in zip(texts, voices, spoken, strict=True):
                count = len(line.samples)
                index.append(shards.Utterance(shard, start, count, text, voice, line.phones, line.ends))
                start += count
            # Files are written beside the next shard's speech.
            if pending is not None:
                pending.result()
            pending = writer.submit(write, claimed, index, [line.samples for line in spoken])
            audio_s += start / teacher.model.sizes.sample_rate
            wall_s = time.monotonic() - began
            print(f"shard={shard} audio_s={audio_s:.0f} xrt={audio_s / wall_s:.0f}", flush=True)
        if pending is not None:
            pending.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("phonemes", type=Path, help="phonemes.jsonl.xz of builtin_voice.phonemize")
    parser.add_argument("weights", type=Path, help="kokoro.npz of builtin_voice.kokoro.prepare")
    parser.add_argument("output", type=Path)
    parser.add_argument("--voices", default=",".join(ACCENTS))
    parser.add_argument("--all-voices", action="store_true", help="every voice reads every row")
    parser.add_argument("--limit", type=int, help="speak this many rows at most")
    parser.add_argument("--compile", action="store_true", help="faster after a minute of compiling")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    rows = read_phonemes(options.phonemes, options.voices.split(","), options.limit, is_all=options.all_voices)
    teacher = Teacher.load(options.weights, options.device, is_compiled=options.compile)
    synthesize(rows, teacher, options.output)


if __name__ == "__main__":
    main()
