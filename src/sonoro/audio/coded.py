"""Codecs, containers and tempo, by PyAV, which takes .25 s to import: nothing else may that is needed to speak."""

from __future__ import annotations

import contextlib
import io
import math
from fractions import Fraction

import av.filter
import numpy as np
import numpy.typing as npt

from sonoro.audio.pcm import Samples


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


class Coded:
    """A codec and its container; returns the bytes as they are written.
    PyAV's filter graph for frame sizes keeps up to 17 idle threads until `close`."""

    def __init__(self, codec: str, container: str, options: str, sample_rate: int, bit_rate: int) -> None:
        self._rate, self._samples, self._written = sample_rate, 0, _Written()
        # Codec and container each take the options they know.
        given = dict(pair.split("=") for pair in options.split(":"))
        self._container = av.open(self._written, "w", format=container, container_options=given)
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            stream = self._container.add_stream(codec, sample_rate, given, layout="mono", bit_rate=bit_rate)
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
