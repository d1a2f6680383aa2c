"""Fixtures of the command line's tests: it runs in this process and an empty folder."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sonoro.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def sonoro(capfdbinary: pytest.CaptureFixture[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run the command line in an empty folder; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main([str(argument) for argument in arguments])
        out, err = capfdbinary.readouterr()
        return end.value.code, out.decode("latin-1"), err.decode()

    return run


def assert_refused(code: int, out: str, err: str, words: list[str]) -> None:
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: [^\n]+\n", err), err
    for word in words:
        assert word in err
