"""The command line in a process of its own: interrupts, readers that leave, streams that fail, terminals."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
from processes import GUARD_S, begin_command, interruptible
from tiny_checkpoint import write_checkpoint

__all__ = ["interruptible"]

pytestmark = pytest.mark.usefixtures("interruptible")


IMPORTS = ("sonoro.cli.main", "sonoro.api", "sonoro.models.qwen3_tts.model")
"""Of the command, for its forks."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    write_checkpoint(folder / "custom_voice", variant="custom_voice", topology="0.6b")
    return folder


def start(models: Path, *arguments: str, **streams: object) -> subprocess.Popen[bytes]:
    """The command in a process of its own, speaking for about half a minute of wall time."""
    command = [sys.executable, "-m", "sonoro", "say", "And on it goes. " * 500, "--model", models / "custom_voice"]
    return begin_command([*command, *arguments], IMPORTS, env={**os.environ, "TERM": "xterm"}, **streams)


@pytest.mark.parametrize("format", ["wav", "flac", "mp3", "opus", "pcm"])
@pytest.mark.parametrize(
    ("number", "word"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "terminated")], ids=["SIGINT", "SIGTERM"]
)
def test_what_was_spoken_before_a_signal_is_a_file_that_plays(
    models: Path, tmp_path: Path, number: signal.Signals, word: str, format: str
) -> None:
    out = tmp_path / f"out.{format}"
    with start(models, "-o", str(out), stderr=subprocess.PIPE) as process:
        while not (out.exists() and out.stat().st_size > 10_000):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    told = re.fullmatch(rf"error: {word}; {re.escape(str(out))} holds the first (\d+\.\d\d) s\n", err.decode())
    assert told, err
    assert process.returncode == 128 + number
    if format == "pcm":
        duration_s = out.stat().st_size / 2 / 24000
    else:
        samples, rate = soundfile.read(out)
        assert np.abs(samples).max() > 0
        duration_s = len(samples) / rate
    # A chunk may have been written and not yet counted.
    assert -0.1 < duration_s - float(told[1]) < 1.1
    if format == "wav":
        assert int.from_bytes(out.read_bytes()[40:44], "little") == out.stat().st_size - 44


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_anything_was_spoken_leaves_what_was_there(
    models: Path, tmp_path: Path, number: signal.Signals
) -> None:
    out = tmp_path / "out.wav"
    out.write_bytes(b"before")
    # Held back until it has ended, nothing comes for a while.
    arguments = ("-o", str(out), "--force", "--attempts", "10", "--progress", "--option", "subtalker_top_k=1")
    with start(models, *arguments, stderr=subprocess.PIPE) as process:
        time.sleep(0.5)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
    assert process.returncode in (128 + number, -number)
    if b"holds the first" in err:  # a busy machine let it speak
        assert soundfile.info(out).frames > 0
    else:
        assert out.read_bytes() == b"before"


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
    with (
        Path("/dev/full").open("wb") as full,
        begin_command(command, IMPORTS, stdout=full, stderr=subprocess.PIPE) as process,
    ):
        _, err = process.communicate(timeout=GUARD_S)
    assert (process.returncode, err) == (2, b"error: cannot write stdout: No space left on device\n")


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
        while not re.search(r"\d+% of the text, [1-9]\d*\.\d s of audio, \d+\.\d times as fast", shown):
            assert process.poll() is None, shown
            if select.select([main_end], [], [], 0.1)[0]:
                shown += os.read(main_end, 4096).decode(errors="replace")
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
    os.close(terminal)
    os.close(main_end)
    assert process.returncode == 130
