"""Texts that come piece by piece on one socket, each under the id of a context, spoken side by side.

A context is spoken by our utterances, one after the other: flushing ends one, more text begins the next. Knows no wire
format: who derives from `ContextSession` reads its client's messages, and writes what a context comes to.
"""

from __future__ import annotations

import asyncio
import itertools
from abc import abstractmethod
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import msgspec
from starlette.types import Message
from starlette.websockets import WebSocket

from sonoro.core.errors import InvalidRequest, SonoroError
from sonoro.core.types import AudioChunk, Finished, SpeechRequest
from sonoro.core.words import CharacterTimes
from sonoro.server.errors import TooManyRequests, Unauthorized
from sonoro.server.schemas import SpeechBody
from sonoro.server.service import ANONYMOUS, Caller, Service
from sonoro.server.timeline import Timeline
from sonoro.server.utterance import Utterance
from sonoro.server.websocket_session import WebSocketSession
from sonoro.transport.launch import cancel_tasks

__all__ = ["Context", "ContextSession"]

MAX_CONTEXTS = 32
"""Open at once on a socket. Who waits for text holds no slot, but memory."""

MAX_STEPS = 4096
"""Pieces and flushes of a context that may wait behind what is being spoken."""

IDLE_S = 300.0
"""How long a socket on which nothing is open may say nothing, at least: clients keep one for hours, some without a
sign of life, and one that is closed costs the next sentence a handshake."""


Convert = Callable[[bytes], bytes]


class _End(Enum):
    """Why no more text of a context comes: all of it is to be spoken, or only what was flushed."""

    SPEAKING = auto()
    DROPPING = auto()


class Context:
    """One text, in the order of what its client says of it. It listens to its own utterances.

    Every call returns at once; what comes of it is told to the session by its `on_...`.
    """

    def __init__(
        self, session: ContextSession, name: str | None, body: SpeechBody, request: SpeechRequest, convert: Convert
    ) -> None:
        self.name, self.dialect = name, session.dialect
        self.wire: Any = None
        """What its session keeps of it."""
        self._session, self._body, self._request, self._convert = session, body, request, convert
        self._steps: asyncio.Queue[str | int | Utterance | _End] = asyncio.Queue()
        self._waiting_characters, self._text, self._last_piece = 0, "", ""
        self._numbers, self._flushes = itertools.count(1), itertools.count(1)
        self._utterance: Utterance | None = None
        self._timeline = Timeline(session.service.client.spec.sample_rate, body.speed)
        self._before_s = 0.0
        self.is_ended = self.is_cancelled = self.has_failed = False
        """Whether all of its text has come or is not wanted any more; whether it was cancelled; whether it failed."""
        self.task = asyncio.create_task(self._run())

    @property
    def caller(self) -> Caller:
        return self._session.caller

    @property
    def is_busy(self) -> bool:
        """Whether there is something to speak, or to be told of."""
        return self._utterance is not None or not self._steps.empty() or self.task.done()

    @property
    def is_listening(self) -> bool:
        """Whether the client has nothing to say: it is spoken to, and the text of that is whole."""
        return self._utterance is not None and self._utterance.is_text_whole

    def say(self, text: str, *, is_phrase: bool = False) -> None:
        """More text, as it is; a phrase stands apart from the one before by a space. Raises `InvalidRequest`."""
        piece = _spaced(self._last_piece, text) if is_phrase else text
        most = self._session.service.config.max_characters
        if self._waiting_characters + len(piece) > most or self._steps.qsize() >= MAX_STEPS:
            raise InvalidRequest("text", f"{len(piece)} characters", f"at most {most} may wait to be spoken")
        self._last_piece = piece or self._last_piece
        self._waiting_characters += len(piece)
        self._steps.put_nowait(piece)

    def flush(self) -> None:
        """Speak all that has come; `on_flushed` tells which of its flushes, from 1 on, that was."""
        if self._steps.qsize() >= MAX_STEPS:
            raise InvalidRequest("flush", "given", f"at most {MAX_STEPS} may wait")
        self._last_piece = ""
        self._steps.put_nowait(next(self._flushes))

    def end(self, *, drops_unflushed: bool = False) -> None:
        """All of the text has come; what of it was not flushed is spoken too, or dropped."""
        if not self.is_ended:
            self.is_ended = True
            self._steps.put_nowait(_End.DROPPING if drops_unflushed else _End.SPEAKING)

    def cancel(self) -> None:
        """Speak no more of it."""
        self.is_cancelled = True
        self._skip_to_end()
        if self._utterance is not None:
            self._utterance.abort()

    async def until_ended(self) -> None:
        """Wait until its end has been told."""
        await asyncio.wait({self.task})

    def _skip_to_end(self) -> None:
        while not self._steps.empty():
            self._steps.get_nowait()
        self.is_ended = True
        self._steps.put_nowait(_End.DROPPING)

    async def _run(self) -> None:
        """Do one step after the other."""
        try:
            while not isinstance(step := await self._steps.get(), _End):
                if isinstance(step, str):
                    self._waiting_characters -= len(step)
                    self._append(step)
                elif isinstance(step, int):
                    await self._speak_rest()
                    if not self.is_cancelled and not self.has_failed:
                        await self._session.on_flushed(self, step)
                elif step is self._utterance:
                    # Before its text was whole: it came to the end of what it may have, or its connection is gone.
                    # Text up to the next flush is none of another's.
                    step.speaking.result()
            if step is _End.DROPPING and self._utterance is not None:
                self._utterance.abort()
            await self._speak_rest()
        finally:
            if self._utterance is not None:
                await cancel_tasks(self._utterance.speaking)
        await self._session.on_end(self)

    def _append(self, text: str) -> None:
        self._text += text
        if self._utterance is not None:
            self._utterance.append(text)
        elif self._text.strip():
            self._text = self._text.lstrip()
            named = msgspec.structs.replace(self._request, id=f"{self._request.id}.{next(self._numbers)}")
            self._utterance = utterance = Utterance(self, self._session.service, self._body, named)
            utterance.append(self._text)
            utterance.speaking.add_done_callback(lambda _: self._steps.put_nowait(utterance))

    async def _speak_rest(self) -> None:
        """Speak what has come. What comes afterwards is another utterance's."""
        if self._utterance is not None:
            self._utterance.end_text()
            await asyncio.wait({self._utterance.speaking})
            self._utterance.speaking.result()
            self._before_s += self._timeline.audio_s
            self._timeline = Timeline(self._session.service.client.spec.sample_rate, self._body.speed)
        self._utterance, self._text = None, ""

    async def send_event(self, event: str, **fields: Any) -> None:
        """Nobody is told of what an utterance says of itself but by its session."""

    async def send_audio(self, audio: bytes, source: AudioChunk | Finished) -> None:
        is_last, tell = isinstance(source, Finished), self._timeline.tell
        told = self._timeline.finish(self._text, source) if isinstance(source, Finished) else tell(self._text, source)
        starts, ends = ([self._before_s + at_s for at_s in at] for at in told[1:])
        times = CharacterTimes(told.characters, list(starts), list(ends))
        if audio or times.characters or is_last:
            await self._session.on_audio(self, self._convert(audio), times, is_last=is_last)

    async def refuse(self, error: SonoroError, request_id: str | None = None) -> None:
        self.has_failed = True
        await self._session.on_failure(self, error)
        self._skip_to_end()


