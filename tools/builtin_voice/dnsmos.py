"""DNSMOS: predicted opinion scores of speech, P.808 and the overall score (OVRL) of P.835.

The two graphs are those of PyPI `speechmos` 0.0.1.1 (microsoft/DNS-Challenge, MIT); windows, features and fitted curves
follow its `dnsmos.py`, with which the scores agree to .001.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np

from builtin_voice.hearing import JUDGE_HZ, Graph, graph

_WINDOW = round(9.01 * JUDGE_HZ)
_PEAK = 0.6
_FFT, _HOP, _MELS = 321, 160, 120
_OVRL = np.poly1d([-0.06766283, 1.11546468, 0.04602535])


class Dnsmos:
    """Scores audio from 1 to 5. Single-threaded."""

    def __init__(self, p808: Graph, p835: Graph) -> None:
        self._p808, self._p835 = p808, p835

    @classmethod
    def load(cls, folder: Path) -> Dnsmos:
        """From the folder that `prepare_judges.sh` filled."""
        return cls(graph(folder / "model_v8.onnx"), graph(folder / "sig_bak_ovr.onnx"))

    def p808(self, samples: np.ndarray) -> float:
        """P.808 score of `samples` [S] float32 at 16 kHz: the mean over `_windows`, as for `ovrl`."""
        features = (_log_mel(window[:-_HOP])[None] for window in _windows(samples))
        return round(float(np.mean([self._p808.run(None, {"input_1": given})[0][0, 0] for given in features])), 3)

    def ovrl(self, samples: np.ndarray) -> float:
        given = (window[None] for window in _windows(samples))
        return round(float(np.mean([_OVRL(self._p835.run(None, {"input_1": one})[0][0, 2]) for one in given])), 3)


def _windows(samples: np.ndarray) -> list[np.ndarray]:
    """Windows of 9 s with a hop of 1 s over `samples` [S], which are level-normalised, and repeated to fill a
    window."""
    audio = samples * (_PEAK / max(float(np.abs(samples).max()), 1e-6))
    while len(audio) < _WINDOW:
        audio = np.concatenate([audio, audio])
    count = int(len(audio) // JUDGE_HZ - _WINDOW / JUDGE_HZ) + 1
    return [audio[at : at + _WINDOW].astype(np.float32) for at in range(0, count * JUDGE_HZ, JUDGE_HZ)]


def _log_mel(audio: np.ndarray) -> np.ndarray:
    """Log-mel features [frames, 120] float32: decibels relative to the loudest, divided by 40."""
    padded = np.pad(audio, _FFT // 2)
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FFT)[::_HOP]
    periodic_hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FFT) / _FFT)
    power = np.abs(np.fft.rfft(frames * periodic_hann)) ** 2 @ _mel_filters().T
    decibels = 10 * np.log10(np.maximum(power, 1e-10) / max(power.max(), 1e-10))
    return ((np.maximum(decibels, decibels.max() - 80) + 40) / 40).astype(np.float32)


@cache
def _mel_filters() -> np.ndarray:
    """Mel filters [mels, bins]: triangles of equal area on Slaney's scale, linear to 1 kHz and logarithmic above."""
    step = np.log(6.4) / 27
    top = 15 + np.log(JUDGE_HZ / 2 / 1000) / step
    mels = np.linspace(0, top, _MELS + 2)
    edges = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (mels - 15)))
    bins = np.arange(_FFT // 2 + 1) * JUDGE_HZ / _FFT
    rising = (bins - edges[:-2, None]) / np.diff(edges)[:-1, None]
    falling = (edges[2:, None] - bins) / np.diff(edges)[1:, None]
    return np.maximum(0, np.minimum(rising, falling)) * (2 / (edges[2:] - edges[:-2]))[:, None]
