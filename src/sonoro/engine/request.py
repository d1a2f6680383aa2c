"""The state of one accepted request in the engine. Bookkeeping only: imports no torch, calls no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sonoro.core.types import FinishReason, SpeechRequest, Timings
from sonoro.text.live_feed import LiveFeed
from sonoro.text.splitting import LETTERS_PER_S, Segment

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from sonoro.engine.words import RequestWords
    from sonoro.models.base import Prompt, Voice


@dataclass(eq=False)
class Allocation:
    """A segment's slot and `pages`, and counts of what was launched for it. Only the scheduler writes it.

    `pages` grow with the steps; their first `cached` positions came from the prefix cache. Launched so far: `steps`
    frames, `columns` frames given to the codec (surplus included), `appended` ids of live text. One object per
    admission: results refer to it, so those of an earlier owner of the slot are recognised.
    """

    slot: int
    pages: list[int]
    cached: int = 0
    steps: int = 0
    columns: int = 0
    appended: int = 0


@dataclass
class Progress:
    """The progress of one attempt at a segment, by the results collected so far. Only the engine writes it.

    `limit` and `expected` are the maximum and the expected number of frames. `prefix` holds the prefix cache keys of
    the first pages of `prompt`, which includes the first `given_ids` ids of live text. `length` frames are made,
    `decoded` of them sent as audio; `is_done` means that no more follow. A faulty attempt `is_broken_off`: its later
    frames are dropped. If it `has_rest` the rest of its text is the next segment. `made` are its frames [T, ...]
    (kept only if another segment may follow); `held` are chunks not sent yet: PCM16 and number of frames.
    """

    prompt: Prompt | None = None
    limit: int = 0
    expected: int = 0
    prefix: list[bytes] = field(default_factory=list)
    given_ids: int = 0
    length: int = 0
    decoded: int = 0
    is_done: bool = False
    is_broken_off: bool = False
    has_rest: bool = False
    made: list[npt.NDArray[Any]] = field(default_factory=list)
    held: list[tuple[bytes, int]] = field(default_factory=list)


@dataclass
class Playback:
    """Chunks sent to a request's listener, and until when their audio plays."""

    accepted_at_s: float
    chunks: int = 0
    first_audio_at_s: float | None = None
    plays_until_s: float = 0.0


