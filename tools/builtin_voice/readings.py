"""Texts read aloud and heard, a journal of it, and a bar that shows how far it is.

Reading goes on while earlier readings are heard in other processes. Every finished reading is a line of the journal, so
a run that was cut short goes on where it stopped. What a reading is judged by is the evaluation's business.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_WAITING_PER_PROCESS = 8


class Scored(IntEnum):
    """Which scores of its sound a reading is given: most of the time goes to all of them."""

    NOT = 0
    P808 = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class Job:
    """One text to be read: by `reader` (a model and the weights it has, or the teacher) as `voice`, on a `path`."""

    reader: str
    path: str
    voice: str
    seed: int
    text: str
    scored: Scored


@dataclass(frozen=True, slots=True)
class Spoken:
    """`samples` [S] float32 in [-1, 1], and why they end."""

    samples: np.ndarray
    sample_rate: int
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    """What the judges made of a reading: the words heard, how many are `missing` at its end and how many `extra` ones
    are there, both as far as two of them agree; of one that is scored, the opinions `p808` and `ovrl` (1 to 5) and the
    share of energy among the `highs`."""

    words: str
    missing: int = 0
    extra: int = 0
    p808: float | None = None
    ovrl: float | None = None
    highs: float | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What became of a job."""

    duration_s: float
    reason: str
    heard: Heard


Listen = Callable[[Spoken, str, Scored], Heard]
"""Hears a reading of a text, and scores its sound as told; sent to other processes by name."""
Reader = Callable[[list[Job]], Iterable[Spoken]]
"""Speaks jobs, all on one path, and yields them in their order."""


class Journal:
    """Readings by job, kept in a file of JSON lines where there is one, beside those of other judges than `judge`."""

    def __init__(self, path: Path | None, judge: str = "") -> None:
        self.readings: dict[Job, Reading] = {}
        self._path, self._judge = path, judge
        if path is not None and path.exists():
            for line in path.read_text("utf-8").splitlines():
                row = json.loads(line)
                if row.get("judge") != judge:
                    continue
                heard = Heard(**row["reading"].pop("heard"))
                self.readings[Job(**row["job"])] = Reading(**row["reading"], heard=heard)

    def add(self, job: Job, reading: Reading) -> None:
        self.readings[job] = reading
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"judge": self._judge, "job": asdict(job), "reading": asdict(reading)}) + "\n")


class Ears:
    """Recognisers in `processes` of their own, each of them a `listen`, and the journal that they fill. One that dies
    ends the reading with `BrokenProcessPool`."""

    def __init__(self, processes: int, journal: Journal, listen: Listen) -> None:
        self.journal = journal
        self._listen = listen
        self._processes = processes
        self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"))
        self._waiting: deque[tuple[Job, Spoken, Future[Heard]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def read(self, jobs: list[Job], reader: Reader, name: str) -> list[Reading]:
        """Have `reader` read what the journal lacks of `jobs`, and hear it; the readings in the order of `jobs`."""
        missing = [job for job in jobs if job not in self.journal.readings]
        columns = TextColumn("{task.description:>28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns) as progress:
            bar = progress.add_task(name, total=len(jobs), completed=len(jobs) - len(missing))
            for job, spoken in zip(missing, reader(missing), strict=True):
                heard = self._pool.submit(self._listen, spoken, job.text, job.scored)
                self._waiting.append((job, spoken, heard))
                for _ in self._taken(_WAITING_PER_PROCESS * self._processes):
                    progress.advance(bar)
            for _ in self._taken(0):
                progress.advance(bar)
        return [self.journal.readings[job] for job in jobs]

    def _taken(self, left: int) -> Iterator[None]:
        """Put into the journal what has been heard, waiting until no more than `left` are not."""
        while self._waiting and (len(self._waiting) > left or self._waiting[0][2].done()):
            job, spoken, heard = self._waiting.popleft()
            duration_s = round(len(spoken.samples) / spoken.sample_rate, 3)
            self.journal.add(job, Reading(duration_s, spoken.reason, heard.result()))
            yield
