"""The command line for its tests: in this process and an empty folder, and a server that it runs in one of its own."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sonoro.cli.main import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def interruptible() -> Iterator[None]:
    """A shell starts its background jobs with interrupts ignored, which children inherit; a handler they do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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


@contextlib.contextmanager
def server(
    folder: Path, *arguments: str, device: str = "--device=cpu", log_level: str = "WARNING"
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A running `sonoro serve`, in a group of its own, what it printed, and its address; it is gone with the block."""
    command = (sys.executable, "-m", "sonoro", "serve", "--port", "0", device, *arguments)
    environment = {**os.environ, "SONORO_LOG_LEVEL": log_level}
    piped: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "process_group": 0}
    with subprocess.Popen(command, cwd=folder, env=environment, **piped) as process:
        try:
            printed = ""
            while "listening on" not in printed:
                line = process.stdout.readline()
                assert line, process.stderr.read()
                printed += line
            yield process, printed, printed.rpartition(" ")[2].strip()
        finally:
            process.kill()
