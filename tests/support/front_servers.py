"""Servers of several front processes on a free port, over engines of sines."""

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncIterator

import httpx
from processes import GUARD_S
from servers import SETTINGS
from sine_engines import CONFIG, FACTORY, children, command_of, until

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

    async def is_ready(self) -> bool:
        return (await self.get("/ready")).status_code == 200

    async def metric(self, name: str) -> float:
        found = re.findall(rf"^{re.escape(name)}\S* (\S+)$", (await self.get("/metrics")).text, re.MULTILINE)
        return sum(map(float, found))


def pids() -> set[int]:
    return {child for child in children() if b"sonoro.server.front" in command_of(child)}


@contextlib.asynccontextmanager
async def serving(count: int = 2, model: str = "slow", config: ServerConfig = SETTINGS) -> AsyncIterator[Server]:
    settings = WorkerSettings(model=model, config=CONFIG, factory=FACTORY)
    with contextlib.ExitStack() as listening:
        sockets = [listening.enter_context(sock) for sock in listen_often(config, count)]
        fronts = Fronts(
            settings, ("cpu",) * 2, Limits(), config.resolve(2 * CONFIG.slots), [[sock] for sock in sockets]
        )
        task = asyncio.create_task(fronts.run())
        server = Server(fronts, f"http://127.0.0.1:{sockets[0].getsockname()[1]}", task)
        try:
            await until(lambda: len(pids()) == count)
            # Each connection may be another front's.
            for _ in range(4 * count):
                await until(server.is_ready)
            yield server
        finally:
            fronts.end()
            await task
