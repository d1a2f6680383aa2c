"""Engine processes: started, waited for, watched, replaced and ended. Knows messages, not what the requests are.

A process that ends without having been asked to is a crash, whatever its exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Self

import msgspec

from sonoro.core.errors import ConfigError, EngineClosed, EngineCrashed, EngineError, SonoroError
from sonoro.core.types import Finished
from sonoro.transport.channel import ClientLink
from sonoro.transport.messages import Fatal, FromEngine, Ready, Shutdown, ToEngine, WorkerSettings

__all__ = ["Limits", "Supervisor", "WorkerProcess"]

logger = logging.getLogger(__name__)

MODULE = "sonoro.engine.worker"

LAST_MESSAGES_S = 0.2
"""How long the last messages of a process that has ended may still be on their way."""


@dataclass(frozen=True)
class Limits:
    """How long things may take, in seconds, and how much is forgiven.

    `ready_timeout_s`: from start to ready, a download included. `accept_timeout_s`: what a request waits for an engine
    that is starting. `answer_timeout_s`: an engine that says nothing for so long, though asked, is replaced; it is
    asked once in that time.
    `slow_reader_timeout_s`: a request whose full queue is not read from for so long is cancelled. `shutdown_timeout_s`:
    what a process gets to end by itself. `max_restarts`: replacements in a row that finished no request. `queue_s`:
    audio a request's queue holds before the request is paused.
    """

    ready_timeout_s: float = 900.0
    accept_timeout_s: float = 60.0
    answer_timeout_s: float = 60.0
    slow_reader_timeout_s: float = 60.0
    shutdown_timeout_s: float = 5.0
    max_restarts: int = 3
    queue_s: float = 10.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, low = getattr(self, field.name), 0 if field.name == "max_restarts" else 1e-3
            if not low <= value < float("inf"):
                raise ConfigError(field.name, value, f"it must be finite and at least {low:g}")


class WorkerProcess:
    """One engine process from its start to its end; belongs to the running event loop."""

    ready: Ready

    def __init__(self, process: asyncio.subprocess.Process, link: ClientLink, output: _Output) -> None:
        self._process, self._link, self._output = process, link, output

    @classmethod
    async def start(cls, settings: WorkerSettings, ready_timeout_s: float) -> Self:
        """Start a process and wait until its engine is ready.

        Raises the error that the child reported (`ConfigError`, `CheckpointError`, ...), `EngineCrashed` with its last
        words if it died without one, and `EngineError` if it took too long. Nothing of it is left then.
        """
        link, output = ClientLink(), _Output()
        try:
            # In a process group of its own: an interrupt at the terminal is the parent's to handle, and what it starts
            # ends with it. -P: what lies in the current folder must not be imported in place of a library.
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", MODULE, link.endpoint, str(os.getpid()), str(time.monotonic())),
                msgspec.json.encode(settings).decode(),
                stdin=subprocess.DEVNULL,
                stdout=output.write_end,
                stderr=output.write_end,
                start_new_session=True,
            )
        except BaseException:
            link.close()
            output.close()
            raise
        output.started()
        worker = cls(process, link, output)
        try:
            worker.ready = await worker._until_ready(ready_timeout_s)
        except BaseException:
            await worker.stop(0)
            raise
        link.settle()
        return worker

    def send(self, message: ToEngine) -> None:
        """Send `message`; it is lost if the process is gone. Raises `InvalidRequest` if it cannot be read there."""
        self._link.send(message)

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet, as far as is known."""
        return self._process.returncode is None

    async def serve(self, take: Callable[[FromEngine], None]) -> EngineCrashed:
        """Hand every message to `take` until the process ends; how it ended."""
        receiving = asyncio.create_task(self._link.receive())
        ending = asyncio.create_task(self._process.wait())
        try:
            while await self._is_heard(receiving, ending):
                for message in receiving.result():
                    take(message)
                receiving = asyncio.create_task(self._link.receive())
            return self._crash()
        except Exception as error:
            # A process that cannot be understood is as good as none.
            logger.exception("event=message_not_understood")
            self.kill()
            return EngineCrashed(f"a message of the engine process could not be understood: {error!r}")
        finally:
            await _drop(receiving, ending)

    def kill(self) -> None:
        """End the process, and any it has started, at once."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, timeout_s: float) -> None:
        """Ask the process to end, make it after `timeout_s`, and wait until it has; then nothing of it is left."""
        try:
            if self._process.returncode is None and timeout_s > 0:
                self._link.send(Shutdown())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), timeout_s)
        finally:
            self.kill()
            try:
                await _finish(self._process.wait())
            finally:
                self._link.close()
                self._output.close()

    async def _is_heard(
        self, receiving: asyncio.Task[list[FromEngine]], ending: asyncio.Task[int], timeout_s: float | None = None
    ) -> bool:
        """Wait for messages; false if the process ended without leaving any, or nothing happens in time."""
        await asyncio.wait({receiving, ending}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            await asyncio.wait({receiving}, timeout=LAST_MESSAGES_S)
        return receiving.done()

    async def _until_ready(self, timeout_s: float) -> Ready:
        started_at_s = time.monotonic()
        receiving = asyncio.create_task(self._link.receive())
        ending = asyncio.create_task(self._process.wait())
        try:
            if await self._is_heard(receiving, ending, timeout_s):
                message = receiving.result()[0]
                if isinstance(message, Fatal):
                    raise message.error
                assert isinstance(message, Ready), message
                return message
            if ending.done():
                raise self._crash()
            waited_s = time.monotonic() - started_at_s
            raise EngineError(f"the engine process was not ready after {waited_s:.0f} s; it may take {timeout_s:g} s")
        finally:
            await _drop(receiving, ending)

    def _crash(self) -> EngineCrashed:
        code = self._process.returncode
        assert code is not None
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return EngineCrashed(f"the engine process ended with {how}{self._output.last_words}")


async def _finish(work: Coroutine[Any, Any, object]) -> None:
    """Do `work`, which is over in a moment, to its end, and be cancelled only then."""
    task, cancelled = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def _drop(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _Output:
    """What a process prints, passed on to our stderr as it comes; its last line is remembered."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._tail = ""
        self._is_open = True
        asyncio.get_running_loop().add_reader(self._read_end, self._pass_on)

    @property
    def last_words(self) -> str:
        """The last line that is not empty, after a colon."""
        if self._is_open:
            self._pass_on()
        lines = [line.strip() for line in self._tail.splitlines() if line.strip()]
        return f": {lines[-1]}" if lines else ""

    def started(self) -> None:
        """Leave the end that is written to the process alone."""
        os.close(self.write_end)
        self.write_end = -1

    def close(self) -> None:
        """Stop listening; what a forgotten child of the process still prints goes nowhere."""
        if self._is_open:
            self._pass_on()
        if self._is_open:
            self._stop()
        if self.write_end >= 0:
            self.started()

    def _pass_on(self) -> None:
        while True:
            try:
                data = os.read(self._read_end, 65536)
            except BlockingIOError:
                return
            text = self._decoder.decode(data)
            self._tail = (self._tail + text)[-4096:]
            with contextlib.suppress(OSError, ValueError, AttributeError):
                # A stderr that is closed, or that nobody gave us, does not concern the engine.
                sys.stderr.write(text)
            if not data:
                self._stop()
                return

    def _stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        self._is_open = False


