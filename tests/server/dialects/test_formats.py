"""G.711 under each API's name for it, judged against a decoder of others and against PCM at 8 kHz."""

import asyncio
import io

import numpy as np
import pytest
import soundfile

from sonoro.audio.encoders import Encoder, Encoding, encoder_threads
from sonoro.audio.pcm import a_law, mu_law, to_pcm16
from sonoro.core.errors import InvalidRequest
from sonoro.server.dialects import cartesia, deepgram, elevenlabs
from sonoro.server.dialects.formats import AudioFormat
from sonoro.server.schemas import parse

LAWS = {"ULAW": mu_law, "ALAW": a_law}
RATES = (8000, 24000, 44100, 48000)


def decoded(coded: bytes, law: str) -> np.ndarray:
    """What libsndfile makes of G.711, in steps of 16 bits."""
    file = io.BytesIO(coded)
    read = soundfile.read(file, format="RAW", subtype=law, samplerate=8000, channels=1, dtype="int16")
    return read[0].astype(float)


def formats(law: str) -> list[AudioFormat]:
    """G.711 as each API names it."""
    letter = {"ULAW": "u", "ALAW": "a"}[law]
    output = {"container": "raw", "encoding": f"pcm_{'mu' if letter == 'u' else 'a'}law", "sample_rate": 8000}
    encoding = "mulaw" if letter == "u" else "alaw"
    return [
        elevenlabs.audio_format(f"{letter}law_8000"),
        cartesia.Output.model_validate(output).audio,
        deepgram.Query(encoding=encoding, sample_rate=8000, container="none").whole,
        deepgram.Query(encoding=encoding, sample_rate=8000).streamed,
    ]


def encoded(format: AudioFormat, samples: np.ndarray, rate: int) -> bytes:
    """`samples` [S] in [-1, 1] as they leave the server, in chunks."""
    threads = encoder_threads()

    async def encode() -> bytes:
        encoding = Encoding(Encoder(format.codec, rate, out_rate=format.rate), threads)
        pcm = to_pcm16(samples.astype(np.float32))
        parts = [await encoding.feed(pcm[at : at + 1920]) for at in range(0, len(pcm), 1920)]
        return b"".join(map(format, [*parts, await encoding.finish()]))

    try:
        return asyncio.run(encode())
    finally:
        threads.shutdown()


@pytest.mark.parametrize("rate", [-1, 0, 7999, 48_001, 2**40])
def test_a_header_is_made_for_no_rate_that_no_encoder_has(rate: int) -> None:
    """It holds 32 bits of it."""
    wav = {"container": "wav", "encoding": "pcm_s16le", "sample_rate": rate}
    for format in (cartesia.Output.model_validate(wav), deepgram.Query(encoding="linear16", sample_rate=rate)):
        with pytest.raises(InvalidRequest, match=f"^sample_rate: {rate} is not allowed"):
            format.whole if isinstance(format, deepgram.Query) else format.audio
    assert deepgram.Query(sample_rate=rate).streamed.rate == rate  # refused with the other fields


def test_bit_rates_are_those_that_names_and_fields_ask_for() -> None:
    """Samples have none, so that a name which gives them one is none of ElevenLabs'."""
    assert elevenlabs.audio_format("mp3_44100_64") == AudioFormat("mp3", 44100, bit_rate=64_000)
    assert elevenlabs.audio_format("opus_48000_96") == AudioFormat("opus", 48000, bit_rate=96_000)
    for name in ("mp3_44100", "pcm_24000_64", "mp3_44100_", "ulaw_8000_8"):
        with pytest.raises(InvalidRequest, match="output_format"):
            elevenlabs.audio_format(name)
    mp3 = cartesia.Output.model_validate({"container": "mp3", "sample_rate": 44100, "bit_rate": 192_000})
    assert mp3.audio == AudioFormat("mp3", 44100, bit_rate=192_000)
    for encoding in ("mp3", "opus", "aac"):
        query = parse(deepgram.Query, {"encoding": encoding, "bit_rate": "48000"})
        assert query.whole == AudioFormat(encoding, bit_rate=48_000)


@pytest.mark.parametrize("law", LAWS)
def test_every_sample_becomes_the_nearest_code(law: str) -> None:
    """Half a step of the code at most, which is a 32nd of what it is about; where steps change, G.711 does not put the
    border in the middle of two values, and a code that is not the nearest is its neighbour."""
    samples = np.arange(-32768, 32768)
    ours = decoded(LAWS[law](samples.astype("<i2").tobytes()), law)
    assert np.all(np.abs(ours - samples) <= (np.abs(samples) + 264) / 32)
    values = np.unique(decoded(bytes(range(256)), law))
    nearest = np.searchsorted((values[1:] + values[:-1]) / 2, samples)
    assert np.max(np.abs(np.searchsorted(values, ours) - nearest)) <= 1
    assert np.mean(np.searchsorted(values, ours) != nearest) < 0.03


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("law", LAWS)
def test_what_is_decoded_again_is_pcm_at_8_khz_within_the_codes_noise(law: str, rate: int) -> None:
    """At least 35 dB: 38 is what G.711 has in the middle of its range. Like speech, up to 3.4 kHz."""
    time_s = np.arange(2 * rate) / rate
    tones = sum(np.sin(2 * np.pi * hz * time_s + hz) / hz**0.5 for hz in (180, 360, 720, 1430, 2210, 3300))
    samples = 0.25 * tones / np.abs(tones).max() * (1 + 0.9 * np.sin(2 * np.pi * 3 * time_s)) * 1.9
    pcm = np.frombuffer(encoded(AudioFormat("pcm", 8000), samples, rate), "<i2").astype(float)
    for format in formats(law):
        coded = encoded(format, samples, rate)
        assert len(coded) == len(pcm) == 16000
        noise = decoded(coded, law) - pcm
        assert 10 * np.log10(np.mean(pcm**2) / np.mean(noise**2)) >= 35


@pytest.mark.parametrize("rate", [rate for rate in RATES if rate > 8000])
@pytest.mark.parametrize("hz", [5000, 6000, 8000, 9500, 11000])
def test_tones_that_8_khz_cannot_hold_leave_nothing(hz: int, rate: int) -> None:
    """At most -60 dB of a tone at full scale, which would come back as another; its ends, which click, apart."""
    samples = 0.99 * np.sin(2 * np.pi * hz * np.arange(rate) / rate)
    for law in LAWS:
        for format in formats(law):
            heard = decoded(encoded(format, samples, rate), law)[400:-400]
            # G.711 has no zero but +-8 (A): -72 dB of full scale.
            assert 20 * np.log10(max(np.sqrt(np.mean(heard**2)), 1e-9) / (0.99 * 32768 / 2**0.5)) <= -60
