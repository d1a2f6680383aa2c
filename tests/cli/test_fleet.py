"""`sonoro serve --devices cpu,cpu` as the built-in voice: what clients may rely on, and what dies with an engine."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from processes import GUARD_S, server
from servers import BUILTIN, Crowd, Server
from sessions import check_all
from sine_engines import engines, run, until

pytestmark = pytest.mark.long

SLOTS = 3
"""Fewer in two engines than a crowd is, so that some of it wait."""


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[tuple[Server, subprocess.Popen[str]]]:
    """Two engines behind one server, ready, and its process."""
    flags = ("--slots", str(SLOTS), "--max-queue-wait-ms", "60000")
    with server(folder, *flags, device="--devices=cpu,cpu") as (process, _, url):
        limits = httpx.Limits(max_connections=100)
        async with httpx.AsyncClient(base_url=url, timeout=GUARD_S, limits=limits, trust_env=False) as http:
            server_over = Server(http, url, None, None, [])
            await until(server_over.is_ready)
            resolved = (await http.get("/v1/models")).json()["configuration"]["server"]
            assert resolved["max_concurrency"] == 2 * SLOTS
            yield server_over, process


async def replicas(server: Server) -> list[str]:
    return sorted(replica["status"] for replica in (await server.http.get("/ready")).json()["replicas"])


def is_empty(pipe: int) -> bool:
    """Whether nothing can be read from `pipe`."""
    return select.select([pipe], [], [], 0)[0] == []


async def check_a_killed_engine(server: Server, process: subprocess.Popen[str]) -> None:
    """Requests come throughout: those begun on it end before it is replaced, all others are spoken; then it is back."""
    clock = asyncio.get_running_loop().time
    async with Crowd(server, BUILTIN) as crowd:
        await until(lambda: crowd.begun == 2 * SLOTS)
        os.kill(min(engines(process.pid)), signal.SIGKILL)
        killed_s = clock()
        await until(lambda: server.has("sonoro_engine_up", 1))
        assert await server.is_ready()
        assert await replicas(server) == ["ready", "starting"]
        await until(lambda: server.has("sonoro_engine_up", 2))
        replaced_s = clock()
        await until(lambda: server.has("sonoro_engine_running", 2 * SLOTS))
    crowd.check_lost(killed_s, killed_s, replaced_s, most=SLOTS)
    assert crowd.sent_since(killed_s)
    assert await server.metric("sonoro_engine_restarts_total") == 1
    for state in ("running", "waiting"):
        assert await server.has(f"sonoro_engine_{state}", 0)


def test_clients_get_what_they_may_rely_on_without_ray_and_lose_what_a_killed_engine_spoke(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One server for both, as its three processes take seconds of a core to start. Neither the server nor an engine
    imports Ray: here that fails."""
    (tmp_path / "ray.py").write_text("raise ImportError('ray was imported')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)

    async def ask() -> None:
        async with serving(tmp_path) as (server, process):
            await until(lambda: server.has("sonoro_engine_up", 2))
            await check_all(server, BUILTIN)
            assert await replicas(server) == ["ready", "ready"]
            assert is_empty(process.stderr.fileno()), "something was logged"
            await check_a_killed_engine(server, process)
            process.send_signal(signal.SIGTERM)
            assert process.wait(GUARD_S) == -signal.SIGTERM

    run(ask(), 10 * GUARD_S)