class Supervisor:
    """Keeps one engine process running. `take` gets its messages, `Ready` first; `lose` is told that what it held is
    lost, and why.

    After `max_restarts` replacements in a row of which none finished a request, it gives up.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        limits: Limits,
        take: Callable[[FromEngine], None],
        lose: Callable[[EngineError], None],
    ) -> None:
        self._settings, self._limits, self._take, self._lose = settings, limits, take, lose
        self._worker: WorkerProcess | None = None
        self._task: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()
        self._closed: EngineClosed | None = None
        self._failures = 0
        self.ready: Ready | None = None
        self.restarts = 0

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine. One that has ended is none, though its last messages may still come."""
        return self._worker is not None and self._worker.is_running and self._closed is None

    @property
    def closed_reason(self) -> str | None:
        """Why there will be no engine any more; None as long as there may be one."""
        return None if self._closed is None else str(self._closed)

    async def start(self) -> None:
        """Start the first process. Raises as `WorkerProcess.start` does; the first is not tried twice."""
        self._accept(await WorkerProcess.start(self._settings, self._limits.ready_timeout_s))
        self._task = asyncio.create_task(self._supervise())

    async def until_ready(self) -> None:
        """Wait for an engine. Raises `EngineCrashed` if there is none in time, `EngineClosed` if there will be none."""
        try:
            async with asyncio.timeout(self._limits.accept_timeout_s):
                # It may be lost again between the event and our turn.
                while not self.is_ready and self._closed is None:
                    self._settled.clear()
                    await self._settled.wait()
        except TimeoutError as error:
            waited_s = self._limits.accept_timeout_s
            raise EngineCrashed(
                f"the engine process ended, and its successor was not ready in {waited_s:g} s"
            ) from error
        if self._closed is not None:
            raise EngineClosed(str(self._closed))

    def send(self, message: ToEngine) -> None:
        """Send `message` to the engine there is; whatever that one held is lost with it."""
        if self._worker is not None:
            self._worker.send(message)

    def kill(self) -> None:
        """End the present process; it is replaced."""
        if self._worker is not None:
            self._worker.kill()

    async def close(self) -> None:
        """End the process for good."""
        self._close(EngineClosed("the engine was closed"))
        try:
            if self._task is not None:
                self._task.cancel()
                await asyncio.gather(self._task, return_exceptions=True)
        finally:
            worker, self._worker = self._worker, None
            if worker is not None:
                await worker.stop(self._limits.shutdown_timeout_s)

    def _accept(self, worker: WorkerProcess) -> None:
        self._worker, self.ready = worker, worker.ready
        self._take(worker.ready)
        self._settled.set()

    def _close(self, error: EngineClosed) -> None:
        self._closed = self._closed or error
        self._settled.set()
        self._lose(error)

    def _heard(self, message: FromEngine) -> None:
        if isinstance(message, Finished):
            self._failures = 0
        self._take(message)

    async def _supervise(self) -> None:
        try:
            while self._worker is not None:
                error = await self._worker.serve(self._heard)
                await self._replace(error)
        except Exception as error:
            logger.exception("event=supervision_failed")
            self._close(EngineClosed(f"the engine cannot be supervised any more: {error!r}"))

    async def _replace(self, error: SonoroError) -> None:
        """Tell of the end of the present process and start another, as often as may be."""
        ended, self._worker = self._worker, None
        self._failures += 1
        logger.error("event=engine_crashed failures=%d reason=%r", self._failures, str(error))
        self._lose(EngineCrashed(str(error)))
        if ended is not None:
            await ended.stop(0)
        while self._failures <= self._limits.max_restarts:
            # The first at once: most crashes are one request's fault. Later ones may wait for memory to come free.
            await asyncio.sleep(0.5 * (self._failures - 1))
            self.restarts += 1
            try:
                self._accept(await WorkerProcess.start(self._settings, self._limits.ready_timeout_s))
            except SonoroError as failure:
                self._failures += 1
                error = failure
                logger.error("event=engine_restart_failed failures=%d reason=%r", self._failures, str(error))
            else:
                return
        self._close(EngineClosed(f"the engine process ended {self._failures} times without an answer: {error}"))
