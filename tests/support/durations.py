"""How long the tests take, by file: said when all are run, and what decides which begin first, and which run aside.

`pytest --keep-durations` writes the figures anew. Those that are stored were measured by `make test` on two cores.
"""

import collections
import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

FILE = Path(__file__).with_name("durations.json")

LONG_S = 10
"""A test that takes so long is best begun early: begun last it would leave the other processes without work."""


class Taken(NamedTuple):
    """By all tests of a file: the seconds of them, of the longest, and of a core, ended child processes counted."""

    total_s: float
    longest_s: float
    core_s: float


KNOWN = {name: Taken(*seconds) for name, seconds in json.loads(FILE.read_text()).items()}
"""By file, below the folder of tests."""


def taken(path: Path) -> Taken:
    return KNOWN.get(path.relative_to(FILE.parents[1]).as_posix(), Taken(0, 0, 0))


def begins_first(path: Path) -> float:
    """What to sort files by: those with a long test come first, the longest of all before them."""
    longest_s = taken(path).longest_s
    return -longest_s if longest_s >= LONG_S else 0.0


def waits(path: Path) -> bool:
    """Whether the tests of a file wait more than others: for servers and engines, for timeouts, for simulated load.

    Measured against all tests, as whatever else the machine did then lets every test use a core less.
    """
    total_s, _, core_s = taken(path)
    all_s, all_core_s = all_tests()
    return core_s * all_s < 0.9 * total_s * all_core_s


def all_tests() -> tuple[float, float]:
    """Their seconds, one after the other, and those of a core."""
    return sum(known.total_s for known in KNOWN.values()), sum(known.core_s for known in KNOWN.values())


def forecast(processes: int, cores: int) -> str:
    """A line that says how long all tests take."""
    total_s, core_s = all_tests()
    minutes = max(total_s / processes, core_s / cores) / 60
    return f"all tests take about {minutes:.0f} minutes in {processes} processes on {cores} cores (durations.json)"


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Meter:
    """Notes with every phase of a test the seconds of a core that it took, in the process that runs it."""

    def __init__(self) -> None:
        self.before_s = 0.0

    def pytest_runtest_logstart(self) -> None:
        self.before_s = sum(os.times()[:4])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        since_s, self.before_s = self.before_s, sum(os.times()[:4])
        report.user_properties.append(("core_s", self.before_s - since_s))
        return report


class Keeper:
    """Adds up what every test took, and writes it in the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
        self.core_s: dict[str, float] = collections.defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.location[0].replace(os.sep, "/").removeprefix("tests/")
        self.seconds[file][report.nodeid] += report.duration
        self.core_s[file] += dict(report.user_properties)["core_s"]

    def pytest_sessionfinish(self) -> None:
        found = {
            file: Taken(sum(tests.values()), max(tests.values()), self.core_s[file])
            for file, tests in sorted(self.seconds.items())
        }
        lines = [f'"{file}": [{", ".join(f"{s:.1f}" for s in t)}]' for file, t in found.items() if t.total_s >= 0.05]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
