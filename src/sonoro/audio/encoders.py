"""Streaming encoders: PCM16 in, encoded bytes out, in the six formats of the speech API at any speed and rate.

The order is tempo, sample rate, format. Latency, as bytes after 1, 2 and 5 chunks of 80 ms at 24 kHz:

| format | content type | bytes after 1, 2, 5 | held back |
|---|---|---|---|
| mp3 | audio/mpeg | 576, 1440, 4320 | a frame (24 ms) and the coder's delay (46 ms, silence at the start) |
| opus | audio/ogg; codecs=opus | 901, 1800, 4471 | one page of one 20 ms packet |
| aac | audio/aac | 0, 863, 3172 | two frames of 43 ms: the first needs 85 ms of sound |
| flac | audio/flac | 978, 1880, 4722 | a block of 24 ms |
| wav | audio/wav | 3884, 7724, 19244 | nothing; the header gives no length |
| pcm | audio/pcm | 3840, 7680, 19200 | nothing |

Tempo adds 40 to 80 ms, up to 200 ms above speed 2; resampling 10 to 60 ms. Slow work runs in threads (`Encoding`), so
that it does not block the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from typing import NamedTuple, Self

import av.filter
import numpy as np
import numpy.typing as npt
import soxr

from sonoro.audio.compressed import encoder_rate
from sonoro.audio.pcm import audible, from_pcm16, to_pcm16
from sonoro.audio.wav import wav_header
from sonoro.core.config import usable_cores
from sonoro.core.errors import InvalidRequest

Samples = npt.NDArray[np.float32]

MIN_SPEED, MAX_SPEED = 0.25, 4.0
MIN_RATE, MAX_RATE = 8000, 48000
MIN_BIT_RATE, MAX_BIT_RATE = 8000, 256_000
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


# mp3: without a bit reservoir frames are independent; a Xing header cannot be completed in a stream.
# opus: a page is written when the next begins, so its duration (1 s by default) is latency.
# flac: level 2 is the highest with short blocks, 24 to 27 ms instead of 105.
_NOW = "flush_packets=1"
_MP3 = f"{_NOW}:reservoir=0:write_xing=0:id3v2_version=0"
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
    second, is for mp3, opus and aac, rounded to one that they have. The result is the same for any split of the input.
    The codec is opened at the first feed, which takes up to 5 ms. Raises `InvalidRequest` naming `response_format`,
    `speed`, `sample_rate` or `bit_rate`."""

    _tempo: Tempo | None = None
    _resampler: soxr.ResampleStream | None = None
    _coded: _Coded | None = None

    def __init__(
        self,
        format: str,
        sample_rate: int,
        *,
        speed: float = 1.0,
        out_rate: int | None = None,
        bit_rate: int | None = None,
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
        self._half, self._is_begun, self._is_open = b"", False, True
        self._is_after_pause = False

    def max_bytes(self, audio_s: float) -> int:
        """An upper bound of the encoded bytes of `audio_s` seconds of input."""
        played_s = audio_s / self.speed + MOST_DELAY_S
        rate_bits = max(self._bit_rate, LEAST_BITS) if self._bit_rate else 16 * self.rate
        return math.ceil(played_s * (rate_bits / 8 * self._format.excess + PAGES_PER_S * PAGE_BYTES))

    @property
    def is_quick(self) -> bool:
        """Whether samples pass unchanged, which takes microseconds; otherwise a chunk takes about a millisecond."""
        return not self._format.codec and self.speed == 1 and self.rate == self._in_rate

    def feed(self, pcm: bytes) -> bytes:
        """Encode more PCM16 little-endian, split anywhere, and return the bytes that are ready, possibly none."""
        assert self._is_open, "the encoder is closed"
        pcm = self._half + pcm
        whole = len(pcm) // 2 * 2
        self._half = pcm[whole:]
        if self.is_quick:
            return self._with_header(pcm[:whole])
        return self._encode(from_pcm16(pcm[:whole]))

    def pause(self, seconds: float) -> bytes:
        """Encode a pause of `seconds` at the tempo of the input, exact to the sample at the output, behind what is held
        back; return the bytes that are ready."""
        assert self._is_open, "the encoder is closed"
        assert not self._half, "the audio ends within a sample"
        silence = bytes(2 * round(seconds / self.speed * self.rate))
        if self.is_quick:
            return self._with_header(silence)
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
                return self._with_header(b"")
            last = self._encode(np.zeros(0, np.float32), is_last=True)
            return last + self._coded.finish() if self._coded else last

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
            self._coded = _Coded(self._format, self.rate, self._bit_rate)

    def _filters(self) -> tuple[Tempo | None, soxr.ResampleStream | None]:
        """New filters for tempo and sample rate, as far as they are needed."""
        tempo = Tempo(self._in_rate, self.speed) if self.speed != 1 else None
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
        pcm = to_pcm16(samples)
        if self._is_after_pause:
            heard = audible(np.frombuffer(pcm, "<i2"))
            self._is_after_pause = not len(heard)
            pcm = pcm[2 * int(heard[0]) :] if len(heard) else b""
        return pcm

    def _with_header(self, pcm: bytes) -> bytes:
        header, self._header = self._header, b""
        return header + pcm


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


class Tempo:
    """Changes the tempo at the same pitch, by ffmpeg's atempo.
    Returns round(S / speed) samples for S. When faster, up to 10 ms more, at most 2%: the filter lags by that much, and
    the end of the last word must not be cut."""

    def __init__(self, sample_rate: int, speed: float) -> None:
        self._rate, self._speed = sample_rate, speed
        # Above 2 a single filter would skip samples instead of blending them.
        steps = math.ceil(abs(math.log2(speed)))
        self._graph = av.filter.Graph()
        self._graph.threads = 1
        source = self._graph.add("abuffer", f"sample_rate={sample_rate}:sample_fmt=flt:channel_layout=mono")
        filters = [self._graph.add("atempo", repr(speed ** (1 / steps))) for _ in range(steps)]
        self._graph.link_nodes(source, *filters, self._graph.add("abuffersink")).configure()
        self._waiting: Samples = np.zeros(0, np.float32)
        self._fed = self._returned = 0

    def feed(self, samples: Samples) -> Samples:
        self._fed += len(samples)
        return self._push(samples)

    def finish(self) -> Samples:
        wanted = self._fed / self._speed
        slack = min(0.01 * self._rate, 0.02 * wanted) if self._speed > 1 else 0
        left = max(0, round(wanted + slack) - self._returned)
        rest = np.zeros(0, np.float32)
        while len(rest) < left:  # silence pushes out what the filters hold
            rest = np.concatenate([rest, self._push(np.zeros(self._rate // 10, np.float32))])
        return rest[:left]

    def _push(self, samples: Samples) -> Samples:
        block = self._rate // 100  # always 10 ms: where the input is cut changes what the filters make of it
        parts, self._waiting = [np.zeros(0, np.float32)], np.concatenate([self._waiting, samples])
        while len(self._waiting) >= block:
            self._graph.push(_frame(self._waiting[:block], "flt", self._rate, 0))
            self._waiting = self._waiting[block:]
            with contextlib.suppress(BlockingIOError):
                while True:
                    parts.append(np.asarray(self._graph.pull().to_ndarray(), np.float32)[0])
        self._returned += sum(map(len, parts))
        return np.concatenate(parts)


class _Coded:
    """A codec and its container; returns the bytes as they are written.
    PyAV's filter graph for frame sizes keeps up to 17 idle threads until `close`."""

    def __init__(self, chosen: _Format, sample_rate: int, bit_rate: int) -> None:
        self._rate, self._samples, self._written = sample_rate, 0, _Written()
        # Codec and container each take the options they know.
        options = dict(pair.split("=") for pair in chosen.options.split(":"))
        self._container = av.open(self._written, "w", format=chosen.container, container_options=options)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            stream = self._container.add_stream(chosen.codec, sample_rate, options, layout="mono", bit_rate=bit_rate)
            assert isinstance(stream, av.AudioStream)
            self._stream = stream
            self._container.start_encoding()
            undo.pop_all()

    def write(self, pcm: bytes) -> bytes:
        if pcm:
            samples = np.frombuffer(pcm, "<i2")
            self._container.mux(self._stream.encode(_frame(samples, "s16", self._rate, self._samples)))
            self._samples += len(samples)
        return self._written.take()

    def finish(self) -> bytes:
        self._container.mux(self._stream.encode(None))
        self.close()
        return self._written.take()

    def close(self) -> None:
        self._container.close()


class _Written(io.BytesIO):
    """A file that cannot seek, so that containers do not wait to complete their header."""

    def seekable(self) -> bool:
        return False

    def take(self) -> bytes:
        taken = self.getvalue()
        self.truncate(self.seek(0))
        return taken


def _frame(samples: npt.NDArray[np.generic], kind: str, sample_rate: int, at: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples)[None], format=kind, layout="mono")
    frame.sample_rate, frame.time_base, frame.pts = sample_rate, Fraction(1, sample_rate), at
    return frame


def encoder_threads() -> ThreadPoolExecutor:
    """The threads for all encoders of a server: one per core, two to eight."""
    return ThreadPoolExecutor(max(2, min(8, usable_cores())), thread_name_prefix="encoder")


class Encoding:
    """Runs `encoder` for one task: in a thread, or inline if it is quick, where a thread would cost more."""

    def __init__(self, encoder: Encoder, threads: ThreadPoolExecutor) -> None:
        self.encoder, self._threads = encoder, threads
        self._work: Future[bytes] | None = None

    async def feed(self, pcm: bytes, pause_s: float = 0.0) -> bytes:
        """Encode more PCM16, or a pause in its place; return the bytes that are ready."""
        return await (self._do(self.encoder.pause, pause_s) if pause_s else self._do(self.encoder.feed, pcm))

    async def finish(self) -> bytes:
        """Encode what is held back; return the last bytes."""
        return await self._do(self.encoder.finish)

    def close(self) -> None:
        """Free the encoder once no thread uses it. Does not wait."""
        if self._work is None:
            self.encoder.close()
        else:
            self._work.add_done_callback(lambda _: self.encoder.close())

    async def _do(self, work: Callable[..., bytes], *arguments: bytes | float) -> bytes:
        if self.encoder.is_quick:
            return work(*arguments)
        # Kept, because work that has begun continues when its task is cancelled.
        self._work = self._threads.submit(work, *arguments)
        return await asyncio.wrap_future(self._work)
