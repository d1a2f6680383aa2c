"""What is said of how long the tests take, which of them begin first, and which run aside."""

from pathlib import Path
from types import SimpleNamespace

import durations
import pytest
from aside import Aside

TESTS = Path(__file__).parent


def test_files_of_the_longest_tests_begin_first() -> None:
    files = sorted((TESTS / name for name in durations.KNOWN), key=durations.begins_first)
    longest = [durations.taken(file).longest_s for file in files]
    early = [seconds for seconds in longest if seconds >= durations.LONG_S]
    assert len(early) > 3
    assert longest[: len(early)] == sorted(early, reverse=True)
    assert durations.begins_first(TESTS / "core" / "test_new.py") == 0


def test_the_forecast_is_what_the_processes_or_the_cores_need(monkeypatch) -> None:
    known = {"a.py": durations.Taken(600, 100, 500), "b.py": durations.Taken(360, 9, 280)}
    monkeypatch.setattr(durations, "KNOWN", known)
    assert durations.forecast(2, 2).startswith("all tests take about 8 minutes in 2 processes on 2 cores")
    assert durations.forecast(3, 1).startswith("all tests take about 13 minutes in 3 processes on 1 cores")
    assert durations.forecast(1, 2).startswith("all tests take about 16 minutes in 1 processes")


def test_most_files_that_are_known_are_there() -> None:
    """A forecast of tests that were moved away would be wrong."""
    there = [name for name in durations.KNOWN if (TESTS / name).exists()]
    assert len(there) >= 0.9 * len(durations.KNOWN)


class Node:
    """A process, by the tests that it was given."""

    def __init__(self) -> None:
        self.given: list[int] = []
        self.gateway = SimpleNamespace(id=str(id(self)))
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices


def share(monkeypatch, nodes: int) -> list[list[int]]:
    """The tests that each of several processes begins with: 10 of each of two files, of which the second waits."""
    known = {"a.py": durations.Taken(60, 9, 50), "b.py": durations.Taken(60, 9, 5)}
    monkeypatch.setattr(durations, "KNOWN", known)
    schedule = Aside(SimpleNamespace(getvalue=lambda _: [f"{nodes}*popen"]))
    processes = [Node() for _ in range(nodes)]
    for process in processes:
        schedule.add_node(process)
        schedule.add_node_collection(process, [f"tests/{file}.py::{number}" for number in range(10) for file in "ab"])
    schedule.schedule()
    return [process.given for process in processes]


def test_of_three_processes_one_begins_with_the_tests_that_wait(monkeypatch) -> None:
    assert share(monkeypatch, 3) == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18], list(range(1, 20, 2))]


@pytest.mark.parametrize("nodes", [1, 2])
def test_of_fewer_each_takes_its_share(monkeypatch, nodes: int) -> None:
    given = share(monkeypatch, nodes)
    assert {len(tests) for tests in given} == {20 // nodes}
    assert sorted(index for tests in given for index in tests) == list(range(20))
