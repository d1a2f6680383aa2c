"""Where in a text a model's attention is, frame by frame, and when its words are spoken.

A head that points at the text reads ahead of the sound, by a distance that is constant in tokens: `Pointing` says which
head and how far. The path of the attention is an online Viterbi path (stay, one on, two on): its last `lookahead`
frames may still be revised. Knows no model: what comes in are shares of attention and PCM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from sonoro.core.words import FaultKind, Word
from sonoro.words.spans import SpokenWord

__all__ = ["AHEAD", "Limits", "Pointing", "SegmentClock", "Tracker", "Trouble", "loudness"]

Array = npt.NDArray[np.floating]

AHEAD = 8
"""Positions after a text that are watched where it is not known how far a head reads ahead."""

_FLOOR = 1e-3
"""The least share of a position, so that one frame of no attention breaks no path."""

_EARLIER = 3
"""Frames before the path's own among which a share may have crossed one half."""

_BESIDE = 0.9
"""The share within a token of the path that is usual."""

_STRAY_FRAMES = 12

_JUMP_FLOOR = 1e-2
"""As `_FLOOR`, where paths are compared: a jump must not pay for one frame alone."""

_LONG_TOKENS = 25
"""Of longer texts half the good readings of the built-in voice strayed as far as short ones never do."""

_STEP_S = 0.01
_PAUSE, _SILENCE = 10 ** (-35 / 20), 10 ** (-45 / 20)
"""Of the peak: less is a pause between two words; less, silence before the first and after the last."""

_AT_MARK = (0.04, 0.2)
_IN_PHRASE = (0.1, 0.15)
"""The shortest pause that counts between two words, and how far from where the attention says it may lie: where a mark
stands, and where none does, for within a word sounds stop for up to .1 s as well."""

_LONGEST_WAIT_S = 0.32
"""How much longer a pause that goes on is listened to before the words around it are told."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Beyond what a segment was probably not spoken as it is written: `end_frames` after its last word was reached,
    `dwell_frames` at one token, and how much of the attention was `strayed` from its path, as `Tracker` counts it,
    which it does not in the first `opening_frames`: there a head may find its place first. Of a segment that has ended
    it counts with what a jump would explain."""

    end_frames: float
    dwell_frames: float
    strayed: float
    opening_frames: int = 0

    def most_strayed(self, tokens: float) -> float:
        """`strayed` of a text of so many tokens: the longer it is, the more of them a head looks at."""
        return self.strayed * max(1.0, tokens / _LONG_TOKENS)


class Trouble(NamedTuple):
    """What is wrong with a segment, and from where on: from its word number `word`, which begins at `at_s`. All words
    before that are good."""

    kind: FaultKind
    word: int
    at_s: float


