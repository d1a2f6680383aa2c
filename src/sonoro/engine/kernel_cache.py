"""What is known of the kernels in Triton's cache: for which settings, code, compiler and card they were compiled.

An engine whose kernels are there starts at once; another has them compiled by `kernels.py`, in a process of its own, in
the order in which it needs them, and waits for each where it launches it. What goes wrong there is a warning: the
engine compiles by itself whatever it does not find.
Knows no model: an engine with a factory of its own is not made to wait for the import of those that there are.
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
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch

import sonoro
from sonoro.core.config import kernel_cache_folder
from sonoro.core.errors import border
from sonoro.runtime.kernels import plans_of
from sonoro.runtime.variants import Card, Variant, await_kernels, count_compiled, current_card, die_with
from sonoro.transport.messages import DEFAULT_FACTORY, WorkerSettings

__all__ = ["Compiling", "KernelCache", "Record", "Standby", "compiling", "may_stand_by"]

logger = logging.getLogger(__name__)

_TIMEOUT_S = 300.0
_LOOK_S = 0.002
_SHAPING = (
    *("slots", "max_positions", "page_positions", "max_text", "max_frames", "prefill_tokens", "chunk_frames"),
    *("codec_dtype", "frame_batches", "prefill_buckets", "codec_batches", "model_settings", "quantization"),
    *("max_shared_bytes", "is_prefill_fused"),
)
"""The fields of a configuration that kernels or the sizes of their arguments depend on."""


class Record(msgspec.Struct, frozen=True):
    """What was compiled: `made_for` which code, compiler and card; the `entries` of Triton's cache; and the errors, of
    what this card cannot have, and of what is `unfinished`, as its compiler was killed or so; each with its kernel."""

    made_for: dict[str, str]
    entries: list[tuple[str, str]] = []
    errors: list[tuple[str, str]] = []
    unfinished: list[tuple[str, str]] = []


class KernelCache:
    """What is recorded of the kernels of an engine of `settings` on a `card`."""

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
        """Why the kernels must be compiled: [] if they need not be, [""] if nothing is known of them; otherwise what
        those that are there were not made for: "code", "torch", "triton", "card" or the user's own
        "plans"; or "entries" that are gone, or what is "unfinished".
        """
        try:
            record = msgspec.json.decode(self._path.read_bytes(), type=Record)
        except (FileNotFoundError, msgspec.DecodeError):
            return ["card" if any(self._path.parent.glob(f"{self._name}-*.json")) else ""]
        names = [name for name, value in self.made_for.items() if record.made_for.get(name) != value]
        names += ["entries"] * (not names and not all((self._folder / entry).is_dir() for _, entry in record.entries))
        return names or ["unfinished"] * bool(record.unfinished)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within, no other process is that would write this; the lock ends with whoever holds it, forks included."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            # Some file systems know no locks: then several starts at once compile the same.
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            # Whoever had it before has removed what was noted, of other code too.
            self._done.mkdir(parents=True, exist_ok=True)
            yield

    def note(self, variant: Variant) -> None:
        """Let whoever waits for `variant` know that it was compiled, or cannot be, while others still are."""
        with contextlib.suppress(OSError):  # they wait for the others too then
            (self._done / _name(variant)).touch()

    def has(self, variant: Variant) -> bool:
        """Whether `variant` was noted, by whatever process."""
        return (self._done / _name(variant)).exists()

    @property
    def _done(self) -> Path:
        return self._path.with_suffix("") / hashlib.sha256(msgspec.json.encode(self.made_for)).hexdigest()[:16]

    def write(self, record: Record) -> None:
        """Keep `record`, which says more than what was noted."""
        part = self._path.with_suffix(f".{os.getpid()}")
        part.write_bytes(msgspec.json.encode(record))
        part.replace(self._path)
        shutil.rmtree(self._path.with_suffix(""), ignore_errors=True)


def _name(variant: Variant) -> str:
    """A file name for `variant`, the same in all processes."""
    return hashlib.sha256(repr(variant).encode()).hexdigest()


def _model_folder(model: str | None) -> str | None:
    """A folder by its whole path, wherever it is named from; a name as it is."""
    return model if model is None or not Path(model).is_dir() else str(Path(model).resolve())


def _dtype(settings: WorkerSettings, card: Card) -> str:
    """What a model is served in; auto where that depends on the model, as it does on cards without bfloat16."""
    has_bfloat16 = bool(card.gfx) or card.capability >= (8, 0)
    wanted = settings.dtype or "auto"
    return "bfloat16" if wanted == "auto" and has_bfloat16 else wanted


def _code() -> str:
    """A digest of the package's code and of the plans in it."""
    package = Path(sonoro.__file__).parent
    return _digest(*sorted([*package.rglob("*.py"), *(package / "ops").rglob("*.json")]))


