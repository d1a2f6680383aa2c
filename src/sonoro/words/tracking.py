"""Track a model's attention over a text, frame by frame, and tell when its words are spoken.

A head that points at the text is ahead of the sound by a constant number of tokens: `Pointing` names the head and the
distance. The path of the attention is an online Viterbi path (steps of 0, 1 or 2 tokens), whose last `lookahead` frames
may still change. Inputs are attention weights and PCM."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from sonoro.core.events import FaultKind, Word
from sonoro.words.spans import SpokenWord

Array = npt.NDArray[np.floating]

AHEAD = 8
"""Positions watched after a text while it is not known how far a head is ahead."""

_FLOOR = 1e-3
"""Lower bound of a position's weight, so that one frame without attention does not break the path."""

_EARLIER = 3
"""Frames before the path's step in which the weight may have crossed one half."""

_BESIDE = 0.9
"""Usual weight within one token of the path."""

_STRAY_FRAMES = 12

_JUMP_FLOOR = 1e-2
"""As `_FLOOR`, for comparing paths: a jump must not pay off for a single frame."""

_SENTENCE_TOKENS, _MOST_MORE = 13, 2.0
"""Texts of more tokens than a sentence stray more, up to so many times: half of the built-in voice's good readings,
text first, stray by .02 at most up to 13 tokens, and by .1 between 18 and 32; those beyond stray no more."""

STEP_S = 0.01
_PAUSE, _SILENCE = 10 ** (-35 / 20), 10 ** (-45 / 20)
"""Levels relative to the peak: below the first is a pause between words, below the second silence at either end."""

_AT_MARK = (0.04, 0.2)
_IN_PHRASE = (0.1, 0.15)
"""Shortest pause between two words, and its largest distance from where the attention expects it, in seconds: at
punctuation, and elsewhere, where a stop within a word may also take .1 s."""

_LONGEST_WAIT_S = 0.32
"""How much longer to wait for the end of a pause before its words are reported."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits beyond which a segment was probably not spoken as written: more than `end_frames` from the end of its last
    word on, or fewer than `least_end_frames` once the segment has ended, `dwell_frames` at one token, and `strayed`
    attention (`Tracker.strayed`, plus `Tracker.jumped` once the segment has ended). The first `opening_frames`, in
    which a head may search for its place, do not count."""

    end_frames: float
    least_end_frames: float = 0.0
    dwell_frames: float
    strayed: float
    opening_frames: int = 0

    def most_strayed(self, tokens: float) -> float:
        """The limit `strayed` for a text of `tokens` tokens: higher for more than a sentence, and for a word or two, of
        which little but the end is spoken after the opening: there the head looks beyond the text."""
        if tokens <= self.opening_frames / 2:
            return self.strayed * _MOST_MORE
        return self.strayed * min(max(1.0, tokens / _SENTENCE_TOKENS), _MOST_MORE)


class Trouble(NamedTuple):
    """A fault of a segment: its kind, the index of the first `word` affected, and when that word begins. Words before
    it are good."""

    kind: FaultKind
    word: int
    at_s: float


