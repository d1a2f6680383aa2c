"""A server of several front processes: its limits are those of one, and the end of a front is that of its streams."""

import asyncio
import collections
import contextlib
import dataclasses
import errno
import os
import signal
import time
from asyncio import create_subprocess_exec
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from front_servers import BODY, Server, pids, serving
from processes import GUARD_S
from servers import SETTINGS, sound
from sine_engines import CONFIG, FACTORY, alone, engines, nothing_left, run, until
from sine_models import HELD

from sonoro.core.errors import ConfigError
from sonoro.core.types import SpeechRequest
from sonoro.server.fronts import Fronts, serve_fronts
from sonoro.server.listening import listen_often
from sonoro.transport import launch
from sonoro.transport.launch import Limits
from sonoro.transport.messages import WorkerSettings

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("tmp_path", "nothing_left")

EXPECTED = SpeechRequest(id="a", text="Some words.", voice="low")


@pytest.mark.parametrize("count", [1, 3])
def test_a_port_is_one_servers(count: int) -> None:
    """Whose sockets share it; those of another would get a part of its connections."""
    first = listen_often(dataclasses.replace(SETTINGS, port=0), count)
    taken = dataclasses.replace(SETTINGS, port=first[0].getsockname()[1])
    for sock in first:
        with pytest.raises(ConfigError, match=r"port: .* is not allowed; cannot listen there"):
            listen_often(taken, 2)
        sock.close()
    for sock in listen_often(taken, 2):
        sock.close()


@pytest.mark.parametrize("field", ["voices_folder", "lexicons_folder"])
def test_a_folder_that_cannot_be_used_ends_the_server(field: str, tmp_path: Path) -> None:
    """As one without fronts: each of them would end, and be started again and again."""
    (tmp_path / "file").touch()
    given: dict[str, Any] = {field: str(tmp_path / "file" / "folder")}
    own = given if field == "lexicons_folder" else {}
    engine = CONFIG if own else dataclasses.replace(CONFIG, **given)
    worker = WorkerSettings(model="sine", config=engine, factory=FACTORY)
    with pytest.raises(ConfigError, match=rf"^{field}: .* is not allowed; it must be a folder that can be used"):
        Fronts(worker, ("cpu",), Limits(), dataclasses.replace(SETTINGS, **own).resolve(1), [[], []])


def test_fronts_share_counts_voices_and_lexicons() -> None:
    """Whichever front is asked: all requests are counted once, and what was registered with one is known to all."""

    async def ask() -> None:
        async with serving() as server:
            answers = await asyncio.gather(*(server.post() for _ in range(20)))
            assert {answer.content for answer in answers} == {alone(EXPECTED)}
            for _ in range(4):
                assert await server.metric("sonoro_requests_total") == 20
                assert await server.metric("sonoro_requests_in_flight") == 0
            rules = {"name": "names", "rules": {"Worcester": "Wooster"}}
            assert (await server.post("/v1/audio/lexicons", json=rules)).status_code == 200
            for _ in range(6):
                answer = await server.post(json={**BODY, "lexicons": ["names"], "seed": 1})
                assert answer.status_code == 200, answer.text

    run(ask())


