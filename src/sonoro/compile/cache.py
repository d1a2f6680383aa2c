"""Records for which settings, code, compiler and card the kernels in Triton's cache were compiled, and compiles missing
ones in another process.

An engine with a valid record starts at once. Otherwise `kernels.py` compiles in a process of its own, in the order of
need, and each launch waits for its kernel. A failure there is only a warning: the engine compiles whatever it does not
find. Imports no model, so that engines with another factory need not wait for the registry.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

import sonoro
from sonoro.compile.variants import Card, Variant, await_kernels, count_compiled, current_card, die_with
from sonoro.core.config import kernel_cache_folder
from sonoro.core.errors import border
from sonoro.runtime.kernels import plans_of
from sonoro.transport.messages import DEFAULT_FACTORY, WorkerSettings

logger = logging.getLogger(__name__)

_TIMEOUT_S = 300.0
_LOOK_S = 0.002
_SHAPING = (
    *("slots", "max_positions", "page_positions", "max_text", "max_frames", "prefill_tokens", "chunk_frames"),
    *("codec_dtype", "frame_batches", "prefill_buckets", "codec_batches", "model_settings", "quantization"),
    *("max_shared_bytes", "is_prefill_fused"),
)
"""The configuration fields on which kernel variants depend."""


class Record(msgspec.Struct, frozen=True):
    """The outcome of a compilation: `made_for` which code, compiler and card; (kernel, entry of Triton's cache) pairs;
    (kernel, error) pairs of what this card cannot run, and of `unfinished` ones, whose compiler was killed or such."""

    made_for: dict[str, str]
    entries: list[tuple[str, str]] = []
    errors: list[tuple[str, str]] = []
    unfinished: list[tuple[str, str]] = []


class KernelCache:
    """The record of the kernels of an engine of `settings` on a `card`, as a file beside Triton's cache."""

    def __init__(self, settings: WorkerSettings, card: Card) -> None:
        config = settings.config.resolve()
        what = (
            _model_folder(settings.model),
            _dtype(settings, card),
            {name: getattr(config, name) for name in _SHAPING},
        )
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
        """Why the kernels must be compiled: [] if they need not be, [""] if there is no record, else what differs from
        the record ("code", "torch", "triton", "card", the user's "plans"), ["entries"] if some are gone from Triton's
        cache, or ["unfinished"]."""
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=Record)
        except (FileNotFoundError, msgspec.DecodeError):
            return ["card" if any(self._path.parent.glob(f"{self._name}-*.json")) else ""]
        names = [name for name, value in self.made_for.items() if record.made_for.get(name) != value]
        names += ["entries"] * (not names and not all((self._folder / entry).is_dir() for _, entry in record.entries))
        return names or ["unfinished"] * bool(record.unfinished)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the file lock of this record, which is freed when the process and its forks end."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            # Some file systems have no locks: then concurrent starts compile the same kernels.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            # The previous holder has removed all notes, those of other code too.
            self._done.mkdir(parents=True, exist_ok=True)
            yield

    def note(self, variant: Variant) -> None:
        """Note that `variant` was compiled, or cannot be, so that launches need not wait for the others."""
        with contextlib.suppress(OSError):  # without the note, launches wait for the end of the compilation
            (self._done / _name(variant)).touch()

    def has(self, variant: Variant) -> bool:
        """Whether any process has noted `variant`."""
        return (self._done / _name(variant)).exists()

    @property
    def _done(self) -> Path:
        return self._path.with_suffix("") / hashlib.sha256(msgspec.json.encode(self.made_for)).hexdigest()[:16]

    def write(self, record: Record) -> None:
        """Write `record` atomically, and remove the notes, which it replaces."""
        part = self._path.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.encode(record))
        part.replace(self._path)
        shutil.rmtree(self._path.with_suffix(""), ignore_errors=True)


def _name(variant: Variant) -> str:
    """A file name for `variant`, equal in all processes."""
    return hashlib.sha256(repr(variant).encode()).hexdigest()


def _model_folder(model: str | None) -> str | None:
    """The resolved path if `model` is a folder, else `model`."""
    return model if model is None or not Path(model).is_dir() else str(Path(model).resolve())


def _dtype(settings: WorkerSettings, card: Card) -> str:
    """The dtype a model is served in; "auto" on cards without bfloat16, where it depends on the model."""
    wanted = settings.dtype or "auto"
    return "bfloat16" if wanted == "auto" and card.has_bfloat16 else wanted


def _code() -> str:
    """A digest of the package's code and its tuned plans."""
    package = Path(sonoro.__file__).parent
    return _digest(*sorted([*package.rglob("*.py"), *(package / "ops").rglob("*.json")]))


