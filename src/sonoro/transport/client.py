"""The engine seen from the process that serves people: requests in, streams of audio out. Loads no torch.

Every accepted request ends: with its `Finished`, with the error that the engine gave, or with that of its process.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from sonoro.core.errors import EngineError, ErrorFacts, InvalidRequest, SonoroError
from sonoro.core.types import (
    AudioChunk,
    Failed,
    Finished,
    ModelSpec,
    Reference,
    SpeechRequest,
    VoiceFacts,
    check_text,
)
from sonoro.transport.inbox import Inbox
from sonoro.transport.launch import Limits, Supervisor
from sonoro.transport.messages import (
    AppendText,
    Cancel,
    DeleteVoice,
    EncodeVoice,
    EndText,
    FromEngine,
    Ready,
    RefreshVoices,
    Stats,
    StatsRequest,
    Submit,
    VoiceDeleted,
    VoiceFailed,
    VoiceReady,
    VoicesRefreshed,
    WorkerSettings,
)

__all__ = ["Answer", "EngineClient"]


class EngineClient:
    """An engine in a process of its own, started with `settings`; `async with EngineClient.launch(...) as client`.

    Belongs to the event loop it was started in. A process that crashes fails the requests it held with `EngineCrashed`
    and is replaced; later requests wait for the new one.
    """

    def __init__(self, settings: WorkerSettings, limits: Limits | None = None) -> None:
        self.settings, self._limits = settings, limits or Limits()
        self._supervisor = Supervisor(settings, self._limits, self._take, self._lose)
        self._inboxes: dict[str, Inbox] = {}
        self._asked: deque[asyncio.Future[Stats]] = deque()
        self._voices: dict[str, VoiceFacts] = {}
        self._numbers = itertools.count()
        self._registering: dict[int, asyncio.Future[VoiceFacts | None]] = {}
        self._watching: asyncio.Task[None] | None = None

    @classmethod
    def launch(cls, model: str | Path | None = None, *, limits: Limits | None = None, **settings: Any) -> Self:
        """A client whose engine speaks as `model`; `settings` are the other fields of `WorkerSettings`."""
        return cls(WorkerSettings(model=None if model is None else str(model), **settings), limits)

    async def start(self) -> None:
        """Start the engine and wait until it is ready.

        Raises what was wrong with it (`ConfigError`, `CheckpointError`), or `EngineError` if it died or took too long.
        """
        await self._supervisor.start()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """End the engine; what is still running fails with `EngineClosed`."""
        try:
            if self._watching is not None:
                self._watching.cancel()
                await asyncio.gather(self._watching, return_exceptions=True)
        finally:
            await self._supervisor.close()

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
        assert self._supervisor.ready is not None, "the engine has not been started"
        return self._supervisor.ready

    @property
    def spec(self) -> ModelSpec:
        """What the model can do."""
        return self.ready.spec

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine now; false while a crashed one is being replaced."""
        return self._supervisor.is_ready

    @property
    def closed_reason(self) -> str | None:
        """Why there will be no engine any more; None as long as there may be one."""
        return self._supervisor.closed_reason

    @property
    def voices(self) -> tuple[VoiceFacts, ...]:
        """The registered voices by name, as the newest engine said."""
        return tuple(self._voices[name] for name in sorted(self._voices))

    @property
    def restarts(self) -> int:
        """How often a replacement was started."""
        return self._supervisor.restarts

    @property
    def open_requests(self) -> int:
        """How many it has been given that have not ended: those that hold a slot and those that wait for one."""
        return len(self._inboxes)

    def holds(self, request_id: str) -> bool:
        """Whether the request of that id is one of them."""
        return request_id in self._inboxes

    def has_registered(self, name: str | None) -> bool:
        """Whether a voice is registered under `name`."""
        return name is not None and name.lower() in self._voices

    async def until_ready(self) -> None:
        """Wait for an engine. Raises `EngineCrashed` if there is none in time, `EngineClosed` if there will be none."""
        await self._supervisor.until_ready()

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

    async def open(self, request: SpeechRequest) -> Answer:
        """The answer to `request`, which the engine has been given: text can be appended, and it can be cancelled.

        It is to be closed in any case. Raises what `stream` does.
        """
        await self._supervisor.until_ready()
        while (previous := self._inboxes.get(request.id)) is not None and previous.is_abandoned:
            await previous.until_ended()
            await self._supervisor.until_ready()
        return Answer(self._submit(request), self._leave)

    def append(self, request_id: str, text: str) -> None:
        """More text for a live request; one that has ended stays so.

        Raises `InvalidRequest` for what is not text, which harms nobody.
        """
        check_text(text)
        if request_id in self._inboxes:
            self._supervisor.send(AppendText(request_id, text))

    def end_text(self, request_id: str) -> None:
        """Say that a live request has all of its text; one that has ended stays so."""
        if request_id in self._inboxes:
            self._supervisor.send(EndText(request_id))

    def cancel(self, request_id: str) -> None:
        """End a request with the reason `cancelled`, after the audio already made. One that has ended stays so."""
        if request_id in self._inboxes:
            self._supervisor.send(Cancel(request_id))

    async def stats(self, *, forgets: bool = False) -> Stats:
        """How the engine is doing. Raises `EngineError` if it does not say so in time.

        With `forgets` it then forgets the durations so far: the next answer is about the time between.
        """
        await self._supervisor.until_ready()
        answer: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        self._supervisor.send(StatsRequest(forgets))
        try:
            return await asyncio.wait_for(answer, self._limits.answer_timeout_s)
        except TimeoutError as error:
            raise EngineError(f"the engine did not answer for {self._limits.answer_timeout_s:g} s") from error

    async def add_voice(self, name: str, references: tuple[Reference, ...], consent: str | None = None) -> VoiceFacts:
        """Register the voice of `references`: requests can name it once this returns.

        Raises `InvalidRequest` for a name that cannot be used, or if as many are registered as may be; `VoiceExists`,
        `InvalidReference`, `EngineBusy`, or `EngineError` if it cannot be kept. Leaving it early does not undo it.
        """
        facts = await self._register(lambda number: EncodeVoice(number, name, references, consent))
        assert facts is not None
        return facts

    async def delete_voice(self, name: str) -> None:
        """Forget a registered voice; what is spoken with it goes on. Raises `UnknownVoice` or `EngineError`."""
        await self._register(lambda number: DeleteVoice(number, name))

    async def refresh_voices(self) -> None:
        """Look again at the folder of voices, which others may have changed. Raises `EngineError`."""
        await self._register(RefreshVoices)

    async def _register(
        self, message_of: Callable[[int], EncodeVoice | DeleteVoice | RefreshVoices]
    ) -> VoiceFacts | None:
        await self._supervisor.until_ready()
        number = next(self._numbers)
        self._supervisor.send(message_of(number))
        answer: asyncio.Future[VoiceFacts | None] = asyncio.get_running_loop().create_future()
        self._registering[number] = answer
        return await answer

    def _submit(self, request: SpeechRequest) -> Inbox:
        if request.id in self._inboxes:
            raise InvalidRequest("id", request.id, "a request of that id is still running")
        self._supervisor.send(Submit(request))
        full_bytes = int(self._limits.queue_s * self.spec.sample_rate) * 2
        inbox = Inbox(request.id, full_bytes, self._limits.slow_reader_timeout_s, self._supervisor.send)
        self._inboxes[request.id] = inbox
        return inbox

    def _leave(self, inbox: Inbox) -> None:
        """The reader is gone. The id stays taken until the engine has said so too, or its next user got the old end."""
        inbox.abandon()
        if self._inboxes.get(inbox.request_id) is inbox:
            self._supervisor.send(Cancel(inbox.request_id))

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Stats):
            answer = self._asked.popleft()
            if not answer.done():
                answer.set_result(message)
        elif isinstance(message, AudioChunk):
            self._inboxes[message.request_id].put(message)
        elif isinstance(message, Ready):
            self._voices = {facts.name: facts for facts in message.voices}
        elif isinstance(message, VoiceReady | VoiceDeleted | VoicesRefreshed | VoiceFailed):
            self._settle(message)
        else:
            assert isinstance(message, Finished | Failed), message
            inbox = self._inboxes.pop(message.request_id)
            if isinstance(message, Failed):
                inbox.fail(message.error)
            else:
                inbox.put(message)

    def _settle(self, message: VoiceReady | VoiceDeleted | VoicesRefreshed | VoiceFailed) -> None:
        """Note what became of voices, and tell whoever asked for it, if they still wait."""
        if isinstance(message, VoiceReady):
            self._voices[message.facts.name] = message.facts
        elif isinstance(message, VoiceDeleted):
            self._voices.pop(message.name, None)
        elif isinstance(message, VoicesRefreshed):
            self._voices = {facts.name: facts for facts in message.voices}
        answer = self._registering.pop(message.number)
        if answer.done():
            return
        if isinstance(message, VoiceFailed):
            answer.set_exception(message.facts.error)
        else:
            answer.set_result(message.facts if isinstance(message, VoiceReady) else None)

    def _lose(self, error: EngineError) -> None:
        """Fail everything that the engine held; each reader raises an exception of its own."""
        inboxes, self._inboxes = self._inboxes, {}
        asked, self._asked = self._asked, deque()
        registering, self._registering = self._registering, {}
        for inbox in inboxes.values():
            inbox.fail(ErrorFacts.of(error).error)
        answers: list[asyncio.Future[Any]] = [*asked, *registering.values()]
        for answer in answers:
            if not answer.done():
                answer.set_exception(ErrorFacts.of(error).error)

    async def _watch(self) -> None:
        """Ask now and then, so that a process that hangs is found out and replaced."""
        while True:
            await asyncio.sleep(self._limits.answer_timeout_s)
            if not self.is_ready:
                continue
            asked = self._supervisor.ready
            try:
                await self.stats()
            except EngineError:
                if self._supervisor.ready is asked:
                    self._supervisor.kill()


class Answer:
    """The events of one request as they are made: `AudioChunk`s, then `Finished`. One reader takes them.

    Raises what the request failed with. Closed before its end it cancels the request.
    """

    def __init__(self, inbox: Inbox, leave: Callable[[Inbox], None]) -> None:
        self._inbox, self._leave = inbox, leave
        self._is_over = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AudioChunk | Finished:
        if self._is_over:
            raise StopAsyncIteration
        try:
            event = await self._inbox.take()
        except SonoroError:
            self._is_over = True
            raise
        self._is_over = isinstance(event, Finished)
        return event

    async def aclose(self) -> None:
        """Nobody reads it any more; done at once."""
        self._is_over = True
        self._leave(self._inbox)
