"""What is said of how long the tests take, and which of them begin first."""

from pathlib import Path

import durations

TESTS = Path(__file__).parent


def test_files_of_the_longest_tests_begin_first() -> None:
    files = sorted((TESTS / name for name in durations.KNOWN), key=durations.begins_first)
    longest = [durations.KNOWN[file.relative_to(TESTS).as_posix()][1] for file in files]
    early = [seconds for seconds in longest if seconds >= durations.LONG_S]
    assert len(early) > 3
    assert longest[: len(early)] == sorted(early, reverse=True)
    assert durations.begins_first(TESTS / "core" / "test_new.py") == 0


def test_the_forecast_is_the_sum_over_what_runs_at_once(monkeypatch) -> None:
    monkeypatch.setattr(durations, "KNOWN", {"a.py": (600.0, 100.0), "b.py": (360.0, 9.0)})
    assert durations.forecast(3, 2).startswith("all tests take about 8 minutes in 3 processes on 2 cores")
    assert durations.forecast(1, 2).startswith("all tests take about 16 minutes in 1 processes")


def test_most_files_that_are_known_are_there() -> None:
    """A forecast of tests that were moved away would be wrong."""
    there = [name for name in durations.KNOWN if (TESTS / name).exists()]
    assert len(there) >= 0.9 * len(durations.KNOWN)