def _spaced(before: str, piece: str) -> str:
    """`piece` as it follows the phrase that ends in `before`: with a space between the two if there is none."""
    is_joined = before and piece and not before[-1].isspace() and not piece[0].isspace()
    return f" {piece}" if is_joined else piece


class ContextSession(WebSocketSession):
    """One socket. `contexts` are those that have not ended, by their ids."""

    def __init__(self, socket: WebSocket, service: Service, dialect: str) -> None:
        super().__init__(socket, service)
        self.dialect = dialect
        self.contexts: dict[str | None, Context] = {}
        self._numbers = itertools.count(1)
        self._name: str | None = None
        """The context that the message at hand is about."""

    async def _receive(self, received: Message) -> None:
        self._name = None
        await super()._receive(received)

    async def say(self, message: dict[str, Any]) -> None:
        """Send `message` as JSON; raises as `send` does."""
        await self.send(msgspec.json.encode(message).decode())

    def begin(self, name: str | None, body: SpeechBody, request: SpeechRequest, convert: Convert) -> Context:
        """A context for a text that is spoken as `request` says; its audio, encoded as `body` says, goes through
        `convert`. Raises `TooManyRequests`."""
        if len(self.contexts) >= MAX_CONTEXTS:
            raise TooManyRequests(f"{MAX_CONTEXTS} contexts are open on this socket; end one first")
        named = msgspec.structs.replace(request, id=f"{request.id}.{next(self._numbers)}")
        context = self.contexts[name] = Context(self, name, body, named, convert)
        return context

    def check_key(self, key: str | None) -> None:
        """Let in a client that came without a key and gives it now, if it must. Raises `Unauthorized`, and ends."""
        if self.caller is ANONYMOUS:
            try:
                self.service.admit(self._socket, key or "")
            except Unauthorized:
                self._socket.state.caller, self.end = ANONYMOUS, "closed"
                raise

    async def run(self) -> None:
        try:
            await super().run()
        finally:
            # Those that wait for text are none of `speaking`.
            await cancel_tasks(*(context.task for context in self.contexts.values()))

    @abstractmethod
    async def on_audio(self, context: Context, audio: bytes, times: CharacterTimes, *, is_last: bool) -> None:
        """Audio of `context`, possibly none, and the characters whose times it tells, from the beginning of the
        context; the last of what was flushed or ended."""

    async def on_flushed(self, context: Context, mark: int) -> None:
        """All that was flushed has been told; nothing to say unless overridden."""

    async def on_failure(self, context: Context, error: SonoroError) -> None:
        """`context` cannot be spoken further; its end is told next. As anything that is wrong unless overridden."""
        await self.refuse(error)

    async def on_end(self, context: Context) -> None:
        """The end of `context`, which comes once, however it ended; nothing to say unless overridden."""

    @property
    def speaking(self) -> list[asyncio.Task[None]]:
        return [context.task for context in self.contexts.values() if context.is_busy]

    @property
    def idle_timeout_s(self) -> float | None:
        if self.caller is ANONYMOUS:
            return self.service.config.head_timeout_s
        if any(context.is_listening for context in self.contexts.values()):
            return None
        limit_s = self.service.config.session_idle_timeout_s
        return limit_s if self.speaking else max(IDLE_S, limit_s)

    async def on_done(self, task: asyncio.Task[Any]) -> None:
        for name in [name for name, context in self.contexts.items() if context.task is task]:
            del self.contexts[name]
        task.result()
