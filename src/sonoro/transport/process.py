"""An engine process of a client: sends and receives messages, notices when it crashes or hangs, and replaces it.

A process that ends without a `Shutdown` has crashed, whatever its exit code."""

import asyncio
import contextlib
import logging
import os
import signal
import time
from abc import ABC, abstractmethod
from asyncio.subprocess import Process
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Self, TypeVar

import msgspec
import zmq

from sonoro.core.errors import EngineClosed, EngineCrashed, EngineError, InvalidRequest, SonoroError
from sonoro.core.types import ModelSpec, SpeechRequest
from sonoro.transport import launch, messages
from sonoro.transport.channel import MessageSocket, new_endpoint, remove_endpoint
from sonoro.transport.launch import Limits

logger = logging.getLogger(__name__)

Asked = TypeVar("Asked", SpeechRequest, messages.EncodeVoice)

DRAIN_S = 0.2
"""How long to wait for the last messages of a process that has ended."""


class EngineProcess:
    """One engine process and this side's end of the link to it. Neither side waits for the other to read."""

    ready: messages.Ready

    def __init__(self) -> None:
        self.endpoint, self._output = new_endpoint(), launch.ProcessOutput()
        self._socket = MessageSocket(zmq.PAIR)
        self._process: Process | None = None
        self._ending: asyncio.Task[int] | None = None

    @classmethod
    async def start(cls, settings: messages.WorkerSettings, ready_timeout_s: float) -> Self:
        """Start a process and wait until its engine is ready. Raises the error that the process reported,
        `EngineCrashed` with its last line of output if it died without one, and `EngineError` after `ready_timeout_s`.
        """
        engine = cls()
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(engine.stop, 0)
            engine._socket.bind(engine.endpoint)
            facts = str(os.getpid()), str(time.monotonic()), msgspec.json.encode(settings).decode()
            try:
                engine._process = await launch.spawn((engine.endpoint, *facts), engine._output.write_end)
            except OSError as error:
                raise EngineCrashed(f"the engine process could not be started: {error}") from error
            engine._output.started()
            engine.ready = await engine._until_ready(ready_timeout_s)
            undo.pop_all()
        if not settings.has_fronts:
            # Both ends are connected, so the socket's file can go: nothing is left over, whichever process dies first.
            remove_endpoint(engine.endpoint)
        return engine

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet, as far as is known."""
        return self._process is not None and self._process.returncode is None

    def send(self, message: messages.ToEngine, *, is_checked: bool = False) -> None:
        """Send `message`; it is lost if the process is gone. Raises `InvalidRequest` as `encode_to_engine` does."""
        self._socket.send(encode_to_engine(message, is_checked=is_checked))

    async def serve(self, take: Callable[[messages.FromEngine], None]) -> EngineCrashed:
        """Call `take` with every message until the process ends; return how it ended."""
        try:
            while (batch := await self._messages()) is not None:
                for message in batch:
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
                self.send(messages.Shutdown())
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), timeout_s)
        finally:
            self.kill()
            try:
                await _run_to_end(self._until_ended())
            finally:
                self._socket.close()
                remove_endpoint(self.endpoint)
                self._output.close()

    async def _messages(self, timeout_s: float | None = None) -> list[messages.FromEngine] | None:
        """The next messages; None if the process has ended without any, or at the timeout."""
        if self._ending is None:
            assert self._process is not None
            self._ending = asyncio.create_task(self._process.wait())
            self._ending.add_done_callback(lambda _: self._socket.wake())
        # The process may have ended while its last messages were handled: nothing wakes a second time.
        has_messages = not self._ending.done() and await self._socket.wait(timeout_s)
        if not has_messages and self._ending.done():
            await self._socket.wait(DRAIN_S, is_woken=False)
        batches = self._socket.take()
        return [message for batch in batches for message in decode_from_engine(batch)] if batches else None

    async def _until_ended(self) -> None:
        """Wait for the end of the process and of the tasks that wait for it."""
        if self._process is not None:
            await self._process.wait()
        if self._ending is not None:
            await cancel_tasks(self._ending)

    async def _until_ready(self, timeout_s: float) -> messages.Ready:
        started_at_s = time.monotonic()
        if (batch := await self._messages(timeout_s)) is not None:
            [message, *_] = batch
            if isinstance(message, messages.Fatal):
                raise message.facts.error
            assert isinstance(message, messages.Ready), message
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


class Started(ABC):
    """An asynchronous context manager of one engine or several. Belongs to the event loop it was started in."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def close(self) -> None:
        """End every engine; requests still running fail with `EngineClosed`."""

    @property
    @abstractmethod
    def ready(self) -> messages.Ready:
        """The newest `Ready` message of the first engine."""

    @property
    def spec(self) -> ModelSpec:
        """What the model can do."""
        return self.ready.spec

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class EngineReadiness(Started):
    """Whether an engine accepts requests, for those who wait for it."""

    def __init__(self, settings: messages.WorkerSettings, limits: Limits | None = None) -> None:
        self.settings, self._limits = settings, limits or Limits()
        self._ready: messages.Ready | None = None
        self._closed: EngineClosed | None = None
        self._state_changed = asyncio.Event()
        self.restarts = 0
        """How many replacements were started."""

    @property
    def ready(self) -> messages.Ready:
        assert self._ready is not None, "the engine has not been started"
        return self._ready

    @property
    @abstractmethod
    def is_ready(self) -> bool:
        """Whether the engine accepts requests: its process runs and answers pings."""

    @property
    def closed_reason(self) -> str | None:
        """Why the engine will not run again; None while it runs or may be replaced."""
        return None if self._closed is None else str(self._closed)

    async def until_ready(self) -> None:
        """Wait until the engine is ready. Raises `EngineCrashed` after `accept_timeout_s`, `EngineClosed` if it will
        not run again."""
        waits_s = self._limits.accept_timeout_s
        if self.is_ready:
            return
        try:
            async with asyncio.timeout(waits_s):
                # The engine may crash again before this task runs.
                while not self.is_ready and self._closed is None:
                    self._state_changed.clear()
                    await self._state_changed.wait()
        except TimeoutError as error:
            raise EngineCrashed(f"the engine has ended or hangs, and was not ready in {waits_s:g} s") from error
        if self._closed is not None:
            raise EngineClosed(str(self._closed))


