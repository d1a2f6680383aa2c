"""A pause within encoded audio has its exact length, in every format, at every sample rate and speed."""

import io

import av
import numpy as np
import pytest

from sonoro.audio.encoders import FORMATS, Encoder
from sonoro.audio.pcm import SILENT

RATE, PAUSE_S, LOUD = 24000, 0.75, 0.02
LOSSLESS = ("wav", "flac", "pcm")


def note(duration_s: float = 0.5) -> bytes:
    """A steady tone that begins and ends at once."""
    time = np.arange(round(duration_s * RATE)) / RATE
    return np.rint(12000 * np.cos(2 * np.pi * 440 * time)).astype("<i2").tobytes()


def encoded(format: str, *, pause_s: float | None, speed: float = 1.0, rate: int | None = None) -> bytes:
    """Two notes with a pause between them, of `pause_s` once it is played; None: the notes apart."""
    with Encoder(format, RATE, speed=speed, out_rate=rate) as encoder:
        parts = [encoder.feed(note()), encoder.pause((pause_s or 0.0) * speed), encoder.feed(note()), encoder.finish()]
    return b"".join(parts)


def decoded(data: bytes, format: str) -> np.ndarray:
    if format == "pcm":
        return np.frombuffer(data, "<i2") / 32768
    with av.open(io.BytesIO(data), format={"opus": "ogg"}.get(format, format)) as container:
        frames = [frame.to_ndarray() for frame in container.decode(audio=0)]
    scale = 32768 if frames[0].dtype == np.int16 else 1
    return np.concatenate([frame.reshape(-1) / scale for frame in frames])


def gap(samples: np.ndarray, least: float = LOUD) -> int:
    """The longest stretch of samples up to `least`."""
    return int(np.diff(np.flatnonzero(np.abs(samples) > least)).max()) - 1


@pytest.mark.parametrize("speed", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("rate", [None, 8000, 22050, 44100, 48000])
@pytest.mark.parametrize("format", LOSSLESS)
def test_a_pause_is_exact_to_the_sample(format: str, rate: int | None, speed: float) -> None:
    made = decoded(encoded(format, pause_s=PAUSE_S, speed=speed, rate=rate), format)
    with Encoder("pcm", RATE, speed=speed, out_rate=rate) as encoder:
        alone = np.frombuffer(encoder.feed(note()) + encoder.finish(), "<i2") / 32768
        length = round(PAUSE_S * encoder.rate)
    assert gap(made, SILENT / 32768) == length
    # What was left out around it is below hearing, and short.
    assert 0 <= 2 * len(alone) + length - len(made) <= 0.012 * length / PAUSE_S
    kept = np.flatnonzero(np.abs(made) > LOUD)
    assert np.array_equal(made[: kept[0] + 100], alone[: kept[0] + 100])


@pytest.mark.parametrize("speed", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("format", ["mp3", "opus", "aac"])
@pytest.mark.parametrize("rate", [24000, 48000])
def test_a_pause_is_within_2_ms_once_decoded(format: str, rate: int, speed: float) -> None:
    made, exact = (decoded(encoded(kind, pause_s=PAUSE_S, speed=speed, rate=rate), kind) for kind in (format, "pcm"))
    made_s, exact_s = gap(made) / (48000 if format == "opus" else rate), gap(exact) / rate
    assert abs(made_s - exact_s) <= 0.002
    # A tempo ramps up and down.
    assert abs(exact_s - PAUSE_S) <= (0.0001 if speed == 1 else 0.012)


def test_a_pause_may_come_first_and_last_and_alone() -> None:
    for format in FORMATS:
        with Encoder(format, RATE, speed=2.0) as encoder:
            data = encoder.pause(1.0) + encoder.pause(1.0) + encoder.finish()
        samples = decoded(data, format)
        assert np.abs(samples).max() < 0.001
        rate = 48000 if format == "opus" else RATE
        assert rate <= len(samples) <= 1.15 * rate
