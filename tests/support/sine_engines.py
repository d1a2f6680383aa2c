"""Engines over sine models, in this process and in processes of their own, and what comes out of them."""

import asyncio
import copy
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
import zmq
import zmq.asyncio
from processes import GUARD_S, stem
from sine_models import VoicedSineModel
from torch import Tensor

from sonoro.audio.pcm import from_pcm16
from sonoro.core.config import EngineConfig, Tuning
from sonoro.core.types import AudioChunk, Event, Failed, Finished, Reference, SpeechRequest
from sonoro.engine import engine
from sonoro.models.base import Pages, SpeechModel
from sonoro.transport.channel import new_endpoint, remove_endpoint
from sonoro.transport.client import EngineClient
from sonoro.transport.fleet import Fleet
from sonoro.transport.launch import Limits
from sonoro.transport.messages import FromEngine, ToEngine, WorkerSettings
from sonoro.transport.process import decode_from_engine, encode_to_engine


def resolved(spec, request: SpeechRequest) -> SpeechRequest:
    """`request` completed by `spec`, the voice of its digest being registered."""
    known = {request.voice: request.voice_digest} if request.voice and request.voice_digest else {}
    return request if request.is_resolved else spec.resolve(request, known)


class Engine(engine.Engine):
    """Takes any request."""

    def submit(self, request: SpeechRequest) -> None:
        super().submit(resolved(self.spec, request))


HOP = 80


def config_of(**changes: object) -> EngineConfig:
    """Three slots and short segments, but for `changes`."""
    return tuned(**{"slots": 3, "max_positions": 600, "max_frames": 512, "segment_letters": 40} | changes)


def tuned(**values: object) -> EngineConfig:
    """A configuration of `values`, of which some are fields of `Tuning`."""
    tuning = {name: values.pop(name) for name in Tuning.__dataclass_fields__ if name in values}
    return EngineConfig(**values, tuning=Tuning(**tuning))


def engine_of(ticks_late: int = 1, **changes: object) -> Engine:
    """Reads results one tick late, as on a GPU, unless told otherwise."""
    return Engine(VoicedSineModel(), config_of(**changes), ticks_late=ticks_late)


def drain(engine: Engine) -> list[Event]:
    """Tick until nothing is left to do; nothing must be left behind."""
    events = []
    while engine.has_work:
        events += engine.tick()
    assert_empty(engine)
    return events


def assert_empty(engine: Engine) -> None:
    """No slot, page, ring entry or place in the queue is held."""
    assert (engine.scheduler.free_slots, engine.waiting) == (engine.config.slots, 0)
    assert (engine.scheduler.pages.free, engine.runner.ring.free) == (engine.runner.pages, engine.runner.ring.depth)


def audio(events: Sequence[Event], request_id: str) -> np.ndarray:
    """All audio of one request, its chunks numbered without a gap."""
    chunks = [event for event in events if isinstance(event, AudioChunk) and event.request_id == request_id]
    assert [chunk.index for chunk in chunks] == list(range(len(chunks)))
    return from_pcm16(b"".join(chunk.pcm for chunk in chunks))


def end(events: Sequence[Event], request_id: str) -> Finished | Failed:
    """The last event of one request, which must be its only end."""
    mine = [event for event in events if event.request_id == request_id]
    assert isinstance(mine[-1], Finished | Failed)
    assert all(isinstance(event, AudioChunk) for event in mine[:-1])
    return mine[-1]


def speak(request: SpeechRequest, engine: Engine | None = None) -> tuple[np.ndarray, Finished | Failed]:
    """The audio and the end of a request that an engine, a fresh one if none is given, serves alone."""
    engine = engine or engine_of()
    engine.submit(request)
    events = drain(engine)
    return audio(events, request.id), end(events, request.id)


def reference(use: str = "prompt", pitch: float = 0.1) -> Reference:
    """A second of a tone to speak like."""
    tone = np.sin(np.arange(8000) * pitch).astype("<f4")
    return Reference(pcm=tone.tobytes(), sample_rate=8000, text="hm" if use == "prompt" else None, use=use)


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class SlowModel(VoicedSineModel):
    """Its frames and its audio take as long as `frame_cost_s` and `codec_cost_s` say, on `clock`."""

    def __init__(self, clock: Clock, frame_cost_s: Callable[[], float], codec_cost_s: Callable[[int], float]) -> None:
        super().__init__()
        step, decode = self.frame, self.codec.decode

        def frame(state, slots):
            clock.now_s += frame_cost_s()
            step(state, slots)

        def slow_decode(frames, slots=None, history=None):
            clock.now_s += codec_cost_s(frames.shape[0] * frames.shape[1])
            return decode(frames, slots, history)

        self.frame, self.codec.decode = frame, slow_decode


def underruns(heard: Sequence[tuple[float, int]], frame_s: float) -> int:
    """How often somebody who plays chunks (arrival in seconds, frames) from the first one on had nothing left."""
    until_s, count = heard[0][0], 0
    for at_s, frames in heard:
        count += at_s > until_s + 1e-9
        until_s = max(until_s, at_s) + frames * frame_s
    return count


PAGE = 32


