"""Compiling the kernels of all sizes of a start in several processes at once, into Triton's cache.

A process compiles one kernel at a time, so a start with an empty cache would take the sum. While the weights are
loaded, another process follows the start on a model without memory, which needs no GPU, to learn what is launched, and
has it compiled; what that leaves in the cache is loaded in milliseconds. What goes wrong here is a warning: the engine
compiles by itself whatever it does not find.
`python -m sonoro.engine.compile SETTINGS TARGET` is that process.
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
from sonoro.core.config import kernel_cache_folder, log_level
from sonoro.engine.runner import Runner
from sonoro.models import registry
from sonoro.runtime.ahead import Target, Variant, compile_all, current_target, recording
from sonoro.transport.messages import DEFAULT_FACTORY, WorkerSettings

__all__ = ["compiling", "launched_by", "main"]

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 16
_TIMEOUT_S = 300.0


@contextlib.contextmanager
def compiling(settings: WorkerSettings) -> Iterator[None]:
    """Compile what an engine of `settings` needs while the body runs; returns when both are done.

    Does nothing without a GPU or Triton, for a model that the registry does not know, and where it was done before.
    """
    marker = _marker(settings)
    if marker is None or marker.exists():
        yield
        return
    process = _start(settings)
    code: int | None = None
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(_TIMEOUT_S)
    finally:
        if process.poll() is None:
            # It and those it has started, which are a group of their own.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if code != 0:
        logger.warning("event=compile_failed exit_code=%s", code)
        return
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text(msgspec.json.encode(settings).decode(), encoding="utf-8")


def launched_by(settings: WorkerSettings, target: Target) -> list[Variant]:
    """The kernels that a start of `settings` launches on a `target`, checks and prompts beyond the graphs included.

    Leaves this process unable to launch any.
    """
    config = settings.config.resolve()
    config = dataclasses.replace(
        config, prefill_buckets=(*config.prefill_buckets, *config.long_prefills), codec_device="", is_eager=True
    )
    with recording(target) as variants:
        nowhere = torch.device("meta")
        loaded = registry.load(settings.model, device=nowhere, dtype=settings.dtype, load_format="dummy")
        Runner(loaded.model, config).warm_up()
    return variants


def main() -> None:
    """Compile what is launched by SETTINGS on TARGET."""
    logging.basicConfig(level=log_level(), format="%(levelname)s %(name)s %(message)s")
    settings = msgspec.json.decode(sys.argv[1], type=WorkerSettings)
    variants = launched_by(settings, msgspec.json.decode(sys.argv[2], type=Target))
    codes = compile_all(variants, min(_MOST_PROCESSES, os.cpu_count() or 1))
    if any(codes):
        sys.exit(f"exit codes {codes}")


def _start(settings: WorkerSettings) -> subprocess.Popen[bytes]:
    inputs = [msgspec.json.encode(given).decode() for given in (settings, current_target())]
    command = [sys.executable, "-P", "-m", "sonoro.engine.compile", *inputs]
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


if __name__ == "__main__":
    main()
