"""Streaming encoders: PCM16 in, encoded bytes out, in the six formats of the speech API at any speed and rate.

The order is gain, tempo, sample rate, limiter, format. Latency, as bytes after 1, 2 and 5 chunks of 80 ms at 24 kHz:

| format | content type | bytes after 1, 2, 5 | held back |
|---|---|---|---|
| mp3 | audio/mpeg | 576, 1440, 4320 | a frame (24 ms) and the coder's delay (46 ms, silence at the start) |
| opus | audio/ogg; codecs=opus | 901, 1800, 4471 | one page of one 20 ms packet |
| aac | audio/aac | 0, 863, 3172 | two frames of 43 ms: the first needs 85 ms of sound |
| flac | audio/flac | 978, 1880, 4722 | a block of 24 ms |
| wav | audio/wav | 3884, 7724, 19244 | nothing; the header gives no length |
| pcm | audio/pcm | 3840, 7680, 19200 | nothing |

Tempo adds 40 to 80 ms, up to 200 ms above speed 2; resampling 10 to 60 ms; the limiter of a level 2 ms. Slow work runs
in threads (`Encoding`), so that it does not block the event loop."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import soxr

from sonoro.audio.compressed import encoder_rate
from sonoro.audio.pcm import Samples, audible, from_pcm16, to_pcm16
from sonoro.audio.wav import wav_header
from sonoro.core.config import usable_cores
from sonoro.core.errors import InvalidRequest
from sonoro.core.types import ModelSpec, SpeechRequest

if TYPE_CHECKING:
    from sonoro.audio.coded import Coded, Tempo

MIN_SPEED, MAX_SPEED = 0.25, 4.0
MIN_RATE, MAX_RATE = 8000, 48000
MIN_BIT_RATE, MAX_BIT_RATE = 8000, 256_000
DEFAULT_LUFS, MIN_LUFS, MAX_LUFS = -18.0, -36.0, -16.0
MOST_BITS_UNASKED = 128_000

LEAST_BITS = 32_000
"""The lowest bit rate of mp3 at 32 kHz and above, whatever is asked for."""

MOST_DELAY_S = 1.0
"""Upper bound of the audio that tempo and codec add, header included."""

PAGES_PER_S, PAGE_BYTES = 50, 32
"""Upper bound of a container's overhead: opus has the most pages, one per 20 ms."""


class _Format(NamedTuple):
    """A format's codec and container; no codec means PCM16. `rates` names a format of `audio.compressed` with the same
    sample rates. Noise takes at most `excess` times `bits_per_sample`, or times 16 if that is 0."""

    content_type: str
    rates: str
    codec: str = ""
    container: str = ""
    bits_per_sample: int = 0
    options: str = ""
    excess: float = 1.0


# mp3: without a bit reservoir frames are independent; a Xing header cannot be completed in a stream. Level 7 leaves the
# search for quantisers out, which at these bit rates gains nothing on speech and takes two fifths of the time.
# opus: a page is written when the next begins, so its duration (1 s by default) is latency.
# flac: level 2 is the highest with short blocks, 24 to 27 ms instead of 105.
_NOW = "flush_packets=1"
_MP3 = f"{_NOW}:reservoir=0:compression_level=7:write_xing=0:id3v2_version=0"
_FLAC = f"{_NOW}:compression_level=2:metadata_header_padding=0"
_FORMATS = {
    "mp3": _Format("audio/mpeg", "mp3", "libmp3lame", "mp3", 4, _MP3, 1.3),
    "opus": _Format("audio/ogg; codecs=opus", "opus", "libopus", "ogg", 3, f"{_NOW}:page_duration=20000", 2.0),
    "aac": _Format("audio/aac", "mp3", "aac", "adts", 4, _NOW, 1.5),
    "flac": _Format("audio/flac", "flac", "flac", "flac", 0, _FLAC, 1.05),
    "wav": _Format("audio/wav", "wav"),
    "pcm": _Format("audio/pcm", "pcm"),
}
FORMATS = tuple(_FORMATS)
CONTENT_TYPES = tuple(format.content_type for format in _FORMATS.values())


