"""Engine processes over the sine model, for the tests of what stands before and behind the link."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fakes.voiced_sine import VoicedSineModel
from forked_engines import stem
from guard import GUARD_S
from resolving import Engine

from sonoro.core.config import EngineConfig
from sonoro.core.types import AudioChunk, Event, Finished, SpeechRequest
from sonoro.models.base import SpeechModel
from sonoro.transport.client import EngineClient
from sonoro.transport.fleet import Fleet
from sonoro.transport.launch import Limits

CONFIG = EngineConfig(slots=4, max_positions=1200, max_frames=512, segment_letters=400)
LONG = "A text with a good many words in it, so that it takes a while. " * 5
FACTORY = "fakes.sine_worker:load"


def launch(model: str = "sine", config: EngineConfig = CONFIG, **limits: float) -> EngineClient:
    return EngineClient.launch(model, limits=Limits(**limits), config=config, factory=FACTORY)


def launch_fleet(model: str = "sine", config: EngineConfig = CONFIG, count: int = 2, **limits: float) -> Fleet:
    """Engines on the CPU."""
    devices = ("cpu",) * count
    return Fleet.launch(model, devices=devices, limits=Limits(**limits), config=config, factory=FACTORY)


def run(coroutine: Coroutine[Any, Any, None], timeout_s: float = 2 * GUARD_S) -> None:
    asyncio.run(asyncio.wait_for(coroutine, timeout_s))


async def gather(stream: AsyncIterator[AudioChunk | Finished]) -> tuple[bytes, Finished]:
    """All PCM of a stream, its chunks numbered without a gap, and its end."""
    events = [event async for event in stream]
    chunks, finished = events[:-1], events[-1]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    return b"".join(chunk.pcm for chunk in chunks), finished


def alone(request: SpeechRequest, config: EngineConfig = CONFIG, model: SpeechModel | None = None) -> bytes:
    """What an engine in this process answers; it speaks sines unless a model is given."""
    engine, events = Engine(model or VoicedSineModel(), config), list[Event]()
    engine.submit(request)
    while engine.has_work:
        events += engine.tick()
    return b"".join(event.pcm for event in events if isinstance(event, AudioChunk))


async def until(condition: Callable[[], Any], timeout_s: float = GUARD_S) -> None:
    """Wait until `condition`, which may be a coroutine function, holds."""
    async with asyncio.timeout(timeout_s):
        while not (await held if asyncio.iscoroutine(held := condition()) else held):
            await asyncio.sleep(0.02)


def parent_of(pid: int) -> int | None:
    """The parent of a process; None if it does not run any more, as a zombie does not."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if state == "Z" else int(parent)


def children(parent: int | None = None) -> set[int]:
    """The processes that `parent` or else this one has started, less what multiprocessing keeps once it was used and
    what engines are forked from."""
    processes = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    found = {process for process in processes if parent_of(process) == (parent or os.getpid())}
    kept = {stem().pid} if stem.cache_info().currsize else set()
    return {child for child in found if b"resource_tracker" not in command_of(child)} - kept


def command_of(process: int) -> bytes:
    """The command line of a process, empty if it is gone."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""


def engines(parent: int | None = None) -> set[int]:
    """Those of them that are engines. Python's own helpers, once started, are there to the end of the run."""
    return {child for child in children(parent) if b"sonoro.engine_process" in command_of(child)}


@pytest.fixture
def nothing_left(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    """The folder that links are made in; afterwards it is empty, and no process is left that was not there before.

    Engines are forked (forked_engines.py) unless the test uses `whole_starts`; until one has ended badly, as its
    successor must be missed for a while, unless the test uses `quick_successors`."""
    # Made on first use, in the temporary folder of that moment.
    tmp_path_factory.getbasetemp()
    # The path of a Unix socket may have 107 letters; pytest's own folders are longer.
    with TemporaryDirectory(prefix="s") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        if sys.platform == "linux" and "whole_starts" not in request.fixturenames:
            is_always = "quick_successors" in request.fixturenames
            monkeypatch.setattr("sonoro.transport.launch.spawn", stem().launcher(is_always=is_always))
        before = children()
        yield Path(folder)
        assert children() == before
        assert list(Path(folder).iterdir()) == []


@pytest.fixture
def whole_starts() -> None:
    """Engine processes are started as they are for a user, all of them."""


@pytest.fixture
def quick_successors() -> None:
    """An engine in the place of one that ended badly is forked too: how often they end is what is tested."""
