"""Decides what becomes of a segment that is faulty or runs away, and does it. Knows no tick and no model."""

from enum import Enum

from sonoro.engine.request import Request
from sonoro.text.splitting import Segment


class Decision(Enum):
    """What becomes of a segment that has ended; `CONTINUE` is for one that still plays."""

    ACCEPT = "it is sent as it is"
    MARK = "it is sent, and its fault reported"
    MARK_RUNAWAY = "it is sent and its fault reported; no later prompt includes its frames"
    DROP = "its fault is reported, and none of it is sent"
    CUT = "it is sent and its fault reported; words that it did not reach are spoken next, alone"
    CONTINUE = "it is broken off after its last good word; the rest of its text is spoken next"
    SPEAK_AGAIN = "it is discarded, and spoken again with the next seed"
    HALVE = "its fault is reported; it is discarded, and spoken again in two halves if it has several sentences"


class Retry:
    """Decides about the segments of `request`, which allows several attempts or has `words`, and so knows of faults.
    Only an attempt that ended by itself can be faulty; one that reached its limit ran away, unless the limit is the
    caller's own."""

    def __init__(self, request: Request) -> None:
        assert request.params.attempts is not None
        self._request, self._attempts, self._on_fault = request, request.params.attempts, request.params.on_fault
        self.holds_back = self._attempts != 1 and self._on_fault != "continue"
        """Whether a segment's audio is held back until the segment has ended."""
        self._ended_to = -1

    @property
    def may_add_segment(self) -> bool:
        """Whether a decision about the current attempt may make the rest of its text a segment."""
        return self._on_fault == "continue" or self._is_last_retry

    @property
    def has_ended_before(self) -> bool:
        """Whether an earlier attempt at the text of the segment ended by itself, though faulty."""
        segment = self._request.segment
        return segment is not None and segment.end <= self._ended_to

    def decide(self) -> Decision:
        """What becomes of the segment, which has ended and whose words are final. Changes nothing."""
        request, progress, words = self._request, self._request.progress, self._request.words
        is_limited = request.finish_reason == "length"
        if self._has_attempts and self.holds_back:
            has_run_away = progress.is_at_limit or self._is_doubtful
            if (has_run_away and not is_limited) or (self._is_faulty and self._on_fault == "retry"):
                return Decision.HALVE if self._is_faulty else Decision.SPEAK_AGAIN
        if words is None:
            return Decision.ACCEPT
        if progress.is_at_limit and self.has_ended_before and (self._is_spoken_alone or not is_limited):
            return Decision.DROP if self._is_spoken_alone else Decision.MARK_RUNAWAY
        if self._is_faulty:
            return Decision.CUT if self._is_last_retry else Decision.MARK
        return Decision.ACCEPT

    def settle(self) -> bool:
        """Carry out what `decide` says of the segment. Returns whether it is spoken again: then `attempt` and
        `segments` are those of the next attempt. Raises what splitting it raises."""
        request, progress, words = self._request, self._request.progress, self._request.words
        decision = self.decide()
        is_again = decision in (Decision.SPEAK_AGAIN, Decision.HALVE)
        if words is not None and decision not in (Decision.ACCEPT, Decision.SPEAK_AGAIN):
            if decision in (Decision.DROP, Decision.MARK_RUNAWAY):
                progress.frames, words.fault = [], words.fault or "ending"
            if decision is Decision.DROP:
                progress.held, progress.length = [], 0
                words.drop()
            elif decision is Decision.CUT and (unreached := words.cut_unreached()) is not None:
                self._speak_next(unreached)
            # Words that are spoken alone belong to the last attempt.
            words.note_fault(min(request.attempt, self._attempts - 1), spoken_again=is_again)
        if decision is Decision.HALVE:
            self._halve()
        request.attempt += is_again
        return is_again

    def watch(self, frame_s: float, *, is_over: bool) -> Decision:
        """Break the segment off after its last good word if its attention shows a fault, with `on_fault` "continue".
        Call it with each frame of `frame_s` seconds that was output. `is_over`: the model has ended the segment."""
        request, progress, words = self._request, self._request.progress, self._request.words
        # Reaching the caller's own limit is no fault; a runaway is.
        is_limited = request.finish_reason == "length"
        if words is None or self._on_fault != "continue" or is_limited or not self._has_attempts:
            return Decision.ACCEPT
        trouble = None if words.clock is None else words.clock.trouble(is_over=is_over)
        if trouble is None:
            return Decision.ACCEPT
        good_frames, rest = min(int(trouble.at_s / frame_s), progress.length), words.break_off(trouble)
        if rest is not None:
            self._speak_next(rest)
        # Audio that was sent, or a part holds for that, is not taken back.
        sent_frames = progress.decoded + (0 if request.whole is None else progress.held_frames)
        progress.length = max(good_frames, sent_frames)
        progress.is_done = progress.is_broken_off = True
        return Decision.CONTINUE

    def _halve(self) -> None:
        """Split the faulty segment in two: a model tends to skip the same part of a long text with any seed."""
        request, segment = self._request, self._request.segment
        assert segment is not None
        assert request.params.language is not None
        self._ended_to = max(self._ended_to, segment.end)
        if (rest := segment.halve(request.params.language)) is not None:
            request.segments.insert(request.index + 1, rest)

    def _speak_next(self, rest: Segment) -> None:
        """Make `rest`, the rest of the current segment's text, the next segment."""
        request, progress = self._request, self._request.progress
        request.segments.insert(request.index + 1, rest)
        progress.has_rest = True
        if progress.is_done and not progress.is_at_limit:
            self._ended_to = rest.end

    @property
    def _has_attempts(self) -> bool:
        """Whether another attempt at the segment, or at its rest, is allowed."""
        return not self._request.params.ignore_eos and self._request.attempt + 1 < self._attempts

    @property
    def _is_faulty(self) -> bool:
        """Whether the segment ended by itself but was probably not spoken as written."""
        request, words = self._request, self._request.words
        is_whole = not request.progress.is_at_limit and not request.params.ignore_eos
        return is_whole and words is not None and words.fault is not None

    @property
    def _is_doubtful(self) -> bool:
        """Whether the segment took so many frames that the model says it probably ran away."""
        prompt = self._request.progress.prompt
        assert prompt is not None
        doubtful = prompt.controls.doubtful_frames
        return doubtful is not None and self._request.progress.length >= doubtful

    @property
    def _is_last_retry(self) -> bool:
        """Whether this is the last attempt at a segment, after which words that it did not reach are spoken alone."""
        request = self._request
        is_last = request.attempt > 0 and request.attempt + 1 == self._attempts
        return is_last and request.words is not None and self._on_fault == "retry"

    @property
    def _is_spoken_alone(self) -> bool:
        """Whether the segment is what the last attempt did not reach."""
        return self._request.attempt == self._attempts
