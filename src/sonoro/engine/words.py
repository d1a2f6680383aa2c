"""When the words of a request are spoken: what the engine gives the clock of each segment, and what it is told.

Knows the protocols of `models` and no model; pure bookkeeping on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from sonoro.core.normalize import trace_english
from sonoro.core.text import Segment
from sonoro.core.words import Fault, FaultKind, Word
from sonoro.models.words import MOST_COLUMNS
from sonoro.words.spans import spoken_words, word_spans
from sonoro.words.tracking import Pointing, SegmentClock, Trouble

if TYPE_CHECKING:
    import numpy.typing as npt

    from sonoro.core.types import ModelSpec
    from sonoro.models.words import ShowsWords

__all__ = ["RequestWords", "spelled_out"]

_BEYOND = 2
"""Positions after a text that a head which reads ahead may look at, besides its distance."""

_AROUND, _FARTHEST = 80, 4000
"""Characters beyond twice its length among which a segment is looked for, and if it is not there, all in all."""


class RequestWords:
    """The words of a request's `text`, which may grow by `append`: begun anew for each attempt at a segment.

    `told` are those whose times are certain, in order; `take` hands on those of them that a listener has reached.
    `clock` is that of the attempt, None where no head points at it and once it has ended. `fault` is what the attention
    says is wrong with the segment that has ended, `faults` are those noted so far.
    """

    def __init__(self, model: ShowsWords, spec: ModelSpec, text: str) -> None:
        self.text, self.told = text, list[Word]()
        self.fault: FaultKind | None = None
        self.faults: list[Fault] = []
        self._broken: tuple[FaultKind, int, int] | None = None
        """Where the attempt was broken off: what was wrong, where the segment ended, and where it is continued."""
        self._model, self._spec = model, spec
        self.clock: SegmentClock | None = None
        self._pointing = Pointing(layer=0, head=0)
        self._segment: Segment | None = None
        self._tokens = self._known = self._column = self._columns = 0
        self._told_before = self._handed = 0
        self._begin = self._start = self._end = 0
        """Of the segment, where in the text it is looked for, and where it was found to start and to end."""

    def append(self, text: str) -> None:
        """More of a live text."""
        self.text += text

    def begin(self, segment: Segment, pointing: Pointing | None, begins_s: float) -> None:
        """An attempt at `segment` begins, `begins_s` after the first sample; what an earlier one told is forgotten.

        None of its words are told if no head points at it.
        """
        if segment is self._segment:
            del self.told[self._told_before :]
        else:
            self._begin = self._end
        self._segment, self._told_before, self.clock, self.fault = segment, len(self.told), None, None
        self._broken = None
        if pointing is None:
            return
        places = self._model.word_heads.places
        self._pointing, self._column = pointing, places.index((pointing.layer, pointing.head))
        self.clock = SegmentClock(pointing, self._spec.frame_s, self._spec.sample_rate, begins_s)
        self._known = self._columns = 0
        self._map(segment)

    @property
    def columns(self) -> int:
        """How many positions of its text the segment's next frame may be looking at; 0 if nobody asks."""
        # A head that reads ahead looks past the end of the text as well, where positions are fed that hold none.
        beyond = int(self._pointing.shift) + _BEYOND if self._pointing.shift > 1 else 0
        return 0 if self.clock is None else max(self._tokens + beyond, 1)

    def see(self, attention: npt.NDArray[np.float32], frames: int) -> None:
        """The attention [H, W] of the segment's frame number `frames`, from 1, to W of its `columns` or all."""
        if self.clock is None or self._segment is None:
            return
        if not self._segment.is_whole or self._known != len(self._segment.ids or ()):
            self._map(self._segment)
        # Of a text that comes a token a frame no more is there.
        self._columns = max(min(self.columns, frames) if self._pointing.ramp else self.columns, self._columns)
        if self._columns > MOST_COLUMNS:
            self.clock = None
            return
        shares = attention[self._column, : self._columns]
        if len(shares) < self._columns:
            # What has come since the frame was launched it did not look at.
            shares = np.pad(shares, (0, self._columns - len(shares)))
        self.clock.tracker.add(shares)

    def hear(self, pcm: bytes) -> None:
        """The next audio of the segment."""
        if self.clock is not None:
            self.clock.hear(pcm)
            self.told += self.clock.take(self.text)

    def end(self) -> None:
        """The segment has ended: all of its words are told."""
        if self.clock is not None and self._segment is not None:
            self._map(self._segment)
            self.clock.finish()
            self.fault = self.clock.fault if self._broken is None else self._broken[0]
            self.told += self.clock.take(self.text)
            self.clock = None

    def stop(self) -> None:
        """The segment is cancelled while it is heard: of its words those that have begun are told."""
        if self.clock is not None:
            self.clock.stop()
            self.told += self.clock.take(self.text)
            self.clock = None

    def break_off(self, trouble: Trouble) -> Segment | None:
        """Shorten the segment to its words before the `trouble`; the rest of it, None if all words are spoken."""
        assert self.clock is not None
        assert self._segment is not None
        segment, words = self._segment, self.clock.words
        self._broken = trouble.kind, self._end, self._end
        if trouble.word == len(words):
            return None
        word = words[trouble.word]
        self._broken = trouble.kind, self._end, word.start
        at, _ = self._model.token_spans(segment.text)[int(word.first)]
        rest = Segment(segment.text[at:].lstrip(), word.start, segment.end)
        segment.text, segment.end = segment.text[:at], word.start
        kept = max(self._handed, self._told_before)
        self.told[kept:] = [told for told in self.told[kept:] if told.end <= word.start]
        return rest

    def note_fault(self, attempt: int, *, spoken_again: bool) -> None:
        """Keep the segment's fault, of number `attempt` to speak it, for whoever asks."""
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
        """Those told and not handed on yet, which begin before `until_s`."""
        end = self._handed
        while end < len(self.told) and (until_s is None or self.told[end].start_s < until_s):
            end += 1
        taken, self._handed = self.told[self._handed : end], end
        return tuple(taken)

    def _map(self, segment: Segment) -> None:
        """Find which tokens speak which words of `segment`, as far as its text has come."""
        assert self.clock is not None
        self._known = len(segment.ids or ())
        if segment.ids is None:
            low, spoken, origins = self._found(segment)
        else:
            low, (spoken, origins) = segment.start, spelled_out(self._spec, self.text[segment.start : segment.end])
        high = max((end for _, end in origins), default=0)
        self._start, self._end = low + min((start for start, _ in origins), default=0), low + high
        words = [(low + start, low + end) for start, end in word_spans(self.text[low : low + high])]
        tokens: Sequence[tuple[int, int]] = self._model.token_spans(spoken)
        if segment.ids is not None and not segment.is_whole:
            tokens = tokens[: len(segment.ids)]
        self._tokens = len(tokens)
        found = spoken_words(words, spoken, [(low + start, low + end) for start, end in origins], tokens)
        # A word that is spelled out over two segments, as a long number, was told with the first.
        told_to = self.told[self._told_before - 1].end if self._told_before else 0
        self.clock.words = [word for word in found if word.start >= told_to]

    def _found(self, segment: Segment) -> tuple[int, str, list[tuple[int, int]]]:
        """Where in the text `segment` is looked for, what is spoken of it, and where from there on that comes from: in
        proportion if it is not found."""
        low, wanted = self._begin, segment.text
        for most in (2 * len(wanted) + _AROUND, _FARTHEST):
            written = self.text[low : low + most]
            # Not within a word: half a number is read otherwise.
            written += (self.text[low + most :].split(maxsplit=1) or [""])[0] if len(written) == most else ""
            spoken, origins = spelled_out(self._spec, written)
            at = spoken.lower().find(wanted.lower())
            if at >= 0:
                return low, wanted, origins[at : at + len(wanted)]
        each = (segment.end - segment.start) / max(len(wanted), 1)
        spread = [(int(at * each), int((at + 1) * each)) for at in range(len(wanted))]
        return segment.start, wanted, spread


def spelled_out(spec: ModelSpec, written: str) -> tuple[str, list[tuple[int, int]]]:
    """What a model of `spec` is given of `written`, and where each of its characters comes from."""
    if spec.text_normalizer == "english":
        return trace_english(written, lowercase=True, respellings=spec.respellings)
    return written, [(at, at + 1) for at in range(len(written))]
