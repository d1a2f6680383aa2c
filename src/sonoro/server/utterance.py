"""One text spoken while it may still be arriving. Knows the service and a `Listener`, but no wire format."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

import msgspec

from sonoro.core.errors import EngineError, InvalidRequest, SonoroError
from sonoro.core.events import Word, at_speed
from sonoro.core.logs import log_event
from sonoro.core.types import AudioChunk, Finished, SpeechRequest, is_speakable
from sonoro.server.bodies import faults_field
from sonoro.server.errors import SlowReader, TooManyRequests
from sonoro.server.gate import Permit
from sonoro.server.keys import Caller
from sonoro.server.schemas import SpeechBody
from sonoro.server.service import Service
from sonoro.server.stream import Speech, conclude, silent_events
from sonoro.server.timeline import last_played
from sonoro.text.script import Lexicon
from sonoro.text.script.live_lexicon import LiveLexicons
from sonoro.transport.client import RequestStream

logger = logging.getLogger(__name__)

CANCELLED = "cancelled"

CANCEL_S = 0.5
"""How long an aborted utterance waits for what the engine has still to tell of it: an engine may hang."""


class Listener(Protocol):
    """Receives an utterance. Each call may raise `SlowReader`, or `WebSocketDisconnect` if the client is gone."""

    dialect: str
    """The client's wire format, as labelled in metrics."""

    @property
    def caller(self) -> Caller:
        """The client's `Caller`."""

    async def send_event(self, event: str, **fields: Any) -> None:
        """Send `audio.start` before the first audio, then `audio.done` or `response.cancelled`; see docs/live.md."""

    async def send_audio(self, audio: bytes, source: AudioChunk | Finished) -> None:
        """Send encoded `audio`, possibly empty: that of `source`, or what the encoder held back until the end."""

    async def refuse(self, error: SonoroError, request_id: str | None) -> None:
        """Send the error that ended the utterance."""


