"""Engine processes: start, wait until ready, send and receive messages, stop.

A process that ends without a `Shutdown` has crashed, whatever its exit code.
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
from abc import ABC, abstractmethod
from asyncio.subprocess import Process
from codecs import getincrementaldecoder
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import msgspec
import zmq
import zmq.asyncio

from sonoro.core.errors import ConfigError, EngineCrashed, EngineError, InvalidRequest
from sonoro.core.types import ModelSpec
from sonoro.transport.channel import new_endpoint, remove_endpoint
from sonoro.transport.messages import EncodeVoice, Fatal, FromEngine, Ready, Shutdown, Submit, ToEngine, WorkerSettings

logger = logging.getLogger(__name__)

MODULE = "sonoro.engine_process"

_CODE = f"import gc; gc.disable(); from {MODULE} import main; main()"
"""Imported objects stay, so garbage collection is off meanwhile: that saves a sixth of the time of the imports."""

DRAIN_S = 0.2
"""How long to wait for the last messages of a process that has ended."""


@dataclass(frozen=True)
class Limits:
    """Timeouts of an engine client, in seconds, and its limit of restarts.

    `ready_timeout_s`: from start to ready, a download included. `accept_timeout_s`: how long a request waits for an
    engine that is starting. An engine is pinged every `ping_interval_s`: after `hang_s` of silence it is not ready
    until it answers, after `answer_timeout_s` it is replaced. `slow_reader_timeout_s`: a request whose full queue is
    not read for that long is cancelled. `shutdown_timeout_s`: how long a process may take to exit. `max_restarts`:
    replacements within `restart_window_s`; after one more crash the client is closed. `queue_s`: seconds of audio in a
    request's queue at which the request is paused.
    """

    ready_timeout_s: float = 900.0
    accept_timeout_s: float = 60.0
    ping_interval_s: float = 1.0
    hang_s: float = 5.0
    answer_timeout_s: float = 60.0
    slow_reader_timeout_s: float = 60.0
    shutdown_timeout_s: float = 5.0
    max_restarts: int = 3
    restart_window_s: float = 600.0
    queue_s: float = 10.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, low = getattr(self, field.name), 0 if field.name == "max_restarts" else 1e-3
            if not low <= value < float("inf"):
                raise ConfigError(field.name, value, f"it must be finite and at least {low:g}")


class Started(ABC):
    """An asynchronous context manager of one engine or several: starts and closes them."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None: ...

    @property
    @abstractmethod
    def ready(self) -> Ready: ...

    @property
    def spec(self) -> ModelSpec:
        """What the model can do."""
        return self.ready.spec

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def spawn(arguments: Sequence[str], output: int) -> Process:
    """Start `engine_process` in a process that writes its output to the file descriptor `output`."""
    # In a process group of its own, so that an interrupt at the terminal reaches the parent alone, and processes that
    # it starts can be killed with it. -P: files in the current folder must not shadow libraries.
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", _CODE, *arguments),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
    )


