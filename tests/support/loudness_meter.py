"""A meter by ITU-R BS.1770-4 of its own: integrated loudness of a mono signal in LUFS, and its true peak in dBTP.

K-weighting is made of the standard's two filters at 48 kHz, which it gives by coefficients; other rates are resampled
to that. The true peak is read off a signal of four times the rate, made by another resampler than the limiter's own."""

import numpy as np
import soxr

_RATE = 48_000
_SHELF = [1.53512485958697, -2.69169618940638, 1.19839281085285], [1.0, -1.69065929318241, 0.73248077421585]
_HIGH_PASS = [1.0, -2.0, 1.0], [1.0, -1.99004745483398, 0.99007225036621]
_BLOCK, _STEP = _RATE * 400 // 1000, _RATE * 100 // 1000


def loudness_lufs(samples: np.ndarray, sample_rate: int) -> float:
    """The integrated loudness, gated twice: of blocks of 400 ms above -70 LUFS, those within 10 LU of their mean."""
    heard = soxr.resample(samples.astype(np.float64), sample_rate, _RATE, quality="VHQ")
    weighted = _filtered(_filtered(heard, *_SHELF), *_HIGH_PASS)
    squares = np.cumsum(np.concatenate([[0.0], weighted**2]))
    powers = (squares[_BLOCK:] - squares[:-_BLOCK])[::_STEP] / _BLOCK
    powers = powers[_lufs(powers) > -70]
    return float(_lufs(powers[_lufs(powers) > _lufs(powers.mean()) - 10].mean()))


def true_peak_dbtp(samples: np.ndarray, sample_rate: int) -> float:
    """The highest amplitude of the signal at four times the rate."""
    padded = np.pad(samples.astype(np.float64), sample_rate // 10)
    return float(20 * np.log10(np.abs(soxr.resample(padded, sample_rate, 4 * sample_rate, quality="VHQ")).max()))


def _lufs(power: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return -0.691 + 10 * np.log10(power)


def _filtered(samples: np.ndarray, forward: list[float], back: list[float]) -> np.ndarray:
    """`samples` through a filter of second order."""
    made = np.convolve(samples, forward)[: len(samples)]
    before, last = 0.0, 0.0
    out = []
    for value in made.tolist():
        before, last = last, value - back[1] * last - back[2] * before
        out.append(last)
    return np.array(out)
