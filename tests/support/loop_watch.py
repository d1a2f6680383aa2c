"""Measures how long callbacks hold the thread of their event loop, by CPU time, which other processes do not add to."""

import asyncio
import contextlib
import dataclasses
import gc
import time
from collections.abc import Iterator
from unittest import mock

MAX_STRETCH_S = 0.02
"""The longest that a callback of a server may take, whatever clients and other servers send."""


@dataclasses.dataclass
class Stretch:
    """The longest callback so far, and what it was."""

    cpu_s: float = 0.0
    callback: str = ""


@contextlib.contextmanager
def longest_stretch() -> Iterator[Stretch]:
    """Measures the callbacks of all loops within the block. No garbage is collected meanwhile."""
    longest, run = Stretch(), asyncio.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        began_s = time.thread_time()
        run(handle)
        taken_s = time.thread_time() - began_s
        if taken_s > longest.cpu_s:
            longest.cpu_s, longest.callback = taken_s, repr(handle)

    gc.disable()
    try:
        with mock.patch.object(asyncio.Handle, "_run", measured):
            yield longest
    finally:
        gc.enable()


@contextlib.contextmanager
def never_blocked() -> Iterator[None]:
    """Asserts that no callback within the block takes longer than `MAX_STRETCH_S`."""
    with longest_stretch() as longest:
        yield
    assert longest.cpu_s < MAX_STRETCH_S, longest