def test_a_front_that_stands_still_is_replaced_unless_all_were_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a container that is paused."""
    monkeypatch.setattr("sonoro.server.fronts._HANG_S", 6.0)

    async def stand() -> None:
        async with serving() as server:
            fronts = pids()
            for pid in fronts:
                os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(0.5)
            time.sleep(7.0)  # this process, which looks after them, stands still too
            await asyncio.sleep(0.5)
            for pid in fronts:
                os.kill(pid, signal.SIGCONT)
            assert (await server.post()).content == alone(EXPECTED)
            assert pids() == fronts
            os.kill(min(fronts), signal.SIGSTOP)
            await until(lambda: min(fronts) not in pids() and len(pids()) == 2)

    run(stand())


def test_what_is_stored_through_one_front_is_at_once_so_at_all() -> None:
    """Registered, changed, replaced or deleted: of requests over new connections, which may be any front's."""
    spoken, lexicons, voices = "/v1/audio/speech", "/v1/audio/lexicons", "/v1/audio/voices"

    async def ask() -> None:
        async with serving(4, "sine") as server:

            async def sent(**fields: object) -> set[tuple[int, int]]:
                body = {"input": "SQL", "response_format": "pcm", **fields}
                answers = [await server.post(spoken, json=body) for _ in range(6)]
                return {(answer.status_code, len(answer.content) if answer.is_success else 0) for answer in answers}

            for alias in ("sequel", "s q l", "x"):
                rules = {"name": "names", "rules": {"SQL": alias}}
                assert (await server.post(lexicons, json=rules)).status_code == 200
                assert await sent(lexicons=["names"]) == {(200, 160 * len(alias))}
            assert (await server.delete(f"{lexicons}/names")).status_code == 200
            assert await sent(lexicons=["names"]) == {(404, 0)}
            for seconds in (1.0, 2.0):
                form = {"data": {"name": "anna", "ref_text": "A tone."}, "files": {"audio": ("a.wav", sound(seconds))}}
                assert (await server.post(voices, **form)).status_code == 201
                assert await sent(voice="anna") == {(200, 160 * 3)}
                listed = [(await server.get(voices)).json()["uploaded_voices"] for _ in range(6)]
                assert [[voice["duration_s"] for voice in found] for found in listed] == [[seconds]] * 6
                assert (await server.delete(f"{voices}/anna")).status_code == 200
                assert await sent(voice="anna") == {(404, 0)}

    run(ask())


def test_a_limit_is_that_of_all_fronts() -> None:
    """Permits that one front releases go to those who wait at another."""
    config = dataclasses.replace(SETTINGS, max_concurrency=1, max_waiting=6)

    async def ask() -> None:
        async with serving(config=config) as server:
            answers = await asyncio.gather(*(server.post() for _ in range(7)))
            assert {answer.content for answer in answers} == {alone(EXPECTED)}
            answers = await asyncio.gather(*(server.post() for _ in range(12)))
            statuses = sorted(answer.status_code for answer in answers)
            assert statuses == [200] * 7 + [429] * 5
            assert (await server.post()).status_code == 200

    run(ask())


def test_a_front_that_is_killed_loses_its_own_streams_alone() -> None:
    long = {**BODY, "max_new_tokens": 200, "ignore_eos": True}

    async def listen(server: Server, begun: "asyncio.Queue[None]") -> str:
        heard = b""
        try:
            async with (
                httpx.AsyncClient(base_url=server.url, timeout=GUARD_S, trust_env=False) as http,
                http.stream("POST", "/v1/audio/speech", json=long) as answer,
            ):
                async for part in answer.aiter_raw():
                    if not heard:
                        begun.put_nowait(None)
                    heard += part
        except httpx.TransportError:
            return "broken"
        return "whole" if len(heard) == 200 * 160 else f"silent: {len(heard)}"

    async def kill() -> None:
        async with serving() as server:
            begun: asyncio.Queue[None] = asyncio.Queue()
            listening = [asyncio.create_task(listen(server, begun)) for _ in range(8)]
            for _ in listening:
                await begun.get()
            before = pids()
            killed = min(before)
            os.kill(killed, signal.SIGKILL)
            ends = [await task for task in listening]
            assert set(ends) <= {"whole", "broken"}
            await until(lambda: len(pids()) == 2 and killed not in pids())
            for _ in range(8):
                assert (await server.post()).content == alone(EXPECTED)
            # The engines run nothing that nobody hears, and no count of the dead front is left.
            await until(lambda: idle(server))

    async def idle(server: Server) -> bool:
        return await server.metric("sonoro_engine_running") == 0 == await server.metric("sonoro_requests_in_flight")

    run(kill())


