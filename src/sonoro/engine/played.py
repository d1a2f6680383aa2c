"""Plays the lines of a script: makes its pauses exact, applies rate and gain, and tells times and places as they are
played and as they were sent. Works on the host, for requests with a script alone; knows no model and no tick."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from sonoro.audio.pcm import audible as find_audible
from sonoro.audio.pcm import from_pcm16, to_pcm16
from sonoro.core.events import Fault, Mark, Word
from sonoro.core.script import Line, Script
from sonoro.text.origins import Origins
from sonoro.text.script.live import LiveScript
from sonoro.text.splitting import Segment

if TYPE_CHECKING:
    from sonoro.audio.coded import Tempo


class Played:
    """The audio at `sample_rate` of the lines of a script, or a live one.

    Of `segment`, if there is one, and those before, `samples` were played before it came.

    A pause lasts from the last audible sample before it to the first one behind it. So the silence that the model makes
    around it is left out: at the end of a line with a pause it is held until something audible follows."""

    def __init__(
        self,
        script: Script | LiveScript,
        sample_rate: int,
        samples: int = 0,
        segment: Segment | None = None,
    ) -> None:
        self._rate, self._segment = sample_rate, segment
        self._sent = Origins(script.origins) if isinstance(script, Script) else script.origins
        self._script, self._marked, self._reached = script, 0, list[Mark]()
        self._held = np.zeros(0, np.int16)
        self._tempo: Tempo | None = None
        self._is_after_pause = False
        self._silent = 0
        """Samples of silence at the end of what was played."""
        self._samples = self._nominal = samples
        """Samples played so far; and with those that a change of tempo holds back."""
        # Of each segment: when it begins by the model's frames and as played, in seconds, and its rate.
        self._starts = [(0.0, 0.0, 1.0)] if samples else []

    def lead_s(self, segment: Segment) -> float:
        """The seconds of silence before the first audio of `segment`, which are then to be played; else 0."""
        return 0.0 if segment is self._segment else self._paused(segment.lead_s)

    def _paused(self, seconds: float) -> float:
        """Count a pause of `seconds`, and return them."""
        if seconds:
            self._held, self._is_after_pause = self._held[:0], True
            self._samples, self._silent = self._samples + round(seconds * self._rate), 0
        self._nominal = self._samples
        return seconds

    def feed(self, segment: Segment, pcm: bytes, begins_s: float) -> bytes:
        """The audio to play for `pcm`, more audio of `segment`, which begins `begins_s` after the model's first."""
        line = segment.line
        assert line is not None
        if segment is not self._segment:
            self._segment = segment
            self._starts.append((begins_s, self._nominal / self._rate, line.rate))
        samples = np.frombuffer(pcm, "<i2")
        if self._is_after_pause:
            audible = find_audible(samples)
            cut = int(audible[0]) if len(audible) else len(samples)
            samples, self._is_after_pause = samples[cut:], not len(audible)
            before, at_s, rate = self._starts[-1]
            self._starts[-1] = (before + cut / self._rate, at_s, rate)
        if segment.ends_line and line.pause_s:
            samples = np.concatenate([self._held, samples])
            audible = find_audible(samples)
            cut = int(audible[-1]) + 1 if len(audible) else 0
            samples, self._held = samples[:cut], samples[cut:]
        audible = find_audible(samples)
        self._silent = len(samples) - 1 - int(audible[-1]) if len(audible) else self._silent + len(samples)
        return self._play(samples, line)

    def end(self, segment: Segment) -> tuple[bytes, float]:
        """The rest of the audio of `segment`, which has ended, and the seconds of the pause that follows: its line's,
        if it ends the line, without the silence that was sent before the pause was known."""
        line = segment.line
        assert line is not None
        if not segment.ends_line:
            return b"", 0.0
        last = b""
        if self._tempo is not None:
            last, self._tempo = _amplified(self._tempo.finish(), line), None
        self._samples += len(last) // 2
        return last, self._paused(max(line.pause_s - self._silent / line.rate / self._rate, 0.0))

    def words(self, words: Sequence[Word], segments: Sequence[Segment]) -> tuple[Word, ...]:
        """`words` of the written text, which `segments` speak, with their times as played, their places as sent, and
        the voices of their lines."""
        made = []
        for word in words:
            line = segments[max(bisect_right(segments, word.start, key=lambda segment: segment.start) - 1, 0)].line
            start, end = self._sent.span(word.start, word.end)
            times = {"start_s": self._played_s(word.start_s), "end_s": self._played_s(word.end_s, word.start_s)}
            voice = None if line is None else line.voice
            made.append(msgspec.structs.replace(word, start=start, end=end, voice=voice, **times))
            self._reach(start, times["start_s"])
        return tuple(made)

    def _reach(self, position: int | None, time_s: float | None) -> None:
        """Note the marks before `position` of the text as it was sent, or all, as reached."""
        marks = self._script.marks
        while self._marked < len(marks) and (position is None or marks[self._marked][0] <= position):
            self._reached.append(Mark(name=marks[self._marked][1], time_s=time_s))
            self._marked += 1

    def marks(self) -> tuple[Mark, ...]:
        """The marks that words have reached since the last call."""
        reached, self._reached = tuple(self._reached), []
        return reached

    def last_marks(self, *, has_words: bool) -> tuple[Mark, ...]:
        """The marks that are left at the end of the audio."""
        self._reach(None, self._samples / self._rate if has_words else None)
        return self.marks()

    def faults(self, faults: Sequence[Fault]) -> tuple[Fault, ...]:
        """`faults` of the written text, at their places as sent."""
        position = self._sent.position
        return tuple(
            msgspec.structs.replace(
                fault,
                start=position(fault.start),
                end=position(fault.end),
                continued_at=None if fault.continued_at is None else position(fault.continued_at),
            )
            for fault in faults
        )

    def position(self, at: int) -> int:
        """Where character `at` of the written text was sent."""
        return self._sent.position(at)

    def _play(self, samples: npt.NDArray[np.int16], line: Line) -> bytes:
        self._nominal += round(len(samples) / line.rate)
        pcm = samples.tobytes() if line.rate == 1 and line.gain == 1 else self._changed(samples, line)
        self._samples += len(pcm) // 2
        return pcm

    def _changed(self, samples: npt.NDArray[np.int16], line: Line) -> bytes:
        played = from_pcm16(samples.tobytes())
        if line.rate != 1:
            # PyAV takes .25 s to import, which only such a line needs.
            self._tempo = self._tempo or import_module("sonoro.audio.coded").Tempo(self._rate, line.rate)
            played = self._tempo.feed(played)
        return _amplified(played, line)

    def _played_s(self, time_s: float, begun_s: float | None = None) -> float:
        """When what the model speaks at `time_s` is played: within the segment of `begun_s`, if that is given."""
        by = time_s if begun_s is None else begun_s
        reached = [one for one in self._starts if one[0] <= by + 1e-9] or self._starts[:1]
        if not reached:
            return time_s
        before_s, at_s, rate = reached[-1]
        return at_s + max(time_s - before_s, 0.0) / rate


def _amplified(samples: npt.NDArray[np.float32], line: Line) -> bytes:
    return to_pcm16(samples * np.float32(line.gain) if line.gain != 1 else samples)
