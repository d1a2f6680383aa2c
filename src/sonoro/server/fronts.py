"""The parent of a server of several processes: it owns engines and listening sockets, and keeps the fronts running.

Fronts and engines talk without it. It tells the fronts which engines run, and the engines which fronts have ended. A
front that dies loses its own connections alone: new ones wait at its socket for the next."""

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import shutil
import signal
import socket
import sys
import tempfile
import time
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path

import msgspec

from sonoro.core.config import with_metrics_folder
from sonoro.core.errors import ConfigError, EngineClosed, EngineError
from sonoro.server.config import ServerConfig
from sonoro.server.metrics import forget_process
from sonoro.server.quotas.counts import Quotas, usage_columns
from sonoro.server.quotas.usage_file import UsageFile
from sonoro.server.shared import BEAT, ENDED, FrontFacts, columns
from sonoro.server.voice_files import open_files
from sonoro.transport import messages
from sonoro.transport.front_link import EngineNews
from sonoro.transport.launch import Limits
from sonoro.transport.process import SupervisedEngine, cancel_tasks
from sonoro.transport.table import Table

logger = logging.getLogger(__name__)

_NEWS_S = 0.02
"""How often the state of engines and fronts is looked at."""

_HANG_S = 20.0
"""A front whose event loop stands still for so long is replaced."""

_AGAIN_S = 1.0
"""Least time between two starts of one front."""


class OwnedEngine(SupervisedEngine):
    """An engine whose requests are the fronts'."""

    def _handle(self, message: messages.FromEngine) -> None:
        assert isinstance(message, messages.Pong), message

    def _fail_pending(self, error: EngineError) -> None:
        """The fronts learn it from the engine's state."""

    def forget(self, front: str) -> None:
        """Let the engine end the requests of a front that is gone."""
        self._send(messages.FrontEnded(front))


