"""Encoders at work beside each other: in order, without delaying who needs none, and freed whatever happens."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from processes import GUARD_S
from sine_engines import run

from sonoro.audio.encoders import FORMATS, Encoder, Encoding, encoder_threads

RATE = 24000
CHUNK = (8000 * np.sin(np.arange(1920) / 9)).astype("<i2").tobytes()


class SlowEncoder:
    """Says what it was fed once `go` is set. Fails if it is used by two at once or after its end."""

    content_type, rate, is_quick = "audio/slow", RATE, False

    def __init__(self) -> None:
        self.go, self.begun, self.closed, self._in_use = threading.Event(), threading.Event(), False, threading.Lock()

    def feed(self, pcm: bytes, voice: str | None = None) -> bytes:
        with self._in_use:
            self.begun.set()
            assert self.go.wait(GUARD_S)
            assert not self.closed
            return b"<" + pcm + b">"

    def finish(self) -> bytes:
        return self.feed(b"")

    def close(self) -> None:
        assert self._in_use.acquire(blocking=False), "closed while a thread works with it"
        self.closed = True
        self._in_use.release()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with encoder_threads() as pool:
        yield pool


@pytest.mark.parametrize("options", [{}, {"speed": 1.5}, {"out_rate": 16000}])
@pytest.mark.parametrize("format", FORMATS)
def test_aside_gives_what_the_encoder_alone_gives(
    format: str, options: dict[str, float], threads: ThreadPoolExecutor
) -> None:
    alone = Encoder(format, RATE, **options)
    wanted = [*(alone.feed(CHUNK) for _ in range(4)), alone.finish()]

    async def encode() -> None:
        encoding = Encoding(Encoder(format, RATE, **options), threads)
        assert (encoding.encoder.content_type, encoding.encoder.rate) == (alone.content_type, alone.rate)
        made = [*[await encoding.feed(CHUNK) for _ in range(4)], await encoding.finish()]
        encoding.close()
        # Opus numbers its streams at random.
        assert list(map(len, made)) == list(map(len, wanted))
        if format != "opus":
            assert made == wanted

    run(encode())


def test_a_slow_encoder_delays_nobody_else(threads: ThreadPoolExecutor) -> None:
    async def encode() -> None:
        slow = SlowEncoder()
        slow_encoding, quick = Encoding(slow, threads), Encoding(Encoder("pcm", RATE), threads)
        other = Encoding(Encoder("flac", RATE), threads)
        waiting = asyncio.create_task(slow_encoding.feed(b"a"))
        await asyncio.to_thread(slow.begun.wait, GUARD_S)
        assert await quick.feed(CHUNK) == CHUNK
        assert await other.feed(CHUNK)
        assert not waiting.done()
        slow.go.set()
        assert await waiting == b"<a>"
        for encoding in (slow_encoding, quick, other):
            encoding.close()
        assert slow.closed

    run(encode())


def test_an_encoder_is_freed_after_the_thread_that_works_with_it(threads: ThreadPoolExecutor) -> None:
    async def leave() -> None:
        slow = SlowEncoder()
        encoding = Encoding(slow, threads)
        waiting = asyncio.create_task(encoding.feed(b"a"))
        await asyncio.to_thread(slow.begun.wait, GUARD_S)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        encoding.close()
        assert not slow.closed
        slow.go.set()
        async with asyncio.timeout(GUARD_S):
            while not slow.closed:
                await asyncio.sleep(0.01)

    run(leave())


def test_work_that_never_began_is_forgotten() -> None:
    async def leave(threads: ThreadPoolExecutor) -> None:
        busy = [SlowEncoder(), SlowEncoder()]
        working = [asyncio.create_task(Encoding(slow, threads).feed(b"a")) for slow in busy]
        await asyncio.sleep(0)
        late = SlowEncoder()
        encoding = Encoding(late, threads)
        waiting = asyncio.create_task(encoding.feed(b"a"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        encoding.close()
        assert late.closed
        for slow in busy:
            slow.go.set()
        assert await asyncio.gather(*working) == [b"<a>"] * len(busy)
        assert not late.begun.is_set()

    with ThreadPoolExecutor(2) as threads:
        run(leave(threads))
