"""Servers on a free port: the real one over engines of sines, one that answers as scripted; and their clients."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import functools
import gc
import io
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self
from unittest import mock

import httpx
import numpy as np
import pytest
import soundfile
import uvicorn
from processes import GUARD_S
from sine_engines import CONFIG, LONG, alone, launch_fleet
from sine_models import LiveSineModel

from sonoro.api import speech_request
from sonoro.audio.encoders import Encoder, gains_for
from sonoro.core.config import EngineConfig
from sonoro.models import registry
from sonoro.models.base import SpeechModel
from sonoro.server.app import create_app, uvicorn_config
from sonoro.server.config import ServerConfig
from sonoro.server.listening import listen
from sonoro.transport.fleet import Fleet

SETTINGS = ServerConfig(port=0, max_queue_wait_ms=60_000, shutdown_timeout_s=30)

FRONTS: list[int] = []
"""How many front processes `serving` starts, if any: `pytest --front-processes`."""


@dataclasses.dataclass
class Server:
    """`http` asks the server at `url`; `engine` is what stands behind it; `failures` are of its start."""

    http: httpx.AsyncClient
    url: str
    engine: Fleet
    process: uvicorn.Server
    failures: list[Exception]

    @property
    def service(self) -> Any:
        """What its endpoints share."""
        return self.process.config.app.state.service

    async def speak(self, text: str = "Some words.", **fields: Any) -> httpx.Response:
        return await self.http.post("/v1/audio/speech", json={"input": text, "response_format": "pcm", **fields})

    async def is_ready(self) -> bool:
        return (await self.http.get("/ready")).status_code == 200

    async def is_idle(self) -> bool:
        states = [await client.stats() for client in self.engine.replicas]
        return all(
            (stats.running, stats.waiting, stats.free_slots) == (0, 0, client.settings.config.slots)
            for client, stats in zip(self.engine.replicas, states, strict=True)
        )

    async def metric(self, name: str) -> float:
        """The value of a metric, its labels part of the name, summed over the engines, and over the dialects unless the
        name tells of one; 0 if there is none."""
        text = re.sub(r'\{replica="\d+"\}|replica="\d+",|,replica="\d+"', "", (await self.http.get("/metrics")).text)
        text = text if "dialect=" in name else re.sub(r'dialect="\w+",', "", text)
        return sum(map(float, re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)))

    async def has(self, name: str, value: float) -> bool:
        """Whether that is the value of a metric."""
        return await self.metric(name) == value


@contextlib.asynccontextmanager
async def serving(
    model: str = "sine",
    settings: ServerConfig = SETTINGS,
    config: EngineConfig = CONFIG,
    *,
    engine: Fleet | None = None,
    engines: int = 1,
    waits: bool = True,
    **limits: float,
) -> AsyncIterator[Server]:
    """A server, ready unless told not to wait; it is gone with the block. `engine` stands in for those of sines."""
    if FRONTS:
        from front_servers import same_serving  # noqa: PLC0415, it imports this module

        if engine or not waits:
            pytest.skip("its engines are in this process, or not ready")
        async with same_serving(FRONTS[0], model, config, settings, engines=engines, **limits) as server:
            yield server
        return
    engine, failures = engine or launch_fleet(model, config, engines, **limits), []
    app = create_app(engine, settings.resolve(config.slots * len(engine.replicas)), failures.append)
    with listen(settings) as sock:
        process = uvicorn.Server(uvicorn_config(app, settings))
        task = asyncio.create_task(process.serve(sockets=[sock]))
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        try:
            async with httpx.AsyncClient(base_url=url, timeout=GUARD_S, trust_env=False) as http:
                server = Server(http, url, engine, process, failures)
                async with asyncio.timeout(GUARD_S):
                    while waits and not await server.is_ready():
                        await asyncio.sleep(0.02)
                yield server
        finally:
            process.should_exit = True
            await task


def sound(seconds: float = 1.0, rate: int = 8000, peak: float = 0.5) -> bytes:
    """A tone as a WAV file."""
    samples = peak * np.sin(np.arange(int(seconds * rate)) / 5)
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format="WAV", subtype="PCM_16")
    return file.getvalue()


def recording(seconds: float = 1.0, rate: int = 8000, peak: float = 0.5) -> str:
    """A tone as a data: URL."""
    return "data:audio/wav;base64," + base64.b64encode(sound(seconds, rate, peak)).decode()


def check_error(answer: httpx.Response, status: int, parameter: str | None = None) -> None:
    """`answer` is a refusal of that status that names the field."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["param"] == parameter, answer.text
    if parameter is not None:
        assert parameter in error["message"]
    assert ("retry-after" in answer.headers) == (status in (429, 503))


