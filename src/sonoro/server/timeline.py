"""Character and word times of a streaming response: from the model's word times, or estimated."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sonoro.core.events import Word, at_speed
from sonoro.core.types import AudioChunk, Finished
from sonoro.server.stream import AudioBody


class Timed(NamedTuple):
    """A character or a word of a text, with its start and end in seconds."""

    text: str
    start_s: float
    end_s: float


def last_played(words: Sequence[Word], played_s: float) -> Word | None:
    """The last of `words` that begins within the first `played_s` seconds; None if there is none."""
    return next((word for word in reversed(words) if word.start_s < played_s), None)


def character_times(
    text: str, words: Sequence[Word], *, start: int = 0, start_s: float = 0.0, end_s: float | None = None
) -> list[Timed]:
    """Times of the characters of `text` from index `start`, spoken from `start_s` on, to the end of `words`.
    Characters within a word share its time evenly, those between two words the time between. With `end_s`, the end of
    the text, characters after the last word take the time until then. Times never decrease; in a stream each call
    continues at the end of the last word of the one before."""
    times: list[Timed] = []
    for word in words:
        times += _shared(text[start : word.start], start_s, word.start_s)
        times += _shared(text[word.start : word.end], word.start_s, word.end_s)
        start, start_s = word.end, word.end_s
    if end_s is not None:
        times += _shared(text[start:], start_s, max(start_s, end_s))
    return times


def _shared(characters: str, start_s: float, end_s: float) -> list[Timed]:
    """Times of `characters`, which share the time from `start_s` to `end_s` evenly."""
    each_s = (end_s - start_s) / max(len(characters), 1)
    return [Timed(one, start_s + at * each_s, start_s + (at + 1) * each_s) for at, one in enumerate(characters)]


class WordTimes:
    """Collects character times into words as written, between white space."""

    def __init__(self) -> None:
        self._word = ""
        self._start_s = self._end_s = 0.0

    def add(self, times: Sequence[Timed], *, is_last: bool) -> list[Timed]:
        """Add further characters; return the words that they complete. With `is_last` the last word is complete too."""
        completed = []
        for character, start_s, end_s in [*times, *[Timed(" ", 0.0, 0.0)] * is_last]:
            if not character.isspace():
                self._start_s = self._start_s if self._word else start_s
                self._word, self._end_s = self._word + character, end_s
            elif self._word:
                completed.append(Timed(self._word, self._start_s, self._end_s))
                self._word = ""
        return completed


class Timeline:
    """Character times of a text as its audio arrives, in seconds from its start.
    They follow the model's word times if it gives any; else the characters of each chunk share its duration, an
    estimate. `sample_rate` is the model's, `speed` that of playback."""

    def __init__(self, sample_rate: int, speed: float) -> None:
        self._rate, self._speed = sample_rate, speed
        self._at, self._at_s = 0, 0.0
        self.audio_s = 0.0
        """Duration of the chunks so far, at `speed`."""

    def add(self, text: str, event: AudioChunk | Finished) -> list[Timed]:
        """Add `event`; return the character times of `text` that have become final: all if it is `Finished`, else more
        text may follow."""
        if isinstance(event, Finished):
            return self._advance(text, event.words or (), self.audio_s)
        self.audio_s += len(event.pcm) / 2 / self._rate / self._speed
        words = event.words
        if words is None and event.characters > self._at:
            words = (self._estimate(text, event.characters),)
        return self._advance(text, words or (), None)

    def _estimate(self, text: str, end: int) -> Word:
        start_s, end_s = self._at_s * self._speed, self.audio_s * self._speed
        return Word(text=text[self._at : end], start_s=start_s, end_s=end_s, start=self._at, end=end, is_estimated=True)

    def _advance(self, text: str, words: tuple[Word, ...], end_s: float | None) -> list[Timed]:
        played = at_speed(words, self._speed)
        times = character_times(text, played, start=self._at, start_s=self._at_s, end_s=end_s)
        self._at += len(times)
        self._at_s = times[-1].end_s if times else self._at_s
        return times


class TimedBody(AudioBody, ABC):
    """A body of content type `kind` with audio and the character times of `text`, which `line` puts together.
    Encoded audio passes through `convert`."""

    kind = "application/json"

    def __init__(self, text: str, timeline: Timeline, convert: Callable[[bytes], bytes]) -> None:
        self._text, self._timeline, self._convert = text, timeline, convert
        self._times: list[Timed] = []

    def content_type(self, audio: str) -> str:
        return self.kind

    def note(self, chunk: AudioChunk) -> None:
        self._times += self._timeline.add(self._text, chunk)

    def packet(self, audio: bytes) -> bytes:
        return self.line(self._convert(audio), self._taken(), is_last=False)

    def end(self, finished: Finished, usage: dict[str, int]) -> bytes:
        self._times += self._timeline.add(self._text, finished)
        return self.line(b"", self._taken(), is_last=True)

    @abstractmethod
    def line(self, audio: bytes, times: list[Timed], *, is_last: bool) -> bytes:
        """The next part of the body; the last one has no audio."""

    def _taken(self) -> list[Timed]:
        taken, self._times = self._times, []
        return taken
