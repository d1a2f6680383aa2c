"""Speech comes at one level: streamed as whole, to the bit, and with true peaks below a limit."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
from loudness_meter import loudness_lufs, true_peak_dbtp
from sine_models import VoicedSineModel

from sonoro.audio.encoders import DELAY_S, MAX_DBTP, Encoder, Gains, gains_for
from sonoro.audio.pcm import SILENT, to_pcm16
from sonoro.core.errors import InvalidRequest
from sonoro.core.options import VoiceDescription
from sonoro.core.types import ModelSpec, SpeechRequest

RATE = 24000
RATES = (8000, 16000, 24000, 44100, 48000)
SPEC = msgspec.structs.replace(
    VoicedSineModel().spec,
    voice_descriptions={"low": VoiceDescription(loudness_lufs=-24.0), "high": VoiceDescription()},
)


def syllables(seconds: float = 2.0, rate: int = RATE, peak: float = 0.5) -> bytes:
    """A gliding note in syllables, each begun by a click of three times its height."""
    time = np.arange(round(seconds * rate)) / rate
    wave = sum(np.sin(2 * np.pi * (150 * k * time + 3 * np.sin(7 * time))) / k for k in range(1, 12))
    swell = np.abs(np.sin(2 * np.pi * 2.3 * time))
    wave = wave * swell * peak / 3 / np.abs(wave).max()
    at = np.flatnonzero(np.diff(np.sign(np.sin(2 * np.pi * 2.3 * time))))
    for start in at + rate // 20:
        wave[start : start + rate // 1000] *= 3
    return to_pcm16(wave)


def levelled(pcm: bytes, gain: float, rate: int = RATE, sizes: tuple[int, ...] = ()) -> bytes:
    """`pcm` at a level, at once or in pieces of so many samples, over and over."""
    with Encoder("pcm", rate, gains=Gains(gain, {})) as encoder:
        made, at = b"", 0
        for size in itertools.cycle(sizes or (len(pcm),)):
            made += encoder.feed(pcm[at : at + 2 * size])
            at += 2 * size
            if at >= len(pcm):
                return made + encoder.finish()
    raise AssertionError("a cycle does not end")


def amplified(pcm: bytes, gain: float) -> bytes:
    return to_pcm16(np.frombuffer(pcm, "<i2") * np.float32(gain / 32768))


def heard(pcm: bytes) -> np.ndarray:
    return np.frombuffer(pcm, "<i2") / 32768


def test_the_meter_reads_what_the_standard_says() -> None:
    """A sine of 997 Hz at full scale in one channel is -3.01 LUFS; silence around it is gated; 0 dBTP at its peak."""
    sine = np.sin(2 * np.pi * 997 * np.arange(4 * RATE) / RATE)
    assert loudness_lufs(sine, RATE) == pytest.approx(-3.01, abs=0.01)
    assert loudness_lufs(np.concatenate([sine / 10, np.zeros(8 * RATE)]), RATE) == pytest.approx(-23.01, abs=0.25)
    # Sampled 45 degrees beside its peaks, a sine of a quarter of the rate has samples 3 dB lower.
    beside = np.sin(np.pi / 2 * np.arange(RATE) + np.pi / 4)
    assert true_peak_dbtp(beside, RATE) == pytest.approx(0.0, abs=0.1)


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("gain", [0.3, 1.0, 1.9, 6.0])
def test_streamed_is_whole_to_the_bit(rate: int, gain: float) -> None:
    pcm = syllables(rate=rate)
    whole = levelled(pcm, gain, rate)
    assert len(whole) == len(pcm)
    for sizes in ((1920,), (1, 7, 640, 2, 5000), (rate // 1000,)):
        assert levelled(pcm, gain, rate, sizes) == whole


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("gain", [4.0, 12.0])
def test_true_peaks_stay_below_the_limit(rate: int, gain: float) -> None:
    pcm = syllables(rate=rate)
    assert true_peak_dbtp(gain * heard(pcm), rate) > MAX_DBTP
    assert true_peak_dbtp(heard(levelled(pcm, gain, rate)), rate) <= MAX_DBTP


def test_a_peak_between_samples_is_limited_too() -> None:
    """No sample of this tone is above the limit, but its peaks are, by 1.4 dB."""
    tone = 0.7 * np.sin(np.pi / 2 * np.arange(RATE) + np.pi / 4)
    swell = np.minimum(np.arange(RATE) / 2400, 1)
    assert true_peak_dbtp(tone * swell / np.sqrt(0.5), RATE) > MAX_DBTP + 1
    assert true_peak_dbtp(heard(levelled(to_pcm16(tone * swell), 1.4142)), RATE) <= MAX_DBTP + 0.05


def test_what_stays_below_the_limit_is_amplified_and_no_more() -> None:
    pcm = syllables(peak=0.4)
    assert levelled(pcm, 1.0, sizes=(1920,)) == pcm
    assert levelled(pcm, 1.9, sizes=(1920,)) == amplified(pcm, 1.9)


def test_a_peak_lowers_what_is_near_it_alone() -> None:
    """Nothing earlier than the delay, and nothing later than the gain takes to rise."""
    quiet = np.full(RATE, 0.1)
    quiet[RATE // 2] = 0.9
    made = heard(levelled(to_pcm16(quiet), 2.0))
    changed = np.flatnonzero(np.abs(made - 2 * heard(to_pcm16(quiet))) > 1 / 32768)
    assert RATE // 2 - DELAY_S * RATE <= changed[0] <= RATE // 2
    assert RATE // 2 < changed[-1] < RATE // 2 + 0.2 * RATE
    assert np.all(np.abs(made) <= 10 ** (MAX_DBTP / 20))


@pytest.mark.parametrize("rate", RATES)
def test_at_most_2_ms_are_held_back(rate: int) -> None:
    pcm, made = syllables(0.2, rate), b""
    with Encoder("pcm", rate, gains=Gains(3.0, {})) as encoder:
        for at in range(0, len(pcm), 10):
            made += encoder.feed(pcm[at : at + 10])
            assert len(made) >= min(at + 10, len(pcm)) - 2 * DELAY_S * rate
        assert len(made + encoder.finish()) == len(pcm)


def encoded(format: str, pieces: list[bytes], gain: float, *, pause_s: float, **how: float) -> bytes:
    """`pieces` twice, with a pause between."""
    with Encoder(format, RATE, gains=Gains(gain, {}), **how) as encoder:  # type: ignore[arg-type]
        first = [encoder.feed(piece) for piece in pieces]
        return b"".join([*first, encoder.pause(pause_s), *map(encoder.feed, pieces), encoder.finish()])


@pytest.mark.parametrize("how", [{}, {"speed": 1.3}, {"out_rate": 16000}, {"speed": 0.8, "out_rate": 44100}])
@pytest.mark.parametrize("format", ["pcm", "wav", "flac", "mp3"])
def test_every_format_holds_the_limit_for_any_split(format: str, how: dict[str, float]) -> None:
    pcm = syllables()
    whole = encoded(format, [pcm], 4.0, pause_s=0.1, **how)
    pieces = [pcm[at : at + 3840] for at in range(0, len(pcm), 3840)]
    assert encoded(format, pieces, 4.0, pause_s=0.1, **how) == whole
    if format == "pcm":
        assert true_peak_dbtp(heard(whole), int(how.get("out_rate", RATE))) <= MAX_DBTP


@pytest.mark.parametrize("how", [{}, {"speed": 1.3}, {"out_rate": 16000}])
def test_a_pause_stays_exact(how: dict[str, float]) -> None:
    speed, rate = how.get("speed", 1.0), int(how.get("out_rate", RATE))
    tone = np.rint(9000 * np.cos(2 * np.pi * 440 * np.arange(RATE // 2) / RATE)).astype("<i2").tobytes()
    made = np.frombuffer(encoded("pcm", [tone], 4.0, pause_s=0.5 * speed, **how), "<i2")
    assert int(np.diff(np.flatnonzero(np.abs(made.astype(int)) > SILENT)).max()) - 1 == rate // 2


def test_a_line_of_another_voice_has_that_gain() -> None:
    pcm = syllables(peak=0.2)
    with Encoder("pcm", RATE, gains=Gains(2.0, {"loud": 1.0})) as encoder:
        made = encoder.feed(pcm) + encoder.feed(pcm, "loud") + encoder.feed(pcm, "of nobody") + encoder.finish()
    assert made == amplified(pcm, 2.0) + pcm + pcm


def resolved(voice: str) -> SpeechRequest:
    return SPEC.resolve(SpeechRequest(id="", text="Hello.", voice=voice))


def test_gains_lead_from_the_measured_level_to_the_one_asked_for() -> None:
    by_default = gains_for(None, SPEC, resolved("low"))
    assert by_default is not None
    assert by_default.own == pytest.approx(10 ** (6 / 20))
    asked = gains_for(-16, SPEC, resolved("low"))
    assert asked is not None
    assert asked.own == asked.others["low"] == pytest.approx(10 ** (8 / 20))
    assert gains_for("none", SPEC, resolved("low")) is None


def test_a_voice_that_was_not_measured_is_left_as_it_is() -> None:
    assert gains_for(None, SPEC, resolved("high")) is None
    assert gains_for("none", SPEC, resolved("high")) is None
    with pytest.raises(InvalidRequest, match=r"loudness: -18 .*the loudness of high is not known") as caught:
        gains_for(-18, SPEC, resolved("high"))
    assert caught.value.field == "loudness"


@pytest.mark.parametrize("value", [-15.9, -36.1, float("nan"), float("inf"), True, "loud", "-18"])
def test_a_bad_level_is_refused_with_its_limit(value: object) -> None:
    spec: ModelSpec = SPEC
    with pytest.raises(InvalidRequest, match=r"loudness: .*from -36 to -16, in LUFS, or none"):
        gains_for(value, spec, resolved("low"))  # type: ignore[arg-type]
