"""Speaks the segments of one request side by side, each in a slot of its own, and hands on what they make in order.

Each is a part: a `Request` that the scheduler and the runner take as any other. Its audio is held until it is over;
then the whole request gets it, as if that had spoken it. Bookkeeping only: imports no torch, calls no model."""

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from sonoro.engine.request import Playback, Progress, Request
from sonoro.engine.retry import Retry
from sonoro.text.splitting import Segment
from sonoro.words.request import RequestWords

_AHEAD = 2
"""Parts may begin as long as fewer than so many times `parallel` of them are begun and not handed on: it bounds the
audio that is held while one part takes longer than the others."""


class _Spoken(NamedTuple):
    """A segment that has ended, and its progress."""

    segment: Segment
    progress: Progress


class RequestParts:
    """The parts of `whole`, one for each of its segments, and at most `params.parallel` at once.
    `running` are those that have begun and are not over, by number."""

    def __init__(self, whole: Request) -> None:
        self._whole, self._segments = whole, list(whole.segments)
        self._begun = self._handed_on = 0
        self.running: dict[int, Request] = {}
        self._spoken: dict[int, list[_Spoken]] = {}
        """What the parts have spoken that are not handed on, by number."""
        self._over: dict[int, Request] = {}

    @property
    def may_begin(self) -> bool:
        """Whether another part may begin beside those that run."""
        limit = self._whole.params.parallel
        has_more = self._begun < min(len(self._segments), self._handed_on + _AHEAD * limit)
        return has_more and len(self.running) < limit and not self._whole.is_paused

    def begin(self) -> Request:
        """The next part."""
        whole, number = self._whole, self._begun
        playback = Playback(whole.playback.accepted_at_s, whole.playback.reached_at_s)
        part = Request(whole.params, [self._segments[number]], whole.voice, playback, whole=whole, first=number)
        part.cast = whole.cast
        part.is_paused, part.words = whole.is_paused, whole.words and whole.words.anew()
        if part.words is not None or part.params.attempts != 1:
            part.retry = Retry(part)
        self._begun += 1
        self.running[number], self._spoken[number] = part, []
        return part

    def end_segment(self, part: Request) -> None:
        """Keep what the current segment of `part` has made."""
        assert part.segment is not None
        self._spoken[part.first].append(_Spoken(part.segment, part.progress))

    def end(self, part: Request, frame_s: float, lead_in_s: float) -> Iterator[None]:
        """End `part`. For each segment that can be sent now, in order, make it the current one of the whole request.
        The caller sends it and moves the request on before the next."""
        whole = self._whole
        self._over[part.first] = self.running.pop(part.first)
        while (over := self._over.pop(self._handed_on, None)) is not None:
            spoken = self._spoken.pop(over.first)
            whole.segments[whole.index : whole.index + 1] = [segment for segment, _ in spoken]
            if whole.words is not None and over.words is not None:
                _adopt(whole.words, over.words, whole.frames_before * frame_s - lead_in_s)
            whole.retry = over.retry
            self._handed_on += 1
            for _, progress in spoken:
                whole.progress = progress
                yield


def _adopt(words: RequestWords, later: RequestWords, later_s: float) -> None:
    """Append to `words` those that `later` has timed in a later part of the text, `later_s` later, and its faults."""
    timed_to = words.timed[-1].end if words.timed else 0
    for word in later.timed:
        if word.start >= timed_to:
            start_s, end_s = (round(max(time_s + later_s, 0.0), 3) for time_s in (word.start_s, word.end_s))
            words.timed.append(msgspec.structs.replace(word, start_s=start_s, end_s=end_s))
    words.faults += later.faults
