"""Compiling the kernels of all captured sizes in several processes at once, into Triton's cache.

A process compiles one kernel at a time, so a start with an empty cache would take the sum. Each process here runs a
share of the sizes on random weights of the model's shapes; what it leaves in the cache is loaded in milliseconds. What
goes wrong here is a warning: the engine compiles by itself whatever it does not find.
`python -m sonoro.engine.compile SETTINGS` does one share.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

import sonoro
from sonoro.core.config import EngineConfig, kernel_cache_folder, log_level
from sonoro.engine.runner import Runner
from sonoro.models import registry
from sonoro.transport.messages import DEFAULT_FACTORY, WorkerSettings

__all__ = ["compiling", "main", "shares_of"]

logger = logging.getLogger(__name__)

_MOST_PROCESSES = 8
_CORES_PER_PROCESS = 2
_TIMEOUT_S = 300.0
_CONTEXT_BYTES = 2 << 30
"""What a process takes on the GPU besides its weights."""


@contextlib.contextmanager
def compiling(settings: WorkerSettings) -> Iterator[None]:
    """Compile what an engine of `settings` needs while the body runs; returns when both are done.

    Does nothing without a GPU or Triton, for a model that the registry does not know, and where it was done before.
    """
    marker = _marker(settings)
    if marker is None or marker.exists():
        yield
        return
    processes = [_start(settings, share) for share in shares_of(settings.config, _process_count(settings))]
    codes: list[int | None]
    try:
        yield
        codes = [process.wait(_TIMEOUT_S) for process in processes]
    except subprocess.TimeoutExpired:
        codes = [None]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if any(codes) or None in codes:
        logger.warning("event=compile_failed exit_codes=%s", codes)
        return
    marker.parent.mkdir(parents=True, exist_ok=True)
    marker.write_text(msgspec.json.encode(settings).decode(), encoding="utf-8")


def shares_of(config: EngineConfig, count: int) -> list[EngineConfig]:
    """`config` in at most `count` shares that together hold all its sizes, each small in memory, capturing nothing."""
    config = config.resolve()
    launches = [(frames, batch) for frames in config.chunk_frames for batch in config.codec_batches]
    prefills = (*config.prefill_buckets, *config.long_prefills)
    shares = []
    for index in range(count):
        mine = launches[index::count]
        batches = config.frame_batches[index::count]
        if not mine and not batches and not prefills[index::count]:
            continue
        slots = max((*batches, 1))
        shares.append(
            dataclasses.replace(
                config,
                slots=slots,
                frame_batches=batches or (1,),
                chunk_frames=tuple(sorted({frames for frames, _ in mine})) or config.chunk_frames[:1],
                codec_batches=tuple(sorted({batch for _, batch in mine})) or config.codec_batches[:1],
                prefill_buckets=prefills[index::count] or prefills[:1],
                codec_frames=0,
                pages=config.pages_per_slot,
                memory_fraction=1.0,
                is_eager=True,
                codec_device="",
            )
        )
    return shares


def main() -> None:
    """Compile one share."""
    logging.basicConfig(level=log_level(), format="%(levelname)s %(name)s %(message)s")
    settings = msgspec.json.decode(sys.argv[1], type=WorkerSettings)
    loaded = registry.load(settings.model, device=settings.device, dtype=settings.dtype, load_format="dummy")
    Runner(loaded.model, settings.config).warm_up()


def _start(settings: WorkerSettings, share: EngineConfig) -> subprocess.Popen[bytes]:
    mine = msgspec.structs.replace(settings, config=share, load_format="dummy")
    command = [sys.executable, "-P", "-m", "sonoro.engine.compile", msgspec.json.encode(mine).decode()]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)


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


def _process_count(settings: WorkerSettings) -> int:
    """As many as there are cores for, and memory: each holds the weights once."""
    weights_bytes = registry.describe(settings.model, device=settings.device, dtype=settings.dtype).memory_bytes[
        "weights"
    ]
    free_bytes = torch.cuda.mem_get_info()[0]
    by_memory = free_bytes // (2 * weights_bytes + _CONTEXT_BYTES)
    return int(max(1, min(_MOST_PROCESSES, (os.cpu_count() or 1) // _CORES_PER_PROCESS, by_memory)))


if __name__ == "__main__":
    main()