class Utterance:
    """One text being spoken, by the task `speaking`, which returns the reason of its end or raises the connection's
    error."""

    def __init__(
        self,
        listener: Listener,
        service: Service,
        body: SpeechBody,
        request: SpeechRequest,
        lexicons: Sequence[Lexicon] = (),
    ) -> None:
        self._listener, self._service, self._body, self._request = listener, service, body, request
        self._lexicons = LiveLexicons(lexicons, request.markup) if lexicons else None
        self.id, self.text = request.id, ""
        self._position = 0  # in the text, of what was sent
        self._cancel_timeout: asyncio.Timeout | None = None
        self._encoding = service.speech.encoding(body, request)
        self._observation = service.speech.observe(body.speed, time.perf_counter(), listener.dialect)
        self._sent_samples = 0  # at the model's rate
        self._words: list[Word] = []
        self._plays_until_s = 0.0
        self._played_s: float | None = None  # played by the time of the abort
        self._is_waiting = self._has_begun = self._is_aborted = False
        self._answer: RequestStream | None = None
        self._permit: Permit | None = None
        self._failure: SonoroError | None = None
        self.is_text_whole = False
        self.speaking = asyncio.create_task(self._run())

    def append(self, text: str) -> None:
        """Append `text`. Raises `InvalidRequest` after `end_text`; too much text ends the utterance with an error."""
        if self.is_text_whole:
            raise InvalidRequest("input.text", "given", "input.done was sent; wait until the utterance has ended")
        if self._is_aborted:
            return
        self.text += text
        most = self._service.config.max_characters
        if len(self.text) > most:
            self._abort(InvalidRequest("input", f"{len(self.text)} characters", f"it must have at most {most}"))
        elif self._answer is not None and self._is_counted(text):
            self._speak_text(self._answer, text)
            if self._permit is not None and self._permit.is_awaiting_text:
                self._permit.await_text()

    def _is_counted(self, text: str) -> bool:
        """Count `text` to the caller's quota, or abort."""
        try:
            if self._permit is not None:
                self._permit.append(len(text))
        except TooManyRequests as error:
            self._abort(error)
            return False
        return True

    def end_text(self) -> None:
        """Mark the text as complete."""
        if self._answer is not None and not self.is_text_whole:
            self._speak_last(self._answer)
            if self._permit is not None:
                self._permit.go_on()
        self.is_text_whole = True

    def _speak_text(self, answer: RequestStream, text: str) -> None:
        answer.append_text(*((text,) if self._lexicons is None else self._lexicons.append(text)))

    def _speak_last(self, answer: RequestStream) -> None:
        if self._lexicons is not None:
            answer.append_text(*self._lexicons.end())
        answer.end_text()

    def abort(self) -> None:
        """Stop speaking; the listener gets the position in the text."""
        self.is_text_whole = True
        if not self._is_aborted:
            self._abort(None)

    async def cancel(self) -> str:
        """Abort, and return the reason of the end, which may have come before."""
        self.abort()
        await asyncio.wait({self.speaking})
        return self.speaking.result()

    def _abort(self, failure: SonoroError | None) -> None:
        self._is_aborted, self._failure = True, failure
        self._played_s = self._samples / self._encoding.encoder.rate - max(
            0.0, self._plays_until_s - time.perf_counter()
        )
        if self._answer is not None:
            self._answer.cancel()
            if self._cancel_timeout is not None:
                self._cancel_timeout.reschedule(asyncio.get_running_loop().time() + CANCEL_S)
        elif self._is_waiting:
            self.speaking.cancel()

    async def _run(self) -> str:
        """Speak, report an error to the listener, and log; return the reason of the end."""
        reason = "disconnected"
        try:
            reason = await self._speak_unless_aborted()
        except SlowReader as error:
            reason = error.code
            raise
        except SonoroError as error:
            reason = error.code
            await self._listener.refuse(error, self.id)
        finally:
            # The client sets the pace of the text, so only the time to the first packet is counted.
            speech = Speech(self.id, msgspec.structs.replace(self._request, text=self.text), self._encoding)
            facts = conclude(speech, self._observation, reason, is_whole=False)
            named = {"id": self.id, "key": self._listener.caller.name}
            log_event(logger, logging.INFO, "utterance", {**named, **facts})
        return reason

    async def _speak_unless_aborted(self) -> str:
        if self._is_aborted:
            return await self._report_cancelled(0)
        self._is_waiting = True
        try:
            return await self._speak()
        except asyncio.CancelledError:
            if not self._is_aborted or self._answer is not None:
                raise
            return await self._report_cancelled(0)
        finally:
            # An abort must not cancel the task while it reports an error.
            self._is_waiting = False

    async def _speak(self) -> str:
        async with (
            self._service.speech.gate.acquire(self._listener.caller.owner, len(self.text)) as permit,
            contextlib.aclosing(await self._service.client.open(self._request)) as answer,
        ):
            permit.follow(answer)
            permit.append(len(self.text) - permit.characters)
            self._observation.mark_permit()
            self._answer, self._permit = answer, permit
            self._speak_text(answer, self.text)
            if self.is_text_whole:
                self._speak_last(answer)
            try:
                async with (
                    contextlib.aclosing(self._engine_events(answer, permit)) as events,
                    asyncio.timeout(None) as timeout,
                ):
                    self._cancel_timeout = timeout
                    async for event in events:
                        if isinstance(event, Finished):
                            return await self._finish(event)
                        await self._send(event)
            except TimeoutError:
                return await self._report_cancelled(self._position)
        raise AssertionError("a stream ends with its `Finished`")

    async def _engine_events(
        self, answer: RequestStream, permit: Permit
    ) -> AsyncGenerator[AudioChunk | Finished, None]:
        """The engine's events, or silence if it refuses a text with nothing to speak, such as a lone emoji."""
        try:
            if not self.is_text_whole:
                permit.await_text()
            async for event in answer:
                permit.go_on()
                yield event
                if not self.is_text_whole:
                    permit.await_text()
        except InvalidRequest:
            if not self.is_text_whole or is_speakable(self.text) or not self.text.strip():
                raise
            for event in silent_events(self.id, self.text, self._service.client.spec.sample_rate):
                yield event

    async def _send(self, chunk: AudioChunk) -> None:
        self._observation.add_audio(chunk.pcm)
        audio = await self._encoding.feed(chunk.pcm, chunk.pause_s, chunk.voice)
        # Audio after an abort is not sent, but may bring times of earlier words.
        self._words += at_speed(chunk.words or (), self._body.speed)
        if not self._is_aborted:
            self._sent_samples += len(chunk.pcm) // 2
            self._position = chunk.characters
            await self._send_audio(audio, chunk)

    async def _send_audio(self, audio: bytes, source: AudioChunk | Finished) -> None:
        if audio and not self._has_begun:
            self._has_begun = True
            kind, rate = self._body.response_format, self._encoding.encoder.rate
            await self._listener.send_event("audio.start", request_id=self.id, format=kind, sample_rate=rate)
            self._observation.mark_sent()
        await self._listener.send_audio(audio, source)
        if isinstance(source, AudioChunk):
            # After an underrun, playback resumes now.
            begins_s = max(self._plays_until_s, time.perf_counter())
            own_rate = self._service.client.spec.sample_rate
            self._plays_until_s = begins_s + len(source.pcm) / 2 / own_rate / self._body.speed

    async def _finish(self, finished: Finished) -> str:
        if self._is_aborted:
            self._words += at_speed(finished.words or (), self._body.speed)
            samples = finished.frames * self._service.client.spec.hop - self._service.client.spec.lead_in
            return await self._report_cancelled(finished.characters * self._sent_samples // max(samples, 1))
        if finished.reason in ("cancelled", "error"):
            raise EngineError(f"the speech was cut off: {finished.reason}")
        self._observation.note(finished)
        await self._send_audio(await self._encoding.finish(), finished)
        samples = self._samples
        await self._listener.send_event(
            "audio.done",
            request_id=self.id,
            finish_reason=finished.reason,
            samples=samples,
            duration_s=samples / self._encoding.encoder.rate,
            characters=finished.characters,
            **faults_field(finished),
        )
        return finished.reason

    async def _report_cancelled(self, position: int) -> str:
        """Send `response.cancelled` at `position` of the text; return `CANCELLED`. Raises the error of an abort."""
        if self._failure is not None:
            raise self._failure
        facts: dict[str, Any] = {"samples_sent": self._samples, "text_position": position}
        if self._request.with_words:
            facts["last_word"] = last_played(self._words, self._played_s or 0.0)
        await self._listener.send_event("response.cancelled", request_id=self.id, **facts)
        return CANCELLED

    @property
    def _samples(self) -> int:
        """Samples sent, at the encoder's rate and speed."""
        own_rate = self._service.client.spec.sample_rate
        return round(self._sent_samples * self._encoding.encoder.rate / own_rate / self._body.speed)
