"""Bodies of requests, received within limits of size, time and memory. Knows no engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from fastapi import Request
from starlette.requests import ClientDisconnect

from sonoro.server.errors import BodyTooLarge, BodyTooSlow, TooManyRequests

__all__ = ["Uploads"]


class Uploads:
    """The bodies being received or worked on: `max_total_bytes` of them at once, each in `timeout_s` at most."""

    def __init__(self, max_total_bytes: int, timeout_s: float) -> None:
        self._max_total_bytes, self._timeout_s = max_total_bytes, timeout_s
        self._bytes = 0

    @contextlib.asynccontextmanager
    async def body(self, request: Request, max_bytes: int) -> AsyncIterator[bytes]:
        """The body of `request`, which counts until the block ends.

        Raises `BodyTooLarge` as soon as it is, `BodyTooSlow` if it does not come, `TooManyRequests` if others leave it
        no room.
        """
        too_large = BodyTooLarge(f"the body must have at most {max_bytes} bytes")
        if (length := request.headers.get("content-length", "")).isdecimal() and int(length) > max_bytes:
            raise too_large
        payload = bytearray()
        try:
            async with self._in_time():
                async for part in request.stream():
                    if len(payload) + len(part) > max_bytes:
                        raise too_large
                    if self._bytes + len(part) > self._max_total_bytes:
                        raise TooManyRequests(f"bodies of {self._bytes} bytes are at work already; try again later")
                    payload += part
                    self._bytes += len(part)
            yield bytes(payload)
        finally:
            self._bytes -= len(payload)

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._timeout_s):
                yield
        except ClientDisconnect as error:
            raise BodyTooSlow("the body ended before its end") from error
        except TimeoutError as error:
            raise BodyTooSlow(f"the body must arrive within {self._timeout_s:g} s") from error
