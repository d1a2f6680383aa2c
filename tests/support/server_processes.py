"""A real server on a free port over engine processes with the sine model, for the tests of what clients see."""

import asyncio
import base64
import contextlib
import dataclasses
import io
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import soundfile
import uvicorn
from engine_processes import CONFIG, launch_fleet
from guard import GUARD_S

from sonoro.core.config import EngineConfig
from sonoro.server.app import create_app, uvicorn_config
from sonoro.server.config import ServerConfig
from sonoro.server.listening import listen
from sonoro.transport.fleet import Fleet

SETTINGS = ServerConfig(port=0, max_queue_wait_ms=60_000, shutdown_timeout_s=30)


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
