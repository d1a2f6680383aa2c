"""FLAC, MP3 and Ogg Opus files, encoded by libsndfile."""

import contextlib
import io
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import soundfile
import soxr

from sonoro.audio.pcm import from_pcm16, to_pcm16

_ENCODERS = {"flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"), "opus": ("OGG", "OPUS")}

_ENCODER_RATES = {
    "mp3": (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000),
    "opus": (8000, 12000, 16000, 24000, 48000),
}


class CompressedFile:
    """A file encoded by libsndfile, which rewrites the header at the close: one that `grows` is appended to with each
    chunk and written again at the end. Raises `OSError`."""

    def __init__(self, file: BinaryIO, format: str, sample_rate: int, *, grows: bool) -> None:
        self._file, self._spool, self._grows, self._written = file, io.BytesIO(), grows, 0
        container, encoding = _ENCODERS[format]
        rate = encoder_rate(format, sample_rate)
        self._resampler = soxr.ResampleStream(sample_rate, rate, 1) if rate != sample_rate else None
        with _as_os_error():
            self._encoder = soundfile.SoundFile(self._spool, "w", rate, 1, format=container, subtype=encoding)

    def write(self, pcm: bytes, *, is_last: bool = False) -> None:
        if self._resampler is not None:
            pcm = to_pcm16(self._resampler.resample_chunk(from_pcm16(pcm), last=is_last))
        with _as_os_error():
            self._encoder.write(np.frombuffer(pcm, dtype="<i2"))
        if self._grows:
            self._put(self._written)

    def close(self) -> None:
        if self._resampler is not None:
            self.write(b"", is_last=True)
        with _as_os_error():
            self._encoder.close()
        self._put(0)

    def _put(self, start: int) -> None:
        """Write the encoded bytes from `start` on to the file."""
        if self._grows:
            self._file.seek(start)
        with self._spool.getbuffer() as encoded:
            self._file.write(encoded[start:])
            self._written = len(encoded)
        self._file.flush()


def encoder_rate(format: str, sample_rate: int) -> int:
    """The lowest rate of `format` that is at least `sample_rate`, or its highest."""
    rates = _ENCODER_RATES.get(format, (sample_rate,))
    return min((rate for rate in rates if rate >= sample_rate), default=rates[-1])


@contextlib.contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except soundfile.SoundFileError as error:
        raise OSError(str(error)) from error
