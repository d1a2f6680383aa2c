"""How an engine process is started: its command, where its output goes, and the limits that it is held to."""

import asyncio
import contextlib
import os
import subprocess
import sys
from asyncio.subprocess import Process
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sonoro.core.config import Settings, setting
from sonoro.core.logs import Outlet

MODULE = "sonoro.engine_process"

_CODE = f"import gc; gc.disable(); from {MODULE} import main; main()"
"""Imported objects stay, so garbage collection is off meanwhile: that saves a sixth of the time of the imports."""


def _seconds(default: float, help: str) -> Any:
    return setting(default, help, 1e-3, 1e9)


@dataclass(frozen=True)
class Limits(Settings):
    """Timeouts of an engine client, in seconds, and its limit of restarts. Raises `ConfigError`."""

    ready_timeout_s: float = _seconds(900.0, "from start to ready, a download included")
    accept_timeout_s: float = _seconds(60.0, "how long a request waits for an engine that is starting")
    ping_interval_s: float = _seconds(1.0, "time between two pings of an engine")
    hang_s: float = _seconds(5.0, "silence after which an engine is not ready until it answers")
    answer_timeout_s: float = _seconds(60.0, "silence after which an engine is replaced")
    slow_reader_timeout_s: float = _seconds(60.0, "how long a full queue may stay unread, before a cancel")
    shutdown_timeout_s: float = _seconds(5.0, "how long a process may take to exit")
    max_restarts: int = setting(3, "replacements within restart_window_s; one more closes the client", 0, 1_000_000)
    restart_window_s: float = _seconds(600.0, "the window in which crashes are counted")
    queue_s: float = _seconds(10.0, "audio in a request's queue at which the request is paused")


async def spawn(arguments: Sequence[str], output: int) -> Process:
    """Start `engine_process` in a process that writes its output to the file descriptor `output`."""
    # In a process group of its own, so that an interrupt at the terminal reaches the parent alone, and processes that
    # it starts can be killed with it. -P: files in the current folder must not shadow libraries.
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _CODE, *arguments),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


class ProcessOutput:
    """Forwards the output of a process to stderr as it arrives, and keeps its last line."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._decoder, self._outlet = getincrementaldecoder("utf-8")(errors="replace"), Outlet(sys.stderr)
        self._tail = ""
        self._is_open = True
        asyncio.get_running_loop().add_reader(self._read_end, self._forward)

    @property
    def last_line(self) -> str:
        """ ": " and the last line that is not empty, or ""."""
        self._forward()
        lines = [line.strip() for line in self._tail.splitlines() if line.strip()]
        return f": {lines[-1]}" if lines else ""

    def started(self) -> None:
        """Close this process's copy of the write end."""
        os.close(self.write_end)
        self.write_end = -1

    def close(self) -> None:
        """Stop reading; later output of a surviving child of the process is dropped."""
        self._forward()
        self._stop()
        if self.write_end >= 0:
            self.started()

    def _forward(self) -> None:
        while self._is_open:
            try:
                data = os.read(self._read_end, 65536)
            except BlockingIOError:
                return
            text = self._decoder.decode(data)
            self._tail = (self._tail + text)[-4096:]
            with contextlib.suppress(OSError, ValueError, AttributeError):
                # A closed or missing stderr is no reason to fail.
                self._outlet.write(text)
            if not data:
                self._stop()

    def _stop(self) -> None:
        if self._is_open:
            self._is_open = False
            asyncio.get_running_loop().remove_reader(self._read_end)
            os.close(self._read_end)
            self._outlet.close()