class EngineProcess:
    """One engine process and this side's end of the link to it.

    Belongs to the running event loop. Neither side waits for the other to read.
    """

    ready: Ready

    def __init__(self) -> None:
        self._endpoint, self._output = new_endpoint(), _Output()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._process: Process | None = None
        self._receiving: asyncio.Task[list[FromEngine]] | None = None
        self._ending: asyncio.Task[int] | None = None

    @classmethod
    async def start(cls, settings: WorkerSettings, ready_timeout_s: float) -> Self:
        """Start a process and wait until its engine is ready.

        Raises the error that the process reported (`ConfigError`, `CheckpointError`, ...), `EngineCrashed` with its
        last line of output if it died without one, and `EngineError` after `ready_timeout_s`. The process is then gone.
        """
        engine = cls()
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(engine.stop, 0)
            engine._socket.bind(engine._endpoint)
            await engine._spawn(settings)
            engine.ready = await engine._until_ready(ready_timeout_s)
            undo.pop_all()
        # Both ends are connected, so the socket's file can go: nothing is left over, whichever process dies first.
        remove_endpoint(engine._endpoint)
        return engine

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet, as far as is known."""
        return self._process is not None and self._process.returncode is None

    def send(self, message: ToEngine) -> None:
        """Send `message`; it is lost if the process is gone. Raises `InvalidRequest` as `encode_to_engine` does."""
        sent = cast("asyncio.Future[object]", self._socket.send(encode_to_engine(message), zmq.NOBLOCK))
        assert sent.done()
        if not isinstance(sent.exception(), zmq.Again):
            sent.result()

    async def serve(self, take: Callable[[FromEngine], None]) -> EngineCrashed:
        """Call `take` with every message until the process ends; return how it ended."""
        try:
            while (messages := await self._messages()) is not None:
                for message in messages:
                    take(message)
            return self._crash()
        except Exception as error:
            # A process whose messages cannot be handled is treated as one that crashed.
            logger.exception("event=message_not_understood")
            self.kill()
            return EngineCrashed(f"a message of the engine process could not be understood: {error!r}")

    def kill(self) -> None:
        """Kill the process and those it has started."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def stop(self, timeout_s: float) -> None:
        """Ask the process to end, kill it after `timeout_s`, wait for its end and free everything."""
        try:
            if self._process is not None and self.is_running and timeout_s > 0:
                self.send(Shutdown())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), timeout_s)
        finally:
            self.kill()
            try:
                await _run_to_end(self._until_ended())
            finally:
                self._socket.close(linger=0)
                self._context.term()
                remove_endpoint(self._endpoint)
                self._output.close()

    async def _spawn(self, settings: WorkerSettings) -> None:
        arguments = (self._endpoint, str(os.getpid()), str(time.monotonic()), msgspec.json.encode(settings).decode())
        self._process = await spawn(arguments, self._output.write_end)
        self._output.started()

    async def _messages(self, timeout_s: float | None = None) -> list[FromEngine] | None:
        """The next batch of messages; None if the process has ended without any, or at the timeout."""
        assert self._process is not None
        self._receiving = self._receiving or asyncio.create_task(self._receive())
        self._ending = self._ending or asyncio.create_task(self._process.wait())
        await asyncio.wait({self._receiving, self._ending}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._ending.done():
            await asyncio.wait({self._receiving}, timeout=DRAIN_S)
        if not self._receiving.done():
            return None
        received, self._receiving = self._receiving, None
        return received.result()

    async def _receive(self) -> list[FromEngine]:
        return decode_from_engine(await self._socket.recv())

    async def _until_ended(self) -> None:
        """Wait for the end of the process and of the tasks that wait for it."""
        if self._process is not None:
            await self._process.wait()
        await cancel_tasks(*(task for task in (self._receiving, self._ending) if task is not None))

    async def _until_ready(self, timeout_s: float) -> Ready:
        started_at_s = time.monotonic()
        if (messages := await self._messages(timeout_s)) is not None:
            [message, *_] = messages
            if isinstance(message, Fatal):
                raise message.facts.error
            assert isinstance(message, Ready), message
            return message
        if not self.is_running:
            raise self._crash()
        waited_s = time.monotonic() - started_at_s
        raise EngineError(f"the engine process was not ready after {waited_s:.0f} s; it may take {timeout_s:g} s")

    def _crash(self) -> EngineCrashed:
        assert self._process is not None
        code = self._process.returncode
        assert code is not None
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return EngineCrashed(f"the engine process ended with {how}{self._output.last_line}")


async def _run_to_end(work: Coroutine[Any, Any, object]) -> None:
    """Run `work` to its end, which must be near; a cancellation takes effect after it."""
    task, cancelled = asyncio.create_task(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def cancel_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel `tasks` and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(list[FromEngine])


def encode_to_engine(message: ToEngine) -> bytes:
    """Encode `message`. Raises `InvalidRequest` for a request with a field that is not of its declared type."""
    try:
        payload = _encoder.encode(message)
        if isinstance(message, Submit | EncodeVoice):
            _to_engine.decode(payload)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        assert isinstance(message, Submit | EncodeVoice), message
        named = message.request.id if isinstance(message, Submit) else "a voice"
        raise InvalidRequest("request", named, f"every field must be of its type ({error})") from error
    return payload


def decode_from_engine(payload: bytes) -> list[FromEngine]:
    """Inverse of `transport.channel.encode_from_engine`."""
    messages: list[FromEngine] = _from_engine.decode(payload)
    return messages


class _Output:
    """Forwards the output of a process to stderr as it arrives, and keeps its last line."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._decoder = getincrementaldecoder("utf-8")(errors="replace")
        self._tail = ""
        self._is_open = True
        asyncio.get_running_loop().add_reader(self._read_end, self._forward)

    @property
    def last_line(self) -> str:
        """ ": " and the last line that is not empty, or ""."""
        if self._is_open:
            self._forward()
        lines = [line.strip() for line in self._tail.splitlines() if line.strip()]
        return f": {lines[-1]}" if lines else ""

    def started(self) -> None:
        """Close this process's copy of the write end."""
        os.close(self.write_end)
        self.write_end = -1

    def close(self) -> None:
        """Stop reading; later output of a surviving child of the process is dropped."""
        if self._is_open:
            self._forward()
        if self._is_open:
            self._stop()
        if self.write_end >= 0:
            self.started()

    def _forward(self) -> None:
        while True:
            try:
                data = os.read(self._read_end, 65536)
            except BlockingIOError:
                return
            text = self._decoder.decode(data)
            self._tail = (self._tail + text)[-4096:]
            with contextlib.suppress(OSError, ValueError, AttributeError):
                # A closed or missing stderr is no reason to fail.
                sys.stderr.write(text)
            if not data:
                self._stop()
                return

    def _stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._read_end)
        os.close(self._read_end)
        self._is_open = False
