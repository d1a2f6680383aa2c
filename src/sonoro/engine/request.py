"""One accepted request on its way through the engine. Pure bookkeeping: imports no torch and calls no model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sonoro.core.text import LETTERS_PER_S, Segment
from sonoro.core.types import FinishReason, SpeechRequest, Timings
from sonoro.engine.live_text import LiveFeed

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from sonoro.engine.words import RequestWords
    from sonoro.models.base import Prompt, Voice

__all__ = ["Allocation", "Playback", "Progress", "RunningRequest"]


@dataclass(eq=False)
class Allocation:
    """What a segment holds from admission to release, and what was launched for it: the scheduler's alone to write.

    Of `pages`, which grow with the steps, the first `cached` positions are filled already. Launched are `steps` frames,
    `columns` frames to be decoded, surplus included, and the `appended` ids of live text. Results carry the allocation
    they were made under, one object per admission, so a reused slot is not mistaken.
    """

    slot: int
    pages: list[int]
    cached: int = 0
    steps: int = 0
    columns: int = 0
    appended: int = 0


@dataclass
class Progress:
    """How far one attempt at a segment is, as far as its results have come back: the engine's to write.

    `limit` is the most frames it may have, `expected` how many its text lets one expect; `prefix` are the keys of the
    pages it may share, the first of its `prompt`, which holds the first `given_ids` of live text. `length` frames are
    made and `decoded` of them sent as audio; once it `is_done` no more come. One that went wrong `is_broken_off`: the
    device has made more of it, and where it `has_rest` that is the next segment. `made` are those frames [T, ...] (kept
    only if another segment may follow), `held` the chunks that are not sent yet, each with its frames.
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
    """What was sent to a request's listener, and until when that plays."""

    accepted_at_s: float
    chunks: int = 0
    first_audio_at_s: float | None = None
    plays_until_s: float = 0.0


