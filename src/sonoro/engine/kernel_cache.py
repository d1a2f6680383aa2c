"""What is known of the kernels in Triton's cache: for which settings, code, compiler and card they were compiled.

An engine whose kernels are there starts at once; another has them compiled by `kernels.py`, in a process of its own,
while it loads its weights. What goes wrong there is a warning: the engine compiles by itself whatever it does not find.
Knows no model: an engine with a factory of its own is not made to wait for the import of those that there are.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

import sonoro
from sonoro.core.config import kernel_cache_folder
from sonoro.runtime.kernels import plans_of
from sonoro.runtime.variants import Card, count_compiled, current_card
from sonoro.transport.messages import DEFAULT_FACTORY, WorkerSettings

__all__ = ["KernelCache", "Record", "compiling"]

logger = logging.getLogger(__name__)

_TIMEOUT_S = 300.0
_SHAPING = (
    *("slots", "max_positions", "page_positions", "max_text", "max_frames", "prefill_tokens", "chunk_frames"),
    *("codec_dtype", "frame_batches", "prefill_buckets", "codec_batches", "model_settings", "quantization"),
    *("max_shared_bytes", "is_prefill_fused"),
)
"""The fields of a configuration that kernels or the sizes of their arguments depend on."""


class Record(msgspec.Struct, frozen=True):
    """What was compiled: `made_for` which code, compiler and card; the `entries` of Triton's cache, and the `errors` of
    what this card cannot have, each with its kernel."""

    made_for: dict[str, str]
    entries: list[tuple[str, str]] = []
    errors: list[tuple[str, str]] = []


class KernelCache:
    """What is recorded of the kernels of an engine of `settings` on a `card`."""

    def __init__(self, settings: WorkerSettings, card: Card) -> None:
        config = settings.config.resolve()
        what = (settings.model, settings.dtype, {name: getattr(config, name) for name in _SHAPING})
        self._name = hashlib.sha256(msgspec.json.encode(what, order="sorted")).hexdigest()
        self._folder = kernel_cache_folder()
        self._path = self._folder / "sonoro" / f"{self._name}-{re.sub(r'[^0-9a-z]+', '-', card.name.lower())}.json"
        self.made_for = {
            "code": _code(),
            "torch": str(torch.__version__),
            "triton": importlib.metadata.version("triton"),
            "card": repr(card),
            "plans": _digest(*(path for path in plans_of(card).values() if path.is_file())),
        }

    @property
    def misfits(self) -> list[str]:
        """Why the kernels must be compiled: [] if they need not be, [""] if nothing is known of them; otherwise what
        those that are there were not made for: "code", "torch", "triton", "card" or the user's own
        "plans", or "entries" that are gone.
        """
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=Record)
        except (FileNotFoundError, msgspec.DecodeError):
            return ["card" if any(self._path.parent.glob(f"{self._name}-*.json")) else ""]
        names = [name for name, value in self.made_for.items() if record.made_for.get(name) != value]
        return names or ["entries"] * (not all((self._folder / entry).is_dir() for _, entry in record.entries))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within, no other process is that would write this; the lock ends with whoever holds it, forks included."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            # Some file systems know no locks: then several starts at once compile the same.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def write(self, record: Record) -> None:
        """Keep `record`."""
        part = self._path.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.encode(record))
        part.replace(self._path)


def _code() -> str:
    """A digest of the package's code and of the plans in it."""
    package = Path(sonoro.__file__).parent
    return _digest(*sorted([*package.rglob("*.py"), *(package / "ops").rglob("*.json")]))


def _digest(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@contextlib.contextmanager
def compiling(settings: WorkerSettings) -> Iterator[Counter[str]]:
    """Compile what an engine of `settings` needs while the body runs; returns when both are done.

    Yields a count, by kernel, of what this process compiles by itself from then on: see `count_compiled`. Does nothing
    without a GPU or Triton, for a model that the registry does not know, and where a record says that all is there.
    """
    counts: Counter[str] = Counter()
    if not _has_kernels(settings):
        yield counts
        return
    process = _begin(settings)
    if process is None:
        yield counts
    else:
        with _waiting(process):
            yield counts
    count_compiled(counts)


def _has_kernels(settings: WorkerSettings) -> bool:
    """Whether there are kernels of such an engine, and a list of them."""
    has_gpu = settings.device != "cpu" and torch.cuda.is_available()
    return has_gpu and importlib.util.find_spec("triton") is not None and settings.factory == DEFAULT_FACTORY


@contextlib.contextmanager
def _waiting(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Wait for `process` after the body; that it failed is a warning."""
    code: int | None = None
    try:
        yield
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(_TIMEOUT_S)
    finally:
        if code != 0:
            process.kill()  # its forks end with it
            process.wait()
    if code != 0:
        logger.warning("event=compile_failed exit_code=%s", code)


def _begin(settings: WorkerSettings) -> subprocess.Popen[bytes] | None:
    """The process that compiles, if there is anything to do; that it cannot be started is a warning."""
    try:
        card = current_card()
        return _start(settings, card) if KernelCache(settings, card).misfits else None
    except Exception as error:  # of the GPU's driver, of the cache's folder: the engine runs without them
        logger.warning("event=compile_failed error=%r", error)
        return None


def _start(settings: WorkerSettings, card: Card) -> subprocess.Popen[bytes]:
    inputs = [msgspec.json.encode(given).decode() for given in (settings, card)]
    command = [sys.executable, "-P", "-m", "sonoro.engine.kernels", *inputs, str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
