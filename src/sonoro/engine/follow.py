"""Following a start on a model without memory, which needs no GPU, and compiling what it launches.

`python -m sonoro.engine.follow SETTINGS TARGET MARKER PARENT` is the process that `compile.py` starts: it ends soon
after the process PARENT, and waits for any other that compiles the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

from sonoro.core.config import is_log_json, log_level
from sonoro.core.logs import configure_logging
from sonoro.core.machine import usable_cores
from sonoro.engine.runner import Runner
from sonoro.models import registry
from sonoro.runtime.ahead import Target, Variant, compile_all, recording
from sonoro.transport.messages import WorkerSettings

__all__ = ["launched_by", "main"]

_MOST_PROCESSES = 16


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
        how = {"load_format": "dummy", "quantization": settings.config.quantization}
        loaded = registry.load(settings.model, device=nowhere, dtype=settings.dtype, **how)
        Runner(loaded.model, config).warm_up()
    return variants


def main() -> None:
    """Compile what is launched by SETTINGS on TARGET, and make the file MARKER, unless another does or PARENT ends."""
    configure_logging(log_level(), is_json=is_log_json())
    settings, target, marker, parent = sys.argv[1:]
    with _alone(Path(marker)):
        if Path(marker).exists():
            return
        variants = launched_by(
            msgspec.json.decode(settings, type=WorkerSettings), msgspec.json.decode(target, type=Target)
        )
        processes = min(_MOST_PROCESSES, usable_cores())
        codes = compile_all(variants, processes, lambda: os.getppid() == int(parent))
        if any(codes) or not variants:
            sys.exit(f"{len(variants)} kernels, exit codes {codes}")
        Path(marker).write_text(settings, encoding="utf-8")


@contextlib.contextmanager
def _alone(marker: Path) -> Iterator[None]:
    """Within, no other process is that would make `marker`; the lock ends with whoever holds it, forks included."""
    marker.parent.mkdir(parents=True, exist_ok=True)
    with marker.with_suffix(".lock").open("w") as lock:
        # Some file systems know no locks: then several starts at once compile the same.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    main()
