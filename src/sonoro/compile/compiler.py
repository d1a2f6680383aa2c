"""Compiles the kernels of an engine in another process while the engine starts.

An engine whose record (`cache.KernelCache`) is valid compiles nothing. Otherwise the other process compiles the kernels
in the order of need, and each launch of the engine waits for its own. A failure there is only a warning: the engine
compiles whatever it does not find."""

import contextlib
import functools
import importlib.util
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator

import msgspec
import torch

from sonoro.compile import kernels
from sonoro.compile.cache import KernelCache
from sonoro.compile.variants import Card, Variant, await_kernels, count_compiled, current_card, die_with
from sonoro.core.errors import border
from sonoro.core.folders import kernel_cache_folder
from sonoro.ops.optional import may_have_gpu
from sonoro.transport.messages import DEFAULT_FACTORY, WorkerSettings

logger = logging.getLogger(__name__)

_TIMEOUT_S = 300.0
_LOOK_S = 0.002


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
    """A fork of this process that waits until it is told what to compile, as `_Child` does, or is dropped.
    It has the imports done. This process must have no other thread and must not have used the GPU yet."""

    def __init__(self) -> None:
        parent = os.getpid()
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
    """A compilation in progress, or none if `compiler` is None.
    `counts`: by kernel, the variants that this process had to compile itself."""

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
    Each launch in this process waits for its own kernel alone; what it compiles itself is counted. Does nothing without
    a GPU or Triton, for a model of another factory, or if the record is valid. If the body raises, it is killed."""
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
    return settings.factory == DEFAULT_FACTORY and settings.device != "cpu" and _has_triton() and may_have_gpu()


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


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
