"""vLLM-Omni's WebSocket, as used by LiveKit's Baseten plugin, on the path of the native sessions.

The messages are like the native ones, but each `input.done` is answered, even without a text, and the next text may
arrive while one is spoken. Each text counts as one sentence: it is spoken as it arrives, however the engine splits it.
"""

import asyncio
import base64
import contextlib
from collections import deque
from typing import Any, Literal

import msgspec
from fastapi import WebSocket

from sonoro.core.errors import InvalidRequest, SonoroError
from sonoro.core.types import AudioChunk, Finished, SpeechRequest
from sonoro.server.bodies import state_length
from sonoro.server.dialects.shared import Message
from sonoro.server.schemas import SpeechBody, parse
from sonoro.server.service import Service
from sonoro.server.sessions import OtherSession
from sonoro.server.timeline import Timed, Timeline, WordTimes
from sonoro.server.utterance import Utterance
from sonoro.server.websocket_session import End, encoded

_MARKS = {"stream_audio", "word_timestamps", "split_granularity", "timestamp_type"}
"""Fields that native configurations lack: a first message with any of them is in this dialect."""

_First = msgspec.defstruct("_First", [("type", Any, None), *((name, Any, msgspec.UNSET) for name in sorted(_MARKS))])

_PASSED_OVER = {*_MARKS, "timestamp_transport_strategy", "task_type"}
"""Fields that are not passed on. Clients send the `task_type` of their checkpoint; here the voice decides."""

MAX_WAITING = 1024
"""Messages that may be queued while a text is spoken."""


class _Said(Message, extra="allow"):
    type: Literal["session.config", "input.text", "input.done", "session.close"]
    text: str = ""
    stream_audio: bool = False
    word_timestamps: bool = False
    timestamp_type: str | None = None


class OmniSession(OtherSession):
    """One connection, from its first message on, which configures it."""

    dialect = "vllm_omni"
    key_scheme = "api-key"

    def __init__(self, socket: WebSocket, service: Service) -> None:
        super().__init__(socket, service)
        self.facts["dialect"] = self.dialect
        self._config = _Said(type="session.config")
        self._waiting: deque[str] = deque()
        self._room = contextlib.ExitStack()  # for the audio that is held
        self._index = 0
        self._words: list[Timed]

    @classmethod
    def recognises(cls, message: str) -> bool:
        try:
            said: Any = msgspec.json.decode(message, type=_First)
        except (msgspec.DecodeError, RecursionError):
            return False
        return said.type == "session.config" and any(getattr(said, name) is not msgspec.UNSET for name in _MARKS)

    async def handle(self, message: str) -> None:
        if self._utterance is None or not self._utterance.is_text_whole:
            await self._handle(message)
        elif (
            len(self._waiting) < MAX_WAITING
            and sum(map(len, [*self._waiting, message])) <= self.service.config.max_message_bytes
        ):
            self._waiting.append(message)
        else:
            raise InvalidRequest("message", "given", "too many messages wait for the current text to end")

    async def _handle(self, message: str) -> None:
        said = parse(_Said, await encoded(message))
        match said.type:
            case "session.config":
                further = said.model_extra or {}
                fields = {name: value for name, value in further.items() if name not in _PASSED_OVER}
                further.clear()  # it may be long
                self._config = said
                await self._configure({"response_format": "wav", **fields})
            case "input.text":
                if text := said.text if self._utterance else said.text.lstrip():
                    await self._append(text)
            case "input.done":
                has_failed = self._is_skipping
                self._end_text()
                if self._utterance is None:
                    await self._end_utterance(int(has_failed))
            case "session.close":
                self.end = "closed"
                self._end_text()

    async def _begin(self) -> Utterance:
        utterance = await super()._begin()
        self._held, self._total_bytes, self._chunks = bytearray(), 0, 0
        assert self._settings is not None
        self._timeline = Timeline(self.service.speech.spec().sample_rate, self._settings[0].speed)
        self._times, self._words = WordTimes(), []
        return utterance

    async def _settings_from(self, fields: dict[str, Any]) -> tuple[SpeechBody, SpeechRequest]:
        body, request = await super()._settings_from(fields)
        has_words = self._config.word_timestamps or self._config.timestamp_type == "word"
        return body, msgspec.structs.replace(request, with_words=has_words)

    def release(self) -> None:
        super().release()
        self._room.close()

    async def on_done(self, task: asyncio.Task[Any]) -> None:
        self._room.close()
        self._held = bytearray()
        await super().on_done(task)
        if not self._is_skipping:
            await self._end_utterance(1)
        while self._waiting and (self._utterance is None or not self._utterance.is_text_whole):
            await asyncio.sleep(0)  # there may be many
            try:
                await self._handle(self._waiting.popleft())
            except SonoroError as error:
                await self.refuse(error)

    async def _end_utterance(self, sentences: int) -> None:
        index, self._index = self._index, self._index + 1
        await super().send_event("session.done", utterance_index=index, total_sentences=sentences)

    @property
    def _spoken_text(self) -> str:
        return self._utterance.text if self._utterance else ""

    async def _send_sentence_event(self, event: str, **fields: Any) -> None:
        await super().send_event(event, utterance_index=self._index, sentence_index=0, **fields)

    async def send_event(self, event: str, **fields: Any) -> None:
        if event == "audio.start":
            self._format, self._rate = fields["format"], fields["sample_rate"]
            facts = {"sentence_text": self._spoken_text, "word_timestamps": self._config.word_timestamps}
            await self._send_sentence_event(event, format=self._format, sample_rate=self._rate, **facts)
        elif event == "audio.done":
            if self._held:
                if self._format == "wav":
                    state_length(self._held, len(self._held))
                await self.send(self._held)
            if self._config.word_timestamps:
                words = [
                    {"word": word, "start_ms": round(1000 * start_s), "end_ms": round(1000 * end_s)}
                    for word, start_s, end_s in self._words
                ]
                await self._send_chunk(b"", self._timeline.audio_s, words)
            names = ("words", "word_start_times_seconds", "word_end_times_seconds")
            aligned = {name: [word[column] for word in self._words] for column, name in enumerate(names)}
            further = {"timestamp_info": {"word_alignment": aligned}} if self._config.timestamp_type == "word" else {}
            await self._send_sentence_event(event, total_bytes=self._total_bytes, error=False, **further)

    async def send_audio(self, audio: bytes, source: AudioChunk | Finished) -> None:
        start_s = self._timeline.audio_s
        characters = self._timeline.add(self._spoken_text, source)
        self._words += self._times.add(characters, is_last=isinstance(source, Finished))
        self._total_bytes += len(audio)
        if self._config.word_timestamps and audio:
            await self._send_chunk(audio, start_s, None)
        elif self._config.stream_audio and audio:
            await self.send(audio)
        else:
            self._room.enter_context(self.service.speech.answers.take(len(audio)))
            self._held += audio

    async def _send_chunk(self, audio: bytes, start_s: float, words: list[dict[str, Any]] | None) -> None:
        span = {"chunk_start_ms": round(1000 * start_s), "chunk_end_ms": round(1000 * self._timeline.audio_s)}
        data = {"audio_b64": base64.b64encode(audio).decode(), "timestamps": words, "sample_rate": self._rate}
        await self._send_sentence_event("audio.chunk", chunk_id=self._chunks, **span, **data)
        self._chunks += 1

    async def refuse(self, error: SonoroError, request_id: str | None = None) -> None:
        await super().send_event("error", message=str(error))

    async def on_close(self, end: End, error: SonoroError | None) -> None:
        """Send no farewell: the protocol has no event for it."""
        if error is not None:
            await self.refuse(error)
