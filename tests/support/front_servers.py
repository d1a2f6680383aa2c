"""Servers of several front processes on a free port, over engines of sines."""

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import servers
from processes import GUARD_S
from servers import SETTINGS
from sine_engines import CONFIG, FACTORY, children, command_of, until

from sonoro.core.config import EngineConfig
from sonoro.server.config import ServerConfig
from sonoro.server.fronts import Fronts
from sonoro.server.listening import listen_often
from sonoro.transport.launch import Limits
from sonoro.transport.messages import WorkerSettings

BODY = {"input": "Some words.", "response_format": "pcm", "voice": "low"}


@dataclasses.dataclass
class Server:
    """`url` of a server in this process, whose fronts are children of it."""

    fronts: Fronts
    url: str
    serving: "asyncio.Task[None]"

    async def post(self, path: str = "/v1/audio/speech", **given: object) -> httpx.Response:
        """Ask over a new connection, which may be any front's."""
        async with httpx.AsyncClient(base_url=self.url, timeout=GUARD_S, trust_env=False) as http:
            return await http.post(path, **(given or {"json": BODY}))

    async def get(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=GUARD_S, trust_env=False) as http:
            return await http.get(path)

    async def delete(self, path: str) -> httpx.Response:
        async with httpx.AsyncClient(base_url=self.url, timeout=GUARD_S, trust_env=False) as http:
            return await http.delete(path)

    async def is_ready(self) -> bool:
        return (await self.get("/ready")).status_code == 200

    async def metric(self, name: str) -> float:
        found = re.findall(rf"^{re.escape(name)}\S* (\S+)$", (await self.get("/metrics")).text, re.MULTILINE)
        return sum(map(float, found))


def pids() -> set[int]:
    return {child for child in children() if b"sonoro.server.front" in command_of(child)}


@contextlib.asynccontextmanager
async def _started(
    count: int, model: str, config: EngineConfig, settings: ServerConfig, *, engines: int = 1, **limits: float
) -> AsyncIterator[tuple[Fronts, str, "asyncio.Task[None]"]]:
    """Fronts, their address, and the task that ends with them."""
    worker = WorkerSettings(model=model, config=config, factory=FACTORY)
    with contextlib.ExitStack() as listening:
        sockets = [listening.enter_context(sock) for sock in listen_often(settings, count)]
        resolved = settings.resolve(engines * config.slots)
        fronts = Fronts(worker, ("cpu",) * engines, Limits(**limits), resolved, [[sock] for sock in sockets])
        others, task = pids(), asyncio.create_task(fronts.run())
        try:
            await until(lambda: len(pids() - others) == count or task.done())
            yield fronts, f"http://127.0.0.1:{sockets[0].getsockname()[1]}", task
        finally:
            fronts.end()
            await task


@contextlib.asynccontextmanager
async def serving(count: int = 2, model: str = "slow", config: ServerConfig = SETTINGS) -> AsyncIterator[Server]:
    async with _started(count, model, CONFIG, config, engines=2) as started:
        server = Server(*started)
        # Each connection may be another front's.
        for _ in range(4 * count):
            await until(server.is_ready)
        yield server


class Elsewhere:
    """What stands behind a server, with its `members`. A test that asks for anything else is skipped: it looks into
    another process."""

    def __init__(self, **members: object) -> None:
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:
        return pytest.skip(f"{name} is in another process")

    def __bool__(self) -> bool:
        return pytest.skip("it is in another process")


class Ending(Elsewhere):
    """In place of the `uvicorn.Server`, which a test may only end."""

    @property
    def should_exit(self) -> bool:
        return self.fronts._is_ending

    @should_exit.setter
    def should_exit(self, is_over: bool) -> None:
        assert is_over
        self.fronts.end()


class SameServer(servers.Server):
    """As `servers.Server`, of fronts: each request may be another's."""

    async def is_idle(self) -> bool:
        busy = [await self.metric(f"sonoro_engine_{name}") for name in ("running", "waiting")]
        return not any(busy)


@contextlib.asynccontextmanager
async def same_serving(
    count: int, model: str, config: EngineConfig, settings: ServerConfig, **limits: float
) -> AsyncIterator[SameServer]:
    """As `servers.serving`, by `count` fronts."""
    connections = httpx.Limits(max_keepalive_connections=0)
    async with (
        _started(count, model, config, settings, **limits) as (fronts, url, _),
        httpx.AsyncClient(base_url=url, timeout=GUARD_S, trust_env=False, limits=connections) as http,
    ):
        behind: Any = Elsewhere(replicas=fronts._engines)
        server = SameServer(http, url, behind, Ending(fronts=fronts), Elsewhere())  # type: ignore[arg-type]
        for _ in range(4 * count):
            await until(server.is_ready)
        yield server