class Encoder:
    """Encodes PCM16 mono of `sample_rate` Hz to `format`; a context manager. Not thread-safe.

    `out_rate` is the sample rate wanted, `rate` the one written: the next that the format has. `bit_rate`, in bits per
    second, is for mp3, opus and aac, rounded to one that they have. With `gains` the audio is brought to a level. The
    result is the same for any split of the input.
    The codec is opened at the first feed, which takes up to 5 ms. Raises `InvalidRequest` naming `response_format`,
    `speed`, `sample_rate` or `bit_rate`."""

    _tempo: Tempo | None = None
    _resampler: soxr.ResampleStream | None = None
    _coded: Coded | None = None

    def __init__(
        self,
        format: str,
        sample_rate: int,
        *,
        speed: float = 1.0,
        out_rate: int | None = None,
        bit_rate: int | None = None,
        gains: Gains | None = None,
    ) -> None:
        assert MIN_RATE <= sample_rate <= MAX_RATE, sample_rate
        _check(format, speed, out_rate, bit_rate)
        self._format, self._in_rate, self.speed = _FORMATS[format], sample_rate, speed
        self.content_type = self._format.content_type
        self.rate = out_rate or sample_rate
        if self._format.codec:
            self.rate = encoder_rate(self._format.rates, self.rate)
        # 0: PCM16, or a lossless format.
        self._bit_rate = bit_rate or min(self._format.bits_per_sample * self.rate, MOST_BITS_UNASKED)
        self._header = wav_header(self.rate) if format == "wav" else b""
        self._level = None if gains is None else _Leveller(gains, self.rate)
        self._half, self._is_begun, self._is_open = b"", False, True
        self._is_after_pause = False

    def max_bytes(self, audio_s: float) -> int:
        """An upper bound of the encoded bytes of `audio_s` seconds of input."""
        played_s = audio_s / self.speed + MOST_DELAY_S
        rate_bits = max(self._bit_rate, LEAST_BITS) if self._bit_rate else 16 * self.rate
        return math.ceil(played_s * (rate_bits / 8 * self._format.excess + PAGES_PER_S * PAGE_BYTES))

    @property
    def is_quick(self) -> bool:
        """Whether samples pass unchanged but for their level, which takes microseconds; otherwise a chunk takes about a
        millisecond."""
        return not self._format.codec and self.speed == 1 and self.rate == self._in_rate

    def feed(self, pcm: bytes, voice: str | None = None) -> bytes:
        """Encode more PCM16 little-endian, split anywhere, and return the bytes that are ready, possibly none. `voice`
        speaks it; None: that of the request."""
        assert self._is_open, "the encoder is closed"
        pcm = self._half + pcm
        whole = len(pcm) // 2 * 2
        self._half = pcm[whole:]
        pcm = pcm[:whole]
        if self.is_quick:
            return self._with_header(pcm if self._level is None else self._level.feed(pcm, voice))
        return self._encode(from_pcm16(pcm) if self._level is None else self._level.amplify(pcm, voice))

    def pause(self, seconds: float) -> bytes:
        """Encode a pause of `seconds` at the tempo of the input, exact to the sample at the output, behind what is held
        back; return the bytes that are ready."""
        assert self._is_open, "the encoder is closed"
        assert not self._half, "the audio ends within a sample"
        silence = bytes(2 * round(seconds / self.speed * self.rate))
        if self.is_quick:
            return self._with_header(self._held() + silence)
        # The filters end, and begin, in samples below hearing: these count as of the pause.
        pcm = _without_end(self._changed(np.zeros(0, np.float32), is_last=True)) + silence
        self._tempo, self._resampler = self._filters()
        self._is_after_pause = True
        return self._coded.write(pcm) if self._coded else self._with_header(pcm)

    def finish(self) -> bytes:
        """Encode what is held back, close, and return the last bytes."""
        assert self._is_open, "the encoder is closed"
        assert not self._half, "the audio ends within a sample"
        with self:
            if self.is_quick:
                return self._with_header(self._held())
            last = self._encode(np.zeros(0, np.float32), is_last=True)
            return last + self._coded.finish() if self._coded else last

    def _held(self) -> bytes:
        """What is held back of samples that pass."""
        return b"" if self._level is None else self._level.feed(b"", is_last=True)

    def close(self) -> None:
        """Free the codec; may be called again."""
        self._is_open, self._tempo, self._resampler = False, None, None
        if self._coded:
            self._coded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # A dropped encoder frees its threads now; PyAV's objects would keep them until a garbage collection.
        self.close()

    def _begin(self) -> None:
        self._is_begun = True
        self._tempo, self._resampler = self._filters()
        if self._format.codec:
            kind = self._format.codec, self._format.container, self._format.options
            self._coded = _by_av().Coded(*kind, self.rate, self._bit_rate)

    def _filters(self) -> tuple[Tempo | None, soxr.ResampleStream | None]:
        """New filters for tempo and sample rate, as far as they are needed."""
        tempo = _by_av().Tempo(self._in_rate, self.speed) if self.speed != 1 else None
        return tempo, soxr.ResampleStream(self._in_rate, self.rate, 1) if self.rate != self._in_rate else None

    def _encode(self, samples: Samples, *, is_last: bool = False) -> bytes:
        pcm = self._changed(samples, is_last=is_last)
        return self._coded.write(pcm) if self._coded else self._with_header(pcm)

    def _changed(self, samples: Samples, *, is_last: bool) -> bytes:
        """PCM16 of `samples` at the tempo and rate of the output; if `is_last`, with all that the filters hold."""
        if not self._is_begun:
            self._begin()
        if self._tempo is not None:
            samples = self._tempo.finish() if is_last else self._tempo.feed(samples)
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=is_last)
        if self._level is not None:
            samples = self._level.limit(samples, is_last=is_last)
        pcm = to_pcm16(samples)
        if self._is_after_pause:
            heard = audible(np.frombuffer(pcm, "<i2"))
            self._is_after_pause = not len(heard)
            pcm = pcm[2 * int(heard[0]) :] if len(heard) else b""
        return pcm

    def _with_header(self, pcm: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + pcm


def _by_av() -> Any:
    return import_module("sonoro.audio.coded")


def _check(format: str, speed: float, out_rate: int | None, bit_rate: int | None) -> None:
    if format not in _FORMATS:
        raise InvalidRequest("response_format", format, f"it must be one of {', '.join(FORMATS)}")
    if bit_rate is not None and not _FORMATS[format].bits_per_sample:
        raise InvalidRequest("bit_rate", bit_rate, f"mp3, opus and aac have one, {format} has none")
    if bit_rate is not None and not MIN_BIT_RATE <= bit_rate <= MAX_BIT_RATE:
        raise InvalidRequest("bit_rate", bit_rate, f"it must be from {MIN_BIT_RATE} to {MAX_BIT_RATE} bits a second")
    if not (isinstance(speed, (int, float)) and MIN_SPEED <= speed <= MAX_SPEED):
        raise InvalidRequest("speed", speed, f"it must be from {MIN_SPEED:g} to {MAX_SPEED:g}")
    if out_rate is not None and not MIN_RATE <= out_rate <= MAX_RATE:
        raise InvalidRequest("sample_rate", out_rate, f"it must be from {MIN_RATE} to {MAX_RATE} Hz")


def _without_end(pcm: bytes) -> bytes:
    """`pcm` without the silence at its end."""
    heard = audible(np.frombuffer(pcm, "<i2"))
    return pcm[: 2 * (int(heard[-1]) + 1)] if len(heard) else b""


def encoder_threads() -> ThreadPoolExecutor:
    """The threads for all encoders of a server: one per core, two to eight. No request will wait for an import."""
    _by_av()
    return ThreadPoolExecutor(max(2, min(8, usable_cores())), thread_name_prefix="encoder")


class Encoding:
    """Runs `encoder` for one task: in a thread, or inline if it is quick, where a thread would cost more."""

    def __init__(self, encoder: Encoder, threads: ThreadPoolExecutor) -> None:
        self.encoder, self._threads = encoder, threads
        self._work: Future[bytes] | None = None

    async def feed(self, pcm: bytes, pause_s: float = 0.0, voice: str | None = None) -> bytes:
        """Encode more PCM16, that `voice` speaks, or a pause in its place; return the bytes that are ready."""
        return await (self._do(self.encoder.pause, pause_s) if pause_s else self._do(self.encoder.feed, pcm, voice))

    async def finish(self) -> bytes:
        """Encode what is held back; return the last bytes."""
        return await self._do(self.encoder.finish)

    def close(self) -> None:
        """Free the encoder once no thread uses it. Does not wait."""
        if self._work is None:
            self.encoder.close()
        else:
            self._work.add_done_callback(lambda _: self.encoder.close())

    async def _do(self, work: Callable[..., bytes], *arguments: bytes | float | str | None) -> bytes:
        if self.encoder.is_quick:
            return work(*arguments)
        # Kept, because work that has begun continues when its task is cancelled.
        self._work = self._threads.submit(work, *arguments)
        return await asyncio.wrap_future(self._work)


MAX_DBTP = -1.5
DELAY_S = 0.002
RELEASE_PER_S = 6.0
"""How fast the gain rises again behind a peak, in shares of the full amplitude."""

LOUDNESS_LIMIT = f"it must be from {MIN_LUFS:g} to {MAX_LUFS:g}, in LUFS, or none"
LOUDNESS_HELP = (
    f"in LUFS, {MIN_LUFS:g} to {MAX_LUFS:g}, or none: as the model speaks; default: {DEFAULT_LUFS:g} if the voice's "
    "own is known"
)

Loudness = float | Literal["none"]
"""A level in LUFS, or "none" for speech as the model makes it."""

_Whole = npt.NDArray[np.int64]
_ONE = 1 << 20
"""Reductions are whole numbers, of which this is the full amplitude: sums of such are exact in any order."""

_PHASES = np.array(
    [
        [14, 90, -161, 272, -487, 1125, 7964, -838, 390, -218, 122, -68],
        [-239, 240, -424, 730, -1364, 3810, 6388, -1641, 832, -477, 271, -155],
    ],
    np.float64,
)
"""Two phases of the 4-fold interpolation filter of BS.1770-4, annex 2, times 8192; the other two are their mirror."""
_FILTERS = np.concatenate([_PHASES, _PHASES[:, ::-1]])
_TAPS, _CENTRE = 12, 6
_SCALE = 8192 * 32768.0
_CEILING = 10 ** ((MAX_DBTP - 0.2) / 20) * _SCALE
"""A little below the limit: the gain changes within the reach of the filter, and other meters have longer filters."""
_SURELY_BELOW = _CEILING / np.abs(_FILTERS).sum(1).max() / 32768 - 1 / 32768
"""Samples up to this have no true peak above the limit."""


class Gains(NamedTuple):
    """The amplification of a request's voice, and of others by name, to the level that was asked for."""

    own: float
    others: Mapping[str, float]


def gains_for(loudness: float | str | None, spec: ModelSpec, request: SpeechRequest) -> Gains | None:
    """The gains for a resolved `request` at `loudness`, None for the default; None if nothing is to be done.
    Raises `InvalidRequest` for a level out of bounds, and for one that is asked for where none was measured."""
    if loudness == "none":
        return None
    if loudness is not None and (isinstance(loudness, (bool, str)) or not MIN_LUFS <= loudness <= MAX_LUFS):
        raise InvalidRequest("loudness", loudness, LOUDNESS_LIMIT)
    measured = {
        name: known.loudness_lufs for name, known in spec.voice_descriptions.items() if known.loudness_lufs is not None
    }
    if request.voice not in measured:
        if loudness is None:
            return None
        voice = "of this voice" if request.voice is None else f"of {request.voice}"
        raise InvalidRequest("loudness", loudness, f"the loudness {voice} is not known; leave it out, or give none")
    target = DEFAULT_LUFS if loudness is None else loudness
    gains = {name: 10 ** ((target - lufs) / 20) for name, lufs in measured.items()}
    return Gains(gains[request.voice], gains)


class _Leveller:
    """Amplifies PCM16 by `gains` and limits what is played of it, at `sample_rate` Hz, to `MAX_DBTP`. What is changed
    between the two, such as the tempo, is the caller's."""

    def __init__(self, gains: Gains, sample_rate: int) -> None:
        self._gains, self._limiter = gains, _Limiter(sample_rate)
        self.limit = self._limiter.feed

    def amplify(self, pcm: bytes, voice: str | None = None) -> Samples:
        """The samples of `pcm`, which the request's voice speaks, or `voice`."""
        gain = self._gains.own if voice is None else self._gains.others.get(voice, 1.0)
        amplified: Samples = np.frombuffer(pcm, "<i2") * np.float32(gain / 32768)
        return amplified

    def feed(self, pcm: bytes, voice: str | None = None, *, is_last: bool = False) -> bytes:
        """The next PCM16 to play where nothing lies between. None of it is beyond full scale."""
        samples = self.limit(self.amplify(pcm, voice), is_last=is_last)
        played: bytes = np.rint(samples * np.float32(32768)).astype("<i2").tobytes()
        return played


class _Limiter:
    """Reduces the amplitude around true peaks above the limit: down within the delay, and slowly up again.

    The reduction at a peak is known `_CENTRE` samples later, held for `_attack` samples, and averaged over as many. So
    it is whole when the peak is played."""

    def __init__(self, sample_rate: int) -> None:
        self._delay = int(DELAY_S * sample_rate)
        self._attack = self._delay - _CENTRE
        self._release = round(RELEASE_PER_S * _ONE / sample_rate)
        self._reset()

    def _reset(self) -> None:
        self._past = np.zeros(self._delay, np.float32)
        self._wanted = self._reduced = np.zeros(self._attack, np.int64)
        self._is_idle, self._ahead = True, self._delay

    def feed(self, samples: Samples, *, is_last: bool = False) -> Samples:
        if is_last:
            samples = np.concatenate([samples, np.zeros(self._delay, np.float32)])
        whole = np.concatenate([self._past, samples])
        played = whole[: len(samples)]
        gain = self._gain(whole[self._delay - _TAPS + 1 :])
        if gain is not None:
            played = played * gain
        skipped = min(self._ahead, len(samples))
        self._past, self._ahead = whole[len(samples) :], self._ahead - skipped
        if is_last:
            self._reset()
        return played[skipped:]

    def _gain(self, samples: Samples) -> Samples | None:
        """What to multiply the samples to play by; None for 1. `samples` are new but for `_TAPS` - 1 before."""
        wanted = _reductions(samples)
        if wanted is None and self._is_idle:
            return None
        count = len(samples) - _TAPS + 1
        wanted = np.concatenate([self._wanted, np.zeros(count, np.int64) if wanted is None else wanted])
        fall = self._release * np.arange(count + 1)
        held = np.concatenate([self._reduced[-1:], _trailing_max(wanted, self._attack + 1)])
        reduced = np.concatenate([self._reduced, np.maximum(np.maximum.accumulate(held + fall) - fall, 0)[1:]])
        sums = np.cumsum(np.concatenate([[0], reduced]))
        mean = (sums[self._attack + 1 :] - sums[: -self._attack - 1]) / ((self._attack + 1) * _ONE)
        self._wanted, self._reduced = wanted[count:], reduced[count:]
        self._is_idle = not (self._wanted.any() or self._reduced.any())
        return (1 - mean).astype(np.float32)


def _reductions(samples: Samples) -> _Whole | None:
    """By how much the amplitude must fall at each of `samples` from the last of `_TAPS` on; None if nowhere."""
    if not len(samples) or max(samples.max(), -samples.min()) <= _SURELY_BELOW:
        return None
    # Whole numbers: their sums are exact, so the same for any split.
    rounded = np.rint(samples * np.float32(32768)).astype(np.float64)
    between = _FILTERS @ np.stack([rounded[tap : len(rounded) - _TAPS + 1 + tap] for tap in range(_TAPS)])
    peaks = np.maximum(
        np.maximum(between.max(0), -between.min(0)), np.abs(rounded[_TAPS - 1 - _CENTRE : -_CENTRE]) * 8192
    )
    if peaks.max() <= _CEILING:
        return None
    reductions: _Whole = np.ceil((1 - _CEILING / np.maximum(peaks, _CEILING)) * _ONE).astype(np.int64)
    return reductions


def _trailing_max(values: _Whole, width: int) -> _Whole:
    """The maxima of each `width` consecutive `values`."""
    span = 1
    while span < width:
        step = min(span, width - span)
        values, span = np.maximum(values[step:], values[:-step]), span + step
    return values