def _digest(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Child:
    """A new process that compiles kernels, notes each in the cache, and ends after the last."""

    def __init__(self, settings: WorkerSettings, card: Card) -> None:
        inputs = [msgspec.json.encode(given).decode() for given in (settings, card)]
        command = [sys.executable, "-P", "-m", "sonoro.compile.kernels", *inputs, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Standby:
    """As `_Child`, a fork of this process, with the imports done, that waits to be told what to compile, or to be
    dropped.

    This process must have no other thread and not use the GPU yet.
    """

    def __init__(self) -> None:
        kernels, parent = importlib.import_module("sonoro.compile.kernels"), os.getpid()
        given, self._give = os.pipe()
        self._code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                die_with(parent)
                os.close(self._give)
                with (
                    border(lambda error: logger.error("event=compile_failed", exc_info=error)),
                    open(given, "rb") as file,
                ):
                    if not any((kernel_cache_folder() / "sonoro").glob("*.json")):
                        kernels.prepare()
                    if inputs := file.read():
                        settings, card = msgspec.json.decode(inputs, type=tuple[WorkerSettings, Card])
                        kernels.run(settings, card)
                    code = 0
            finally:
                os._exit(code)
        os.close(given)

    def begin(self, settings: WorkerSettings, card: Card) -> None:
        """Tell it to compile the kernels of an engine of `settings` on `card`."""
        os.write(self._give, msgspec.json.encode((settings, card)))
        self.drop()

    def drop(self) -> None:
        """Close its input: it ends if it was told nothing."""
        if self._give >= 0:
            os.close(self._give)
            self._give = -1

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        """Kill it and its forks."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._code = -signal.SIGKILL


class Compiling:
    """A compilation in progress, or none if `compiler` is None. `counts`: variants by kernel that this process had to
    compile itself."""

    def __init__(self, compiler: _Child | Standby | None) -> None:
        self.counts: Counter[str] = Counter()
        self.waited_s = 0.0
        """How long launches have waited in all."""
        self._compiler, self._polling = compiler, threading.Lock()

    @property
    def is_done(self) -> bool:
        """Whether the compiler has ended. Logs a warning, once, if it failed."""
        with self._polling:
            if self._compiler is not None and (code := self._compiler.poll()) is not None:
                self._end(code)
            return self._compiler is None

    def wait_for(self, variant: Variant, cache: KernelCache) -> None:
        """Wait until `variant` is noted in `cache` or the compiler has ended; kill it after `_TIMEOUT_S`."""
        began_s = time.monotonic()
        while not self.is_done and not cache.has(variant):
            time.sleep(_LOOK_S)
            if time.monotonic() > began_s + _TIMEOUT_S:
                self.kill()
        self.waited_s += time.monotonic() - began_s

    def kill(self) -> None:
        """Kill the compiler, if it runs."""
        with self._polling:
            if self._compiler is not None:
                self._compiler.kill()
                self._end(self._compiler.poll())

    def _end(self, code: int | None) -> None:
        self._compiler = None
        if code != 0:
            logger.warning("event=compile_failed exit_code=%s", code)


@contextlib.contextmanager
def compiling(settings: WorkerSettings, standby: Standby | None = None) -> Iterator[Compiling]:
    """Compile the kernels of an engine of `settings` in `standby`, or else a new process, during the body and beyond.

    Each launch in this process waits for its own kernel alone; what it still compiles itself is counted (see
    `count_compiled`). Does nothing without a GPU or Triton, for a model of another factory, or if the record is valid.
    If the body raises, the compiler is killed.
    """
    if not _has_kernels(settings):
        if standby is not None:
            standby.drop()
        yield Compiling(standby)
        return
    work = _begin(settings, standby)
    count_compiled(work.counts)
    try:
        yield work
    except BaseException:
        work.kill()
        raise


def may_stand_by(settings: WorkerSettings) -> bool:
    """Whether an engine of `settings` might have kernels to compile, decided without using the GPU."""
    return settings.factory == DEFAULT_FACTORY and settings.device != "cpu" and _has_triton() and _has_node()


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _has_node() -> bool:
    """Whether the system has the device node of an NVIDIA or AMD GPU."""
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd"))


def _has_kernels(settings: WorkerSettings) -> bool:
    """Whether an engine of `settings` launches Triton kernels that can be listed ahead of time."""
    has_gpu = settings.device != "cpu" and torch.cuda.is_available()
    return has_gpu and _has_triton() and settings.factory == DEFAULT_FACTORY


def _begin(settings: WorkerSettings, standby: Standby | None) -> Compiling:
    """Start compiling if the record does not fit. Logs a warning if that cannot be started."""
    try:
        card = current_card()
        cache = KernelCache(settings, card)
        if cache.misfits:
            if standby is not None:
                standby.begin(settings, card)
            work = Compiling(standby or _Child(settings, card))
            await_kernels(card, functools.partial(work.wait_for, cache=cache))
            return work
    except Exception as error:  # of the GPU's driver or the cache's folder: the engine runs without compiled kernels
        logger.warning("event=compile_failed error=%r", error)
    if standby is not None:
        standby.drop()
    return Compiling(standby)