class Pointing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a head of a checkpoint points at the text, in one prompt layout.

    `layer` and `head` count from 0; `beside` are further heads (layer, head), whose weights are averaged with its own.
    The sound of token i begins `offset_s` after the attention is `shift` tokens past the token's start (less within the
    first `ramp` tokens of text fed per frame); the first word begins `onset_s` after the first loud sample.
    `is_measured`: against an aligner, otherwise estimated. Without `limits` nothing counts as a fault."""

    layer: int
    head: int
    beside: tuple[tuple[int, int], ...] = ()
    shift: float = 0.0
    ramp: float = 0.0
    offset_s: float = 0.0
    onset_s: float = 0.0
    lookahead: int = 0
    is_measured: bool = False
    limits: Limits | None = None

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """All of its heads (layer, head)."""
        return (self.layer, self.head), *self.beside

    def position(self, token: float) -> float:
        """Position of the attention when the sound of `token` begins."""
        return token + self.shift * (min(1.0, token / self.ramp) if self.ramp else 1.0)


class Tracker:
    """The path of one head's attention over the positions of a text, final up to `lookahead` frames ago.

    `crossings[j]`: when the attention reached position j, in fractional frames: when the weight of j and all after it
    was one half. `strayed`: the largest sum, over `_STRAY_FRAMES` consecutive frames after the first `opening`, of the
    weight missing within one token of the path (below the usual `_BESIDE`); `strayed_from`: the first frame of them
    that strayed. `jumped`: the gain in log likelihood (nats) of all frames if the path may jump once to any position
    after the `opening`, and `jumped_from` the frame of that jump. It is about 0 unless words were repeated or left out;
    two short words show in it, but hardly in `strayed`, since a path may step over two tokens. Without an
    `opening` it is not computed."""

    def __init__(self, lookahead: int, opening: int | None = None) -> None:
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
        """The last position that the final part of the path has reached."""
        return len(self.crossings) - 1

    def add(self, attention: Array) -> None:
        """Add the next frame's attention [N] to the positions known so far; N never decreases."""
        positions = len(attention)
        self._raw.append(attention / max(float(attention.sum()), 1e-30))
        shares = np.maximum(self._raw[-1], _FLOOR)
        shares /= shares.sum()
        if self._opening is not None:
            self._weigh(self._raw[-1], self._opening)
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
        """Make the whole path final: no frame follows."""
        if self._steps:
            self._settle(0)

    def _weigh(self, raw: Array, opening: int) -> None:
        """Update the log likelihoods of the best paths to each position, without and with a jump, with a frame's
        weights [N]."""
        positions, frame = len(raw), len(self._steps)
        if frame:
            weights, taken = _stepped(self._weights, positions)
            jumps = np.pad(self._jumps, (0, positions - len(self._jumps)))[np.arange(positions) - taken[1]]
            best = self._weights[0].max() if frame > opening else -np.inf
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
        """Make the path final for all frames but the last `revised`."""
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
        # Free the arrays of old frames.
        for frame in range(max(0, len(self.path) - 2 * _EARLIER - 2), len(self.path) - _EARLIER - 1):
            self._later[frame] = self._later[frame][:0]

    def _stray(self, share: float) -> None:
        """Count the weight `share` that one more frame missed beside the path."""
        self._strays.append(share if len(self._strays) >= (self._opening or 0) else 0.0)
        recent = self._strays[-_STRAY_FRAMES:]
        if sum(recent) > self.strayed:
            first = next(number for number, each in enumerate(recent) if each)
            self.strayed, self.strayed_from = sum(recent), len(self._strays) - len(recent) + first

    def _crossing(self, frame: int, position: int) -> float:
        """When, by `frame` at the latest, the weight of `position` and all after it crossed one half; in frames."""
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
    """The Viterbi step: for each of `positions`, the best of `scores` [..., N] from which it is reached by a step of 0,
    1 or 2, and that step; [..., positions] each."""
    grown = np.full((*scores.shape[:-1], positions), -np.inf)
    grown[..., : scores.shape[-1]] = scores
    # Ties go to the shortest step.
    choices = np.full((3, *grown.shape), -np.inf)
    for step in range(3):
        choices[step, ..., step:] = grown[..., : positions - step]
    return choices.max(0), choices.argmax(0)


