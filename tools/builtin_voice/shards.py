"""The teachers' speech: shards of int16 audio, fast to memory-map, each with an index.

A shard is `shard-NNNNN.npy` ([S] int16 at 24 kHz, concatenated utterances) and `shard-NNNNN.jsonl` (one `Utterance` per
line). The index is written last, so that it marks a complete shard, and an interrupted run resumes; a folder belongs to
one choice of corpus, voices and limit.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np


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


def is_written(folder: Path, shard: int) -> bool:
    return (folder / f"shard-{shard:05d}.jsonl").exists()


def write(folder: Path, rows: list[Utterance], audio: list[np.ndarray]) -> None:
    """A shard from its utterances and the samples [S] int16 of each."""
    path = folder / f"shard-{rows[0].shard:05d}"
    np.save(path.with_suffix(".npy"), np.concatenate(audio))
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows), encoding="ascii")
    partial.rename(path.with_suffix(".jsonl"))


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