def _digest(*paths: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


class _Compiler(ABC):
    """A process that compiles and notes each kernel that is there; it ends after the last."""

    @abstractmethod
    def poll(self) -> int | None:
        """How it has ended; None if it has not."""

    @abstractmethod
    def kill(self) -> None:
        """End it, and with it its forks."""


class _Child(_Compiler):
    """A process of its own, which has all to import."""

    def __init__(self, settings: WorkerSettings, card: Card) -> None:
        inputs = [msgspec.json.encode(given).decode() for given in (settings, card)]
        command = [sys.executable, "-P", "-m", "sonoro.engine.kernels", *inputs, str(os.getpid())]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class Standby(_Compiler):
    """A fork of this process, which may have no thread and no GPU in use, that compiles once it is told what for.

    It has imported already what that takes. One that is told nothing ends when it is dropped.
    """

    def __init__(self) -> None:
        kernels, parent = importlib.import_module("sonoro.engine.kernels"), os.getpid()
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
        """Compile what an engine of `settings` needs on `card`."""
        os.write(self._give, msgspec.json.encode((settings, card)))
        self.drop()

    def drop(self) -> None:
        """It is told no more."""
        if self._give >= 0:
            os.close(self._give)
            self._give = -1

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._code = -signal.SIGKILL


class Compiling:
    """The kernels of an engine on their way; `counts`, by kernel, are what this process compiled by itself."""

    def __init__(self, compiler: _Compiler | None) -> None:
        self.counts: Counter[str] = Counter()
        self.waited_s = 0.0
        """How long launches have waited."""
        self._compiler, self._polling = compiler, threading.Lock()

    @property
    def is_done(self) -> bool:
        """Whether nothing is compiled any more. That it failed is a warning, once."""
        with self._polling:
            if self._compiler is not None and (code := self._compiler.poll()) is not None:
                self._end(code)
            return self._compiler is None

    def wait_for(self, variant: Variant, cache: KernelCache) -> None:
        """Wait until `variant` is in the cache, or nothing is compiled any more: then it will not be."""
        began_s = time.monotonic()
        while not self.is_done and not cache.has(variant):
            time.sleep(_LOOK_S)
            if time.monotonic() > began_s + _TIMEOUT_S:
                self.kill()
        self.waited_s += time.monotonic() - began_s

    def kill(self) -> None:
        """Compile no more, if anything is."""
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
    """Compile what an engine of `settings` needs while the body runs, and after it while the result is not done.

    Each launch of this process waits for the kernel that it needs, and for no other; what it compiles by itself all the
    same is counted: see `count_compiled`. By `standby`, if there is one, or in a process of its own. Does nothing
    without a GPU or Triton, for a model that the registry does not know, and where a record says that all is there.
    """
    if not _has_kernels(settings):
        _drop(standby)
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
    """Whether an engine of `settings` might have kernels to compile; uses no GPU to find out."""
    return settings.factory == DEFAULT_FACTORY and settings.device != "cpu" and _has_triton() and _has_node()


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _has_node() -> bool:
    """Whether the system has a GPU of NVIDIA's or AMD's."""
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/kfd"))


def _has_kernels(settings: WorkerSettings) -> bool:
    """Whether there are kernels of such an engine, and a list of them."""
    has_gpu = settings.device != "cpu" and torch.cuda.is_available()
    return has_gpu and _has_triton() and settings.factory == DEFAULT_FACTORY


def _drop(standby: Standby | None) -> None:
    if standby is not None:
        standby.drop()


def _begin(settings: WorkerSettings, standby: Standby | None) -> Compiling:
    """What compiles, if there is anything to do; that it cannot be started is a warning."""
    try:
        card = current_card()
        cache = KernelCache(settings, card)
        if cache.misfits:
            work = Compiling(_start(settings, card, standby))
            await_kernels(card, functools.partial(work.wait_for, cache=cache))
            return work
    except Exception as error:  # of the GPU's driver, of the cache's folder: the engine runs without them
        logger.warning("event=compile_failed error=%r", error)
    _drop(standby)
    return Compiling(standby)


def _start(settings: WorkerSettings, card: Card, standby: Standby | None) -> _Compiler:
    if standby is None:
        return _Child(settings, card)
    standby.begin(settings, card)
    return standby
