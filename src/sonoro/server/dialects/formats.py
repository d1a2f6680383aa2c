"""Audio formats of the dialects beyond those of the native API: G.711, float32, and WAV of either. Knows no dialect.

The server's encoder makes PCM16 at the requested sample rate; here each sample is converted."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sonoro.audio.encoders import MAX_RATE, MIN_RATE
from sonoro.audio.pcm import a_law, mu_law
from sonoro.audio.wav import wav_header
from sonoro.core.errors import InvalidRequest
from sonoro.server.stream import AudioBody

Convert = Callable[[bytes], bytes]


@dataclass(frozen=True)
class AudioFormat:
    """An audio format. `codec` is a format of the native API; `rate` in Hz and `bit_rate` in bits per second default to
    its own. PCM passes through `convert`, after `header`. `content_type` defaults to the codec's."""

    codec: str = "pcm"
    rate: int | None = None
    convert: Convert | None = None
    header: bytes = b""
    content_type: str | None = None
    bit_rate: int | None = None

    def __call__(self, audio: bytes) -> bytes:
        """Convert `audio` of the encoder to this format, without the header."""
        return self.convert(audio) if self.convert else audio


PCM = AudioFormat()


class FormatBody(AudioBody):
    """A body of audio in a format of a dialect."""

    def __init__(self, format: AudioFormat) -> None:
        self._format, self._header = format, format.header

    def content_type(self, audio: str) -> str:
        return self._format.content_type or audio

    def packet(self, audio: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + self._format(audio)


def _float32(pcm: bytes) -> bytes:
    """Convert PCM16 to float32 little-endian in [-1, 1)."""
    return (np.frombuffer(pcm, "<i2") / np.float32(32768)).astype("<f4").tobytes()


_SAMPLES: dict[str, tuple[Convert | None, int, int, str | None]] = {
    **dict.fromkeys(("pcm", "pcm_s16le", "linear16"), (None, 1, 2, None)),
    **dict.fromkeys(("mulaw", "ulaw", "pcm_mulaw"), (mu_law, 7, 1, "audio/basic")),
    **dict.fromkeys(("alaw", "pcm_alaw"), (a_law, 6, 1, "audio/x-alaw-basic")),
    "pcm_f32le": (_float32, 3, 4, "audio/x-f32le"),
}
"""Encodings by their names in the APIs: conversion from PCM16, WAV format tag, bytes per sample, and content type if it
is not PCM16's."""


def sample_format(encoding: str, rate: int | None, *, is_wav: bool = False) -> AudioFormat:
    """The format of an encoding in `_SAMPLES`, raw or in a WAV file. Raises `InvalidRequest`."""
    if encoding not in _SAMPLES:
        raise InvalidRequest("encoding", encoding, f"it must be one of {', '.join(_SAMPLES)}")
    convert, tag, width, content_type = _SAMPLES[encoding]
    if not is_wav:
        return AudioFormat("pcm", rate, convert, b"", content_type)
    rate = 24000 if rate is None else rate
    if not MIN_RATE <= rate <= MAX_RATE:
        raise InvalidRequest("sample_rate", rate, f"it must be from {MIN_RATE} to {MAX_RATE}")
    return AudioFormat("pcm", rate, convert, wav_header(rate, encoding=tag, width=width), "audio/wav")
