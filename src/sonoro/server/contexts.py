"""Concurrent texts on one WebSocket, each arriving in pieces under the id of a context.

A context is spoken as a series of utterances: a flush ends one, more text begins the next. Knows no wire format:
subclasses of `ContextSession` parse the client's messages and write the events."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from abc import abstractmethod
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import msgspec
from starlette.types import Message
from starlette.websockets import WebSocket

from sonoro.core.errors import InvalidRequest, SonoroError
from sonoro.core.types import AudioChunk, Finished
from sonoro.server.errors import TooManyRequests, Unauthorized
from sonoro.server.keys import ANONYMOUS, Caller
from sonoro.server.schemas import SpeechBody
from sonoro.server.service import Service
from sonoro.server.stream import Speech
from sonoro.server.timeline import Timed, Timeline
from sonoro.server.utterance import Utterance
from sonoro.server.websocket_session import End, WebSocketSession
from sonoro.transport.process import cancel_tasks

MAX_CONTEXTS = 32
"""Open at once on a socket. A context that waits for text holds memory, but no slot."""

MAX_STEPS = 4096
"""Pieces of text and flushes of a context that may be queued."""

IDLE_S = 300.0
"""The least idle timeout of a socket without a context: clients keep sockets open for hours, some without pings, and
after a close the next sentence pays for a handshake."""


Convert = Callable[[bytes], bytes]


class _End(Enum):
    """How a context's text ends: unflushed text is spoken, or dropped."""

    SPEAKING = auto()
    DROPPING = auto()


class Context:
    """One text, whose steps run in the order of the client's messages. It is the listener of its own utterances.
    Every call returns at once; events go to the session's `on_...` methods."""

    def __init__(
        self, session: ContextSession, name: str | None, body: SpeechBody, speech: Speech, convert: Convert
    ) -> None:
        self.name, self.dialect = name, session.dialect
        self.wire: Any = None
        """State of the session's wire format."""
        self._session, self._body, self._speech, self._convert = session, body, speech, convert
        self._steps: asyncio.Queue[str | int | Utterance | _End] = asyncio.Queue()
        self._waiting_characters, self._text, self._last_piece = 0, "", ""
        self._numbers, self._flushes = itertools.count(1), itertools.count(1)
        self._utterance: Utterance | None = None
        self._timeline = Timeline(session.service.client.spec.sample_rate, body.speed)
        self._before_s = 0.0
        self.is_ended = self.is_cancelled = self.has_failed = False
        """Whether no more text is taken, whether it was cancelled, and whether it failed."""
        self.task = asyncio.create_task(self._run())

    @property
    def caller(self) -> Caller:
        return self._session.caller

    @property
    def is_busy(self) -> bool:
        """Whether there are steps to do or an end to report."""
        return self._utterance is not None or not self._steps.empty() or self.task.done()

    @property
    def is_listening(self) -> bool:
        """Whether an utterance with its whole text is being spoken, so that no message is expected of the client."""
        return self._utterance is not None and self._utterance.is_text_whole

    def say(self, text: str, *, is_phrase: bool = False) -> None:
        """Append `text` as it is, or, if `is_phrase`, set off by a space. Raises `InvalidRequest` if too much waits."""
        piece = _spaced(self._last_piece, text) if is_phrase else text
        most = self._session.service.config.max_characters
        if self._waiting_characters + len(piece) > most or self._steps.qsize() >= MAX_STEPS:
            raise InvalidRequest("text", f"{len(piece)} characters", f"at most {most} may wait to be spoken")
        self._last_piece = piece or self._last_piece
        self._waiting_characters += len(piece)
        self._steps.put_nowait(piece)

    def flush(self) -> None:
        """Speak all text so far; `on_flushed` is then called with the number of the flush, from 1 on."""
        if self._steps.qsize() >= MAX_STEPS:
            raise InvalidRequest("flush", "given", f"at most {MAX_STEPS} may wait")
        self._last_piece = ""
        self._steps.put_nowait(next(self._flushes))

    def end(self, *, drops_unflushed: bool = False) -> None:
        """Take no more text. Unflushed text is spoken, or dropped if `drops_unflushed`."""
        if not self.is_ended:
            self.is_ended = True
            self._steps.put_nowait(_End.DROPPING if drops_unflushed else _End.SPEAKING)

    def cancel(self) -> None:
        """Stop speaking, and drop the steps that wait."""
        self.is_cancelled = True
        self._skip_to_end()
        if self._utterance is not None:
            self._utterance.abort()

    async def until_ended(self) -> None:
        """Wait until `on_end` has been called."""
        await asyncio.wait({self.task})

    def _skip_to_end(self) -> None:
        """Drop the steps that wait, but for flushes: clients wait for their answers, unless they have cancelled."""
        steps = [self._steps.get_nowait() for _ in range(self._steps.qsize())]
        for step in steps:
            if isinstance(step, int) and not self.is_cancelled:
                self._steps.put_nowait(step)
        self.is_ended = True
        self._steps.put_nowait(_End.DROPPING)

    async def _run(self) -> None:
        """Run the steps in order, then call `on_end`."""
        try:
            while not isinstance(step := await self._steps.get(), _End):
                if isinstance(step, str):
                    self._waiting_characters -= len(step)
                    self._append(step)
                elif isinstance(step, int):
                    await self._speak_rest()
                    if not self.is_cancelled:
                        await self._session.on_flushed(self, step)
                elif step is self._utterance:
                    # The utterance ended before its text was whole: at its limit, or without its connection, which
                    # raises here. Text up to the next flush is dropped with it.
                    step.speaking.result()
                await asyncio.sleep(0)  # there may be many
            if step is _End.DROPPING and self._utterance is not None:
                self._utterance.abort()
            await self._speak_rest()
        finally:
            if self._utterance is not None:
                await cancel_tasks(self._utterance.speaking)
        await self._session.on_end(self)

    def _append(self, text: str) -> None:
        self._text = (self._text + text) if self._utterance else text.lstrip()
        if self._utterance is not None:
            self._utterance.append(text)
        elif self._text:
            request, lexicons = self._speech.request, self._speech.lexicons
            named = msgspec.structs.replace(request, id=f"{request.id}.{next(self._numbers)}")
            self._utterance = utterance = Utterance(self, self._session.service, self._body, named, lexicons)
            utterance.append(self._text)
            utterance.speaking.add_done_callback(lambda _: self._steps.put_nowait(utterance))

    async def _speak_rest(self) -> None:
        """Finish the current utterance; later text begins another."""
        if self._utterance is not None:
            self._utterance.end_text()
            await asyncio.wait({self._utterance.speaking})
            self._utterance.speaking.result()
            self._before_s += self._timeline.audio_s
            self._timeline = Timeline(self._session.service.client.spec.sample_rate, self._body.speed)
        self._utterance, self._text = None, ""

    async def send_event(self, event: str, **fields: Any) -> None:
        """Ignore the utterance's own events: the session writes its own."""

    async def send_audio(self, audio: bytes, source: AudioChunk | Finished) -> None:
        is_last, before_s = isinstance(source, Finished), self._before_s
        added = self._timeline.add(self._text, source)
        times = [Timed(one, before_s + start_s, before_s + end_s) for one, start_s, end_s in added]
        if audio or times or is_last:
            await self._session.on_audio(self, self._convert(audio), times, is_last=is_last)

    async def refuse(self, error: SonoroError, request_id: str | None = None) -> None:
        self.has_failed = True
        await self._session.on_failure(self, error)
        self._skip_to_end()


