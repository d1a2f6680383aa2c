"""An answer's encoder at work: what takes long is done by threads, so that no other answer waits for it.

Knows no request and no HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from sonoro.core.machine import usable_cores
from sonoro.server.encode import Encoder

__all__ = ["Encoding", "encoder_threads"]


def encoder_threads() -> ThreadPoolExecutor:
    """Threads for the encoders of a whole server: as many as can run at once, two to eight."""
    return ThreadPoolExecutor(max(2, min(8, usable_cores())), thread_name_prefix="encoder")


class Encoding:
    """What `encoder` makes of the audio fed, in its order. Belongs to one task at a time.

    An encoder that is quick works at once: handing a chunk over would cost more than the work.
    """

    def __init__(self, encoder: Encoder, threads: ThreadPoolExecutor) -> None:
        self._encoder, self._threads = encoder, threads
        self._work: Future[bytes] | None = None

    @property
    def content_type(self) -> str:
        return self._encoder.content_type

    @property
    def rate(self) -> int:
        """Of the audio that leaves, in Hz."""
        return self._encoder.rate

    async def feed(self, pcm: bytes) -> bytes:
        """Encode more PCM16; what is ready."""
        return await self._do(self._encoder.feed, pcm)

    async def finish(self) -> bytes:
        """Encode what is held back; the last bytes."""
        return await self._do(self._encoder.finish)

    def close(self) -> None:
        """Free the encoder, as soon as no thread works with it. Does not wait."""
        if self._work is None:
            self._encoder.close()
        else:
            self._work.add_done_callback(lambda _: self._encoder.close())

    async def _do(self, work: Callable[..., bytes], *arguments: bytes) -> bytes:
        if self._encoder.is_quick:
            return work(*arguments)
        # Kept, because work that has begun goes on when its task is cancelled.
        self._work = self._threads.submit(work, *arguments)
        return await asyncio.wrap_future(self._work)
