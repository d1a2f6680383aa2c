"""Which head of a checkpoint points at its text, found without labels: from readings of known texts whose attention was
watched whole. Knows no model.

A head points if its attention runs along the text (path mass) at about the pace of the letters (agreement). How far it
reads ahead of the sound is measured where the sound itself says when a word begins: behind the pauses at marks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sonoro.words.spans import SpokenWord
from sonoro.words.tracking import AHEAD, Pointing, Tracker, loudness

__all__ = ["LEAST_MASS", "MOST_DEVIATION_S", "Candidate", "Reading", "candidates", "choose", "judge"]

LEAST_MASS, MOST_DEVIATION_S = 0.15, 0.2
"""The gate. True heads were seen at .46 to .81 and .10 to .14 s, the best wrong one of text that is there at .09 and
.25 s; where text comes along, at .26 and .3 s."""

_PAUSE_S, _AROUND_S, _QUIET = 0.08, 0.35, 10 ** (-35 / 20)
_RAMP = 2.0


@dataclass(frozen=True)
class Reading:
    """A text as it was spoken: its `words` and how many `tokens` it has, PCM16 of it, and the `attention` [F, H, W]
    of each frame and head, of all positions, to those from the text's first on. Where it is spoken `along`, a token
    comes a frame."""

    words: Sequence[SpokenWord]
    tokens: int
    pcm: bytes
    attention: npt.NDArray[np.float32]
    along: bool


@dataclass(frozen=True)
class Candidate:
    """How a head does: `mass` of its raw attention along its best path, times how much of the text that covers, and
    how far, `deviation_s`, its words are from the pace of the letters. `shift` is how far it reads ahead, in tokens."""

    layer: int
    head: int
    mass: float
    deviation_s: float
    shift: float

    @property
    def points(self) -> bool:
        """Whether it passes the gate."""
        return self.mass >= LEAST_MASS and self.deviation_s <= MOST_DEVIATION_S


def candidates(readings: Sequence[Reading], heads: int) -> list[int]:
    """Which of the `heads` of the readings' H, by number, look at the text enough to be judged."""
    # No path has more mass than all of the text.
    looked = np.mean([reading.attention[:, :, : reading.tokens + AHEAD].sum(2).mean(0) for reading in readings], axis=0)
    return [number for number in range(heads) if looked[number] >= LEAST_MASS]


def choose(found: Sequence[Candidate], *, along: bool) -> Pointing | None:
    """How the best of those judged, which comes first, points; None if it does not pass the gate. What was not measured
    is estimated."""
    if not found or not found[0].points:
        return None
    best = found[0]
    return Pointing(
        layer=best.layer, head=best.head, shift=round(max(best.shift, 0.0), 2), ramp=_RAMP if along else 0.0
    )


def judge(
    readings: Sequence[Reading], place: tuple[int, int], number: int, frame_s: float, sample_rate: int
) -> Candidate:
    """How head `number` of the readings' H, the one at `place`, does. All `readings` are of one layout."""
    traced = [_trace(reading, number) for reading in readings]
    clocks = [np.array(tracker.crossings) * frame_s for tracker, _ in traced]
    paces = [_pace(reading, frame_s, sample_rate) for reading in readings]
    # By the pace of the letters first, roughly; then by pauses, which are where that leads to.
    shift = float(np.median(np.concatenate([
        _positions(clock, pace) - [word.first for word in reading.words]
        for reading, clock, pace in zip(readings, clocks, paces, strict=True)
    ])))  # fmt: skip
    told = [_times(reading, clock, shift) for reading, clock in zip(readings, clocks, strict=True)]
    late = np.concatenate([times - pace for times, pace in zip(told, paces, strict=True)])
    paused = [
        ahead
        for reading, clock, times in zip(readings, clocks, told, strict=True)
        for ahead in _at_pauses(reading, clock, times, sample_rate)
    ]
    return Candidate(
        *place,
        mass=float(np.mean([mass for _, mass in traced])),
        deviation_s=float(np.abs(late - np.median(late)).mean()),
        shift=float(np.median(paused)) if paused else shift,
    )


def _trace(reading: Reading, number: int) -> tuple[Tracker, float]:
    """The path of head `number`, and its mass times how much of the text it covers. Where text comes along, of the
    frames after all of it is there alone: a head that follows the input has no path by then."""
    tracker, frames = Tracker(0), len(reading.attention)
    attention = reading.attention[:, number, : reading.tokens + AHEAD]
    for frame in range(frames):
        tracker.add(attention[frame, : frame + 1] if reading.along else attention[frame, : reading.tokens])
    tracker.finish()
    first = min(reading.tokens, frames - 1) if reading.along else 0
    path = np.array(tracker.path)
    mass = float(attention[np.arange(frames), path][first:].mean())
    covered = (path[-1] - path[first] + 1) / max(reading.tokens * (frames - first) / frames, 1.0)
    return tracker, mass * min(covered, 1.0)


def _pace(reading: Reading, frame_s: float, sample_rate: int) -> npt.NDArray[np.float64]:
    """When each word begins if each token takes the same time of the sound."""
    peaks, step_s = loudness(reading.pcm, sample_rate)
    loud = np.flatnonzero(peaks > _QUIET * peaks.max()) if len(peaks) and peaks.max() else np.array([0, 0])
    begin_s, end_s = loud[0] * step_s, min((loud[-1] + 1) * step_s, len(reading.attention) * frame_s)
    total = max(reading.words[-1].last, 1.0)
    return np.array([begin_s + word.first / total * (end_s - begin_s) for word in reading.words])


def _positions(clock: npt.NDArray[np.float64], at_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Where the attention is at `at_s`, of the times `clock` at which it came to each position."""
    return np.interp(at_s, clock, np.arange(len(clock)))


def _times(reading: Reading, clock: npt.NDArray[np.float64], shift: float) -> npt.NDArray[np.float64]:
    """When each word begins, by a head that reads `shift` tokens ahead."""
    tokens = np.array([word.first for word in reading.words])
    ramp = np.minimum(1.0, tokens / _RAMP) if reading.along else 1.0
    return np.interp(tokens + shift * ramp, np.arange(len(clock)), clock)


def _at_pauses(
    reading: Reading, clock: npt.NDArray[np.float64], told: npt.NDArray[np.float64], sample_rate: int
) -> list[float]:
    """How many tokens ahead the attention is as the sound comes back after each mark."""
    peaks, step_s = loudness(reading.pcm, sample_rate)
    quiet = peaks <= _QUIET * peaks.max(initial=0)
    found = []
    for number in range(1, len(reading.words)):
        word = reading.words[number]
        if word.first <= reading.words[number - 1].last or (reading.along and word.first < _RAMP):
            continue
        low, high = (max(0, round((told[number] + side) / step_s)) for side in (-_AROUND_S, _AROUND_S))
        edges = np.flatnonzero(np.diff(np.concatenate([[0], quiet[low:high].astype(np.int8), [0]])))
        stretches = [(end - begin, low + end) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
        length, end = max(stretches, default=(0, 0))
        if length * step_s >= _PAUSE_S and end < high:
            found.append(float(_positions(clock, np.array([end * step_s]))[0] - word.first))
    return found