class Watched:
    """An engine over `model`: the frames that were made for each (seed, segment), and what each launch staged."""

    def __init__(self, model: SpeechModel, **changes: object) -> None:
        self.frames: dict[tuple[int, int], Tensor] = {}
        self.positions: list[int] = []
        self.rows: list[int] = []
        self.shared: list[list[int]] = []
        self._model, self._said = model, dict[int, tuple[int, int]]()
        # A copy has all members of the model: protocols do not see what `__getattr__` finds.
        watched: Any = copy.copy(model)
        watched.allocate, watched.stage = self.allocate, self.stage
        values = {"slots": 3, "max_positions": 1536, "max_frames": 64, "segment_letters": 200}
        self.engine = Engine(watched, EngineConfig(**values | changes), lambda: 0.0)  # type: ignore[arg-type]

    def allocate(self, capacity: Any) -> Any:
        self.state = self._model.allocate(capacity)
        return self.state

    def stage(self, state: Any, prompts: Any, slots: Any, pages: list[Pages]) -> int:
        for slot, prompt, (numbers, cached) in zip(slots, prompts, pages, strict=True):
            self._said[slot] = prompt.controls.seed, prompt.controls.segment
            self.positions.append(prompt.positions)
            self.shared.append(list(numbers[: cached // PAGE]))
        self.rows.append(self._model.stage(state, prompts, slots, pages))
        return self.rows[-1]

    def tick(self) -> list[Any]:
        events = self.engine.tick()
        if self.state.done.is_cuda:
            torch.cuda.synchronize()
        for slot, said in self._said.items():
            length = int(self.state.length[slot])
            # One that was cancelled is emptied.
            if length > len(self.frames.get(said, ())):
                self.frames[said] = self.state.frames[slot, :length].cpu().clone()
        return events

    def say(self, *requests: SpeechRequest) -> list[Any]:
        events = []
        for one in requests:
            self.engine.submit(one)
        while self.engine.has_work:
            events += self.tick()
        return events + drain(self.engine)


def frames_alone(model: SpeechModel, *requests: SpeechRequest) -> dict[tuple[int, int], Tensor]:
    """What an engine that keeps nothing makes of each of `requests`, by seed and segment."""
    frames: dict[tuple[int, int], Tensor] = {}
    for one in requests:
        watched = Watched(model, prefix_cache_bytes=0)
        assert isinstance(end(watched.say(one), one.id), Finished)
        assert not any(watched.shared)
        assert not frames.keys() & watched.frames.keys()
        frames |= watched.frames
    return frames


def assert_made(watched: Watched, expected: dict[tuple[int, int], Tensor], tolerance: float = 0.0) -> None:
    """That `watched` has made what is `expected` for each (seed, segment)."""
    for key, frames in expected.items():
        torch.testing.assert_close(watched.frames[key], frames, rtol=0, atol=tolerance)


def speak_at_once(
    watched: Watched,
    requests: Sequence[SpeechRequest],
    expected: dict[tuple[int, int], Tensor],
    draw: random.Random,
    tolerance: float = 0.0,
) -> None:
    """All `requests`, named by their numbers, in one engine that is short of pages, of which a few are cancelled; the
    others make the frames that are `expected` of each (seed, segment)."""
    engine, events, cancelled = watched.engine, list[Any](), set[int]()
    for one in requests:
        engine.submit(one)
    while engine.has_work:
        events += watched.tick()
        if draw.random() < 0.05:
            cancelled.add(number := draw.randrange(len(requests)))
            engine.cancel(str(number))
        assert engine.prefixes.kept_bytes <= engine.config.prefix_cache_bytes
    events += drain(engine)
    for one in requests:
        made = expected[one.seed or 0, 0]
        got = watched.frames.get((one.seed or 0, 0), made[:0])
        finished = end(events, one.id)
        assert isinstance(finished, Finished), finished
        torch.testing.assert_close(got, made[: len(got)], rtol=0, atol=tolerance)
        assert len(got) == len(made) or int(one.id) in cancelled
    assert 1 <= len(cancelled) <= 8
    assert engine.prefixes.hits > 3
    assert engine.prefixes.evictions > 0


CONFIG = EngineConfig(slots=4, max_positions=1200, max_frames=512, segment_letters=400)
LONG = "A text with a good many words in it, so that it takes a while. " * 5
FACTORY = "sine_models:load"


def launch(model: str = "sine", config: EngineConfig = CONFIG, **limits: float) -> EngineClient:
    return EngineClient(WorkerSettings(model=model, config=config, factory=FACTORY), Limits(**limits))


def launch_fleet(model: str = "sine", config: EngineConfig = CONFIG, count: int = 2, **limits: float) -> Fleet:
    """Engines on the CPU."""
    settings = WorkerSettings(model=model, config=config, factory=FACTORY)
    return Fleet(settings, ("cpu",) * count, Limits(**limits))


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
            # Asking all the time would take a core from who is waited for.
            await asyncio.sleep(0.05)


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

    Engines are forked (processes.py) unless the test uses `whole_starts`; until one has ended badly, as its
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


class Peer:
    """Belongs to the running event loop."""

    def __init__(self) -> None:
        self.endpoint = new_endpoint()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(self.endpoint)

    async def receive(self) -> list[FromEngine]:
        return decode_from_engine(await self._socket.recv())

    def send(self, message: ToEngine) -> None:
        sent = self._socket.send(encode_to_engine(message), zmq.NOBLOCK)
        if not isinstance(sent.exception(), zmq.Again):  # lost, if nobody is there
            sent.result()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        remove_endpoint(self.endpoint)
