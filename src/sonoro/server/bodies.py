"""Response bodies with more than the audio itself: server-sent events, and one JSON object."""

import base64
import json
import math
import struct
from typing import Any

import msgspec

from sonoro.core.events import at_speed, marks_at_speed
from sonoro.core.types import AudioChunk, Finished
from sonoro.server.errors import AnswerTooLarge, Refusal
from sonoro.server.stream import AudioBody

_FACTS_BYTES, _WORD_BYTES = 1024, 176
"""Upper bounds in JSON of a result without its audio and words, and of a word, whose characters may be escaped."""


def json_bytes(audio_bytes: int) -> int:
    """An upper bound of a JSON object with so much encoded audio in base64, without words."""
    return math.ceil(audio_bytes / 3) * 4 + _FACTS_BYTES


class _WordsBody(AudioBody):
    """A body with word times at `speed`. `new_words` are those not sent yet; None if the model gives none so far.
    `new_marks` are the marks of the text not sent yet."""

    def __init__(self, speed: float) -> None:
        self._speed = speed
        self.new_words: list[dict[str, Any]] | None = None
        self.new_marks: list[dict[str, Any]] = []

    def note(self, chunk: AudioChunk) -> None:
        self._add(chunk)

    def _add(self, source: AudioChunk | Finished) -> None:
        if source.words is not None:
            added = [word.fields for word in at_speed(source.words, self._speed)]
            self.new_words = [*(self.new_words or []), *added]
        self.new_marks += msgspec.to_builtins(marks_at_speed(source.marks, self._speed))


class EventBody(_WordsBody):
    """OpenAI's server-sent events with audio, and events with the words whose times are final."""

    def content_type(self, audio: str) -> str:
        return "text/event-stream"

    def packet(self, audio: bytes) -> bytes:
        delta = sse_event({"type": "speech.audio.delta", "audio": base64.b64encode(audio).decode()})
        return delta + self._words()

    def end(self, finished: Finished, usage: dict[str, int]) -> bytes:
        self._add(finished)
        done = {"type": "speech.audio.done", "usage": usage, "finish_reason": finished.reason, **faults_field(finished)}
        return self._words() + sse_event(done)

    def _words(self) -> bytes:
        words, marks, self.new_words, self.new_marks = self.new_words, self.new_marks, None, []
        told = sse_event({"type": "speech.words", "words": words}) if words else b""
        return told + (sse_event({"type": "speech.marks", "marks": marks}) if marks else b"")

    def failure(self, refused: Refusal) -> bytes:
        return sse_event({"type": "error", **refused.body})


def faults_field(finished: Finished) -> dict[str, object]:
    """The fields `faults` and `warnings` of a body, as far as there are any."""
    facts = {"faults": msgspec.to_builtins(finished.faults), "warnings": finished.warnings}
    return {name: value for name, value in facts.items() if value}


class HeldAudio:
    """Encoded audio that is held until its end, in base64: encoded as it comes, since a minute at once takes 20 ms.
    It may have `max_bytes`. The header of a WAV file then states the length. `before` comes before it, for example in
    JSON: a whole of many megabytes is not copied."""

    def __init__(self, before: bytes, format: str, max_bytes: int) -> None:
        self._format, self._max_bytes, self._bytes, self._at = format, max_bytes, 0, len(before)
        self._head, self._left, self._encoded = bytearray(), b"", bytearray(before)

    def add(self, audio: bytes) -> None:
        """Append `audio`. Raises `AnswerTooLarge`."""
        self._bytes += len(audio)
        if self._bytes > self._max_bytes:
            # For example numbers: few letters, many words.
            limit = f"input: its audio takes more than {self._max_bytes} bytes"
            raise AnswerTooLarge(f"{limit}; ask for it alone, with stream_format sse or audio")
        self._head += audio[: 48 - len(self._head)] if len(self._head) < 48 else b""
        self._left += audio
        cut = len(self._left) // 3 * 3
        self._encoded += base64.b64encode(self._left[:cut])
        self._left = self._left[cut:]

    def end(self, after: bytes) -> bytearray:
        """The whole in base64, and `after`. Call it once."""
        self._encoded += base64.b64encode(self._left)
        if self._format == "wav" and self._head:
            state_length(self._head, self._bytes)
            self._encoded[self._at : self._at + 64] = base64.b64encode(self._head)
        self._encoded += after
        return self._encoded


def state_length(wav: bytearray, length: int) -> None:
    """State in the header of `wav`, or of its first part, that the file has `length` bytes."""
    struct.pack_into("<I", wav, 4, length - 8)
    struct.pack_into("<I", wav, 40, length - 44)


class JSONBody(_WordsBody):
    """One JSON object with the audio, in `format`, and the words of a text of `characters`, or of
    none by default. The audio may have `audio_bytes`; `packet` raises `AnswerTooLarge` beyond that."""

    def __init__(self, speed: float, format: str, audio_bytes: int, characters: int = 0) -> None:
        super().__init__(speed)
        self._format, self._audio = format, HeldAudio(b'{"audio": "', format, audio_bytes)
        self.max_bytes = json_bytes(audio_bytes) + _WORD_BYTES * characters

    def content_type(self, audio: str) -> str:
        return "application/json"

    def packet(self, audio: bytes) -> bytes:
        self._audio.add(audio)
        return b""

    def end(self, finished: Finished, usage: dict[str, int]) -> bytearray:
        self._add(finished)
        facts = {"finish_reason": finished.reason, "usage": usage, "words": self.new_words, **faults_field(finished)}
        facts |= {"marks": self.new_marks} if self.new_marks else {}
        return self._audio.end(b'", ' + json.dumps({"format": self._format, **facts}).encode()[1:])


def sse_event(data: dict[str, Any]) -> bytes:
    """Encode `data` as a server-sent event."""
    return b"data: " + json.dumps(data).encode() + b"\n\n"
