"""What audio may be asked for in the dialects, beyond the formats of our own API: G.711, floats, and WAV of either.

PCM16 is made by our encoder, at the rate that was asked for and with its low-pass; here each sample becomes another
number. Knows no dialect.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sonoro.core.audio import wav_header
from sonoro.core.errors import InvalidRequest
from sonoro.core.g711 import a_law, mu_law
from sonoro.server.stream import AudioBody

__all__ = ["PCM", "AudioFormat", "FormatBody", "sample_format"]

Convert = Callable[[bytes], bytes]


@dataclass(frozen=True)
class AudioFormat:
    """`codec` is a format of our own API, `rate` in Hz and `bit_rate` in bits a second, None for our own. Of PCM each
    sample goes through `convert`; `header` comes before the first. `content_type` is the codec's unless given."""

    codec: str = "pcm"
    rate: int | None = None
    convert: Convert | None = None
    header: bytes = b""
    content_type: str | None = None
    bit_rate: int | None = None

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


def _float32(pcm: bytes) -> bytes:
    """PCM16 as float32 little-endian in [-1, 1)."""
    return (np.frombuffer(pcm, "<i2") / np.float32(32768)).astype("<f4").tobytes()


_SAMPLES: dict[str, tuple[Convert | None, int, int, str | None]] = {
    **dict.fromkeys(("pcm", "pcm_s16le", "linear16"), (None, 1, 2, None)),
    **dict.fromkeys(("mulaw", "ulaw", "pcm_mulaw"), (mu_law, 7, 1, "audio/basic")),
    **dict.fromkeys(("alaw", "pcm_alaw"), (a_law, 6, 1, "audio/x-alaw-basic")),
    "pcm_f32le": (_float32, 3, 4, "audio/x-f32le"),
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
    return AudioFormat("pcm", rate, convert, wav_header(rate, encoding=tag, width=width), "audio/wav")