class SupervisedEngine(EngineReadiness):
    """Keeps an engine process with `settings` running.
    A process that crashes or hangs is replaced. After more than `max_restarts` crashes within `restart_window_s` the
    engine is closed."""

    def __init__(self, settings: messages.WorkerSettings, limits: Limits | None = None) -> None:
        super().__init__(settings, limits)
        self._process: EngineProcess | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._crashed_at_s: deque[float] = deque()
        self._last_message_s, self._is_hung = 0.0, False

    @abstractmethod
    def _handle(self, message: messages.FromEngine) -> None:
        """Handle a message of the engine, other than `Ready`."""

    @abstractmethod
    def _fail_pending(self, error: EngineError) -> None:
        """Fail everything that waits for the engine."""

    async def start(self) -> None:
        """Start the engine and wait until it is ready, or raise as `EngineProcess.start` does."""
        self._adopt(await EngineProcess.start(self.settings, self._limits.ready_timeout_s))
        self._tasks = [asyncio.create_task(work()) for work in (self._supervise, self._ping)]

    async def close(self) -> None:
        self._close_for_good(EngineClosed("the engine was closed"))
        try:
            await cancel_tasks(*self._tasks)
        finally:
            process, self._process = self._process, None
            if process is not None:
                await process.stop(self._limits.shutdown_timeout_s)

    @property
    def endpoint(self) -> str | None:
        """The address of the engine's process; None if none runs."""
        return None if self._process is None else self._process.endpoint

    @property
    def last_ready(self) -> messages.Ready | None:
        """`ready`; None before the first start."""
        return self._ready

    @property
    def is_ready(self) -> bool:
        return self._process is not None and self._process.is_running and not self._is_hung and self._closed is None

    def _send(self, message: messages.ToEngine, *, is_checked: bool = False) -> None:
        """Send `message` to the current process, if there is one."""
        if self._process is not None:
            self._process.send(message, is_checked=is_checked)

    def _dispatch(self, message: messages.FromEngine) -> None:
        self._mark_alive()
        if not isinstance(message, messages.Ready):
            self._handle(message)
            return
        if self.ready.graphs_to_come and not message.graphs_to_come:
            logger.info("event=graphs_captured")
        self._ready = message

    def _adopt(self, process: EngineProcess) -> None:
        self._process, self._ready = process, process.ready
        self._mark_alive()
        self._state_changed.set()

    def _close_for_good(self, error: EngineClosed) -> None:
        self._closed = self._closed or error
        self._state_changed.set()
        self._fail_pending(error)

    async def _supervise(self) -> None:
        """Dispatch the messages of the process until it ends, replace it, and repeat."""
        try:
            while self._process is not None:
                error = await self._process.serve(self._dispatch)
                await self._replace(error)
        except Exception as error:
            logger.exception("event=supervision_failed")
            self._close_for_good(EngineClosed(f"the engine cannot be supervised any more: {error!r}"))

    async def _replace(self, error: SonoroError) -> None:
        """Fail the requests of the ended process and start another, or close after too many crashes."""
        ended, self._process = self._process, None
        self._fail_pending(EngineCrashed(str(error)))
        if ended is not None:
            await ended.stop(0)
        while (crashes := self._count_crash(error)) <= self._limits.max_restarts:
            # The first restart is immediate: most crashes are one request's fault. Later ones let memory be freed.
            await asyncio.sleep(0.5 * (crashes - 1))
            self.restarts += 1
            try:
                self._adopt(await EngineProcess.start(self.settings, self._limits.ready_timeout_s))
                return
            except SonoroError as failure:
                error = failure
        window_s = self._limits.restart_window_s
        self._close_for_good(EngineClosed(f"the engine process ended {crashes} times within {window_s:g} s: {error}"))

    def _count_crash(self, error: SonoroError) -> int:
        """Log and count a crash; return the number within `restart_window_s`, this one included."""
        now_s = asyncio.get_running_loop().time()
        self._crashed_at_s.append(now_s)
        while self._crashed_at_s[0] <= now_s - self._limits.restart_window_s:
            self._crashed_at_s.popleft()
        logger.error("event=engine_crashed crashes=%d reason=%r", len(self._crashed_at_s), str(error))
        return len(self._crashed_at_s)

    def _mark_alive(self) -> None:
        self._last_message_s = asyncio.get_running_loop().time()
        if self._is_hung:
            self._is_hung = False
            self._state_changed.set()

    async def _ping(self) -> None:
        """Ping the process; it is not ready after `hang_s` of silence, and killed after `answer_timeout_s`.
        A time in which this process did not run either, as both were suspended, is no silence."""
        now = asyncio.get_running_loop().time
        interval_s = min(self._limits.ping_interval_s, self._limits.answer_timeout_s / 2)
        while True:
            if not self._is_hung:
                self._send(messages.Ping())
            due_s = now() + interval_s
            await asyncio.sleep(interval_s)
            self._last_message_s = min(now(), self._last_message_s + max(0.0, now() - due_s))
            silent_s = now() - self._last_message_s
            if self._process is None:
                continue
            if silent_s > self._limits.hang_s and not self._is_hung:
                self._is_hung = True
                logger.warning("event=engine_hangs silent_s=%.1f", silent_s)
            if silent_s > self._limits.answer_timeout_s:
                self._process.kill()


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
_to_engine = msgspec.msgpack.Decoder(messages.ToEngine)
decode_from_engine: Callable[[bytes], list[messages.FromEngine]] = msgspec.msgpack.Decoder(
    list[messages.FromEngine]
).decode


def encode_to_engine(message: messages.ToEngine, *, is_checked: bool = False) -> bytes:
    """Encode `message`. Raises `InvalidRequest` for a request with a field that is not of its declared type, unless
    that `is_checked`."""
    try:
        if is_checked:
            return _encoder.encode(message)
        if isinstance(message, messages.Submit):
            _check(messages.Submit(_without_samples(message.request)))
        elif isinstance(message, messages.EncodeVoice):
            _check(_without_samples(message))
        return _encoder.encode(message)
    except (msgspec.MsgspecError, AttributeError, TypeError, ValueError, OverflowError) as error:
        assert isinstance(message, messages.Submit | messages.EncodeVoice), message
        named = message.request.id if isinstance(message, messages.Submit) else "a voice"
        raise InvalidRequest("request", named, f"every field must be of its type ({error})") from error


def _check(message: messages.ToEngine) -> None:
    _to_engine.decode(_encoder.encode(message))


def _without_samples(asked: Asked) -> Asked:
    """`asked` with empty recordings: checking a copy of a minute's samples takes 7 ms."""
    bare = (msgspec.structs.replace(each, pcm=bytes(memoryview(each.pcm)[:0])) for each in asked.references)
    return msgspec.structs.replace(asked, references=tuple(bare))
