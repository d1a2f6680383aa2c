"""How long the tests take, by file: said when all are run, and what decides which of them begin first.

`pytest --keep-durations` writes the figures anew. Those that are stored are seconds of a processor, children counted,
on a machine of two cores that others used as well: their ratios count, and their sum is no less than on an idle one.
"""

import collections
import json
import os
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("durations.json")

LONG_S = 10
"""A test that takes so long is best begun early: begun last it would leave the other processes without work."""


def known() -> dict[str, tuple[float, float]]:
    """By file, below the folder of tests: the seconds of all of its tests, and of the longest."""
    return {name: (total, longest) for name, (total, longest) in json.loads(FILE.read_text()).items()}


KNOWN = known()


def begins_first(path: Path) -> float:
    """What to sort files by: those with a long test come first, the longest of all before them."""
    _, longest = KNOWN.get(path.relative_to(FILE.parent).as_posix(), (0.0, 0.0))
    return -longest if longest >= LONG_S else 0.0


def forecast(processes: int, cores: int) -> str:
    """A line that says how long all tests take."""
    minutes = sum(total for total, _ in KNOWN.values()) / min(processes, cores) / 60
    return (
        f"all tests take about {minutes:.0f} minutes in {processes} processes on {cores} cores (tests/durations.json)"
    )


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Keeper:
    """Adds up what every test took, and writes it in the end."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.location[0].replace(os.sep, "/").removeprefix("tests/")
        self.seconds[file][report.nodeid] += report.duration

    def pytest_sessionfinish(self) -> None:
        found = {file: [sum(tests.values()), max(tests.values())] for file, tests in sorted(self.seconds.items())}
        lines = [f'"{file}": [{total:.1f}, {longest:.1f}]' for file, (total, longest) in found.items() if total >= 0.05]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
