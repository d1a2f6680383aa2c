"""The server's side of an engine: requests in, streams of audio out, and a process that is kept running. No torch.

Every accepted request ends: with its `Finished`, with the error that the engine gave, or with that of its process.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sonoro.core.encoded_voice import EncodedVoice
from sonoro.core.errors import (
    EngineClosed,
    EngineCrashed,
    EngineError,
    ErrorFacts,
    InvalidRequest,
    SonoroError,
    UnknownVoice,
)
from sonoro.core.types import (
    AudioChunk,
    Failed,
    Finished,
    ModelSpec,
    Reference,
    SpeechRequest,
    check_text,
)
from sonoro.transport.answer import RequestStream
from sonoro.transport.launch import EngineProcess, Limits, cancel_tasks
from sonoro.transport.messages import (
    AppendText,
    Cancel,
    EncodeVoice,
    EndText,
    FromEngine,
    LoadVoice,
    Ping,
    Pong,
    Ready,
    Stats,
    StatsRequest,
    Submit,
    ToEngine,
    VoiceEncoded,
    VoiceFailed,
    VoiceLost,
    VoiceWanted,
    WorkerSettings,
)

__all__ = ["EngineClient", "VoiceSource"]

logger = logging.getLogger(__name__)


VoiceSource = Callable[[str], Awaitable[bytes]]


async def _no_voices(digest: str) -> bytes:
    raise UnknownVoice("voice", digest, "no voices are kept here")


class EngineClient:
    """The server's side of an engine: a process started with `settings`, kept running, and the requests it holds.

    `async with EngineClient.launch(...) as client`. Belongs to the event loop it was started in. A process that crashes
    or hangs fails the requests it held with `EngineCrashed` and is replaced; later requests wait for the new one. After
    more than `max_restarts` crashes within `restart_window_s` there is none any more.
    """

    def __init__(self, settings: WorkerSettings, limits: Limits | None = None) -> None:
        self.settings, self._limits = settings, limits or Limits()
        self._process: EngineProcess | None = None
        self._ready: Ready | None = None
        self._closed: EngineClosed | None = None
        self._state_changed = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._crashed_at_s: deque[float] = deque()
        self._last_message_s, self._is_hung = 0.0, False
        self._streams: dict[str, RequestStream] = {}
        self._stats_waiters: deque[asyncio.Future[Stats]] = deque()
        self._numbers = itertools.count()
        self._voice_waiters: dict[int, asyncio.Future[EncodedVoice]] = {}
        self._fetches: set[asyncio.Task[None]] = set()
        self.voice_source: VoiceSource = _no_voices
        """Where encoded voices come from that the engine lacks, by digest. Raises `SonoroError`."""
        self.restarts = 0
        """How often a replacement was started."""

    @classmethod
    def launch(cls, model: str | Path | None = None, *, limits: Limits | None = None, **settings: Any) -> Self:
        """A client whose engine speaks as `model`; `settings` are the other fields of `WorkerSettings`."""
        return cls(WorkerSettings(model=None if model is None else str(model), **settings), limits)

    async def start(self) -> None:
        """Start the engine and wait until it is ready; the first process is not tried twice.

        Raises what was wrong with it (`ConfigError`, `CheckpointError`), or `EngineError` if it died or took too long.
        """
        self._adopt(await EngineProcess.start(self.settings, self._limits.ready_timeout_s))
        self._tasks = [asyncio.create_task(work()) for work in (self._supervise, self._ping)]

    async def close(self) -> None:
        """End the engine; what is still running fails with `EngineClosed`."""
        self._close_for_good(EngineClosed("the engine was closed"))
        try:
            await cancel_tasks(*self._tasks, *self._fetches)
        finally:
            process, self._process = self._process, None
            if process is not None:
                await process.stop(self._limits.shutdown_timeout_s)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def ready(self) -> Ready:
        """What the newest engine said when it was ready."""
        assert self._ready is not None, "the engine has not been started"
        return self._ready

    @property
    def spec(self) -> ModelSpec:
        """What the model can do."""
        return self.ready.spec

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine that answers. One that has ended is none, though its last messages may come."""
        return self._process is not None and self._process.is_running and not self._is_hung and self._closed is None

    @property
    def closed_reason(self) -> str | None:
        """Why there will be no engine any more; None as long as there may be one."""
        return None if self._closed is None else str(self._closed)

    @property
    def open_requests(self) -> int:
        """How many it has been given that have not ended: those that hold a slot and those that wait for one."""
        return len(self._streams)

    def has_request(self, request_id: str) -> bool:
        """Whether the request of that id is one of them."""
        return request_id in self._streams

    async def until_ready(self) -> None:
        """Wait for an engine. Raises `EngineCrashed` if there is none in time, `EngineClosed` if there will be none."""
        waits_s = self._limits.accept_timeout_s
        try:
            async with asyncio.timeout(waits_s):
                # It may be lost again between the event and our turn.
                while not self.is_ready and self._closed is None:
                    self._state_changed.clear()
                    await self._state_changed.wait()
        except TimeoutError as error:
            raise EngineCrashed(f"the engine has ended or hangs, and was not ready in {waits_s:g} s") from error
        if self._closed is not None:
            raise EngineClosed(str(self._closed))

    async def stream(self, request: SpeechRequest) -> AsyncGenerator[AudioChunk | Finished, None]:
        """The answer to `request` as it is made: `AudioChunk`s, then `Finished`.

        Leaving it early (closing the generator, cancelling the task) cancels the request. A reader that falls behind by
        `queue_s` of audio pauses the request, and one that then reads nothing for `slow_reader_timeout_s` ends it with
        the reason `cancelled`. Raises `InvalidRequest` (or a subclass) or `EngineError`.
        """
        answer = await self.open(request)
        try:
            async for event in answer:
                yield event
        finally:
            await answer.aclose()

    async def open(self, request: SpeechRequest) -> RequestStream:
        """The answer to `request`, which the engine has been given: text can be appended, and it can be cancelled.

        It is to be closed in any case. Raises what `stream` does.
        """
        await self.until_ready()
        while (previous := self._streams.get(request.id)) is not None and previous.is_closed:
            await previous.wait_ended()
            await self.until_ready()
        if previous is not None:
            raise InvalidRequest("id", request.id, "a request of that id is still running")
        self._send(Submit(request))
        full_bytes = int(self._limits.queue_s * self.spec.sample_rate) * 2
        answer = RequestStream(request.id, full_bytes, self._limits.slow_reader_timeout_s, self._send)
        self._streams[request.id] = answer
        return answer

    def append_text(self, request_id: str, text: str) -> None:
        """More text for a live request; one that has ended stays so.

        Raises `InvalidRequest` for what is not text, which harms nobody.
        """
        check_text(text)
        if request_id in self._streams:
            self._send(AppendText(request_id, text))

    def end_text(self, request_id: str) -> None:
        """Say that a live request has all of its text; one that has ended stays so."""
        if request_id in self._streams:
            self._send(EndText(request_id))

    def cancel(self, request_id: str) -> None:
        """End a request with the reason `cancelled`, after the audio already made. One that has ended stays so."""
        if request_id in self._streams:
            self._send(Cancel(request_id))

    async def stats(self, *, resets: bool = False) -> Stats:
        """How the engine is doing. Raises `EngineError` if it does not say so in time.

        With `resets` it then forgets the durations so far: the next answer is about the time between.
        """
        await self.until_ready()
        answer: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(answer)
        self._send(StatsRequest(resets))
        try:
            return await asyncio.wait_for(answer, self._limits.answer_timeout_s)
        except TimeoutError as error:
            raise EngineError(f"the engine did not answer for {self._limits.answer_timeout_s:g} s") from error

    async def encode_voice(self, references: tuple[Reference, ...]) -> EncodedVoice:
        """The voice of `references`, which the engine also keeps at hand. Leaving it early does not undo it.

        Raises `InvalidReference`, `EngineBusy`, or another `EngineError`.
        """
        await self.until_ready()
        number = next(self._numbers)
        self._send(EncodeVoice(number, references))
        answer: asyncio.Future[EncodedVoice] = asyncio.get_running_loop().create_future()
        self._voice_waiters[number] = answer
        return await answer

    def _send(self, message: ToEngine) -> None:
        """Send `message` to the engine there is; whatever that one held is lost with it."""
        if self._process is not None:
            self._process.send(message)

    def _dispatch(self, message: FromEngine) -> None:
        self._mark_alive()
        if isinstance(message, AudioChunk):
            self._streams[message.request_id].put(message)
        elif isinstance(message, Finished | Failed):
            event = message.error if isinstance(message, Failed) else message
            self._streams.pop(message.request_id).end(event)
        elif isinstance(message, Stats):
            answer = self._stats_waiters.popleft()
            if not answer.done():
                answer.set_result(message)
        elif isinstance(message, VoiceEncoded | VoiceFailed):
            self._resolve_voice(message)
        elif isinstance(message, VoiceWanted):
            task = asyncio.create_task(self._fetch(message.digest))
            self._fetches.add(task)
            task.add_done_callback(self._fetches.discard)
        else:
            assert isinstance(message, Pong), message

    def _resolve_voice(self, message: VoiceEncoded | VoiceFailed) -> None:
        """Tell whoever had a voice encoded, if they still wait."""
        answer = self._voice_waiters.pop(message.number)
        if answer.done():
            return
        if isinstance(message, VoiceFailed):
            answer.set_exception(message.facts.error)
        else:
            answer.set_result(EncodedVoice(message.digest, message.data))

    async def _fetch(self, digest: str) -> None:
        """Give the engine a voice that it wants. A successor, which does not, passes it over."""
        try:
            self._send(LoadVoice(digest, await self.voice_source(digest)))
        except SonoroError as error:
            self._send(VoiceLost(digest, ErrorFacts.of(error)))

    def _fail_pending(self, error: EngineError) -> None:
        """Fail everything that the engine held; each reader raises an exception of its own."""
        answers, self._streams = self._streams, {}
        asked, self._stats_waiters = self._stats_waiters, deque()
        encoding, self._voice_waiters = self._voice_waiters, {}
        for answer in answers.values():
            answer.end(ErrorFacts.of(error).error)
        futures: list[asyncio.Future[Any]] = [*asked, *encoding.values()]
        for future in futures:
            if not future.done():
                future.set_exception(ErrorFacts.of(error).error)

    def _adopt(self, process: EngineProcess) -> None:
        self._process, self._ready = process, process.ready
        self._mark_alive()
        self._state_changed.set()

    def _close_for_good(self, error: EngineClosed) -> None:
        self._closed = self._closed or error
        self._state_changed.set()
        self._fail_pending(error)

    async def _supervise(self) -> None:
        """Serve the process there is, and replace it when it ends."""
        try:
            while self._process is not None:
                error = await self._process.serve(self._dispatch)
                await self._replace(error)
        except Exception as error:
            logger.exception("event=supervision_failed")
            self._close_for_good(EngineClosed(f"the engine cannot be supervised any more: {error!r}"))

    async def _replace(self, error: SonoroError) -> None:
        """Tell of the end of the present process and start another, as often as may be."""
        ended, self._process = self._process, None
        self._fail_pending(EngineCrashed(str(error)))
        if ended is not None:
            await ended.stop(0)
        while (crashes := self._count_crash(error)) <= self._limits.max_restarts:
            # The first at once: most crashes are one request's fault. Later ones may wait for memory to come free.
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
        """Crashes within `restart_window_s`, this one among them."""
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
        """Ask now and then, so that a process that hangs is found out: given nothing more, and replaced in the end."""
        while True:
            if not self._is_hung:
                self._send(Ping())
            await asyncio.sleep(min(self._limits.ping_interval_s, self._limits.answer_timeout_s / 2))
            silent_s = asyncio.get_running_loop().time() - self._last_message_s
            if self._process is None:
                continue
            if silent_s > self._limits.hang_s and not self._is_hung:
                self._is_hung = True
                logger.warning("event=engine_hangs silent_s=%.1f", silent_s)
            if silent_s > self._limits.answer_timeout_s:
                self._process.kill()
