"""One text being spoken while it may still arrive. Knows the service and who listens, not how that is told."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any, Protocol

import msgspec

from sonoro.core.errors import EngineError, InvalidRequest, SonoroError
from sonoro.core.logs import log_event
from sonoro.core.types import AudioChunk, Finished, SpeechRequest, is_speakable
from sonoro.core.words import Word, at_speed, last_heard
from sonoro.server.errors import SlowReader
from sonoro.server.schemas import SpeechBody
from sonoro.server.service import Caller, Service
from sonoro.server.stream import Speech, conclude, silent_events, told_faults
from sonoro.transport.client import RequestStream

__all__ = ["CANCELLED", "Listener", "Utterance"]

logger = logging.getLogger(__name__)

CANCELLED = "cancelled"


class Listener(Protocol):
    """Who an utterance is spoken to. Each call may raise `SlowReader`, or `WebSocketDisconnect` if nobody is there."""

    dialect: str
    """The wire format that the client speaks, as metrics call it."""

    @property
    def caller(self) -> Caller:
        """Who asks."""

    async def send_event(self, event: str, **fields: Any) -> None:
        """Tell of `audio.start` before the first audio, then of `audio.done` or `response.cancelled`: docs/live.md."""

    async def send_audio(self, audio: bytes, source: AudioChunk | Finished) -> None:
        """Take `audio`, encoded, possibly nothing: what `source` adds, or what the encoder held back until the end."""

    async def refuse(self, error: SonoroError, request_id: str | None) -> None:
        """Tell why the utterance has ended."""


class Utterance:
    """One text being spoken. Ends by itself: with the client told, or with what its connection raised."""

    def __init__(self, listener: Listener, service: Service, body: SpeechBody, request: SpeechRequest) -> None:
        self._listener, self._service, self._body, self._request = listener, service, body, request
        self._id, self._text = request.id, ""
        self._encoding = service.encoding(body)
        self._observation = service.observe(body.speed, time.perf_counter(), listener.dialect)
        self._sent_samples = 0  # of the model
        self._words: list[Word] = []
        self._plays_until_s = 0.0
        self._heard_s: float | None = None  # of the audio as it is played, when it was aborted
        self._is_waiting = self._has_begun = self._is_aborted = False
        self._answer: RequestStream | None = None
        self._failure: SonoroError | None = None
        self.is_text_whole = False
        self.speaking = asyncio.create_task(self._run())

    def append(self, text: str) -> None:
        """More text. Raises `InvalidRequest` if it had all; too much ends the utterance."""
        if self.is_text_whole:
            raise InvalidRequest("input.text", "given", "input.done was said; wait until the utterance has ended")
        if self._is_aborted:
            return
        self._text += text
        most = self._service.config.max_characters
        if len(self._text) > most:
            self._abort(InvalidRequest("input", f"{len(self._text)} characters", f"it must have at most {most}"))
        elif self._answer is not None:
            self._answer.append_text(text)

    def end_text(self) -> None:
        """The text is whole."""
        if self._answer is not None and not self.is_text_whole:
            self._answer.end_text()
        self.is_text_whole = True

    def abort(self) -> None:
        """Say no more, and tell what was said."""
        self.is_text_whole = True
        if not self._is_aborted:
            self._abort(None)

    async def cancel(self) -> str:
        """Abort; how it ended, which it may have done before."""
        self.abort()
        await asyncio.wait({self.speaking})
        return self.speaking.result()

    def _abort(self, failure: SonoroError | None) -> None:
        self._is_aborted, self._failure = True, failure
        self._heard_s = self._samples / self._encoding.encoder.rate - max(
            0.0, self._plays_until_s - time.perf_counter()
        )
        if self._answer is not None:
            self._answer.cancel()
        elif self._is_waiting:
            self.speaking.cancel()

    async def _run(self) -> str:
        """Speak; how it ended."""
        reason = "disconnected"
        try:
            reason = await self._speak_unless_aborted()
        except SlowReader as error:
            reason = error.code
            raise
        except SonoroError as error:
            reason = error.code
            await self._listener.refuse(error, self._id)
        finally:
            # The pace of its text is the client's: no time but that of its first packet says anything of the server.
            speech = Speech(self._id, msgspec.structs.replace(self._request, text=self._text), self._encoding)
            facts = conclude(speech, self._observation, reason, is_whole=False)
            named = {"id": self._id, "key": self._listener.caller.name}
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

    async def _speak(self) -> str:
        async with (
            self._service.gate.acquire() as permit,
            contextlib.aclosing(await self._service.client.open(self._request)) as answer,
        ):
            permit.follow(answer)
            self._answer = answer
            answer.append_text(self._text)
            if self.is_text_whole:
                answer.end_text()
            async with contextlib.aclosing(self._engine_events(answer)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        return await self._finish(event)
                    await self._send(event)
        raise AssertionError("a stream ends with its `Finished`")

    async def _engine_events(self, answer: RequestStream) -> AsyncGenerator[AudioChunk | Finished, None]:
        """What the engine says; silence, where it says that there is nothing to speak, as in an emoji alone."""
        try:
            async for event in answer:
                yield event
        except InvalidRequest:
            if not self.is_text_whole or is_speakable(self._text) or not self._text.strip():
                raise
            for event in silent_events(self._id, self._text, self._service.client.spec.sample_rate):
                yield event

    async def _send(self, chunk: AudioChunk) -> None:
        self._observation.made(chunk.pcm)
        audio = await self._encoding.feed(chunk.pcm)
        # What comes too late to be heard may tell of words before it.
        self._words += at_speed(chunk.words or (), self._body.speed)
        if not self._is_aborted:
            self._sent_samples += len(chunk.pcm) // 2
            await self._send_audio(audio, chunk)

    async def _send_audio(self, audio: bytes, source: AudioChunk | Finished) -> None:
        if audio and not self._has_begun:
            self._has_begun = True
            kind, rate = self._body.response_format, self._encoding.encoder.rate
            await self._listener.send_event("audio.start", request_id=self._id, format=kind, sample_rate=rate)
            self._observation.sent()
        await self._listener.send_audio(audio, source)
        if isinstance(source, AudioChunk):
            # A listener who had run out of audio waited for it.
            begins_s = max(self._plays_until_s, time.perf_counter())
            own_rate = self._service.client.spec.sample_rate
            self._plays_until_s = begins_s + len(source.pcm) / 2 / own_rate / self._body.speed

    async def _finish(self, finished: Finished) -> str:
        if self._is_aborted:
            self._words += at_speed(finished.words or (), self._body.speed)
            made = finished.frames * self._service.client.spec.hop - self._service.client.spec.lead_in
            return await self._report_cancelled(finished.characters * self._sent_samples // max(made, 1))
        if finished.reason in ("cancelled", "error"):
            raise EngineError(f"the speech was cut off: {finished.reason}")
        self._observation.caught(finished.faults)
        await self._send_audio(await self._encoding.finish(), finished)
        samples = self._samples
        await self._listener.send_event(
            "audio.done",
            request_id=self._id,
            finish_reason=finished.reason,
            samples=samples,
            duration_s=samples / self._encoding.encoder.rate,
            characters=finished.characters,
            **told_faults(finished),
        )
        return finished.reason

    async def _report_cancelled(self, position: int) -> str:
        """Tell of a cut at `position` of the text; how it ended."""
        if self._failure is not None:
            raise self._failure
        facts: dict[str, Any] = {"samples_sent": self._samples, "text_position": position}
        if self._request.with_words:
            facts["last_word"] = last_heard(self._words, self._heard_s or 0.0)
        await self._listener.send_event("response.cancelled", request_id=self._id, **facts)
        return CANCELLED

    @property
    def _samples(self) -> int:
        """Those sent, at the rate they are heard at."""
        own_rate = self._service.client.spec.sample_rate
        return round(self._sent_samples * self._encoding.encoder.rate / own_rate / self._body.speed)
