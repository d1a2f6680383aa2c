"""The teacher Flite: its free voices through the C library, as 24 kHz speech with trimmed ends, even loudness and phone
times.

Input must be normalised text (`sonoro.text.english`).
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import soxr

from builtin_voice.phones import PAUSE

SAMPLE_RATE = 24000
LEADING_SILENCE_S = 0.06
TRAILING_SILENCE_S = 0.16
# Bring each voice's mean active level over the first 100 Harvard sentences to 0.08 of full scale, without clipping.
GAINS = {"slt": 0.41, "rms": 0.81, "awb": 0.69, "kal16": 1.75}
VOICES = tuple(GAINS)
_WINDOW = SAMPLE_RATE // 200


class Phone(NamedTuple):
    """One of `phones.FLITE`, and the sample that it ends before."""

    name: str
    end: int


class Speech(NamedTuple):
    """`samples` [S] int16 at 24 kHz, and the phones in them, one after the other up to the end."""

    samples: np.ndarray
    phones: list[Phone]


class _Wave(ctypes.Structure):
    _fields_ = (
        ("type", ctypes.c_char_p),
        ("sample_rate", ctypes.c_int),
        ("num_samples", ctypes.c_int),
        ("num_channels", ctypes.c_int),
        ("samples", ctypes.POINTER(ctypes.c_short)),
    )


@cache
def _library(name: str, folder: Path | None) -> ctypes.CDLL:
    path = f"{name}.so.1" if folder is None else str(folder / f"{name}.so.1")
    return ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


class Flite:
    """Flite 2.2 from `folder` (the system's own where None). One per process: the library keeps global state."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        if folder is not None:
            for name in ("libasound.so.2", "libflite.so.1", "libflite_cmulex.so.1", "libflite_usenglish.so.1"):
                if (folder / name).exists():
                    ctypes.CDLL(str(folder / name), mode=ctypes.RTLD_GLOBAL)
        self._flite = _library("libflite", folder)
        pointer, text = ctypes.c_void_p, ctypes.c_char_p
        for name, returned, taken in (
            ("flite_synth_text", pointer, [text, pointer]),
            ("utt_wave", ctypes.POINTER(_Wave), [pointer]),
            ("utt_relation", pointer, [pointer, text]),
            ("relation_head", pointer, [pointer]),
            ("item_next", pointer, [pointer]),
            ("item_feat_string", text, [pointer, text]),
            ("item_feat_float", ctypes.c_float, [pointer, text]),
            ("delete_utterance", None, [pointer]),
        ):
            function = getattr(self._flite, name)
            function.restype, function.argtypes = returned, taken
        self._flite.flite_init()
        self._voices: dict[str, int] = {}

    def _voice(self, voice: str) -> int:
        if voice not in self._voices:
            register = getattr(_library(f"libflite_cmu_us_{voice}", self._folder), f"register_cmu_us_{voice}")
            register.restype, register.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
            self._voices[voice] = register(None)
        return self._voices[voice]

    def raw(self, text: str, voice: str) -> tuple[np.ndarray, int, list[tuple[str, float]]]:
        """Flite's untrimmed output: [S] float32 in [-1, 1], its rate in Hz, and phones with their ends in seconds."""
        # Flite ends a sentence only before a capital; otherwise it treats a full stop as a comma.
        sentences = re.sub(r"([.?!] )([a-z])", lambda match: match[1] + match[2].upper(), text)
        utterance = self._flite.flite_synth_text(sentences.encode("ascii"), self._voice(voice))
        if utterance is None:
            raise ValueError(f"Flite cannot read {text!r} as {voice}")
        try:
            content = self._flite.utt_wave(utterance).contents
            samples = np.ctypeslib.as_array(content.samples, (content.num_samples,)).astype(np.float32) / 32768
            phones = []
            segment = self._flite.relation_head(self._flite.utt_relation(utterance, b"Segment"))
            while segment:
                name = self._flite.item_feat_string(segment, b"name").decode("ascii")
                phones.append((name, self._flite.item_feat_float(segment, b"end")))
                segment = self._flite.item_next(segment)
            return samples, content.sample_rate, phones
        finally:
            self._flite.delete_utterance(utterance)

    def speak(self, text: str, voice: str) -> Speech:
        """60 ms of silence, the speech at an even loudness, 160 ms of silence."""
        samples, rate, phones = self.raw(text, voice)
        speech, first = trim(soxr.resample(samples, rate, SAMPLE_RATE))
        ends = [(name, round(end_s * SAMPLE_RATE) - first) for name, end_s in phones]
        samples = (np.clip(speech * GAINS[voice], -1, 1) * 32767).round().astype(np.int16)
        return Speech(samples, placed(ends, len(speech)))


def placed(phones: list[tuple[str, int]], length: int) -> list[Phone]:
    """The `phones` (name, end) within samples 0 to `length`, extended to fill all of them."""
    found, at = [], 0
    for name, given in [*phones, (PAUSE, length)]:
        end = min(given, length)
        if end > at:
            found.append(Phone(name, end))
            at = end
    return found


def levels(samples: np.ndarray) -> np.ndarray:
    """RMS of each whole 5 ms of `samples`."""
    frames = samples[: len(samples) // _WINDOW * _WINDOW].reshape(-1, _WINDOW)
    return np.asarray(np.sqrt(np.square(frames, dtype=np.float64).mean(axis=1)))


def trim(samples: np.ndarray) -> tuple[np.ndarray, int]:
    """`samples` [S] with 60 ms before and 160 ms after what is within 40 dB of its loud parts, zero-padded if short;
    and the index in `samples` of the first one, below 0 if that is padding."""
    level = levels(samples)
    loud = np.flatnonzero(level > 0.01 * np.quantile(level, 0.95))
    assert len(loud), "silence has no ends to trim"
    start = int(loud[0]) * _WINDOW - round(LEADING_SILENCE_S * SAMPLE_RATE)
    end = (int(loud[-1]) + 1) * _WINDOW + round(TRAILING_SILENCE_S * SAMPLE_RATE)
    padded = np.pad(samples, (max(0, -start), max(0, end - len(samples))))
    return padded[max(0, start) : max(0, start) + end - start], start