@dataclass(eq=False)
class Request:
    """A resolved request and its progress. Only the engine writes it, except `allocation`, which is the scheduler's.

    The current segment is `segments[index]`; of a live request `live` appends to `segments`. `before` holds the frames
    [T, ...] of the earlier segments, `frames_before` counts them. `attempt` counts from 0. Up to character `ended_to`
    an attempt has spoken the text and ended by itself, though faulty. `words` times the words, if the request needs
    that and the model can.
    """

    params: SpeechRequest
    segments: list[Segment]
    voice: Voice | None
    playback: Playback
    live: LiveFeed | None = None
    index: int = 0
    attempt: int = 0
    progress: Progress = field(default_factory=Progress)
    before: list[Tensor] = field(default_factory=list)
    frames_before: int = 0
    allocation: Allocation | None = None
    is_paused: bool = False
    ended_to: int = -1
    words: RequestWords | None = None

    @property
    def positions(self) -> int:
        """The most backbone positions that the current segment can need."""
        assert self.progress.prompt is not None
        return self.progress.prompt.positions + self.progress.limit

    @property
    def is_heard(self) -> bool:
        """Whether any of its audio was sent. Otherwise it may be preempted and start again."""
        return self.playback.chunks > 0

    @property
    def steps(self) -> int:
        """Frames of the segment that were launched."""
        return 0 if self.allocation is None else self.allocation.steps

    @property
    def columns(self) -> int:
        """Frames of the segment that codec launches cover, surplus included."""
        return 0 if self.allocation is None else self.allocation.columns

    @property
    def segment(self) -> Segment | None:
        """The current segment; None while its text has not come."""
        return self.segments[self.index] if self.index < len(self.segments) else None

    @property
    def has_more_segments(self) -> bool:
        return self.index < len(self.segments) - 1 or (self.live is not None and self.live.has_more)

    @property
    def keeps_frames(self) -> bool:
        """Whether another segment may follow, whose prompt includes this one's frames."""
        return self.has_more_segments or self.is_continued or self.is_last_retry

    @property
    def has_text_to_come(self) -> bool:
        return self.live is not None and not self.live.is_ended

    @property
    def text_length(self) -> int:
        """Characters of the text as far as it has come."""
        return len(self.params.text) if self.live is None else self.live.characters

    @property
    def late_ids(self) -> list[int]:
        """Ids of the current segment that came after its prompt was made and are not appended yet."""
        segment = None if self.live is None else self.segment
        if segment is None or segment.ids is None:
            return []
        return segment.ids[self.progress.given_ids + (0 if self.allocation is None else self.allocation.appended) :]

    @property
    def pending_ids(self) -> int:
        """Text ids that the model consumes one per frame: those of the prompt and those appended."""
        assert self.progress.prompt is not None
        return self.progress.prompt.text_ids + (0 if self.allocation is None else self.allocation.appended)

    @property
    def is_starving(self) -> bool:
        """Whether the next frame lacks its text: frame n needs the first n pending ids."""
        segment = None if self.live is None else self.segment
        if segment is None or segment.ids is None or segment.is_whole or self.is_ending:
            return False
        return self.steps > self.pending_ids + len(self.late_ids)

    @property
    def undecoded(self) -> int:
        """Frames presumed made that no chunk covers yet; negative after a padded chunk."""
        return self.presumed_length - self.columns

    @property
    def launched(self) -> int:
        """Frames of the whole request that chunks cover, padding included."""
        return self.frames_before + self.columns

    @property
    def audio_frames(self) -> int:
        """Frames of the whole request sent as audio."""
        return self.frames_before + self.progress.decoded

    @property
    def held_frames(self) -> int:
        """Frames of the segment whose audio is held back."""
        return sum(frames for _, frames in self.progress.held)

    @property
    def presumed_length(self) -> int:
        """Frames made once everything launched has run: presumed to be `steps` until the segment is known as done."""
        return self.progress.length if self.progress.is_done else self.steps

    @property
    def is_ending(self) -> bool:
        """Whether no further step of the segment will be launched."""
        return self.progress.is_done or self.steps >= self.progress.limit

    @property
    def is_silent(self) -> bool:
        """Whether no audio of the request has been launched."""
        return not self.frames_before and not self.columns

    @property
    def is_drained(self) -> bool:
        """Whether the segment has ended and all of its audio is sent, or held back."""
        return self.progress.is_done and self.progress.decoded + self.held_frames == self.progress.length

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ends with its drained segment; None if another segment follows.

        A segment that reaches its limit ends the whole request: what follows a runaway cannot be trusted. Not so after
        an attempt that ended, since without another attempt the text would have gone on.
        """
        if self.is_at_limit and self.frames_before + self.progress.length == self.params.max_frames:
            return "length"
        if self.is_at_limit and not (self.has_ended_before and self.has_more_segments):
            return "runaway"
        return None if self.has_more_segments else "stop"

    @property
    def is_at_limit(self) -> bool:
        """Whether the segment was made to its limit instead of ending by itself."""
        return self.progress.length >= self.progress.limit

    @property
    def has_ended_before(self) -> bool:
        """Whether an earlier attempt at the text of the segment ended by itself, though faulty."""
        return self.segment is not None and self.segment.end <= self.ended_to

    @property
    def is_faulty(self) -> bool:
        """Whether the drained segment ended by itself but was probably not spoken as written."""
        is_whole = not self.is_at_limit and not self.params.ignore_eos
        return is_whole and self.words is not None and self.words.fault is not None

    @property
    def has_attempts(self) -> bool:
        """Whether another attempt at the segment, or at its rest, is allowed."""
        assert self.params.attempts is not None
        return not self.params.ignore_eos and self.attempt + 1 < self.params.attempts

    @property
    def is_continued(self) -> bool:
        """Whether a faulty segment is broken off while it plays and continued from its last good word."""
        return self.params.on_fault == "continue"

    @property
    def is_last_retry(self) -> bool:
        """Whether this is the last attempt at a segment, after which words that it did not reach are spoken alone."""
        is_last = self.attempt > 0 and self.attempt + 1 == self.params.attempts
        return is_last and self.words is not None and self.params.on_fault == "retry"

    @property
    def is_spoken_alone(self) -> bool:
        """Whether the segment is what the last attempt did not reach."""
        return self.attempt == self.params.attempts

    @property
    def holds_back(self) -> bool:
        """Whether a segment's audio is held back until the segment has ended."""
        return self.params.attempts != 1 and not self.is_continued

    @property
    def may_try_again(self) -> bool:
        """Whether the drained segment ran away or is faulty, and another attempt is allowed."""
        assert self.progress.prompt is not None
        if not self.has_attempts or not self.holds_back:
            return False
        doubtful = self.progress.prompt.controls.doubtful_frames
        is_doubtful = doubtful is not None and self.progress.length >= doubtful and self.finish_reason != "length"
        is_faulty = self.is_faulty and self.params.on_fault == "retry"
        return is_doubtful or is_faulty or (self.is_at_limit and self.finish_reason != "length")

    def timings(self, now_s: float) -> Timings:
        """Timings of the request if it ends at `now_s`."""
        accepted_at_s, first_at_s = self.playback.accepted_at_s, self.playback.first_audio_at_s
        return Timings(
            first_audio_s=(now_s if first_at_s is None else first_at_s) - accepted_at_s, total_s=now_s - accepted_at_s
        )

    def characters(self, frame_s: float) -> int:
        """Characters of the text spoken by the end of the audio sent so far.

        Exact at the end of a segment; within it estimated from the usual rate of speech.
        """
        segment = self.segment
        if segment is None:
            return self.segments[-1].end if self.segments else 0
        if self.progress.is_done and not self.is_at_limit:
            share = self.progress.decoded / max(self.progress.length, 1)
        else:
            share = self.progress.decoded * frame_s * LETTERS_PER_S / max(segment.letters, 1)
        return segment.start + int((segment.end - segment.start) * min(share, 1.0))

    def tighten(self, limit: int) -> None:
        """Lower the limit of the segment to `limit`, but not below the next frame."""
        self.progress.limit = min(self.progress.limit, max(limit, self.steps + 1))

    def lead_s(self, now_s: float, frame_s: float) -> float:
        """Playback lead: seconds of audio sent or in flight that the listener has not heard yet."""
        under_way = min(self.columns, self.presumed_length) - self.progress.decoded
        played_s = 0.0 if self.playback.first_audio_at_s is None else self.playback.plays_until_s - now_s
        return played_s + under_way * frame_s

    def count_sent(self, frames: int, now_s: float, audio_s: float) -> None:
        """Count a chunk of `frames` frames and `audio_s` seconds as sent now; after an underrun it plays from now."""
        playback = self.playback
        playback.chunks += 1
        self.progress.decoded += frames
        if playback.first_audio_at_s is None:
            playback.first_audio_at_s = playback.plays_until_s = now_s
        playback.plays_until_s = max(playback.plays_until_s, now_s) + audio_s

    def next_segment(self, frames: Tensor) -> None:
        """Move on to the next segment; `frames` [T, ...] are those of the one that ended."""
        assert self.allocation is None
        self.before.append(frames)
        self.frames_before += self.progress.length
        self.index += 1
        self.attempt = self.attempt + 1 if self.progress.has_rest else 0
        self.progress = Progress()

    def break_off(self, frames: int, rest: Segment | None) -> None:
        """End the segment after `frames`, or after what was sent if that is more; `rest` becomes the next segment."""
        progress = self.progress
        if rest is not None:
            self._add_rest(rest)
        progress.length, progress.is_done, progress.is_broken_off = max(frames, progress.decoded), True, True

    def _add_rest(self, rest: Segment) -> None:
        """Make `rest`, the rest of the current segment's text, the next segment."""
        self.segments.insert(self.index + 1, rest)
        self.progress.has_rest = True
        if self.progress.is_done and not self.is_at_limit:
            self.ended_to = rest.end

    def note_fault(self, *, spoken_again: bool) -> None:
        """Note the fault of the drained segment in `words`; unless it is `spoken_again`, words that it did not reach in
        its last attempt become the next segment.

        A segment that reached its limit counts as faulty if an attempt had ended before: no later prompt includes its
        frames, and none of it is sent if it was spoken alone.
        """
        is_over = self.is_at_limit and (self.is_spoken_alone or self.finish_reason != "length")
        has_run_away = is_over and self.has_ended_before and not spoken_again
        if self.words is None or not (self.is_faulty or has_run_away):
            return
        if has_run_away:
            self.progress.made = []
            self.words.fault = self.words.fault or "ending"
        if has_run_away and self.is_spoken_alone:
            self.progress.held, self.progress.length = [], 0
            self.words.drop()
        elif self.is_faulty and self.is_last_retry and (rest := self.words.cut_unreached()) is not None:
            self._add_rest(rest)
        # Words that are spoken alone belong to the last attempt.
        self.words.note_fault(min(self.attempt, (self.params.attempts or 1) - 1), spoken_again=spoken_again)

    def try_again(self) -> None:
        """Discard the segment's frames and begin its next attempt. A faulty segment of several sentences is split in
        two: a model tends to skip the same part of a long text with any seed."""
        assert self.allocation is None
        assert self.segment is not None
        assert self.params.language is not None
        rest = None
        if self.is_faulty:
            self.ended_to = max(self.ended_to, self.segment.end)
            rest = self.segment.halve(self.params.language)
        if rest is not None:
            self.segments.insert(self.index + 1, rest)
        self.attempt += 1
        self.progress = Progress()
