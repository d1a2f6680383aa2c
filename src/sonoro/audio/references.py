"""Reads reference recordings of voices, whatever their file claims to hold. Knows no model."""

import contextlib
import hashlib
import io
from pathlib import Path

import numpy as np
import soundfile
import soxr

from sonoro.audio.pcm import Samples
from sonoro.core.errors import InvalidReference, without_addresses
from sonoro.core.types import Reference, ReferenceUse

MIN_REFERENCE_S = 0.5
MAX_REFERENCE_S = 60.0
MIN_REFERENCE_HZ, MAX_REFERENCE_HZ = 4000, 384_000
MAX_KEPT_HZ = 48_000
"""References of a higher rate are resampled as they are read: a small file could decode to 92 MB otherwise."""

MAX_REFERENCE_CHANNELS = 8
MAX_DECODED_SAMPLES = 24_000_000
"""Of all channels together: 60 s of eight at 48 kHz, or of one at 384. A 250 KB file could decode to 184 million."""

MIN_REFERENCE_PEAK = 1e-3
"""60 dB below full scale, as from a muted microphone."""


def check_duration(duration_s: float) -> None:
    """Raise `InvalidReference` unless a recording lasts 0.5 to 60 s."""
    if not MIN_REFERENCE_S <= duration_s <= MAX_REFERENCE_S:
        limit = f"it must last at least {MIN_REFERENCE_S:g} s and at most {MAX_REFERENCE_S:g} s"
        # A longer recording was not decoded to its end, so its duration is unknown.
        shown = f"{duration_s:.2f} s" if duration_s < MIN_REFERENCE_S else f"more than {MAX_REFERENCE_S:g} s"
        raise InvalidReference("ref_audio", shown, limit)


def read_reference(source: bytes | str | Path, *, text: str | None = None, use: ReferenceUse = "prompt") -> Reference:
    """Read a recording (a file's bytes, or its path), mixed to mono, at its own rate but at most 48 kHz.
    Raises `InvalidReference` if it is not audio, has a rate outside 4 to 384 kHz or more than 8 channels, is shorter
    than 0.5 s or longer than 60 s, silent or not finite, or has more than 24 million samples in all channels. Never
    decodes more than that, whatever the header says, and keeps at most 60 s of one channel."""
    name = f"{len(source)} bytes" if isinstance(source, bytes) else str(source)
    try:
        samples, rate = _decode(source)
    except FileNotFoundError as error:
        raise InvalidReference("ref_audio", name, "there is no such file") from error
    except (soundfile.SoundFileError, OSError) as error:
        reason = without_addresses(str(error))
        raise InvalidReference("ref_audio", name, f"it must be audio that libsndfile reads ({reason})") from error
    _check_samples(samples)
    return Reference(pcm=samples.astype("<f4").tobytes(), sample_rate=rate, text=text, use=use)


def _decode(source: bytes | str | Path) -> tuple[Samples, int]:
    """Decode to mono samples [S] and their sample rate."""
    with contextlib.ExitStack() as stack:
        # A descriptor, not a path: the format must be detected by content, and the wrapper treats *.raw paths apart.
        opened = io.BytesIO(source) if isinstance(source, bytes) else stack.enter_context(Path(source).open("rb"))
        handle = opened if isinstance(opened, io.BytesIO) else opened.fileno()
        file = stack.enter_context(soundfile.SoundFile(handle, closefd=False))
        rate: int = file.samplerate
        _check_layout(rate, file.channels)
        # Mix one second at a time: a buffer for all channels would be as large as the header claims.
        kept_hz, nothing = min(rate, MAX_KEPT_HZ), np.zeros(0, np.float32)
        resampler = soxr.ResampleStream(rate, kept_hz, 1, quality="HQ") if kept_hz < rate else None
        decodable = MAX_DECODED_SAMPLES // file.channels
        parts, read, most = [nothing], 0, min(int(MAX_REFERENCE_S * rate), decodable) + 1
        while read < most and len(block := file.read(min(most - read, rate), dtype="float32", always_2d=True)):
            mono = block.mean(axis=1, dtype=np.float32)
            parts.append(mono if resampler is None else resampler.resample_chunk(mono))
            read += len(block)
        if resampler is not None:
            parts.append(resampler.resample_chunk(nothing, last=True))
        check_duration(read / rate)
        if read > decodable:
            most = f"{MAX_DECODED_SAMPLES / 1e6:g} million samples"
            limit = f"it must have at most {most}, those of all channels together"
            raise InvalidReference("ref_audio", f"{file.channels} channels at {rate} Hz", limit)
        return np.concatenate(parts), kept_hz


def _check_layout(rate: int, channels: int) -> None:
    if not MIN_REFERENCE_HZ <= rate <= MAX_REFERENCE_HZ:
        limit = f"its sample rate must be from {MIN_REFERENCE_HZ} to {MAX_REFERENCE_HZ} Hz"
        raise InvalidReference("ref_audio", f"{rate} Hz", limit)
    if channels > MAX_REFERENCE_CHANNELS:
        limit = f"it must have at most {MAX_REFERENCE_CHANNELS} channels"
        raise InvalidReference("ref_audio", f"{channels} channels", limit)


def _check_samples(samples: Samples) -> None:
    if not np.isfinite(samples).all():
        raise InvalidReference("ref_audio", "a sample that is not a finite number", "every sample must be finite")
    peak = float(np.abs(samples).max())
    if peak < MIN_REFERENCE_PEAK:
        limit = f"it must not be silent: a peak of at least {MIN_REFERENCE_PEAK:g}"
        raise InvalidReference("ref_audio", f"a peak of {peak:.1e}", limit)


def content_hash(references: tuple[Reference, ...]) -> str:
    """SHA-256 of audio, sample rate, transcript and use of `references`, as hex."""
    digest = hashlib.sha256()
    for reference in references:
        digest.update(repr((reference.sample_rate, reference.text, reference.use, reference.digest)).encode())
    return digest.hexdigest()