class Pointing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a head of a checkpoint points at a text, in one layout of text.

    `layer` and `head` count from 0. The sound of token i begins when the attention is `shift` tokens past its beginning
    (less within the first `ramp` tokens of a text that arrives with the sound) plus `offset_s`; that of the first word
    `onset_s` after it is loud enough to be noticed. Where `is_measured`, against the words of an aligner; else
    estimated. Without `limits` nothing is held to be a fault.
    """

    layer: int
    head: int
    shift: float = 0.0
    ramp: float = 0.0
    offset_s: float = 0.0
    onset_s: float = 0.0
    lookahead: int = 0
    is_measured: bool = False
    limits: Limits | None = None

    def position(self, token: float) -> float:
        """Where the attention is as the sound of `token` begins."""
        return token + self.shift * (min(1.0, token / self.ramp) if self.ramp else 1.0)


class Tracker:
    """The path of one head's attention over the positions of a text, known up to `lookahead` frames ago.

    `crossings` [j] is when the attention came to position j, in frames and parts: when the share of it and of all after
    it was one half. `strayed` is how much of it was not within a token of the path, beyond what is usual, in frames,
    at most among `_STRAY_FRAMES` that follow one another after the first `opening`, and `strayed_from` the first frame
    of those that did. `jumped` is how much likelier all frames so far are, in nats, if the path jumps once to any
    position after the `opening`, and `jumped_from` the frame where it does. It is about 0 unless words were repeated or
    left out; two short ones show there and hardly in what strayed, for a path may step over two tokens anyway.
    """

    def __init__(self, lookahead: int, opening: int = 0) -> None:
        self.crossings: list[float] = [0.0]
        self.path: list[int] = []
        self.strayed, self.strayed_from = 0.0, 0
        self._strays: list[float] = []
        self._lookahead, self._opening = lookahead, opening
        self._scores: Array = np.zeros(0)
        self._steps: list[npt.NDArray[np.int8]] = []
        self._later: list[Array] = []
        self._raw: list[Array] = []
        self.jumped, self.jumped_from = 0.0, 0
        self._weights: Array = np.zeros((2, 0))
        self._jumps: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    @property
    def reached(self) -> int:
        """The last position that the path, as far as it is certain, has come to."""
        return len(self.crossings) - 1

    def add(self, attention: Array) -> None:
        """The attention [N] of the next frame to the positions known by now, of which there are never fewer."""
        positions = len(attention)
        self._raw.append(attention / max(float(attention.sum()), 1e-30))
        shares = np.maximum(self._raw[-1], _FLOOR)
        shares /= shares.sum()
        self._weigh(self._raw[-1])
        if self._steps:
            grown, taken = _stepped(self._scores, positions)
        else:
            grown, taken = np.full(positions, -np.inf), np.zeros(positions, np.int64)
            grown[:3] = 0.0
        self._scores = grown + np.log(shares)
        self._scores -= self._scores.max()
        self._steps.append(taken.astype(np.int8))
        self._later.append(shares[::-1].cumsum()[::-1])
        self._settle(self._lookahead)

    def finish(self) -> None:
        """No frame follows: all of the path is certain."""
        if self._steps:
            self._settle(0)

    def _weigh(self, raw: Array) -> None:
        """Add a frame's shares [N] to the likelihoods of the paths that end at each position: without a jump, and with
        one."""
        positions, frame = len(raw), len(self._steps)
        if frame:
            weights, taken = _stepped(self._weights, positions)
            jumps = np.pad(self._jumps, (0, positions - len(self._jumps)))[np.arange(positions) - taken[1]]
            best = self._weights[0].max() if frame > self._opening else -np.inf
            jumps[weights[1] < best] = frame
            weights[1] = np.maximum(weights[1], best)
        else:
            weights, jumps = np.full((2, positions), -np.inf), np.zeros(positions, np.int64)
            weights[0, :3] = 0.0
        self._weights, self._jumps = weights + np.log(np.maximum(raw, _JUMP_FLOOR)), jumps
        at = int(self._weights[1].argmax())
        self.jumped = max(0.0, float(self._weights[1, at] - self._weights[0].max()))
        self.jumped_from = int(self._jumps[at])

    def _settle(self, revised: int) -> None:
        """Make all frames but the last `revised` certain."""
        made, begun = len(self._steps), len(self.path)
        at, latest = int(self._scores.argmax()), []
        for frame in range(made - 1, begun - 1, -1):
            latest.append(at)
            at -= int(self._steps[frame][at])
        latest.reverse()
        for frame in range(begun, made - revised):
            position = max(latest[frame - begun], self.path[-1] if self.path else 0)
            self.path.append(position)
            self._stray(max(0.0, _BESIDE - float(self._raw[frame][max(position - 1, 0) : position + 2].sum())))
            self._raw[frame] = self._raw[frame][:0]
            while self.reached < position:
                self.crossings.append(max(self._crossing(frame, self.reached + 1), self.crossings[-1]))
        # Not read again: the arrays of frames long past.
        for frame in range(max(0, len(self.path) - 2 * _EARLIER - 2), len(self.path) - _EARLIER - 1):
            self._later[frame] = self._later[frame][:0]

    def _stray(self, share: float) -> None:
        """Of one more frame so much was not beside the path."""
        self._strays.append(share if len(self._strays) >= self._opening else 0.0)
        recent = self._strays[-_STRAY_FRAMES:]
        if sum(recent) > self.strayed:
            first = next(number for number, each in enumerate(recent) if each)
            self.strayed, self.strayed_from = sum(recent), len(self._strays) - len(recent) + first

    def _crossing(self, frame: int, position: int) -> float:
        """When, by `frame` at the latest, the share of `position` and all after it was one half."""
        if not frame:
            return 0.0
        before, after = self._share(frame - 1, position), self._share(frame, position)
        for _ in range(_EARLIER):
            if before < 0.5 or frame < 2:
                break
            frame -= 1
            before, after = self._share(frame - 1, position), before
        part = (0.5 - before) / (after - before) if after > before else 0.5
        return frame - 1 + min(max(part, 0.0), 1.0)

    def _share(self, frame: int, position: int) -> float:
        later = self._later[frame]
        return float(later[position]) if position < len(later) else 0.0


def _stepped(scores: Array, positions: int) -> tuple[Array, npt.NDArray[np.int64]]:
    """The best of `scores` [..., N] from which each of `positions` is reached by a step (stay, one on, two on), and how
    long that is: [..., positions]."""
    grown = np.full((*scores.shape[:-1], positions), -np.inf)
    grown[..., : scores.shape[-1]] = scores
    # Of equal ones the shortest step.
    choices = np.full((3, *grown.shape), -np.inf)
    for step in range(3):
        choices[step, ..., step:] = grown[..., : positions - step]
    return choices.max(0), choices.argmax(0)


def loudness(pcm: bytes, sample_rate: int) -> tuple[npt.NDArray[np.int32], float]:
    """The peak of each step of PCM16, and how long a step is, in seconds. What does not fill a step is left out."""
    step = round(_STEP_S * sample_rate)
    samples = np.frombuffer(pcm, "<i2", count=len(pcm) // 2 // step * step)
    # In 32 bits: the least of 16 has no absolute value.
    return np.abs(samples.astype(np.int32)).reshape(-1, step).max(1), _STEP_S


class SegmentClock:
    """When the words of one segment are spoken, told as they become certain, in seconds from `begins_s`.

    `frame_s` is the length of a frame. `words` may grow by assignment while a text arrives; those told stay.
    """

    def __init__(self, pointing: Pointing, frame_s: float, sample_rate: int, begins_s: float = 0.0) -> None:
        self.words: Sequence[SpokenWord] = ()
        self._pointing, self._frame_s, self._begins_s = pointing, frame_s, begins_s
        self.tracker = Tracker(pointing.lookahead, pointing.limits.opening_frames if pointing.limits else 0)
        self._sample_rate = sample_rate
        self._rest = b""
        self._peaks: list[int] = []
        self._told = 0
        self._latest_s = 0.0
        self._is_over = False

    def hear(self, pcm: bytes) -> None:
        """The segment's next audio, PCM16."""
        self._rest += pcm
        peaks, _ = loudness(self._rest, self._sample_rate)
        self._peaks += peaks.tolist()
        self._rest = self._rest[2 * round(_STEP_S * self._sample_rate) * len(peaks) :]

    def finish(self) -> None:
        """The segment has ended: neither audio nor attention follows."""
        self.tracker.finish()
        self._is_over = True

    def stop(self) -> None:
        """The segment is broken off: the words that have begun in what was heard of it are all that are told."""
        begun = sum(
            self._pointing.position(word.first) <= self.tracker.reached and self._at(word.first) < self._heard_s
            for word in self.words
        )
        self.words = self.words[: max(begun, self._told)]
        self.finish()

    @property
    def fault(self) -> FaultKind | None:
        """What is wrong with the segment, which has ended by itself; None if nothing is, or nobody knows."""
        trouble = self.trouble(is_over=True)
        return None if trouble is None else trouble.kind

    def trouble(self, *, is_over: bool) -> Trouble | None:
        """What is wrong with the segment as far as it has come, or, where it `is_over`, has ended by itself."""
        limits, tracker = self._pointing.limits, self.tracker
        if limits is None or not self.words:
            return None
        if is_over:
            tracker.finish()
        frames, lasts = len(tracker.path), [int(word.last) + int(self._pointing.shift) for word in self.words]
        has_reached = tracker.reached >= lasts[-1]
        if is_over and not has_reached:
            return self._from_word("unreached", sum(last <= tracker.reached for last in lasts))
        if has_reached and frames - tracker.crossings[lasts[-1]] > limits.end_frames:
            return Trouble("ending", len(self.words), frames * self._frame_s)
        waits = np.diff([*tracker.crossings, frames] if not has_reached else tracker.crossings)
        if max(waits, default=0.0) > limits.dwell_frames:
            return self._from_frame("dwelling", tracker.crossings[int(waits.argmax())])
        most_strayed = limits.most_strayed(self.words[-1].last)
        if tracker.strayed > most_strayed:
            return self._from_frame("straying", tracker.strayed_from)
        # As long as it goes on the path may still come to where it seems to have jumped.
        if is_over and tracker.strayed + tracker.jumped > most_strayed:
            return self._from_frame("straying", tracker.jumped_from)
        return None

    def _from_frame(self, kind: FaultKind, frame: float) -> Trouble:
        """`kind` of trouble that begins with a frame: from the word that is being spoken then."""
        begun = sum(self._at(word.first) <= frame * self._frame_s for word in self.words)
        return self._from_word(kind, max(begun - 1, 0))

    def _from_word(self, kind: FaultKind, word: int) -> Trouble:
        return Trouble(kind, word, self._at(self.words[word].first) if word else 0.0)

    def take(self, text: str) -> list[Word]:
        """The words of `text`, which `words` are spans of, that have become certain: each with its end, so each once
        the one after it has begun. After `finish` all that are left."""
        made = []
        while self._told < len(self.words):
            word = self.words[self._told]
            after = self.words[self._told + 1] if self._told + 1 < len(self.words) else None
            times = self._times(word, after)
            if times is None:
                break
            start_s, end_s, self._latest_s = times
            self._told += 1
            made.append(
                Word(
                    text=text[word.start : word.end],
                    start_s=round(max(self._begins_s + start_s, 0.0), 3),
                    end_s=round(max(self._begins_s + end_s, 0.0), 3),
                    start=word.start,
                    end=word.end,
                    is_estimated=not self._pointing.is_measured,
                )
            )
        return made

    @property
    def _heard_s(self) -> float:
        return len(self._peaks) * _STEP_S

    def _times(self, word: SpokenWord, after: SpokenWord | None) -> tuple[float, float, float] | None:
        """Start and end of `word`, and the start of the one `after` it; None while they are not certain."""
        if not self._is_over:
            # That of the last word is known at the end alone; that of others once the one after them is reached.
            if after is None or self.tracker.reached < self._pointing.position(after.first):
                return None
            if self._heard_s < self._at(after.first) + _AT_MARK[1]:
                return None
        start_s = self._latest_s if self._told else self._onset_s()
        if after is None:
            end_s = max(start_s, self._last_sound_s())
            return start_s, end_s, end_s
        next_s = max(self._at(after.first), start_s)
        has_mark = after.first > word.last
        end_s = max(self._at(word.last), start_s) if has_mark else next_s
        pause = self._pause(end_s, next_s, *(_AT_MARK if has_mark else _IN_PHRASE))
        if pause is None:
            return None
        end_s, next_s = pause
        return start_s, max(end_s, start_s), max(next_s, start_s)

    def _at(self, token: float) -> float:
        """When the sound of `token` begins."""
        position = self._pointing.position(token)
        crossings = self.tracker.crossings
        if position >= len(crossings) - 1:
            last = crossings[-1] if position < len(crossings) else float(len(self.tracker.path))
            return self._inside(last * self._frame_s + self._pointing.offset_s)
        low = int(position)
        frames = crossings[low] + (position - low) * (crossings[low + 1] - crossings[low])
        return self._inside(frames * self._frame_s + self._pointing.offset_s)

    def _inside(self, at_s: float) -> float:
        at_s = max(at_s, 0.0)
        return min(at_s, self._heard_s) if self._is_over else at_s

    @property
    def _peak(self) -> int:
        return max(self._peaks, default=0)

    def _onset_s(self) -> float:
        limit = _SILENCE * self._peak
        loud = next((number for number, peak in enumerate(self._peaks) if peak > limit), 0)
        return max(0.0, loud * _STEP_S + self._pointing.onset_s)

    def _last_sound_s(self) -> float:
        limit = _SILENCE * self._peak
        loud = (number for number in range(len(self._peaks) - 1, -1, -1) if self._peaks[number] > limit)
        return (next(loud, -1) + 1) * _STEP_S

    def _pause(self, end_s: float, start_s: float, least_s: float, around_s: float) -> tuple[float, float] | None:
        """From when to when there is silence between two words, of which one ends near `end_s` and the other begins
        near `start_s`: the longest there is. Without one the first ends as the second begins. None while it goes on."""
        first = max(0, round((end_s - around_s) / _STEP_S))
        last = min(len(self._peaks), round((start_s + around_s) / _STEP_S))
        latest = round((start_s + around_s + _LONGEST_WAIT_S) / _STEP_S)
        limit, best, begun = _PAUSE * self._peak, (0, 0), None
        for at in range(first, latest + 1):
            if at == len(self._peaks) and begun is not None and not self._is_over and at < latest:
                return None
            is_quiet = at < min(latest, len(self._peaks)) and self._peaks[at] <= limit
            if is_quiet and begun is None and at < last:
                begun = at
            elif not is_quiet and begun is not None:
                best, begun = max(best, (at - begun, begun)), None
            if at >= last and begun is None:
                break
        length, at = best
        if length * _STEP_S < least_s:
            return start_s, start_s
        return at * _STEP_S, (at + length) * _STEP_S
