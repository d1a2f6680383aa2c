"""A server over several engines: the same to its clients, and one that dies takes with it what it spoke alone."""

import asyncio
import contextlib
import dataclasses
import os
import signal

import httpx
import pytest
from servers import SETTINGS, SINE, check_error, serving, sound
from sessions import VOICES, check_all, session
from sine_engines import CONFIG, LONG, alone, engines, nothing_left, run, until

from sonoro.core.types import SpeechRequest
from sonoro.server import gate
from sonoro.transport.messages import WorkerSettings
from sonoro.transport.process import EngineProcess

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

LASTING = {"input": LONG, "response_format": "pcm", "max_new_tokens": 300, "ignore_eos": True}
"""A second and a half of the slow model."""


@pytest.mark.parametrize("count", [1, 2], ids=["one engine", "two engines"])
def test_clients_get_what_they_may_rely_on(count: int) -> None:
    async def ask() -> None:
        async with serving("live", engines=count) as server:
            await check_all(server, SINE)
            assert await server.is_idle()
            launches = 'sonoro_engine_launches_total{{how="eager",kind="frame",replica="{}"}}'
            text = (await server.http.get("/metrics")).text
            assert all(launches.format(replica) in text for replica in range(count))
            assert await server.metric("sonoro_engine_slots") == CONFIG.slots * count
            ready = (await server.http.get("/ready")).json()
            assert (
                ready["replicas"] == [{"device": "cpu", "status": "ready", "restarts": 0, "graphs_to_come": 0}] * count
            )

    run(ask())


async def hear(http: httpx.AsyncClient, seed: int) -> str:
    """Whether an answer was whole and right, cut off, or what else became of it."""
    try:
        answer = await http.post("/v1/audio/speech", json={**LASTING, "seed": seed})
    except httpx.RemoteProtocolError:
        return "cut off"
    made = SpeechRequest(id="a", text=LONG, seed=seed, max_frames=300, ignore_eos=True)
    return "whole" if answer.content == alone(made) else f"{answer.status_code}: {answer.text[:200]}"


def test_while_an_engine_is_away_its_places_are_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests beyond the slots of the other engine wait in the server's queue, not in that engine's."""

    async def kill() -> None:
        async with serving("slow", engines=2) as server:
            start, may_start = EngineProcess.start, asyncio.Event()

            async def started(settings: WorkerSettings, ready_timeout_s: float) -> EngineProcess:
                await may_start.wait()
                return await start(settings, ready_timeout_s)

            monkeypatch.setattr(EngineProcess, "start", started)
            asking = [asyncio.create_task(server.http.post("/v1/audio/speech", json=LASTING)) for _ in range(8)]
            await until(lambda: server.has("sonoro_engine_running", 2 * CONFIG.slots))
            os.kill(min(engines()), signal.SIGKILL)
            await until(lambda: server.has("sonoro_engine_up", 1))
            more = [asyncio.create_task(server.speak()) for _ in range(CONFIG.slots)]
            await until(lambda: server.has("sonoro_queue_depth", CONFIG.slots))
            assert await server.metric("sonoro_engine_waiting") == 0
            may_start.set()
            assert {answer.status_code for answer in await asyncio.gather(*more)} == {200}
            await asyncio.gather(*asking, return_exceptions=True)

    run(kill())


def test_an_engine_that_is_back_serves_those_who_wait_though_nobody_comes_or_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # However long the engine takes to start, no session lends its permit to the one who waits.
    monkeypatch.setattr(gate, "IDLE_PERMIT_S", 3600.0)

    async def kill() -> None:
        async with serving("slow_live", engines=2) as server, contextlib.AsyncExitStack() as sessions:
            lasting = [await sessions.enter_async_context(session(server)) for _ in range(CONFIG.slots)]
            os.kill(min(engines()), signal.SIGKILL)
            await until(lambda: server.has("sonoro_engine_up", 1))
            for each in lasting:
                # Its text never ends, and it keeps its place.
                await each.say("input.text", text="Some words and ")
            await until(lambda: server.has("sonoro_requests_in_flight", CONFIG.slots))
            waiting = asyncio.create_task(server.speak())
            await until(lambda: server.has("sonoro_queue_depth", 1))
            assert (await waiting).content == alone(SpeechRequest(id="a", text="Some words."))
            assert await server.has("sonoro_engine_up", 2)

    run(kill())


def test_without_any_engine_those_who_wait_for_a_place_wait_for_one_to_be_back() -> None:
    async def kill() -> None:
        settings = dataclasses.replace(SETTINGS, max_concurrency=2, max_queue_wait_ms=100_000)
        async with serving("slow", settings, engines=2) as server:
            asking = [asyncio.create_task(hear(server.http, seed)) for seed in range(6)]
            await until(lambda: server.has("sonoro_queue_depth", 4))
            for process in engines():
                os.kill(process, signal.SIGKILL)
            await until(lambda: not server.engine.is_ready)
            check_error(await server.http.get("/ready"), 503)
            ends = await asyncio.gather(*asking)
            assert ends.count("whole") == 4, "what an engine held is lost with it, and nothing else"
            assert await server.is_ready()
            assert (await server.speak()).content == alone(SpeechRequest(id="a", text="Some words."))

    run(kill())


def test_two_servers_share_a_folder_of_voices(tmp_path_factory: pytest.TempPathFactory) -> None:
    config = dataclasses.replace(CONFIG, voices_folder=str(tmp_path_factory.mktemp("voices")))

    async def ask() -> None:
        async with serving(config=config) as one, serving(config=config) as other:
            fields, files = {"name": "anna", "ref_text": "A tone."}, {"audio": ("a.wav", sound(), "audio/wav")}
            assert (await one.http.post(VOICES, data=fields, files=files)).status_code == 201
            assert (await other.speak(voice="anna")).content == (await one.speak(voice="anna")).content
            check_error(await other.http.post(VOICES, data=fields, files=files), 409, "name")
            assert (await other.http.delete(f"{VOICES}/anna")).status_code == 200
            assert (await one.http.get(VOICES)).json()["uploaded_voices"] == []
            check_error(await one.speak(voice="anna"), 404, "voice")

    run(ask())