def test_what_cannot_be_started_is_started_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A front, at whose socket connections wait, and an engine: where the system has no process left for a while."""
    counts = collections.Counter[str]()

    def fails_at_first(name: str, start: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
        async def started(*arguments: object, **given: object) -> object:
            counts[name] += 1
            if counts[name] == 1:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            return await start(*arguments, **given)

        return started

    async def start() -> None:
        async with serving() as server:
            with monkeypatch.context() as patched:
                patched.setattr(asyncio, "create_subprocess_exec", fails_at_first("front", create_subprocess_exec))
                os.kill(min(pids()), signal.SIGKILL)
                await until(lambda: counts["front"] == 2 and len(pids()) == 2)
            assert {(await server.post()).content for _ in range(8)} == {alone(EXPECTED)}
            monkeypatch.setattr(launch, "spawn", fails_at_first("engine", launch.spawn))
            os.kill(min(engines()), signal.SIGKILL)
            await until(lambda: counts["engine"] == 2 and len(engines()) == 2)
            for _ in range(8):
                assert (await server.post()).content == alone(EXPECTED)

    run(start())
    assert "event=front_not_started front=" in caplog.text
    assert "the engine process could not be started: [Errno 11]" in caplog.text


def test_a_front_that_does_not_understand_its_parent_is_replaced() -> None:
    """It would know of no engine that is started from then on."""

    async def confuse() -> None:
        async with serving() as server:
            before = pids()
            confused = server.fronts._running[0]
            assert confused.stdin is not None
            confused.stdin.write(b"[]\n")
            await until(lambda: len(pids()) == 2 and confused.pid not in pids())
            assert len(pids() & before) == 1
            for _ in range(4):
                assert (await server.post()).content == alone(EXPECTED)

    run(confuse())


async def refuses(server: Server) -> bool:
    """Whether new connections are refused, rather than left to wait for a front."""
    with contextlib.suppress(httpx.ReadError):
        try:
            await server.get("/health")
        except httpx.ConnectError:
            return True
    return False


def test_running_streams_end_before_the_server_does() -> None:
    long = {**BODY, "max_new_tokens": 100, "ignore_eos": True}

    async def drain() -> None:
        async with serving() as server:
            asking = [asyncio.create_task(server.post(json=long)) for _ in range(4)]
            await until(lambda: speaking(server))
            server.fronts.end()
            await until(lambda: refuses(server))
            assert [len((await task).content) for task in asking] == [100 * 160] * 4
            await server.serving

    async def speaking(server: Server) -> bool:
        return await server.metric("sonoro_engine_running") == 4

    run(drain())
    assert not pids()


def test_a_second_interrupt_waits_for_no_stream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As with one process, which uvicorn then ends."""
    endless, signals = {**BODY, "max_new_tokens": 500, "ignore_eos": True}, list[int]()
    monkeypatch.setattr("sonoro.server.fronts.signal.raise_signal", signals.append)

    async def interrupt() -> None:
        worker = WorkerSettings(model=f"{HELD}{tmp_path / 'go'}", config=CONFIG, factory=FACTORY)
        with contextlib.ExitStack() as listening:
            sockets = [listening.enter_context(sock) for sock in listen_often(SETTINGS, 2)]
            settings = dataclasses.replace(SETTINGS, shutdown_timeout_s=600).resolve(CONFIG.slots)
            fronts = Fronts(worker, ("cpu",), Limits(), settings, [[sock] for sock in sockets])
            serving = asyncio.create_task(serve_fronts(fronts))
            server = Server(fronts, f"http://127.0.0.1:{sockets[0].getsockname()[1]}", serving)
            await until(lambda: len(pids()) == 2)
            await until(server.is_ready)
            speaking = asyncio.create_task(server.post(json=endless))
            await until(lambda: is_speaking(server))
            os.kill(os.getpid(), signal.SIGINT)
            await until(lambda: refuses(server))
            assert not speaking.done()
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(httpx.HTTPError):
                await speaking
            await serving

    async def is_speaking(server: Server) -> bool:
        return await server.metric("sonoro_engine_running") == 1

    run(interrupt())
    assert signals == [signal.SIGINT]