@dataclass(eq=False)
class RunningRequest:
    """A resolved request and how far it is. The engine writes it, but for the scheduler's `allocation`.

    `before` holds the frames [T, ...] of the segments before number `index`, `frames_before` counts them. Of a live
    request `segments` grow, as `live` cuts them. Where a segment may be spoken again, `attempt` counts from 0. `words`
    tell when its words are spoken, if it is to be told and the model shows it.
    """

    request: SpeechRequest
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
    words: RequestWords | None = None

    @property
    def positions(self) -> int:
        """Backbone positions the current segment may come to need."""
        assert self.progress.prompt is not None
        return self.progress.prompt.positions + self.progress.limit

    @property
    def is_heard(self) -> bool:
        """Whether any of its audio was sent. A segment that is held back may be made anew from its start."""
        return self.playback.chunks > 0

    @property
    def steps(self) -> int:
        """Frames of the segment that were launched."""
        return 0 if self.allocation is None else self.allocation.steps

    @property
    def columns(self) -> int:
        """Frames of the segment that were launched to be decoded, surplus included."""
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
        """Whether another segment may follow, which is spoken in the manner of this one's frames."""
        return self.has_more_segments or self.is_continued

    @property
    def has_text_to_come(self) -> bool:
        return self.live is not None and not self.live.is_ended

    @property
    def text_length(self) -> int:
        """Characters of the text as far as it has come."""
        return len(self.request.text) if self.live is None else self.live.characters

    @property
    def late_ids(self) -> list[int]:
        """Ids of the current segment that came after its prompt was made and have not been appended."""
        segment = None if self.live is None else self.segment
        if segment is None or segment.ids is None:
            return []
        return segment.ids[self.progress.given_ids + (0 if self.allocation is None else self.allocation.appended) :]

    @property
    def pending_ids(self) -> int:
        """Ids that the model has been given to be fed frame by frame."""
        assert self.progress.prompt is not None
        return self.progress.prompt.text_ids + (0 if self.allocation is None else self.allocation.appended)

    @property
    def is_starving(self) -> bool:
        """Whether the text that the next frame needs has not come: frame n needs the first n pending ids."""
        segment = None if self.live is None else self.segment
        if segment is None or segment.ids is None or segment.is_whole or self.is_ending:
            return False
        return self.steps > self.pending_ids + len(self.late_ids)

    @property
    def undecoded(self) -> int:
        """Frames presumed made that no chunk holds yet; negative after a padded one."""
        return self.presumed_length - self.columns

    @property
    def launched(self) -> int:
        """Frames of the whole request that chunks hold, those padded included."""
        return self.frames_before + self.columns

    @property
    def audio_frames(self) -> int:
        """Frames of the whole request turned into audio so far."""
        return self.frames_before + self.progress.decoded

    @property
    def held_frames(self) -> int:
        """Frames of the segment whose audio is held back."""
        return sum(frames for _, frames in self.progress.held)

    @property
    def presumed_length(self) -> int:
        """Frames made once everything launched has run: as many as steps, until it is known that there were fewer."""
        return self.progress.length if self.progress.is_done else self.steps

    @property
    def is_ending(self) -> bool:
        """Whether the segment makes no frame beyond those presumed."""
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
        """Why the request is over now that its segment is drained; None while it has another segment to speak.

        A segment that runs into its limit ends the whole request: what would follow a runaway cannot be trusted.
        """
        if self.progress.length >= self.progress.limit:
            return "length" if self.frames_before + self.progress.length == self.request.max_frames else "runaway"
        return None if self.has_more_segments else "stop"

    @property
    def is_faulty(self) -> bool:
        """Whether the segment, which is drained, ended by itself and was probably not spoken as it is written."""
        is_whole = self.progress.length < self.progress.limit and not self.request.ignore_eos
        return is_whole and self.words is not None and self.words.fault is not None

    @property
    def has_attempts(self) -> bool:
        """Whether the segment may be spoken once more, or from somewhere on."""
        assert self.request.attempts is not None
        return not self.request.ignore_eos and self.attempt + 1 < self.request.attempts

    @property
    def is_continued(self) -> bool:
        """Whether a segment that goes wrong while it is heard is broken off, and continued from its last good word."""
        return self.request.on_fault == "continue"

    @property
    def holds_back(self) -> bool:
        """Whether the audio of a segment is held back until it has ended."""
        return self.request.attempts != 1 and not self.is_continued

    @property
    def may_try_again(self) -> bool:
        """Whether the segment, which is drained, ran away or is faulty, and is to be spoken again."""
        assert self.progress.prompt is not None
        if not self.has_attempts or not self.holds_back:
            return False
        doubtful = self.progress.prompt.controls.doubtful_frames
        is_doubtful = doubtful is not None and self.progress.length >= doubtful and self.finish_reason != "length"
        is_faulty = self.is_faulty and self.request.on_fault == "retry"
        return is_doubtful or is_faulty or self.finish_reason == "runaway"

    def timings(self, now_s: float) -> Timings:
        """Those of a request that ends at `now_s`."""
        accepted_at_s, first_at_s = self.playback.accepted_at_s, self.playback.first_audio_at_s
        return Timings(
            first_audio_s=(now_s if first_at_s is None else first_at_s) - accepted_at_s, total_s=now_s - accepted_at_s
        )

    def characters(self, frame_s: float) -> int:
        """Characters of the text that are spoken by the end of the audio sent so far.

        Exact where a segment has ended; before that as many as ordinary speech says in that time.
        """
        segment = self.segment
        if segment is None:
            return self.segments[-1].end if self.segments else 0
        if self.progress.is_done and self.progress.length < self.progress.limit:
            share = self.progress.decoded / max(self.progress.length, 1)
        else:
            share = self.progress.decoded * frame_s * LETTERS_PER_S / max(segment.letters, 1)
        return segment.start + int((segment.end - segment.start) * min(share, 1.0))

    def tighten(self, limit: int) -> None:
        """Lower the limit, now that the text of the segment is known, to `limit` or to the very next frame."""
        self.progress.limit = min(self.progress.limit, max(limit, self.steps + 1))

    def lead_s(self, now_s: float, frame_s: float) -> float:
        """Playback lead: seconds of audio sent or under way that the listener has not heard yet."""
        under_way = min(self.columns, self.presumed_length) - self.progress.decoded
        played_s = 0.0 if self.playback.first_audio_at_s is None else self.playback.plays_until_s - now_s
        return played_s + under_way * frame_s

    def count_sent(self, frames: int, now_s: float, audio_s: float) -> None:
        """Count a chunk of `frames` frames, `audio_s` long, as sent now; who had run out of audio waited for it."""
        playback = self.playback
        playback.chunks += 1
        self.progress.decoded += frames
        if playback.first_audio_at_s is None:
            playback.first_audio_at_s = playback.plays_until_s = now_s
        playback.plays_until_s = max(playback.plays_until_s, now_s) + audio_s

    def next_segment(self, frames: Tensor) -> None:
        """Move on to the following segment; `frames` [T, ...] are those of the one that ended."""
        assert self.allocation is None
        self.before.append(frames)
        self.frames_before += self.progress.length
        self.index += 1
        self.attempt = self.attempt + 1 if self.progress.has_rest else 0
        self.progress = Progress()

    def break_off(self, frames: int, rest: Segment | None) -> None:
        """End the segment after `frames`, or those that are sent; the following one is its `rest`."""
        progress = self.progress
        progress.length, progress.is_done, progress.is_broken_off = max(frames, progress.decoded), True, True
        if rest is not None:
            self.segments.insert(self.index + 1, rest)
            progress.has_rest = True

    def try_again(self) -> None:
        """Discard what the segment has made and begin its next attempt. One that went wrong is spoken in two, if it has
        several sentences: of a long text the same is left out with any seed."""
        assert self.allocation is None
        assert self.segment is not None
        assert self.request.language is not None
        rest = self.segment.halve(self.request.language) if self.is_faulty else None
        if rest is not None:
            self.segments.insert(self.index + 1, rest)
        self.attempt += 1
        self.progress = Progress()
