"""Read the corpus aloud with every core: shards of int16 audio beside an index, fast to map into memory.

A shard is `shard-NNNNN.npy` ([S] int16 at 24 kHz, utterances end to end) and `shard-NNNNN.jsonl` (one `Utterance` a
line). A finished shard is kept, so a run that was cut short goes on where it stopped; a folder belongs to one choice of
corpus, voices and limit.
"""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from builtin_voice.flite import SAMPLE_RATE, VOICES, Flite
from sonoro.core.machine import usable_cores

SHARD_UTTERANCES = 256


@dataclass(frozen=True, slots=True)
class Utterance:
    """Where `text`, as `voice` reads it, lies: samples `start` to `start + samples` of shard `shard`. Its `phones`, one
    after the other, and where each `ends`, in samples from `start`."""

    shard: int
    start: int
    samples: int
    text: str
    voice: str
    phones: list[str]
    ends: list[int]


@dataclass(frozen=True, slots=True)
class _Job:
    shard: int
    lines: list[dict[str, str]]
    output: Path
    libraries: Path | None


def read_corpus(path: Path, voices: Iterable[str] = VOICES, limit: int | None = None) -> list[dict[str, str]]:
    """The first `limit` rows {text, voice} of corpus.jsonl or corpus.jsonl.gz that are spoken by one of `voices`."""
    wanted = frozenset(voices)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="ascii") as file:
        rows = [row for row in map(json.loads, file) if row["voice"] in wanted]
    return rows[:limit]


def written(folder: Path) -> dict[int, list[Utterance]]:
    """The utterances of every shard that is whole, by its number, in the order of the corpus."""
    shards = {}
    for index in sorted(folder.glob("shard-*.jsonl")):
        rows = [Utterance(**json.loads(line)) for line in index.read_text(encoding="ascii").splitlines()]
        shards[rows[0].shard] = rows
    return shards


def load(folder: Path) -> tuple[dict[int, np.ndarray], list[Utterance]]:
    """The shards by number, mapped read-only [S] int16, and every utterance in them in the order of the corpus."""
    found = written(folder)
    shards = {shard: np.load(folder / f"shard-{shard:05d}.npy", mmap_mode="r") for shard in found}
    return shards, [row for rows in found.values() for row in rows]


def _write_shard(job: _Job) -> int:
    """Speak one shard to disk; returns its samples. The index is renamed into place last, so it marks a whole shard."""
    flite = Flite(job.libraries)
    rows, audio, start = [], [], 0
    for line in job.lines:
        samples, phones = flite.speak(line["text"], line["voice"])
        names, ends = ([*column] for column in zip(*phones, strict=True))
        rows.append(Utterance(job.shard, start, len(samples), line["text"], line["voice"], names, ends))
        audio.append(samples)
        start += len(samples)
    path = job.output / f"shard-{job.shard:05d}"
    np.save(path.with_suffix(".npy"), np.concatenate(audio))
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="ascii")
    partial.rename(path.with_suffix(".jsonl"))
    return start


def synthesize(rows: list[dict[str, str]], output: Path, libraries: Path | None, processes: int) -> None:
    """Write every shard of `rows` that `output` does not hold yet, `processes` at a time."""
    output.mkdir(parents=True, exist_ok=True)
    jobs = [
        _Job(first // SHARD_UTTERANCES, rows[first : first + SHARD_UTTERANCES], output, libraries)
        for first in range(0, len(rows), SHARD_UTTERANCES)
    ]
    missing = [job for job in jobs if not (output / f"shard-{job.shard:05d}.jsonl").exists()]
    began, total_s = time.monotonic(), 0.0
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for done, samples in enumerate(pool.imap_unordered(_write_shard, missing), start=1):
            total_s += samples / SAMPLE_RATE
            wall_s = time.monotonic() - began
            print(f"shards={done}/{len(missing)} audio_s={total_s:.0f} xrt={total_s / wall_s:.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("corpus", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--libraries", type=Path, help="folder of libflite*.so.1; the system's own where left out")
    parser.add_argument("--voices", default=",".join(VOICES), help="speak the rows of these voices alone")
    parser.add_argument("--limit", type=int, help="speak this many rows at most")
    parser.add_argument("--processes", type=int, default=usable_cores())
    options = parser.parse_args()
    rows = read_corpus(options.corpus, options.voices.split(","), options.limit)
    synthesize(rows, options.output, options.libraries, options.processes)


if __name__ == "__main__":
    main()
