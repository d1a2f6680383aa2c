"""Samples as bytes: PCM16 and the codes of telephony. Knows no file and no codec.

Samples are mono float32 in [-1, 1]."""

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt
import soxr

Samples = npt.NDArray[np.float32]
Numbers = npt.NDArray[np.int64]


SILENT = 32
"""PCM16 up to this amplitude, -60 dB of full scale, is silence around a pause. The level of the speech cannot decide:
it is not known when a line begins."""


def audible(samples: npt.NDArray[np.int16]) -> npt.NDArray[np.intp]:
    """Where `samples` are not `SILENT`."""
    return np.flatnonzero((samples > SILENT) | (samples < -SILENT))


def to_pcm16(samples: npt.NDArray[np.floating]) -> bytes:
    """Convert to PCM16 little-endian, rounded to nearest, clipped at full scale. Inverse of `from_pcm16`."""
    pcm: bytes = np.clip(np.rint(samples * 32768.0), -32768, 32767).astype("<i2").tobytes()
    return pcm


def from_pcm16(pcm: bytes) -> Samples:
    """Convert PCM16 little-endian to float32 in [-1, 1), exactly."""
    return np.frombuffer(pcm, dtype="<i2").astype(np.float32) / np.float32(32768)


def resample(samples: Samples, from_hz: int, to_hz: int) -> Samples:
    """Resample `samples` [S] to length round(S * to_hz / from_hz)."""
    if from_hz == to_hz:
        return samples
    resampled: Samples = soxr.resample(samples, from_hz, to_hz, quality="HQ")
    return resampled


def mu_law(pcm: bytes) -> bytes:
    """G.711 mu-law of PCM16."""
    return bytes(_table(_mu_law)[np.frombuffer(pcm, "<u2")])


def a_law(pcm: bytes) -> bytes:
    """G.711 A-law of PCM16."""
    return bytes(_table(_a_law)[np.frombuffer(pcm, "<u2")])


@cache
def _table(law: Callable[[Numbers], Numbers]) -> npt.NDArray[np.uint8]:
    """The code of every PCM16 sample, by its bits as an unsigned number."""
    bits = np.arange(65536)
    return law(np.where(bits < 32768, bits, bits - 65536)).astype(np.uint8)


def _mu_law(samples: Numbers) -> Numbers:
    """ITU-T G.711, table 2: 14 bits, of which the magnitude plus 33 lies in one of eight segments."""
    magnitude = np.minimum(np.where(samples < 0, ~samples, samples) >> 2, 8158) + 33
    segment = np.floor(np.log2(magnitude)).astype(np.int64) - 5
    code = segment << 4 | (magnitude >> (segment + 1)) & 15
    coded: Numbers = ~(code | np.where(samples < 0, 128, 0)) & 255
    return coded


def _a_law(samples: Numbers) -> Numbers:
    """ITU-T G.711, table 1: 12 bits, whose magnitude lies in one of eight segments; even bits are inverted."""
    magnitude = np.where(samples < 0, ~samples, samples) >> 4
    segment = np.maximum(np.floor(np.log2(np.maximum(magnitude, 1))).astype(np.int64) - 3, 0)
    code = segment << 4 | (magnitude >> np.maximum(segment - 1, 0)) & 15
    coded: Numbers = (code | np.where(samples < 0, 0, 128)) ^ 0x55
    return coded
