"""The state of one accepted request in the engine. Bookkeeping only: imports no torch, calls no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from sonoro.core.events import Timings
from sonoro.core.types import FinishReason, SpeechRequest
from sonoro.text.script.live import LiveScript
from sonoro.text.splitting import LETTERS_PER_S, Segment

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from sonoro.engine.played import Played
    from sonoro.models.base import Prompt, Voice
    from sonoro.words.request import RequestWords


@dataclass(eq=False)
class Allocation:
    """A segment's slot and `pages`, and counts of what was launched for it. Only the scheduler writes it.
    `pages` grow with the steps; their first `cached` positions came from the prefix cache. Launched so far: `steps`
    frames, `columns` frames given to the codec (surplus included), `appended` ids of live text. One object per
    admission: results refer to it, so those of an earlier owner of the slot are recognised."""

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
    the first pages of `prompt`, which includes the first `given_ids` ids of live text. The model has output `length`
    frames, `decoded` of them sent as audio; `is_done` means that no more follow. If the attempt `is_broken_off`, its
    later frames are dropped. `voice` is that of the prompt, unless it is one of the model's own. If it `has_rest`, the
    rest of its text is the next segment. `frames` [T, ...] are its frames (kept only if another segment may follow);
    `held` are chunks not sent yet: PCM16 and number of frames."""

    prompt: Prompt | None = None
    limit: int = 0
    expected: int = 0
    prefix: list[bytes] = field(default_factory=list)
    given_ids: int = 0
    length: int = 0
    decoded: int = 0
    is_done: bool = False
    voice: Voice | None = None
    is_broken_off: bool = False
    has_rest: bool = False
    frames: list[npt.NDArray[Any]] = field(default_factory=list)
    held: list[tuple[bytes, int]] = field(default_factory=list)

    @property
    def positions(self) -> int:
        """The most backbone positions that the segment can need."""
        assert self.prompt is not None
        return self.prompt.positions + self.limit

    @property
    def held_frames(self) -> int:
        """Frames whose audio is held back."""
        return sum(frames for _, frames in self.held)

    @property
    def is_at_limit(self) -> bool:
        """Whether the segment was cut off at its limit instead of ending by itself."""
        return self.length >= self.limit

    @property
    def is_drained(self) -> bool:
        """Whether the segment has ended and all of its audio is sent, or held back."""
        return self.is_done and self.decoded + self.held_frames == self.length


@dataclass
class Playback:
    """Chunks sent to a request's listener, and until when they play; when it was first `queued`, and got a `slot`."""

    accepted_at_s: float
    reached_at_s: dict[str, float] = field(default_factory=dict)
    chunks: int = 0
    plays_until_s: float = 0.0

    @property
    def has_begun(self) -> bool:
        """Whether any audio was sent. Otherwise the request may be preempted and start again."""
        return self.chunks > 0

    def left_s(self, now_s: float) -> float:
        """Seconds of audio sent that the listener has not heard yet; negative after an underrun."""
        return self.plays_until_s - now_s if self.has_begun else 0.0

    def extend(self, now_s: float, audio_s: float) -> None:
        """Count a chunk of `audio_s` seconds as sent now; after an underrun it plays from now."""
        if not self.has_begun:
            self.reached_at_s["first_audio"] = self.plays_until_s = now_s
        self.chunks += 1
        self.plays_until_s = max(self.plays_until_s, now_s) + audio_s

    def timings(self, now_s: float) -> Timings:
        """Timings of the request if it ends at `now_s`."""
        at = {"first_audio": now_s, **self.reached_at_s, "total": now_s}
        return Timings(**{f"{name}_s": at_s - self.accepted_at_s for name, at_s in at.items()})


class SegmentRetry(Protocol):
    """What becomes of the segments of a request: `sonoro.engine.retry.Retry`, which imports this module."""

    holds_back: bool

    @property
    def may_add_segment(self) -> bool: ...

    @property
    def has_ended_before(self) -> bool: ...

    def settle(self) -> bool: ...

    def watch(self, frame_s: float, *, is_over: bool) -> object: ...


class ParallelSegments(Protocol):
    """The parts of a request whose segments are spoken side by side: `sonoro.engine.parallel.RequestParts`."""

    running: dict[int, Request]

    @property
    def may_begin(self) -> bool: ...

    def begin(self) -> Request: ...

    def end_segment(self, part: Request) -> None: ...

    def end(self, part: Request, frame_s: float, lead_in_s: float) -> Iterator[None]: ...


