"""Compiling the kernels of all sizes of a start in several processes at once, into Triton's cache.

A process compiles one kernel at a time, so a start with an empty cache would take the sum. While the weights are
loaded, another process, of `follow.py`, learns what the start launches and has it compiled; what that leaves in the
cache is loaded in milliseconds. What goes wrong here is a warning: the engine compiles by itself whatever it does not
find.
Knows no model: an engine with a factory of its own is not made to wait for the import of those that there are.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

import sonoro
from sonoro.core.config import kernel_cache_folder
from sonoro.runtime.ahead import current_target
from sonoro.transport.messages import DEFAULT_FACTORY, WorkerSettings

__all__ = ["compiling"]

logger = logging.getLogger(__name__)

_TIMEOUT_S = 300.0


@contextlib.contextmanager
def compiling(settings: WorkerSettings) -> Iterator[None]:
    """Compile what an engine of `settings` needs while the body runs; returns when both are done.

    Does nothing without a GPU or Triton, for a model that the registry does not know, and where it was done before.
    """
    process = _begin(settings)
    if process is None:
        yield
        return
    code: int | None = None
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(_TIMEOUT_S)
    finally:
        if code != 0:
            # It and those it has started, which are a group of their own and may outlive it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        logger.warning("event=compile_failed exit_code=%s", code)


def _begin(settings: WorkerSettings) -> subprocess.Popen[bytes] | None:
    """The process that compiles, if there is anything to do; that it cannot be started is a warning."""
    try:
        marker = _marker(settings)
        return None if marker is None or marker.exists() else _start(settings, marker)
    except Exception as error:  # of the GPU's driver in Triton, of the cache's folder: the engine runs without them
        logger.warning("event=compile_failed error=%r", error)
        return None


def _start(settings: WorkerSettings, marker: Path) -> subprocess.Popen[bytes]:
    inputs = [msgspec.json.encode(given).decode() for given in (settings, current_target())]
    command = [sys.executable, "-P", "-m", "sonoro.engine.follow", *inputs, str(marker), str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, process_group=0)


def _marker(settings: WorkerSettings) -> Path | None:
    """The file that says that it was done for these settings by this code; None if there is nothing to do."""
    has_gpu = settings.device != "cpu" and torch.cuda.is_available()
    if not has_gpu or importlib.util.find_spec("triton") is None or settings.factory != DEFAULT_FACTORY:
        return None
    # Engines that share a folder for as long as they live are given another one at every start.
    config = dataclasses.replace(settings.config, voices_folder="", codec_device="")
    same = msgspec.structs.replace(settings, config=config)
    digest = hashlib.sha256(msgspec.json.encode((same, str(torch.__version__), torch.cuda.get_device_name())))
    for path in sorted(Path(sonoro.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return kernel_cache_folder() / "sonoro" / digest.hexdigest()
