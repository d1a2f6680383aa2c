"""G.711: the codes of telephony, 8 bits a sample, from PCM16. Follows ITU-T G.711, tables 1 and 2."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]


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