class Fronts:
    """Front processes on `listeners`, over engines with `settings` on `devices`. `config` is resolved. Raises
    `ConfigError` for a folder or file that cannot be used."""

    def __init__(
        self,
        settings: messages.WorkerSettings,
        devices: Sequence[str],
        limits: Limits,
        config: ServerConfig,
        listeners: Sequence[Sequence[socket.socket]],
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sonoro-fronts-"))
        self._config, self._settings = config, msgspec.structs.replace(settings, has_fronts=True)
        self._devices, self._limits, self._listeners = tuple(devices), limits, listeners
        self._engines = [OwnedEngine(msgspec.structs.replace(self._settings, device=one), limits) for one in devices]
        names = columns(self._config, len(devices))
        Table.create(names, len(listeners), self._folder)
        self._table = Table(names, len(listeners), 0, self._folder)
        folders = {"voices_folder": settings.config.voices_folder, "lexicons_folder": config.lexicons_folder}
        try:
            # A front that cannot use one ends, and would be started again and again.
            for field, location in folders.items():
                if location:
                    open_files(field, location)
            self._usage = UsageFile.of(config, Quotas.of(config, self._table))
        except ConfigError:
            shutil.rmtree(self._folder)
            raise
        (self._folder / "metrics").mkdir()
        self._running: dict[int, Process] = {}
        self._starts = itertools.count()
        self._is_ending, self._ended = False, asyncio.Event()

    async def run(self) -> None:
        """Serve until `end`, then drain. Raises the error of an engine that could not be started, and
        `EngineClosed` once none is left."""
        starting = asyncio.create_task(self._start_engines())
        keeping = [asyncio.create_task(self._keep(number)) for number in range(len(self._listeners))]
        telling = asyncio.create_task(self._tell())
        waiting = asyncio.create_task(self._ended.wait())
        if self._usage is not None:
            self._usage.start()
        try:
            await asyncio.wait({starting, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                starting.result()
            while not waiting.done() and not telling.done():
                await asyncio.wait({waiting, telling}, return_when=asyncio.FIRST_COMPLETED)
            if telling.done():
                telling.result()
        finally:
            self._is_ending = True
            await self._drain()
            await cancel_tasks(starting, telling, waiting, *keeping)
            await asyncio.gather(*(engine.close() for engine in self._engines))
            if self._usage is not None:
                await self._usage.close()
            self._table.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _start_engines(self) -> None:
        await asyncio.gather(*(engine.start() for engine in self._engines))

    def end(self, *, is_forced: bool = False) -> None:
        """Let `run` drain and return; if `is_forced`, without the end of running requests."""
        self._ended.set()
        for process in self._running.values() if is_forced else ():
            with contextlib.suppress(ProcessLookupError):
                process.kill()

    async def _keep(self, number: int) -> None:
        """Keep front `number` running."""
        while not self._is_ending:
            began_s = time.monotonic()
            name = f"front-{number}-{next(self._starts)}"
            try:
                process = self._running[number] = await self._start(number, name)
            except OSError as error:  # no memory, process or file is left for it: connections wait at its socket
                logger.error("event=front_not_started front=%d reason=%r", number, str(error))
                await asyncio.sleep(_AGAIN_S)
                continue
            code = await process.wait()
            self._clean(number, name, process.pid)
            if self._is_ending:
                return
            if code != ENDED:
                logger.error("event=front_ended front=%d code=%s", number, code)
            await asyncio.sleep(max(0.0, began_s + _AGAIN_S - time.monotonic()))

    async def _start(self, number: int, name: str) -> Process:
        own = tuple(sock.fileno() for sock in self._listeners[number])
        config = {**self._config.values, "wyoming": self._config.wyoming if number == 0 else ""}
        limits = {entry.name: getattr(self._limits, entry.name) for entry in dataclasses.fields(self._limits)}
        numbers = number, len(self._listeners), own, str(self._folder)
        facts = FrontFacts(name, *numbers, config, self._settings, self._devices, limits)
        # A session of its own: an interrupt at the terminal reaches the parent alone.
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "sonoro.server.front"),
            stdin=asyncio.subprocess.PIPE,
            pass_fds=own,
            start_new_session=True,
            env=with_metrics_folder(self._folder / "metrics"),
        )
        self._say(process, msgspec.json.encode(facts))
        self._say(process, self._news())
        return process

    def _clean(self, number: int, name: str, pid: int) -> None:
        """Take back what a front that has ended held."""
        self._running.pop(number, None)
        self._table.clear(number, usage_columns(self._config))
        forget_process(pid, self._folder / "metrics")
        for engine in self._engines:
            engine.forget(name)
        for each in range(len(self._listeners)):
            self._table.wake(each)

    async def _tell(self) -> None:
        """Tell the fronts what changes of the engines, and kill those that hang. Raises `EngineClosed` when no engine
        is left."""
        told, resumed_s = self._states(), 0.0
        while True:
            due_s = time.monotonic() + _NEWS_S
            await asyncio.sleep(_NEWS_S)
            now_s = time.monotonic()
            # What stood still while this process did, as all were suspended, has time to go on.
            resumed_s = now_s if now_s > due_s + 1 else resumed_s
            if (states := self._states()) != told:
                told = states
                for process in list(self._running.values()):
                    self._say(process, self._news())
            reasons = [engine.closed_reason for engine in self._engines]
            if None not in reasons:
                raise EngineClosed(str(reasons[0]))
            for number, process in list(self._running.items()):
                beat_s = self._table.get(BEAT, number) / 1000
                if beat_s and now_s - max(beat_s, resumed_s) > _HANG_S:
                    logger.error("event=front_hangs front=%d", number)
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()

    def _states(self) -> list[tuple[object, ...]]:
        """What changes when there is news."""
        return [(one.endpoint, one.is_ready, id(one.last_ready), one.closed_reason) for one in self._engines]

    def _news(self) -> bytes:
        return msgspec.json.encode([EngineNews.of(engine) for engine in self._engines])

    @staticmethod
    def _say(process: Process, line: bytes) -> None:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            process.stdin.write(line + b"\n")

    async def _drain(self) -> None:
        """End the fronts as uvicorn ends: connections are refused, running requests end."""
        for sock in (sock for own in self._listeners for sock in own):
            sock.close()
        processes = list(self._running.values())
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        try:
            async with asyncio.timeout(self._config.shutdown_timeout_s + 10):
                await asyncio.gather(*(process.wait() for process in processes))
        except TimeoutError:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()


async def serve_fronts(fronts: Fronts) -> None:
    """Run `fronts` until SIGTERM or SIGINT, which then ends this process too; another SIGINT ends it at once."""
    signals, loop = list[int](), asyncio.get_running_loop()

    def end(number: int) -> None:
        fronts.end(is_forced=bool(signals) and number == signal.SIGINT)
        signals.append(number)

    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, end, each)
    try:
        await fronts.run()
    finally:
        for each in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(each)
    for number in signals[:1]:
        signal.raise_signal(number)
