"""Times the words of a request: feeds attention and audio of each segment to its clock, and collects its words.

Host bookkeeping only: knows no model and no engine."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from sonoro.core.events import Fault, FaultKind, Word
from sonoro.core.types import ModelSpec
from sonoro.text.splitting import Segment, Span
from sonoro.words.heads import MOST_COLUMNS, WordHeads
from sonoro.words.spans import SpokenWord, spoken_words, word_spans
from sonoro.words.tracking import Pointing, SegmentClock, Trouble

_BEYOND = 2
"""Positions after the end of a text that a read-ahead head may attend to, besides its shift."""

_MOST_TOKENS = 4
"""Tokens assumed for a character until they are counted."""


class FollowsText(Protocol):
    """A model some of whose attention heads follow the text that it speaks."""

    word_heads: WordHeads
    """The heads to watch; set before any `allocate`, empty to watch none."""

    def token_spans(self, text: str) -> Sequence[Span]:
        """The range (start, end) of characters of `text` that each token of the segment covers; a token that ends the
        text has an empty range at its end."""


class RequestWords:
    """The word times of a request's `text`, which may grow by `append`; `begin` starts each attempt at a segment.

    `timed` are the words with final times, in order; `take` returns those that playback has reached. `clock` times the
    current attempt: None after its end, or if no head follows its text. `fault` is the fault of the segment that ended
    last, `faults` all that were noted. Unless a segment's text is live, its attention and audio are only kept until its
    first audio is on its way, so that asking for words does not delay the first packet."""

    def __init__(self, model: FollowsText, spec: ModelSpec, text: str) -> None:
        self.text, self.timed = text, list[Word]()
        self.fault: FaultKind | None = None
        self.faults: list[Fault] = []
        self._broken: tuple[FaultKind, int, int] | None = None
        """Where the attempt was cut: kind of fault, end of the segment, and where it continues, in characters."""
        self._model, self._spec = model, spec
        self._clock: SegmentClock | None = None
        self._ended: SegmentClock | None = None
        self._pointing = Pointing(layer=0, head=0)
        self._kept: list[tuple[npt.NDArray[np.float32], int] | bytes] = []
        """Attention with its frame number, and PCM16, in order of arrival."""
        self._is_deferred = False
        self._segment: Segment | None = None
        self._rows: list[int] = []
        """Of the pointing's heads, in the attention."""
        self._tokens = self._known = self._columns = 0
        self._timed_before = self._reported = 0
        self._start = self._end = 0
        """Where the segment starts and ends in the text."""

    def append(self, text: str) -> None:
        """Append live `text`."""
        self.text += text

    def begin(self, segment: Segment, pointing: Pointing | None, begins_s: float) -> None:
        """Begin an attempt at `segment`, `begins_s` after the first sample; drops the words of an earlier attempt.
        Without `pointing`, a head that follows the text, its words get no times."""
        if segment is self._segment:
            del self.timed[self._timed_before :]
        self._segment, self._timed_before, self._clock, self.fault = segment, len(self.timed), None, None
        self._broken, self._ended, self._kept = None, None, []
        if pointing is None:
            return
        places = self._model.word_heads.places
        self._pointing, self._rows = pointing, [places.index(place) for place in pointing.places]
        self._clock = SegmentClock(pointing, self._spec.frame_s, self._spec.sample_rate, begins_s)
        self._columns, self._known, self._is_deferred = 0, -1, segment.ids is None
        self._tokens = _MOST_TOKENS * len(segment.text)
        if segment.ids is not None:
            self._map(self._clock, segment)

    def anew(self) -> "RequestWords":
        """An object to time words of the same text, none of which it knows."""
        return RequestWords(self._model, self._spec, self.text)

    @property
    def clock(self) -> SegmentClock | None:
        """The clock of the current attempt, up to date."""
        self._catch_up()
        return self._clock

    @property
    def columns(self) -> int:
        """How many text positions the attention of the segment's next frame is needed for; 0 without a clock."""
        # A read-ahead head also attends past the end of the text, to positions without text.
        beyond = int(self._pointing.shift) + _BEYOND if self._pointing.shift > 1 else 0
        return 0 if self._clock is None else max(self._tokens + beyond, 1)

    def add_attention(self, attention: npt.NDArray[np.float32], frames: int) -> None:
        """Take the attention [H, W] of the segment's frame number `frames` (from 1) to its first W text positions."""
        if self._clock is not None:
            first, *beside = self._rows
            shares = attention[first].copy()
            # For two heads `mean` takes four times as long, at each frame of each request.
            for row in beside:
                shares += attention[row]
            self._keep((shares / len(self._rows) if beside else shares, frames))

    def _keep(self, one: tuple[npt.NDArray[np.float32], int] | bytes) -> None:
        """Keep attention or audio; pass all that is kept to the clock now, unless deferred to the first audio."""
        self._kept.append(one)
        if not self._is_deferred:
            self._catch_up()

    def _catch_up(self) -> None:
        """Pass to the clock what was kept, and collect the words that it makes final."""
        kept, self._kept = self._kept, []
        if self._clock is not None and self._segment is not None and self._known < 0:
            self._map(self._clock, self._segment)
        for one in kept:
            if self._clock is not None and isinstance(one, bytes):
                self._clock.add_audio(one)
                self.timed += self._clock.take(self.text)
            elif self._clock is not None and not isinstance(one, bytes):
                self._look(self._clock, *one)

    def _look(self, clock: SegmentClock, attention: npt.NDArray[np.float32], frames: int) -> None:
        """Pass the attention [W] of frame number `frames` to `clock`."""
        assert self._segment is not None
        if not self._segment.is_whole or self._known != len(self._segment.ids or ()):
            self._map(clock, self._segment)
        # If the text is fed one token per frame, only so many positions exist.
        self._columns = max(min(self.columns, frames) if self._pointing.ramp else self.columns, self._columns)
        if self._columns > MOST_COLUMNS:
            self._clock = None
            return
        shares = attention[: self._columns]
        if len(shares) < self._columns:
            # Text that came after the launch of the frame was not attended to.
            shares = np.pad(shares, (0, self._columns - len(shares)))
        clock.tracker.add(shares)

    def add_audio(self, pcm: bytes) -> None:
        """Take the segment's next audio, PCM16."""
        if self._clock is not None:
            self._keep(pcm)
            self._is_deferred = False

    def end(self) -> None:
        """End the segment: all of its words become final, and `fault` is set."""
        if (clock := self.clock) is not None and self._segment is not None:
            self._map(clock, self._segment)
            clock.finish()
            self.fault = clock.fault if self._broken is None else self._broken[0]
            self.timed += clock.take(self.text)
            self._clock, self._ended = None, clock

    def stop(self) -> None:
        """End a cancelled segment: the words that have begun become final."""
        if (clock := self.clock) is not None:
            clock.stop()
            self.timed += clock.take(self.text)
            self._clock = None

    def drop(self) -> None:
        """Take back the words of the segment that ended: its audio is not sent, so they are not reached."""
        del self.timed[max(self._reported, self._timed_before) :]
        self.fault = "unreached"

    def break_off(self, trouble: Trouble) -> Segment | None:
        """Cut the segment before the word of `trouble`; return the rest as a segment, None if all words are spoken."""
        clock = self.clock
        assert clock is not None
        self._broken = trouble.kind, self._end, self._end
        return None if trouble.word == len(clock.words) else self._cut(trouble, clock.words)

    def cut_unreached(self) -> Segment | None:
        """Cut the segment that ended before the first word that it did not reach; return the rest as a segment, None
        unless it reached some words and not the last."""
        trouble = None if self._ended is None else self._ended.trouble(is_over=True)
        if self._ended is None or trouble is None or trouble.kind != "unreached" or not trouble.word:
            return None
        rest = self._cut(trouble, self._ended.words)
        self._end = rest.start
        return rest

    def _cut(self, trouble: Trouble, words: Sequence[SpokenWord]) -> Segment:
        """Cut the segment before the word of `trouble`, one of its `words`; return the rest as a segment."""
        assert self._segment is not None
        segment, word = self._segment, words[trouble.word]
        self._broken = trouble.kind, self._end, word.start
        at, _ = self._model.token_spans(segment.text)[int(word.first)]
        rest = segment.cut(at, word.start)
        kept = max(self._reported, self._timed_before)
        self.timed[kept:] = [timed for timed in self.timed[kept:] if timed.end <= word.start]
        return rest

    def note_fault(self, attempt: int, *, spoken_again: bool) -> None:
        """Append the fault of the segment's attempt number `attempt` to `faults`."""
        assert self.fault is not None
        _, end, continued_at = self._broken or (None, self._end, None)
        self.faults.append(
            Fault(
                kind=self.fault,
                start=self._start,
                end=end,
                attempt=attempt,
                spoken_again=spoken_again,
                continued_at=continued_at,
            )
        )

    def take(self, until_s: float | None = None) -> tuple[Word, ...]:
        """The final words not returned before that begin before `until_s`, or all of them."""
        end = self._reported
        while end < len(self.timed) and (until_s is None or self.timed[end].start_s < until_s):
            end += 1
        taken, self._reported = self.timed[self._reported : end], end
        return tuple(taken)

    def _map(self, clock: SegmentClock, segment: Segment) -> None:
        """Map the tokens of `segment`, as far as its text has come, to the written words."""
        self._known = len(segment.ids or ())
        origins, tokens = segment.spoken.origins, self._model.token_spans(segment.text)
        low = self._start = min((start for start, _ in origins), default=segment.start)
        self._end = max((end for _, end in origins), default=segment.start)
        unread = set(range(self._end - low)).difference(*(range(start - low, end - low) for start, end in set(origins)))
        words = [(low + start, low + end) for start, end in word_spans(self.text[low : self._end], unread)]
        if segment.ids is not None and not segment.is_whole:
            tokens = tokens[: len(segment.ids)]
        self._tokens = len(tokens)
        found = spoken_words(words, segment.text, origins, tokens)
        # A word that spans two segments, such as a long number, was reported with the first.
        timed_to = self.timed[self._timed_before - 1].end if self._timed_before else 0
        clock.words = [word for word in found if word.start >= timed_to]
