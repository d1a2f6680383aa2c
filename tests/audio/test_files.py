"""Reference recordings in, written audio out, in every format."""

import io
import struct
import sys
import tracemalloc
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile

from sonoro.audio import references
from sonoro.audio.files import FORMATS, AudioWriter, output_format, write_audio
from sonoro.audio.pcm import from_pcm16, resample, to_pcm16
from sonoro.audio.references import read_reference
from sonoro.core.errors import InvalidReference, OutputError


def tone(seconds: float = 1.0, rate: int = 24000, hz: float = 440.0) -> np.ndarray:
    return (0.5 * np.sin(2 * np.pi * hz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def encoded(samples: np.ndarray, rate: int = 24000, **how: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **({"format": "WAV", "subtype": "FLOAT"} | how))
    return file.getvalue()


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(a, b)[0, 1])


def test_pcm16_round_trip_is_exact_for_every_value() -> None:
    every = np.arange(-32768, 32768, dtype="<i2")
    samples = from_pcm16(every.tobytes())
    assert samples.dtype == np.float32
    assert np.abs(samples).max() <= 1
    assert to_pcm16(samples) == every.tobytes()


def test_pcm16_rounds_to_nearest_and_clips() -> None:
    values = np.array([0.4, 0.6, -0.6]) / 32768
    assert np.frombuffer(to_pcm16(values), "<i2").tolist() == [0, 1, -1]
    assert np.frombuffer(to_pcm16(np.array([1.0, 2.0, -2.0])), "<i2").tolist() == [32767, 32767, -32768]


@pytest.mark.parametrize("to_hz", [16000, 24000, 48000])
def test_resample_keeps_the_tone(to_hz: int) -> None:
    resampled = resample(tone(rate=24000), 24000, to_hz)
    assert resampled.dtype == np.float32
    assert len(resampled) == to_hz
    # The ends lack context; a tone of 440 Hz is far inside every band.
    inner = slice(to_hz // 10, -to_hz // 10)
    assert np.abs(resampled - tone(rate=to_hz))[inner].max() < 1e-3


@pytest.mark.parametrize(
    "how",
    [
        {"format": "WAV", "subtype": "FLOAT"},
        {"format": "WAV", "subtype": "PCM_24"},
        {"format": "FLAC", "subtype": "PCM_16"},
        {"format": "OGG", "subtype": "OPUS"},
        {"format": "MP3", "subtype": "MPEG_LAYER_III"},
    ],
)
def test_references_are_read_in_every_format_from_bytes_and_path(how: dict, tmp_path: Path) -> None:
    data = encoded(tone(), **how)
    # A suffix that lies: the content decides.
    path = tmp_path / "reference.raw"
    path.write_bytes(data)
    from_bytes, from_path = read_reference(data, text="Hi."), read_reference(path, text="Hi.")
    assert from_bytes == from_path
    assert (from_bytes.sample_rate, from_bytes.text, from_bytes.use) == (24000, "Hi.", "prompt")
    assert abs(from_bytes.duration_s - 1) < 0.06, "encoders pad by less than a block"
    length = min(len(from_bytes.samples), 24000)
    assert correlation(from_bytes.samples[:length], tone()[:length]) > 0.99


def test_channels_are_mixed() -> None:
    reference = read_reference(encoded(np.stack([tone(), 0.5 * tone()], 1)), use="reference")
    np.testing.assert_allclose(reference.samples, 0.75 * tone(), atol=1e-7)


@pytest.mark.parametrize("seconds", [0.5, 60.0])
def test_the_shortest_and_longest_reference_are_accepted(seconds: float) -> None:
    assert read_reference(encoded(tone(seconds, 8000), 8000), use="reference").duration_s == seconds


@pytest.mark.parametrize(
    ("samples", "limit"),
    [
        (tone(0.49, 8000), "at least 0.5 s"),
        (tone(60.1, 8000), "at most 60 s"),
        (np.zeros(0, np.float32), "at least 0.5 s"),
        (1e-4 * tone(1.0, 8000), "silent"),
        (np.zeros(8000, np.float32), "silent"),
        (np.where(np.arange(8000) == 77, np.nan, tone(1.0, 8000)), "finite"),
        (np.where(np.arange(8000) == 77, np.inf, tone(1.0, 8000)), "finite"),
    ],
)
def test_unusable_references_are_refused(samples: np.ndarray, limit: str) -> None:
    with pytest.raises(InvalidReference, match=limit) as refusal:
        read_reference(encoded(samples, 8000), use="reference")
    assert refusal.value.field == "ref_audio"


@pytest.mark.parametrize(
    ("rate", "channels", "limit"),
    [
        (2**31 - 1, 1, "from 4000 to 384000 Hz"),
        (384_001, 1, "from 4000 to 384000 Hz"),
        (3999, 1, "from 4000 to 384000 Hz"),
        (0, 1, "libsndfile|from 4000"),
        (48_000, 9, "at most 8 channels"),
        (48_000, 1024, "at most 8 channels"),
        (384_000, 8, "at least 0.5 s"),
    ],
)
def test_a_header_cannot_ask_for_much_memory(rate: int, channels: int, limit: str) -> None:
    """A few bytes that say they are a long recording of many channels."""
    layout = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, channels, rate, 2**32 - 1, 2 * channels, 16)
    data = b"RIFF" + struct.pack("<I", 2**31 - 1) + b"WAVE" + layout + b"data" + struct.pack("<I", 2**31 - 37)
    tracemalloc.start()
    with pytest.raises(InvalidReference, match=limit):
        read_reference(data + b"\1" * 4096, use="reference")
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 20e6


@pytest.mark.parametrize(("rate", "channels"), [(4000, 1), (48_000, 8)])
def test_the_widest_layouts_are_mixed_as_the_whole_would_be(rate: int, channels: int) -> None:
    samples = np.stack([tone(2.5, rate, 100 + 10 * channel) for channel in range(channels)], 1)
    reference = read_reference(encoded(samples, rate), use="reference")
    assert reference.sample_rate == rate
    np.testing.assert_array_equal(reference.samples, samples.mean(axis=1, dtype=np.float32))


@pytest.mark.parametrize(("rate", "channels"), [(48_001, 1), (96_000, 2), (384_000, 8)])
def test_a_high_rate_is_kept_at_one_that_suffices(rate: int, channels: int) -> None:
    samples = np.stack([tone(2.5, rate, 100 + 10 * channel) for channel in range(channels)], 1)
    reference = read_reference(encoded(samples, rate), use="reference")
    assert (reference.sample_rate, len(reference.samples)) == (48_000, 120_000)
    whole = resample(samples.mean(axis=1, dtype=np.float32), rate, 48_000)
    # Second by second or at once it is one filter; its sums are float32.
    np.testing.assert_allclose(reference.samples, whole, atol=1e-6)


def test_decoding_is_bounded_by_the_samples_of_all_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(references, "MAX_DECODED_SAMPLES", 80_000)
    samples = np.full((10_001, 8), 0.1, np.float32)
    assert read_reference(encoded(samples[:-1], 8000), use="reference").duration_s == 1.25
    with pytest.raises(InvalidReference, match=r"8 channels at 8000 Hz.*million samples"):
        read_reference(encoded(samples, 8000), use="reference")


def test_a_sample_too_many_is_too_many_at_any_rate() -> None:
    samples = np.full(60 * 96_000 + 1, 0.1, np.float32)
    assert read_reference(encoded(samples[:-1], 96_000), use="reference").duration_s == 60
    with pytest.raises(InvalidReference, match="at most 60 s"):
        read_reference(encoded(samples, 96_000), use="reference")


@pytest.mark.parametrize("source", [b"", b"no audio at all" * 100, b"RIFF\x00\x00\x00\x00WAVE", encoded(tone())[:30]])
def test_what_is_not_audio_is_refused(source: bytes, tmp_path: Path) -> None:
    path = tmp_path / "noise.wav"
    path.write_bytes(source)
    for given in (source, path):
        with pytest.raises(InvalidReference) as refusal:
            read_reference(given, use="reference")
        assert refusal.value.field == "ref_audio"


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path, words in ((tmp_path / "none.wav", "no such file"), (tmp_path, "directory")):
        with pytest.raises(InvalidReference, match=words):
            read_reference(path, use="reference")


@pytest.mark.parametrize("text", [None, "", "  "])
def test_a_prompt_needs_its_transcript(text: str | None) -> None:
    reference = read_reference(encoded(tone()), text=text)
    with pytest.raises(InvalidReference) as refusal:
        reference.check()
    assert refusal.value.field == "ref_text"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rate", [24000, 44100, 48000])
def test_written_in_chunks_or_whole_it_is_the_same_file(format: str, rate: int, tmp_path: Path) -> None:
    samples = tone(1.0, rate)
    path, whole = tmp_path / f"chunks.{format}", tmp_path / f"whole.{format}"
    with AudioWriter(path, rate) as writer:
        for start in range(0, rate, 1920):
            writer.write(to_pcm16(samples[start : start + 1920]))
    write_audio(whole, samples, rate)
    if format == "pcm":
        got, got_rate = from_pcm16(path.read_bytes()), rate
    else:
        got, got_rate = soundfile.read(path, dtype="float32")
    assert got_rate == (48000 if format == "opus" and rate == 44100 else rate)
    if format == "opus":
        # An Ogg stream carries a random serial number, so files differ.
        np.testing.assert_allclose(got, soundfile.read(whole, dtype="float32")[0], atol=1e-6)
    else:
        assert path.read_bytes() == whole.read_bytes()
    if format in ("wav", "flac", "pcm"):
        assert to_pcm16(got) == to_pcm16(samples)
    else:
        assert abs(len(got) - got_rate) < got_rate * 0.06
        assert correlation(got[:got_rate], tone(1.0, got_rate)[: len(got)]) > 0.99


def test_a_wav_is_readable_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "growing.wav"
    with AudioWriter(path, 24000) as writer:
        writer.write(to_pcm16(tone(0.1)))
        assert len(soundfile.read(path)[0]) == 2400
        writer.write(to_pcm16(tone(0.1)))
        assert len(soundfile.read(path)[0]) == 4800
    with wave.open(str(path)) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels()) == (4800, 24000, 1)


