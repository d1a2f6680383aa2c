"""Read the corpus aloud with every core, as Flite's voices do: `builtin_voice.shards` of 256 utterances."""

from __future__ import annotations

import argparse
import gzip
import json
import multiprocessing
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from builtin_voice import shards
from builtin_voice.flite import SAMPLE_RATE, VOICES, Flite
from sonoro.core.config import usable_cores

SHARD_UTTERANCES = 256


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


def _write_shard(job: _Job) -> int:
    """Speak one shard to disk; returns its samples."""
    flite = Flite(job.libraries)
    rows, audio, start = [], [], 0
    for line in job.lines:
        samples, phones = flite.speak(line["text"], line["voice"])
        names, ends = ([*column] for column in zip(*phones, strict=True))
        rows.append(shards.Utterance(job.shard, start, len(samples), line["text"], line["voice"], names, ends))
        audio.append(samples)
        start += len(samples)
    shards.write(job.output, rows, audio)
    return start


def synthesize(rows: list[dict[str, str]], output: Path, libraries: Path | None, processes: int) -> None:
    """Write every shard of `rows` that `output` does not hold yet, `processes` at a time."""
    output.mkdir(parents=True, exist_ok=True)
    jobs = [
        _Job(first // SHARD_UTTERANCES, rows[first : first + SHARD_UTTERANCES], output, libraries)
        for first in range(0, len(rows), SHARD_UTTERANCES)
    ]
    missing = [job for job in jobs if not shards.is_written(output, job.shard)]
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
