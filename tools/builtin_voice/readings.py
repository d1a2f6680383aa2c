"""Read texts aloud and have them judged, with a journal and a progress bar.

Reading continues while earlier readings are judged in other processes. Every finished reading is a line of the journal,
so that an interrupted run resumes. The evaluation provides the judges.
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
    """Which sound scores a reading gets; computing all of them takes most of the time."""

    NOT = 0
    P808 = 1
    ALL = 2


@dataclass(frozen=True, slots=True)
class Job:
    """One text to be read by `reader` (a model with its weights, or the teacher) as `voice`, on a `path`."""

    reader: str
    path: str
    voice: str
    seed: int
    text: str
    scored: Scored


@dataclass(frozen=True, slots=True)
class Spoken:
    """`samples` [S] float32 in [-1, 1], and the finish reason."""

    samples: np.ndarray
    sample_rate: int
    reason: str


@dataclass(frozen=True, slots=True)
class Heard:
    """The judgement of a reading: the words heard, the number `missing` at its end and of `extra` ones, both as far as
    two judges agree; if scored, `p808` and `ovrl` (1 to 5), and the share of energy in the `highs`."""

    words: str
    missing: int = 0
    extra: int = 0
    p808: float | None = None
    ovrl: float | None = None
    highs: float | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of a job."""

    duration_s: float
    reason: str
    heard: Heard


Listen = Callable[[Spoken, str, Scored], Heard]
"""Judges a reading of a text, with the requested scores; pickled by name."""
Reader = Callable[[list[Job]], Iterable[Spoken]]
"""Speaks jobs, all of one path, and yields the results in order."""


class Journal:
    """Readings by job, optionally stored in a file of JSON lines, which may also hold those of other judges."""

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
    """A pool of `processes` processes that run `listen`, and the journal of their results. Raises `BrokenProcessPool`
    if one dies."""

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
        """Read and judge the `jobs` that the journal lacks; returns all readings in the order of `jobs`."""
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
        """Add finished judgements to the journal, waiting until at most `left` are pending."""
        while self._waiting and (len(self._waiting) > left or self._waiting[0][2].done()):
            job, spoken, heard = self._waiting.popleft()
            duration_s = round(len(spoken.samples) / spoken.sample_rate, 3)
            self.journal.add(job, Reading(duration_s, spoken.reason, heard.result()))
            yield