@dataclass(eq=False)
class Request:
    """A resolved request, its `params`, and its progress. Only the engine writes it; the scheduler writes `allocation`.
    The current segment is `segments[index]`; of a live request `live` appends to `segments`. `before` holds the frames
    [T, ...] of the earlier segments, `frames_before` counts them. `attempt` counts from 0. Segment `cut_off` was the
    last to lose its slot for want of text; -1 if none was. `words` times the words, if the request needs that and the
    model can. `played` plays the lines of its script, if it has one. `retry` decides about faults; None if nothing can
    be found or done. `cast` are the voices that lines of its script name. With `parts` it only sends what they speak. A
    part of the request `whole` begins with segment number `first` of that."""

    params: SpeechRequest
    segments: list[Segment]
    voice: Voice | None
    playback: Playback
    live: LiveScript | None = None
    index: int = 0
    attempt: int = 0
    progress: Progress = field(default_factory=Progress)
    before: list[Tensor] = field(default_factory=list)
    frames_before: int = 0
    allocation: Allocation | None = None
    is_paused: bool = False
    cut_off: int = -1
    cast: dict[str, Voice] = field(default_factory=dict)
    words: RequestWords | None = None
    played: Played | None = None
    retry: SegmentRetry | None = None
    parts: ParallelSegments | None = None
    whole: Request | None = None
    first: int = 0

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
        return self.has_more_segments or (self.retry is not None and self.retry.may_add_segment)

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
        if self.live is None or (segment := self.segment) is None or segment.ids is None:
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
        if self.live is None:
            return False
        segment = self.segment
        if segment is None or segment.ids is None or segment.is_whole or self.is_ending:
            return False
        return self.steps > self.pending_ids + len(self.late_ids)

    @property
    def undecoded(self) -> int:
        """Frames presumed output that no chunk covers yet; negative after a padded chunk."""
        allocation, progress = self.allocation, self.progress
        if allocation is None:
            return progress.length if progress.is_done else 0
        return (progress.length if progress.is_done else allocation.steps) - allocation.columns

    @property
    def launched(self) -> int:
        """Frames of the whole request that chunks cover, padding included."""
        return self.frames_before + self.columns

    @property
    def audio_frames(self) -> int:
        """Frames of the whole request sent as audio."""
        return self.frames_before + self.progress.decoded

    @property
    def presumed_length(self) -> int:
        """Frames output once everything launched has run: presumed to be `steps` until the segment is known as done."""
        return self.progress.length if self.progress.is_done else self.steps

    @property
    def is_ending(self) -> bool:
        """Whether no further step of the segment will be launched."""
        # Asked several times a request and tick, so it reads the fields themselves.
        allocation, progress = self.allocation, self.progress
        return progress.is_done or (0 if allocation is None else allocation.steps) >= progress.limit

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the request ends with its drained segment; None if another segment follows.
        A segment that reaches its limit ends the whole request: what follows a runaway cannot be trusted. The request
        goes on if an earlier attempt ended, since without another attempt the text would have gone on."""
        progress = self.progress
        if progress.is_at_limit and self.frames_before + progress.length == self.params.max_frames:
            return "length"
        has_ended_before = self.retry is not None and self.retry.has_ended_before
        if progress.is_at_limit and not (has_ended_before and self.has_more_segments):
            return "runaway"
        return None if self.has_more_segments else "stop"

    def characters(self, frame_s: float) -> int:
        """Characters of the text spoken by the end of the audio sent so far.
        Exact at the end of a segment; within it estimated from the usual rate of speech."""
        segment, progress = self.segment, self.progress
        if segment is None:
            return self.segments[-1].end if self.segments else 0
        if progress.is_done and not progress.is_at_limit:
            share = progress.decoded / max(progress.length, 1)
        else:
            share = progress.decoded * frame_s * LETTERS_PER_S / max(segment.spoken.letters, 1)
        return segment.start + int((segment.end - segment.start) * min(share, 1.0))

    def lead_s(self, now_s: float, frame_s: float) -> float:
        """Playback lead: seconds of audio sent or in flight that the listener has not heard yet."""
        under_way = min(self.columns, self.presumed_length) - self.progress.decoded
        return self.playback.left_s(now_s) + under_way * frame_s

    def count_sent(self, frames: int, now_s: float, audio_s: float) -> None:
        """Count a chunk of `frames` frames and `audio_s` seconds as sent now."""
        self.progress.decoded += frames
        self.playback.extend(now_s, audio_s)

    def next_segment(self, frames: Tensor) -> None:
        """Move on to the next segment; `frames` [T, ...] are those of the one that ended."""
        assert self.allocation is None
        self.before.append(frames)
        self.frames_before += self.progress.length
        self.index += 1
        self.attempt = self.attempt + 1 if self.progress.has_rest else 0
        self.progress = Progress()


def allocation_of(request: Request) -> Allocation:
    """The allocation of a request that has one."""
    assert request.allocation is not None
    return request.allocation


def speaking(request: Request) -> list[Request]:
    """`request` and its parts that have begun and are not over."""
    return [request] if request.parts is None else [request, *request.parts.running.values()]
