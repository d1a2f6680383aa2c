"""The server's side of an engine: keeps an engine process running, submits requests and streams their audio.

Every accepted request ends: with `Finished`, with the engine's error, or with `EngineCrashed`. No torch."""

import asyncio
import itertools
import logging
from abc import abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, Self

from sonoro.core.errors import EngineError, ErrorFacts, InvalidRequest, SonoroError, UnknownVoice
from sonoro.core.script import Said
from sonoro.core.types import AudioChunk, Failed, Finished, Reference, SpeechRequest, check_text
from sonoro.transport import messages
from sonoro.transport.encoded_voice import EncodedVoice
from sonoro.transport.launch import Limits
from sonoro.transport.process import EngineReadiness, SupervisedEngine, cancel_tasks
from sonoro.transport.table import Count

logger = logging.getLogger(__name__)


class RequestStream:
    """The events of one request as they arrive, for one reader: `AudioChunk`s, then `Finished`.

    Raises the error that the request failed with. Closing it early cancels the request. At `full_bytes` of unread audio
    the request is paused, below half of that it resumes; if nothing is read of a paused request for
    `slow_reader_timeout_s`, it is cancelled."""

    def __init__(
        self, request_id: str, full_bytes: int, slow_reader_timeout_s: float, send: Callable[[messages.ToEngine], None]
    ) -> None:
        self.request_id = request_id
        self._full_bytes, self._timeout_s, self._send = full_bytes, slow_reader_timeout_s, send
        self._events: deque[AudioChunk | Finished | Exception] = deque()
        self._waiters: list[asyncio.Future[None]] = []
        self._is_paused = self._is_finished = False
        self._timer: asyncio.TimerHandle | None = None
        self._on_end: Callable[[], None] | None = None
        self.unread_bytes = 0
        self.has_audio = False
        """Whether the engine has sent audio."""
        self.is_ended = False
        """Whether the engine has finished the request; audio may still be unread."""
        self.is_closed = False
        """Whether the reader has closed it."""

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AudioChunk | Finished:
        if self._is_finished or self.is_closed:
            raise StopAsyncIteration
        while not self._events:
            await self._next_event()
        event = self._events.popleft()
        self._is_finished = not isinstance(event, AudioChunk)
        if isinstance(event, Exception):
            raise event
        if isinstance(event, AudioChunk):
            self.unread_bytes -= len(event.pcm)
            self._resume()
        return event

    def append_text(self, text: str, said: tuple[Said, ...] = ()) -> None:
        """Append text to a live request, of which is `said` what lexicons say; ignored if it has ended. Raises
        `InvalidRequest` for what is not text."""
        check_text("text", text)
        self._send_unless_ended(messages.AppendText(self.request_id, text, said))

    def end_text(self) -> None:
        """Mark the text of a live request as complete; ignored if it has ended."""
        self._send_unless_ended(messages.EndText(self.request_id))

    def cancel(self) -> None:
        """End the request with the reason `cancelled`, after the audio already made; ignored if it has ended."""
        self._send_unless_ended(messages.Cancel(self.request_id))

    async def aclose(self) -> None:
        """Close the stream and cancel the request, without waiting. Its id is free once the engine has ended it."""
        self.is_closed = True
        self._events.clear()
        self._stop_timer()
        self.cancel()

    def on_done(self, call: Callable[[], None]) -> None:
        """Set the one callback for when the engine has finished the request; called at once if it has."""
        self._on_end = call
        if self.is_ended:
            call()

    async def wait_ended(self) -> None:
        """Wait until the engine has finished the request, after `aclose`."""
        while not self.is_ended:
            await self._next_event()

    def put(self, chunk: AudioChunk) -> None:
        """Add audio from the engine."""
        if self.is_closed:
            return
        self.has_audio = True
        self._events.append(chunk)
        self._wake()
        self.unread_bytes += len(chunk.pcm)
        if self.unread_bytes >= self._full_bytes and not self._is_paused:
            self._is_paused = True
            self._send(messages.Pause(self.request_id))
            self._start_timer()

    def end(self, event: Finished | Exception) -> None:
        """Add the last event; the reader gets it after the audio before it."""
        self.is_ended = True
        self._stop_timer()
        self._events.append(event)
        self._wake()
        if self._on_end is not None:
            self._on_end()

    async def _next_event(self) -> None:
        """Wait for the next event. A bare future costs half of an `asyncio.Event`."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _send_unless_ended(self, message: messages.ToEngine) -> None:
        if not self.is_ended:
            self._send(message)

    def _resume(self) -> None:
        if not self._is_paused or self.is_ended:
            return
        if self.unread_bytes < self._full_bytes / 2:
            self._is_paused = False
            self._stop_timer()
            self._send(messages.Resume(self.request_id))
        else:
            self._start_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._timeout_s, self._send, messages.Cancel(self.request_id))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


VoiceSource = Callable[[str], Awaitable[bytes]]


async def _no_voices(digest: str) -> bytes:
    raise UnknownVoice("voice", digest, "no voices are stored here")


class EngineRequests(EngineReadiness):
    """The requests of an engine, whose messages a subclass sends and receives."""

    def __init__(self, settings: messages.WorkerSettings, limits: Limits | None = None) -> None:
        super().__init__(settings, limits)
        self._streams: dict[str, RequestStream] = {}
        self._stats_waiters: deque[asyncio.Future[messages.Stats]] = deque()
        self._numbers = itertools.count()
        self._voice_waiters: dict[int, asyncio.Future[EncodedVoice]] = {}
        self._fetches: set[asyncio.Task[None]] = set()
        self.voice_source: VoiceSource = _no_voices
        """Returns the encoded voice of a digest that the engine lacks. May raise `SonoroError`."""
        self.load = Count()
        """How many requests of all fronts of the engine have not ended."""

    @abstractmethod
    def _send(self, message: messages.ToEngine, *, is_checked: bool = False) -> None:
        """Send `message` to the engine, if there is one."""

    @property
    def open_requests(self) -> int:
        """Requests that have not ended: those that hold a slot and those that wait for one, of all fronts."""
        return self.load.total

    def has_request(self, request_id: str) -> bool:
        """Whether the request of that id has not ended."""
        return request_id in self._streams

    async def stream(self, request: SpeechRequest) -> AsyncGenerator[AudioChunk | Finished, None]:
        """Submit `request` and yield its events as a `RequestStream` does, which is closed with the generator.
        Raises `InvalidRequest` (or a subclass) or `EngineError`."""
        answer = await self.open(request)
        try:
            async for event in answer:
                yield event
        finally:
            await answer.aclose()

    async def open(self, request: SpeechRequest) -> RequestStream:
        """Submit `request`, resolved or not; the caller closes the stream. Raises what `stream` does."""
        await self.until_ready()
        while (previous := self._streams.get(request.id)) is not None and previous.is_closed:
            await previous.wait_ended()
            await self.until_ready()
        if previous is not None:
            raise InvalidRequest("id", request.id, "a request of that id is still running")
        is_checked = request.is_resolved  # by who resolved it, which took its fields from validated ones
        if not is_checked:
            known = {request.voice or "": request.voice_digest} if request.voice_digest else {}
            request = self.spec.resolve(request, known)
        self._send(messages.Submit(request), is_checked=is_checked)
        full_bytes = int(self._limits.queue_s * self.spec.sample_rate) * 2
        answer = RequestStream(request.id, full_bytes, self._limits.slow_reader_timeout_s, self._send)
        self._streams[request.id] = answer
        self.load.add(1)
        return answer

    async def stats(self, *, resets: bool = False) -> messages.Stats:
        """The engine's counters and durations; see `StatsRequest`. Raises `EngineError` after `answer_timeout_s`."""
        await self.until_ready()
        answer: asyncio.Future[messages.Stats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(answer)
        self._send(messages.StatsRequest(resets))
        try:
            return await asyncio.wait_for(answer, self._limits.answer_timeout_s)
        except TimeoutError as error:
            raise EngineError(f"the engine did not answer for {self._limits.answer_timeout_s:g} s") from error

    async def encode_voice(self, references: tuple[Reference, ...]) -> EncodedVoice:
        """Encode `references` to a voice, which the engine caches too. Cancelling the call does not stop it.
        Raises `InvalidReference`, `EngineBusy`, or another `EngineError`."""
        await self.until_ready()
        number = next(self._numbers)
        self._send(messages.EncodeVoice(number, references))
        answer: asyncio.Future[EncodedVoice] = asyncio.get_running_loop().create_future()
        self._voice_waiters[number] = answer
        return await answer

    def _handle(self, message: messages.FromEngine) -> None:
        if isinstance(message, AudioChunk):
            self._streams[message.request_id].put(message)
        elif isinstance(message, Finished | Failed):
            event = message.facts.error if isinstance(message, Failed) else message
            self.load.add(-1)
            self._streams.pop(message.request_id).end(event)
        elif isinstance(message, messages.Stats):
            answer = self._stats_waiters.popleft()
            if not answer.done():
                answer.set_result(message)
        elif isinstance(message, messages.VoiceEncoded | messages.VoiceFailed):
            self._resolve_voice(message)
        elif isinstance(message, messages.VoiceWanted):
            task = asyncio.create_task(self._fetch(message.digest))
            self._fetches.add(task)
            task.add_done_callback(self._fetches.discard)
        else:
            assert isinstance(message, messages.Pong), message

    def _resolve_voice(self, message: messages.VoiceEncoded | messages.VoiceFailed) -> None:
        answer = self._voice_waiters.pop(message.number)
        if answer.done():
            return
        if isinstance(message, messages.VoiceFailed):
            answer.set_exception(message.facts.error)
        else:
            answer.set_result(EncodedVoice(message.digest, message.data))

    async def _fetch(self, digest: str) -> None:
        """Send the engine a voice that it asked for. A replacement that did not ask ignores it."""
        try:
            self._send(messages.LoadVoice(digest, await self.voice_source(digest)))
        except SonoroError as error:
            self._send(messages.VoiceLost(digest, ErrorFacts.of(error)))

    def _fail_pending(self, error: EngineError) -> None:
        """Fail everything that waits for the engine, each with an exception object of its own."""
        streams, self._streams = self._streams, {}
        self.load.add(-len(streams))
        futures: list[asyncio.Future[Any]] = [*self._stats_waiters, *self._voice_waiters.values()]
        self._stats_waiters.clear()
        self._voice_waiters.clear()
        for stream in streams.values():
            stream.end(ErrorFacts.of(error).error)
        for future in futures:
            if not future.done():
                future.set_exception(ErrorFacts.of(error).error)


class EngineClient(EngineRequests, SupervisedEngine):
    """The requests of a `SupervisedEngine`: `async with EngineClient(settings) as client`.
    A process that crashes or hangs fails its requests with `EngineCrashed`; later ones wait for the new process."""

    async def close(self) -> None:
        try:
            await super().close()
        finally:
            await cancel_tasks(*self._fetches)

    def _send(self, message: messages.ToEngine, *, is_checked: bool = False) -> None:
        SupervisedEngine._send(self, message, is_checked=is_checked)
