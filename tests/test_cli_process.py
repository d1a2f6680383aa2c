"""The command line in a process of its own: interrupts, readers that leave, streams that fail, terminals."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module", autouse=True)
def interruptible() -> Iterator[None]:
    """A shell starts its background jobs with interrupts ignored, which children inherit; a handler they do not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    write_checkpoint(folder / "custom_voice", variant="custom_voice", topology="0.6b")
    return folder


def start(models: Path, *arguments: str, **streams: object) -> subprocess.Popen[bytes]:
    """The command in a process of its own, speaking for about half a minute of wall time."""
    command = [sys.executable, "-m", "sonoro", "say", "And on it goes. " * 500, "--model", models / "custom_voice"]
    return subprocess.Popen(
        [*command, *arguments],
        env={**os.environ, "TERM": "xterm"},
        **streams,
    )


def test_an_interrupt_ends_cleanly_and_removes_the_partial_file(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.wav"
    with start(models, "-o", str(out), "--stream", stderr=subprocess.PIPE) as process:
        while not (out.exists() and out.stat().st_size > 10_000):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"error: interrupted\n")
    assert not out.exists()


def test_a_reader_that_leaves_ends_the_command(models: Path) -> None:
    with start(models, "-o", "-", "--stream", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.read(4) == b"RIFF"
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=60)
    assert (process.returncode, err) == (2, b"error: cannot write stdout: Broken pipe\n")


@pytest.mark.parametrize("arguments", [["voices"], ["info"], [], ["--version"]])
def test_a_full_stdout_is_one_line(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "sonoro", *arguments]
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (2, b"error: cannot write stdout: No space left on device\n")


def test_closed_standard_streams_are_refused(models: Path) -> None:
    model = models / "custom_voice"
    for arguments, words in (("-o - Hi >&-", "stdout: it is closed"), ("-o - - <&-", "stdin is closed")):
        command = f"{sys.executable} -m sonoro say --max-frames 2 --model {model} {arguments}"
        ended = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stdout) == (2, "")
        assert re.fullmatch(rf"error: [^\n]*{words}\n", ended.stderr)


def test_a_terminal_gets_a_progress_bar(models: Path, tmp_path: Path) -> None:
    main_end, terminal = pty.openpty()
    with start(models, "-o", str(tmp_path / "a.wav"), stdout=subprocess.DEVNULL, stderr=terminal) as process:
        shown = ""
        while not re.search(r"[1-9]\d* frames, \d+\.\d s of audio", shown):
            assert process.poll() is None, shown
            if select.select([main_end], [], [], 0.1)[0]:
                shown += os.read(main_end, 4096).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    os.close(terminal)
    os.close(main_end)
    assert process.returncode == 130
