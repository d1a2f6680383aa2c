"""What audio may be asked for in the dialects, beyond the formats of our own API: G.711, floats, and WAV of either.

PCM16 is made by our encoder, at the rate that was asked for and with its low-pass; here each sample becomes another
number. Knows no dialect.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from sonoro.core.errors import InvalidRequest
from sonoro.server.stream import AudioBody

__all__ = ["PCM", "AudioFormat", "FormatBody", "a_law", "float32", "mu_law", "sample_format"]

Convert = Callable[[bytes], bytes]
Numbers = npt.NDArray[np.int64]

_UNKNOWN = b"\xff\xff\xff\xff"
"""The size of a WAV file whose length is not known when its header is sent: readers take it as "until the end"."""


@dataclass(frozen=True)
class AudioFormat:
    """`codec` is a format of our own API and `rate` in Hz, None for the model's own. Of PCM each sample goes through
    `convert`; `header` comes before the first. `content_type` is the codec's unless given."""

    codec: str = "pcm"
    rate: int | None = None
    convert: Convert | None = None
    header: bytes = b""
    content_type: str | None = None

    def __call__(self, audio: bytes) -> bytes:
        """`audio` of our encoder in this format, without the header."""
        return self.convert(audio) if self.convert else audio


PCM = AudioFormat()


class FormatBody(AudioBody):
    """The audio itself, in a format."""

    def __init__(self, format: AudioFormat) -> None:
        self._format, self._header = format, format.header

    def content_type(self, audio: str) -> str:
        return self._format.content_type or audio

    def packet(self, audio: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + self._format(audio)


def mu_law(pcm: bytes) -> bytes:
    """G.711 mu-law of PCM16."""
    return bytes(_table(_mu_law)[np.frombuffer(pcm, "<u2")])


def a_law(pcm: bytes) -> bytes:
    """G.711 A-law of PCM16."""
    return bytes(_table(_a_law)[np.frombuffer(pcm, "<u2")])


def float32(pcm: bytes) -> bytes:
    """PCM16 as float32 little-endian in [-1, 1)."""
    return (np.frombuffer(pcm, "<i2") / np.float32(32768)).astype("<f4").tobytes()


_SAMPLES: dict[str, tuple[Convert | None, int, int, str | None]] = {
    **dict.fromkeys(("pcm", "pcm_s16le", "linear16"), (None, 1, 2, None)),
    **dict.fromkeys(("mulaw", "ulaw", "pcm_mulaw"), (mu_law, 7, 1, "audio/basic")),
    **dict.fromkeys(("alaw", "pcm_alaw"), (a_law, 6, 1, "audio/x-alaw-basic")),
    "pcm_f32le": (float32, 3, 4, "audio/x-f32le"),
}
"""Encodings by the names that the APIs give them: what makes them of PCM16, the tag of a WAV file that holds them, the
bytes of a sample, and the type of their content if it is not that of PCM16."""


def sample_format(encoding: str, rate: int | None, *, is_wav: bool = False) -> AudioFormat:
    """The audio of one of `_SAMPLES`, bare or in a WAV file. Raises `InvalidRequest`."""
    if encoding not in _SAMPLES:
        raise InvalidRequest("encoding", encoding, f"it must be one of {', '.join(_SAMPLES)}")
    convert, tag, width, content_type = _SAMPLES[encoding]
    if not is_wav:
        return AudioFormat("pcm", rate, convert, b"", content_type)
    rate = rate or 24000
    layout = struct.pack("<4sIHHIIHH", b"fmt ", 16, tag, 1, rate, rate * width, width, 8 * width)
    header = b"RIFF" + _UNKNOWN + b"WAVE" + layout + b"data" + _UNKNOWN
    return AudioFormat("pcm", rate, convert, header, "audio/wav")


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