def _spaced(before: str, piece: str) -> str:
    """`piece`, with a space before it unless there is white space between it and `before`."""
    is_joined = before and piece and not before[-1].isspace() and not piece[0].isspace()
    return f" {piece}" if is_joined else piece


class ContextSession(WebSocketSession):
    """A WebSocket with several contexts; `contexts` are the open ones, by id."""

    def __init__(self, socket: WebSocket, service: Service, dialect: str) -> None:
        super().__init__(socket, service)
        self.dialect = dialect
        self.contexts: dict[str | None, Context] = {}
        self._numbers = itertools.count(1)
        self._name: str | None = None
        """The context id of the current message."""

    async def _receive(self, received: Message) -> None:
        self._name = None
        await super()._receive(received)

    async def say(self, message: dict[str, Any]) -> None:
        """Send `message` as JSON; raises as `send` does."""
        await self.send(msgspec.json.encode(message).decode())

    def begin(self, name: str | None, body: SpeechBody, speech: Speech, convert: Convert) -> Context:
        """Open context `name` with the parameters of `speech`; its audio is encoded as `body` asks, then passed
        through `convert`. Raises `TooManyRequests`."""
        if len(self.contexts) >= MAX_CONTEXTS:
            raise TooManyRequests(f"{MAX_CONTEXTS} contexts are open on this socket; end one first")
        named = msgspec.structs.replace(speech.request, id=f"{speech.request.id}.{next(self._numbers)}")
        speech = dataclasses.replace(speech, request=named)
        context = self.contexts[name] = Context(self, name, body, speech, convert)
        return context

    async def free(self, name: str | None) -> None:
        """Wait for the end of the context `name`, if it was cancelled: the next text may have the same id."""
        context = self.contexts.get(name)
        if context is not None and context.is_cancelled:
            await context.until_ended()
            await self.on_done(context.task)

    def check_key(self, key: str | None) -> None:
        """Authorise a client that connected without a key by `key`. Raises `Unauthorized`, and ends the session."""
        if self.caller is ANONYMOUS:
            try:
                self.service.keys.admit(self._socket, key or "")
                self.settle()
            except Unauthorized:
                self._socket.state.caller, self.end = ANONYMOUS, "closed"
                raise

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            # `speaking` does not include the contexts that wait for text.
            await cancel_tasks(*(context.task for context in self.contexts.values()))

    @abstractmethod
    async def on_audio(self, context: Context, audio: bytes, times: list[Timed], *, is_last: bool) -> None:
        """Send `audio` of `context`, possibly empty, and `times` of characters, from the start of the context.
        `is_last` marks the end of an utterance."""

    async def on_flushed(self, context: Context, mark: int) -> None:
        """Called when flush number `mark` has been spoken. Does nothing unless overridden."""

    async def on_failure(self, context: Context, error: SonoroError) -> None:
        """Called when `context` has failed, before its `on_end`. Calls `refuse` unless overridden."""
        await self.refuse(error)

    async def on_end(self, context: Context) -> None:
        """Called once at the end of `context`, however it ended. Does nothing unless overridden."""

    async def on_close(self, end: End, error: SonoroError | None) -> None:
        if error is not None:
            for context in self.contexts.values():
                await self.on_failure(context, error)

    @property
    def max_message_bytes(self) -> int:
        return self.service.config.max_message_bytes

    @property
    def speaking(self) -> list[asyncio.Task[None]]:
        return [context.task for context in self.contexts.values() if context.is_busy]

    @property
    def idle_timeout_s(self) -> float | None:
        if any(context.is_listening for context in self.contexts.values()):
            return None
        limit_s = self.service.config.session_idle_timeout_s
        return limit_s if self.speaking else max(IDLE_S, limit_s)

    async def on_done(self, task: asyncio.Task[Any]) -> None:
        for name in [name for name, context in self.contexts.items() if context.task is task]:
            del self.contexts[name]
        task.result()