RATE = 8000
BYTES_PER_S = 2 * RATE


def tone(duration_s: float, silence_s: float = 0.0) -> bytes:
    """PCM16 of `duration_s`, the first `silence_s` of it below what is heard."""
    samples = np.full(round(duration_s * RATE), 3000, dtype="<i2")
    samples[: round(silence_s * RATE)] = 100
    return samples.tobytes()


@dataclass(frozen=True)
class Answer:
    """After each delay in seconds, these bytes, once `after` requests have come. `ending`: `whole`, `broken` (cut
    without an end) or `never`."""

    parts: Sequence[tuple[float, bytes]] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "audio/pcm", "X-Sample-Rate": str(RATE)})
    ending: str = "whole"
    after: int = 0


@dataclass
class ScriptedServer:
    """`bodies` and `headers` of the speech requests so far; `models` is what GET /v1/models answers."""

    answer: Callable[[int], Answer]
    models: object = field(default_factory=lambda: {"data": [{"id": "spoken"}]})
    bodies: list[dict[str, object]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, with all its requests."""
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether another may follow."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.paths.append(head[0].split()[1])
        if head[0].startswith("GET"):
            models = json.dumps(self.models).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(models) + models)
            return True
        self.headers.append(headers)
        self.bodies.append(json.loads(body))
        answer = self.answer(len(self.bodies) - 1)
        lines = [f"HTTP/1.1 {answer.status} status", "Transfer-Encoding: chunked"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        begun = False
        while len(self.bodies) < answer.after:
            await asyncio.sleep(0.01)
        for delay_s, data in answer.parts:
            await asyncio.sleep(delay_s)
            if not begun:
                writer.write("\r\n".join([*lines, "", ""]).encode())
                begun = True
            writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
            await writer.drain()
        if answer.ending == "never":
            await reader.read()
        if answer.ending != "whole":
            return False
        writer.write(b"" if begun else "\r\n".join([*lines, "", ""]).encode())
        writer.write(b"0\r\n\r\n")
        return True


@contextlib.contextmanager
def served(answer: Callable[[int], Answer] | Answer) -> Iterator[ScriptedServer]:
    """A server that gives request number n the answer `answer(n)`."""
    server = ScriptedServer(answer if callable(answer) else lambda number: answer)
    loop, is_up, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def live() -> None:
        connections: set[asyncio.Task[None]] = set()

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            task.add_done_callback(connections.discard)
            with contextlib.suppress(asyncio.CancelledError):
                await server.serve(reader, writer)

        listener = await asyncio.start_server(connect, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        is_up.set()
        await stop.wait()
        # What has been accepted becomes a connection first: a listener closed before that leaves its socket open.
        for accepting in listener.sockets:
            loop.remove_reader(accepting)
        while len(asyncio.all_tasks()) > 1:
            while connections:
                connections.pop().cancel()
            await asyncio.sleep(0.001)
        listener.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),))
    thread.start()
    assert is_up.wait(GUARD_S)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(GUARD_S)
        loop.close()
        assert not thread.is_alive()


@dataclass(frozen=True, eq=False)
class Speaker:
    """A model that takes its text while it speaks, and what to ask it for.

    `load` gives the model, `options` are some of its own that are heard, `live_options` what live text is spoken with
    unless told otherwise, `seeds` are for a crowd. Two answers to the same request differ by `tolerance` steps of 16
    bits.
    """

    name: str
    load: Callable[[], SpeechModel]
    voices: tuple[str, ...]
    sample_rate: int
    hop: int
    long_text: str
    options: Mapping[str, float]
    live_options: Mapping[str, bool] = field(default_factory=dict)
    can_clone: bool = False
    lead_in: int = 0
    seeds: tuple[int, ...] = tuple(range(20))
    tolerance: int = 0

    def spoken(self, text: str = "Some words.", **fields: Any) -> bytes:
        """The PCM16 of a request, whose fields `sonoro.api.speech_request` takes."""
        return _spoken(self, text, **{"voice": self.voices[0]} | fields)

    def spoken_live(self, text: str, **fields: Any) -> bytes:
        """The PCM16 of a text that came in pieces."""
        return self.spoken(text, **{**self.live_options, **fields})

    def is_same(self, heard: bytes, expected: bytes) -> bool:
        """Whether that is the same sound: as long, and nowhere further apart than two answers may be."""
        if len(heard) != len(expected):
            return False
        samples, others = (np.frombuffer(pcm, "<i2").astype(int) for pcm in (heard, expected))
        return bool(np.abs(samples - others).max(initial=0) <= self.tolerance)


@functools.cache
def _spoken(speaker: Speaker, text: str, **fields: Any) -> bytes:
    model, request = speaker.load(), speech_request(text, **fields)
    pcm = alone(request, model=model)
    gains = gains_for(None, model.spec, model.spec.resolve(request))
    if gains is None:
        return pcm
    with Encoder("pcm", model.spec.sample_rate, gains=gains) as encoder:
        return encoder.feed(pcm) + encoder.finish()


SINE = Speaker(
    name="sine",
    load=LiveSineModel,
    voices=("low", "high"),
    sample_rate=8000,
    hop=80,
    long_text=LONG,
    options={"strength": 20},
    can_clone=True,
)

BUILTIN = Speaker(
    name=registry.BUILTIN,
    load=functools.cache(lambda: registry.load(None, device="cpu").model),
    voices=("nora", "miles", "edith", "hugh"),
    sample_rate=24000,
    hop=1920,
    lead_in=1200,
    long_text="Rice is often served in round bowls.",
    options={"subtalker_temperature": 0.9},
    live_options={"non_streaming_mode": False},
    # With these no draw is so near a tie that rounding, 1e-5 of a logit, decides it: the nearest is 5e-4 away.
    seeds=(7, 29, 19, 9, 1, 21, 30),
    # Which chunk lengths there are follows the clock, and how many rows there are the others; both round differently,
    # and a step is then amplified to twice its size.
    tolerance=3,
)


@dataclass
class Ended:
    """A request that ended: `whole`, or however else; sent and over at these times."""

    how: str
    sent_s: float
    over_s: float


LISTENS_S = 2.0
"""How long clients listen before they ask again, about as long as an answer lasts, and at least as long as they waited
for the answers: a slow machine has half of its time for what else runs."""


class Crowd:
    """Eight clients, who ask together, again and again until the block ends; `begun` of their answers are under way."""

    def __init__(self, server: Server, speaker: Speaker) -> None:
        self._server, self._text, self._speaker = server, speaker.long_text, speaker
        self.ended, self.begun, self._is_over = list[Ended](), 0, asyncio.Event()

    async def __aenter__(self) -> Self:
        for seed in self._speaker.seeds[:4]:
            self._speaker.spoken(self._text, seed=seed)
        self._asking = asyncio.create_task(self._ask_together())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over.set()
        await self._asking

    async def _ask_together(self) -> None:
        clock = asyncio.get_running_loop().time
        while not self._is_over.is_set():
            asked_s = clock()
            await asyncio.gather(*(self._ask(seed) for seed in 2 * self._speaker.seeds[:4]))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_over.wait(), max(LISTENS_S, clock() - asked_s))

    async def _ask(self, seed: int) -> None:
        expected, clock = self._speaker.spoken(self._text, seed=seed), asyncio.get_running_loop().time
        sent_s = clock()
        try:
            status, heard = await self._hear(seed)
            how = "whole" if self._speaker.is_same(heard, expected) else f"{status}, {len(heard)} bytes"
        except httpx.TransportError as error:
            how = f"cut off: {error!r}"
        self.ended.append(Ended(how, sent_s, clock()))

    async def _hear(self, seed: int) -> tuple[int, bytes]:
        body, heard = {"input": self._text, "response_format": "pcm", "seed": seed}, b""
        async with self._server.http.stream("POST", "/v1/audio/speech", json=body) as answer:
            try:
                async for part in answer.aiter_raw():
                    self.begun += not heard
                    heard += part
            finally:
                self.begun -= bool(heard)
        return answer.status_code, heard

    def sent_since(self, time_s: float) -> list[Ended]:
        return [ended for ended in self.ended if ended.sent_s > time_s]

    def check_lost(self, killed_s: float, noticed_s: float, replaced_s: float, most: int) -> None:
        """Something that spoke to at most `most` of them was killed: they, and whoever was sent to it until that was
        noticed, heard of it before it was replaced, and the others of nothing."""
        lost = [ended for ended in self.ended if ended.how != "whole"]
        assert 1 <= len([ended for ended in lost if ended.sent_s < killed_s]) <= most, lost
        assert all(ended.sent_s <= noticed_s for ended in lost), "what came later was lost"
        assert all(ended.over_s < replaced_s for ended in lost), lost
        assert not any(ended.how.startswith("200") for ended in lost), "an answer that was cut off looked whole"


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
