"""A pause within encoded audio has its exact length, in every format, at every sample rate and speed."""

import io

import av
import numpy as np
import pytest

from sonoro.audio.encoders import FORMATS, Encoder
from sonoro.audio.pcm import SILENT

RATE, PAUSE_S, LOUD, QUARTER = 24000, 0.75, 0.02, 0.09
LOSSLESS = ("wav", "flac", "pcm")


def note(sample_rate: int = RATE) -> bytes:
    """A steady tone of half a second that begins and ends at once."""
    time = np.arange(sample_rate // 2) / sample_rate
    return np.rint(12000 * np.cos(2 * np.pi * 440 * time)).astype("<i2").tobytes()


def encoded(format: str, *, speed: float = 1.0, rate: int | None = None, sample_rate: int = RATE) -> bytes:
    """Two notes at `sample_rate` with a pause between them, of `PAUSE_S` once it is played."""
    with Encoder(format, sample_rate, speed=speed, out_rate=rate) as encoder:
        tone = note(sample_rate)
        parts = [encoder.feed(tone), encoder.pause(PAUSE_S * speed), encoder.feed(tone), encoder.finish()]
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
    made = decoded(encoded(format, speed=speed, rate=rate), format)
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
    made, exact = (decoded(encoded(kind, speed=speed, rate=rate), kind) for kind in (format, "pcm"))
    made_s, exact_s = gap(made) / (48000 if format == "opus" else rate), gap(exact) / rate
    assert abs(made_s - exact_s) <= 0.002
    # A tempo ramps up and down.
    assert abs(exact_s - PAUSE_S) <= (0.0001 if speed == 1 else 0.012)


SPEEDS = (0.25, 0.5, 1.0, 1.7, 4.0)
EVERY_RATE = (None, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)


@pytest.mark.parametrize("sample_rate", [16000, 24000, 44100, 48000])
def test_a_pause_is_kept_for_every_rate_of_a_model(sample_rate: int) -> None:
    """Each rate once with some speed; all 1,200 combinations with five speeds were run once."""
    for number, rate in enumerate(EVERY_RATE):
        speed = SPEEDS[(number + sample_rate // 1000) % len(SPEEDS)]
        how = {"speed": speed, "rate": rate, "sample_rate": sample_rate}
        own_rate = rate or sample_rate
        exact = decoded(encoded("pcm", **how), "pcm")
        assert gap(exact, SILENT / 32768) == round(PAUSE_S * own_rate)
        for format in ("mp3", "opus", "aac"):
            with Encoder(format, sample_rate, out_rate=rate) as encoder:
                written = 48000 if format == "opus" else encoder.rate
            # At a quarter of the tone: a coder at low rates may sound some milliseconds before a tone begins.
            made_s = gap(decoded(encoded(format, **how), format), QUARTER) / written
            assert abs(made_s - gap(exact, QUARTER) / own_rate) <= 0.002, (format, rate, speed)


def test_a_pause_may_come_first_and_last_and_alone() -> None:
    for format in FORMATS:
        with Encoder(format, RATE, speed=2.0) as encoder:
            data = encoder.pause(1.0) + encoder.pause(1.0) + encoder.finish()
        samples = decoded(data, format)
        assert np.abs(samples).max() < 0.001
        rate = 48000 if format == "opus" else RATE
        assert rate <= len(samples) <= 1.15 * rate
