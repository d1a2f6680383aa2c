"""Find the attention heads of a checkpoint that point at the text, without labels, from readings of known texts with
the attention of all heads.

A head points if its attention moves along the text (path mass) at about the pace of the letters (deviation). How far it
is ahead of the sound is measured where the audio shows when a word begins: after pauses at punctuation."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sonoro.words.spans import SpokenWord
from sonoro.words.tracking import AHEAD, STEP_S, Pointing, Tracker, loudness

TEXTS = (
    "When the rain had stopped, the children ran outside, and their mother closed the window.",
    "On Monday we talked about the garden, the kitchen, and the colour of the front door.",
    "She put the letter on the table, turned off the light, and waited for the morning train.",
    "If you ask me, the old bridge is too narrow, but nobody wants to build another one.",
    "My brother lives near the harbour, so he hears the ships, even in the middle of the night.",
    "First we bought some apples, then we walked home slowly, because the sun was still warm.",
)
"""Short enough for every model to speak as one segment, with punctuation to pause at."""

LEAST_MASS, MOST_DEVIATION_S = 0.15, 0.2
"""The gate. True heads had a mass of .46 to .81 and a deviation of .10 to .14 s; the best wrong head had .09 and .25 s
with all text in the prompt, .26 and .3 s with text per frame."""

_PAUSE_S, _AROUND_S, _QUIET = 0.08, 0.35, 10 ** (-35 / 20)
_RAMP = 2.0


@dataclass(frozen=True)
class Reading:
    """A spoken text: its `words`, its number of `tokens`, PCM16, and `attention` [F, H, W] of each frame and head
    (softmax over all positions) to W positions from the text's first on. `along`: one token per frame."""

    words: Sequence[SpokenWord]
    tokens: int
    pcm: bytes
    attention: npt.NDArray[np.float32]
    along: bool


@dataclass(frozen=True)
class Candidate:
    """Scores of a head: `mass` of its attention along its best path times the share of the text that the path covers;
    `deviation_s`, mean deviation of its words from the pace of the letters; `shift`, tokens ahead of the sound."""

    layer: int
    head: int
    mass: float
    deviation_s: float
    shift: float

    @property
    def points(self) -> bool:
        """Whether the head passes the gate."""
        return self.mass >= LEAST_MASS and self.deviation_s <= MOST_DEVIATION_S


def candidates(readings: Sequence[Reading], heads: int) -> list[int]:
    """Indices of those of the `heads` heads whose total attention to the text passes `LEAST_MASS`."""
    # No path has more mass than the whole text.
    looked = np.mean([reading.attention[:, :, : reading.tokens + AHEAD].sum(2).mean(0) for reading in readings], axis=0)
    return [number for number in range(heads) if looked[number] >= LEAST_MASS]


def choose(found: Sequence[Candidate], *, along: bool) -> Pointing | None:
    """The estimated `Pointing` of the best head, `found[0]`; None if it does not pass the gate."""
    if not found or not found[0].points:
        return None
    best = found[0]
    return Pointing(
        layer=best.layer, head=best.head, shift=round(max(best.shift, 0.0), 2), ramp=_RAMP if along else 0.0
    )


def judge(
    readings: Sequence[Reading], place: tuple[int, int], number: int, frame_s: float, sample_rate: int
) -> Candidate:
    """Score the head with index `number` in the readings, which is at `place` (layer, head). All `readings` must have
    the same layout."""
    traced = [_trace(reading, number) for reading in readings]
    clocks = [np.array(tracker.crossings) * frame_s for tracker, _ in traced]
    paces = [_pace(reading, frame_s, sample_rate) for reading in readings]
    # A rough shift by the pace of the letters, refined at the pauses found near it.
    shift = float(np.median(np.concatenate([
        _positions(clock, pace) - [word.first for word in reading.words]
        for reading, clock, pace in zip(readings, clocks, paces, strict=True)
    ])))  # fmt: skip
    starts_s = [_times(reading, clock, shift) for reading, clock in zip(readings, clocks, strict=True)]
    late = np.concatenate([start_s - pace for start_s, pace in zip(starts_s, paces, strict=True)])
    paused = [
        ahead
        for reading, clock, start_s in zip(readings, clocks, starts_s, strict=True)
        for ahead in _at_pauses(reading, clock, start_s, sample_rate)
    ]
    return Candidate(
        *place,
        mass=float(np.mean([mass for _, mass in traced])),
        deviation_s=float(np.abs(late - np.median(late)).mean()),
        shift=float(np.median(paused)) if paused else shift,
    )


def _trace(reading: Reading, number: int) -> tuple[Tracker, float]:
    """The path of head `number`, and its mass times the share of the text it covers. With text per frame only frames
    after the last token count: there a head that just follows the input has no path."""
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
    """Start of each word, in seconds, if every token took an equal part of the sound."""
    peaks = loudness(reading.pcm, sample_rate)
    loud = np.flatnonzero(peaks > _QUIET * peaks.max()) if len(peaks) and peaks.max() else np.array([0, 0])
    begin_s, end_s = loud[0] * STEP_S, min((loud[-1] + 1) * STEP_S, len(reading.attention) * frame_s)
    total = max(reading.words[-1].last, 1.0)
    return np.array([begin_s + word.first / total * (end_s - begin_s) for word in reading.words])


def _positions(clock: npt.NDArray[np.float64], at_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Position of the attention at times `at_s`; `clock` are the times at which it reached each position."""
    return np.interp(at_s, clock, np.arange(len(clock)))


def _times(reading: Reading, clock: npt.NDArray[np.float64], shift: float) -> npt.NDArray[np.float64]:
    """Start of each word, in seconds, by a head that is `shift` tokens ahead."""
    tokens = np.array([word.first for word in reading.words])
    ramp = np.minimum(1.0, tokens / _RAMP) if reading.along else 1.0
    return np.interp(tokens + shift * ramp, np.arange(len(clock)), clock)


def _at_pauses(
    reading: Reading, clock: npt.NDArray[np.float64], start_s: npt.NDArray[np.float64], sample_rate: int
) -> list[float]:
    """Tokens that the attention is ahead when the sound resumes after each pause at punctuation."""
    peaks = loudness(reading.pcm, sample_rate)
    quiet = peaks <= _QUIET * peaks.max(initial=0)
    found = []
    for number in range(1, len(reading.words)):
        word = reading.words[number]
        if word.first <= reading.words[number - 1].last or (reading.along and word.first < _RAMP):
            continue
        low, high = (max(0, round((start_s[number] + side) / STEP_S)) for side in (-_AROUND_S, _AROUND_S))
        edges = np.flatnonzero(np.diff(np.concatenate([[0], quiet[low:high].astype(np.int8), [0]])))
        stretches = [(end - begin, low + end) for begin, end in zip(edges[::2], edges[1::2], strict=True)]
        length, end = max(stretches, default=(0, 0))
        if length * STEP_S >= _PAUSE_S and end < high:
            found.append(float(_positions(clock, np.array([end * STEP_S]))[0] - word.first))
    return found