@pytest.mark.parametrize("format", FORMATS)
def test_stdout_gets_a_readable_stream(format: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    with AudioWriter("-", 24000, format) as writer:
        writer.write(to_pcm16(tone(0.5)))
        early = capfdbinary.readouterr().out
        writer.write(to_pcm16(tone(0.5)))
    assert bool(early) == (format in ("wav", "pcm")), "a streamable format leaves with its chunk"
    data = early + capfdbinary.readouterr().out
    got = from_pcm16(data) if format == "pcm" else soundfile.read(io.BytesIO(data))[0]
    assert abs(len(got) - 24000) < 24000 * 0.06


def test_stdout_that_is_a_terminal_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with pytest.raises(OutputError, match="terminal"):
        AudioWriter("-", 24000)


@pytest.mark.parametrize(
    ("path", "given", "format"),
    [
        ("a.WAV", None, "wav"),
        ("a.ogg", None, "opus"),
        ("a.raw", None, "pcm"),
        ("a.wav", "mp3", "mp3"),
        ("a", "flac", "flac"),
    ],
)
def test_the_format_comes_from_the_suffix_unless_given(
    path: str, given: str | None, format: str, tmp_path: Path
) -> None:
    assert output_format(tmp_path / path, given) == format
    assert output_format("-") == "wav"


@pytest.mark.parametrize(
    ("path", "given", "words"),
    [
        ("a.aac", None, "suffix"),
        ("a", None, "suffix"),
        ("a.wav", "aac", "wav, flac, mp3, opus, pcm"),
        ("missing/a.wav", None, "no folder"),
        (".", "wav", "is a folder"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(
    path: str, given: str | None, words: str, tmp_path: Path
) -> None:
    for action in (
        lambda: output_format(tmp_path / path, given),
        lambda: write_audio(tmp_path / path, tone(), 24000, given),
    ):
        with pytest.raises(OutputError, match=words):
            action()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_opened_is_an_output_error() -> None:
    # Not even root can create files there.
    with pytest.raises(OutputError, match=r"cannot write '/proc/a\.wav'"):
        write_audio("/proc/a.wav", tone(), 24000)


@pytest.mark.parametrize("format", FORMATS)
def test_a_full_disk_is_an_output_error(format: str) -> None:
    with pytest.raises(OutputError, match="No space left"):
        write_audio("/dev/full", tone(), 24000, format)
    assert Path("/dev/full").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_interrupted_can_be_played_as_far_as_it_came(format: str, tmp_path: Path) -> None:
    path, whole = tmp_path / f"a.{format}", tmp_path / f"b.{format}"

    def interrupted(chunks: int) -> None:
        with AudioWriter(path, 24000) as writer:
            for _ in range(chunks):
                writer.write(to_pcm16(tone()))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted(0)
    assert not path.exists(), "nothing was written"
    with pytest.raises(KeyboardInterrupt):
        interrupted(2)
    write_audio(whole, np.concatenate([tone()] * 2), 24000)
    if format == "opus":  # each of its streams has a number of its own
        assert soundfile.info(path).frames == soundfile.info(whole).frames
    else:
        assert path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_grows_with_its_chunks(format: str, tmp_path: Path) -> None:
    path, sizes = tmp_path / f"a.{format}", []
    with AudioWriter(path, 24000) as writer:
        for _ in range(4):
            writer.write(to_pcm16(tone()))
            sizes.append(path.stat().st_size)
    assert 0 < sizes[0] < sizes[1] < sizes[3]


def test_an_impossible_rate_is_an_output_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        write_audio(tmp_path / "a.flac", tone(), 2_000_000)
    assert not (tmp_path / "a.flac").exists()


@pytest.mark.parametrize("format", FORMATS)
def test_no_audio_is_still_a_file(format: str, tmp_path: Path) -> None:
    write_audio(tmp_path / f"a.{format}", np.zeros(0, np.float32), 24000)
    assert (tmp_path / f"a.{format}").exists()