def loudness(pcm: bytes, sample_rate: int) -> npt.NDArray[np.int32]:
    """Peak level of each `STEP_S` of PCM16. An incomplete last step is dropped."""
    step = round(STEP_S * sample_rate)
    samples = np.frombuffer(pcm, "<i2", count=len(pcm) // 2 // step * step)
    # int32, as abs(-32768) overflows int16.
    return np.abs(samples.astype(np.int32)).reshape(-1, step).max(1)


class SegmentClock:
    """Tells when the words of one segment, which starts at `begins_s`, are spoken, as soon as they are certain.
    `frame_s` is the length of a frame. `words` may be replaced by a longer list while live text arrives; words that
    were reported must stay."""

    def __init__(self, pointing: Pointing, frame_s: float, sample_rate: int, begins_s: float = 0.0) -> None:
        self.words: Sequence[SpokenWord] = ()
        self._pointing, self._frame_s, self._begins_s = pointing, frame_s, begins_s
        self.tracker = Tracker(pointing.lookahead, pointing.limits.opening_frames if pointing.limits else None)
        self._sample_rate = sample_rate
        self._rest = b""
        self._peaks: list[int] = []
        self._reported = 0
        self._latest_s = 0.0
        self._is_over = False

    def add_audio(self, pcm: bytes) -> None:
        """Add the segment's next audio, PCM16."""
        self._rest += pcm
        peaks = loudness(self._rest, self._sample_rate)
        self._peaks += peaks.tolist()
        self._rest = self._rest[2 * round(STEP_S * self._sample_rate) * len(peaks) :]

    def finish(self) -> None:
        """End the segment: neither audio nor attention follows."""
        self.tracker.finish()
        self._is_over = True

    def stop(self) -> None:
        """Break the segment off: only words that have begun in the audio so far will be reported."""
        begun = sum(
            self._pointing.position(word.first) <= self.tracker.reached and self._at(word.first) < self._audio_s
            for word in self.words
        )
        self.words = self.words[: max(begun, self._reported)]
        self.finish()

    @property
    def fault(self) -> FaultKind | None:
        """The fault of a segment that has ended by itself; None if there is none, or without limits."""
        trouble = self.trouble(is_over=True)
        return None if trouble is None else trouble.kind

    def trouble(self, *, is_over: bool) -> Trouble | None:
        """The trouble with the segment so far or, if it `is_over` (has ended by itself), with all of it; else None."""
        limits, tracker = self._pointing.limits, self.tracker
        if limits is None or not self.words:
            return None
        if is_over:
            tracker.finish()
        frames, lasts = len(tracker.path), [int(word.last) + int(self._pointing.shift) for word in self.words]
        has_reached = tracker.reached >= lasts[-1]
        if is_over and not has_reached:
            return self._from_word("unreached", sum(last <= tracker.reached for last in lasts))
        ending = frames - tracker.crossings[lasts[-1]] if has_reached else 0.0
        if is_over and ending < limits.least_end_frames:
            # The head went over the last word while the one before it was spoken.
            return self._from_word("unreached", len(lasts) - 1)
        if ending > limits.end_frames:
            return Trouble("ending", len(self.words), frames * self._frame_s)
        waits = np.diff([*tracker.crossings, frames] if not has_reached else tracker.crossings)
        if max(waits, default=0.0) > limits.dwell_frames:
            return self._from_frame("dwelling", tracker.crossings[int(waits.argmax())])
        most_strayed = limits.most_strayed(self.words[-1].last)
        if tracker.strayed > most_strayed:
            return self._from_frame("straying", tracker.strayed_from)
        # Before the end the path may still reach the position it seems to have jumped to.
        if is_over and tracker.strayed + tracker.jumped > most_strayed:
            return self._from_frame("straying", tracker.jumped_from)
        return None

    def _from_frame(self, kind: FaultKind, frame: float) -> Trouble:
        """A `Trouble` from the word that is being spoken at `frame`."""
        begun = sum(self._at(word.first) <= frame * self._frame_s for word in self.words)
        return self._from_word(kind, max(begun - 1, 0))

    def _from_word(self, kind: FaultKind, word: int) -> Trouble:
        return Trouble(kind, word, self._at(self.words[word].first) if word else 0.0)

    def take(self, text: str) -> list[Word]:
        """The words of `text` that have become certain since the last call: a word, with its end, once the next one has
        begun; after `finish` all that remain. `words` are spans of `text`."""
        made = []
        while self._reported < len(self.words):
            word = self.words[self._reported]
            after = self.words[self._reported + 1] if self._reported + 1 < len(self.words) else None
            times = self._times(word, after)
            if times is None:
                break
            start_s, end_s, self._latest_s = times
            self._reported += 1
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
    def _audio_s(self) -> float:
        return len(self._peaks) * STEP_S

    def _times(self, word: SpokenWord, after: SpokenWord | None) -> tuple[float, float, float] | None:
        """Start and end of `word`, and start of the word `after` it, in seconds; None while they are not certain."""
        if not self._is_over:
            # The last word's end is known only at the end; others' once the next word is reached.
            if after is None or self.tracker.reached < self._pointing.position(after.first):
                return None
            if self._audio_s < self._at(after.first) + _AT_MARK[1]:
                return None
        start_s = self._latest_s if self._reported else self._onset_s()
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
        """When the sound of `token` begins, in seconds."""
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
        return min(at_s, self._audio_s) if self._is_over else at_s

    @property
    def _peak(self) -> int:
        return max(self._peaks, default=0)

    def _onset_s(self) -> float:
        limit = _SILENCE * self._peak
        loud = next((number for number, peak in enumerate(self._peaks) if peak > limit), 0)
        return max(0.0, loud * STEP_S + self._pointing.onset_s)

    def _last_sound_s(self) -> float:
        limit = _SILENCE * self._peak
        loud = (number for number in range(len(self._peaks) - 1, -1, -1) if self._peaks[number] > limit)
        return (next(loud, -1) + 1) * STEP_S

    def _pause(self, end_s: float, start_s: float, least_s: float, around_s: float) -> tuple[float, float] | None:
        """The longest silence (begin, end) between two words, of which one ends near `end_s` and the other begins near
        `start_s`; without one, (`start_s`, `start_s`). None while the silence continues."""
        first = max(0, round((end_s - around_s) / STEP_S))
        last = min(len(self._peaks), round((start_s + around_s) / STEP_S))
        latest = round((start_s + around_s + _LONGEST_WAIT_S) / STEP_S)
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
        if length * STEP_S < least_s:
            return start_s, start_s
        return at * STEP_S, (at + length) * STEP_S
