"""What operators ask: configuration, readiness, and metrics that say what was heard."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from servers import SETTINGS, Server, check_error, serving
from sine_engines import CONFIG, engines, nothing_left, run, until
from sine_models import HELD

from sonoro.core.errors import EngineClosed
from sonoro.server.metrics import EngineState, Metrics
from sonoro.server.stream import Observation

__all__ = ["nothing_left"]

SPEECH = "/v1/audio/speech"


@pytest.mark.usefixtures("tmp_path", "nothing_left")
def test_models_tell_what_was_decided_and_nothing_secret(tmp_path: object) -> None:
    config = dataclasses.replace(CONFIG, voices_folder=str(tmp_path))
    settings = dataclasses.replace(SETTINGS, api_keys=("first-key",), reference_folder=str(tmp_path), max_waiting=7)

    async def ask() -> None:
        async with serving(settings=settings, config=config) as server:
            answer = await server.http.get("/v1/models", headers={"authorization": "Bearer first-key"})
            shown = answer.json()["configuration"]
            engine = {**dataclasses.asdict(CONFIG.resolve()), "voices_folder": "set"}
            del engine["tuning"]  # which no file may set
            assert shown["engine"] == json.loads(json.dumps(engine))
            assert (shown["server"]["max_waiting"], shown["server"]["max_concurrency"]) == (7, CONFIG.slots)
            assert shown["load"] == {"device": "cpu", "dtype": None, "load_format": "auto"}
            assert shown["ready"]["seconds"] > 0
            assert shown["ready"]["report"] == server.engine.ready.report.splitlines()
            assert "first-key" not in answer.text
            assert str(tmp_path) not in answer.text
            assert answer.json()["data"][0]["options"] == {"strength": "a whole number >= 0 and <= 100"}

    run(ask())


@pytest.mark.usefixtures("nothing_left")
def test_an_engine_that_ended_for_good_is_told_of() -> None:
    async def ask() -> None:
        async with serving(max_restarts=0) as server:
            (worker,) = engines()
            os.kill(worker, signal.SIGKILL)
            await until(lambda: server.engine.closed_reason is not None)
            for answer in (await server.http.get("/ready"), await server.speak()):
                check_error(answer, 503)
                assert "ended for good" in answer.json()["error"]["message"]
            assert (await server.http.get("/health")).status_code == 200
            assert await server.metric("sonoro_engine_up") == 0
            # Whoever runs the server is told, to end it.
            await until(lambda: server.failures)
            assert isinstance(server.failures[0], EngineClosed)

    run(ask())


def test_a_server_whose_engines_are_spent_ends_with_an_error(nothing_left: Path) -> None:
    """So a container or a service is started again: alive and never ready, it would stay as it is for ever."""
    script = """
import asyncio
from sine_engines import launch_fleet
from servers import SETTINGS
from sonoro.server.app import serve
from sonoro.server.listening import listen
with listen(SETTINGS) as sock:
    print("listening", flush=True)
    asyncio.run(serve(launch_fleet(count=1, max_restarts=0), SETTINGS.resolve(4), sock))
"""
    environment = {**os.environ, "TMPDIR": str(nothing_left)}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, **piped) as process:
        while not (found := engines(process.pid)):
            assert process.poll() is None
            time.sleep(0.05)
        (engine,) = found
        os.kill(engine, signal.SIGKILL)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"SIGKILL" in err


@pytest.mark.usefixtures("nothing_left")
def test_a_defect_is_told_of_under_the_id_of_its_request(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Metrics, engines: Sequence[EngineState], *, queued: int) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(Metrics, "exposition", broken)

    async def ask() -> None:
        async with serving() as server:
            answer = await server.http.get("/metrics", headers={"x-request-id": "job-7"})
            check_error(answer, 500)
            assert answer.headers["x-request-id"] == "job-7"
            assert "ZeroDivisionError" in caplog.text
            assert (await server.speak()).status_code == 200

    run(ask())


@pytest.mark.usefixtures("nothing_left")
def test_metrics_count_who_waits_and_who_speaks(tmp_path: Path) -> None:
    long = {"input": "Some words.", "response_format": "pcm", "max_new_tokens": 150, "ignore_eos": True}

    async def ask() -> None:
        async with serving(f"{HELD}{tmp_path / 'go'}", dataclasses.replace(SETTINGS, max_concurrency=2)) as server:
            asking = [asyncio.create_task(server.http.post(SPEECH, json=long)) for _ in range(5)]
            await until(lambda: server.metric("sonoro_engine_running"))
            await until(lambda: server.has("sonoro_queue_depth", 3))
            assert await server.metric("sonoro_requests_in_flight") == 5
            assert await server.metric("sonoro_engine_slots") == CONFIG.slots
            assert await server.metric("sonoro_engine_free_pages") > 0
            (tmp_path / "go").touch()
            answers = await asyncio.gather(*asking)
            assert {answer.status_code for answer in answers} == {200}
            text = (await server.http.get("/metrics")).text
            for name in ("first_packet_seconds", "request_seconds", "rtf"):
                assert await server.metric(f'sonoro_{name}_count{{model="sine"}}') == 5
            assert await server.metric('sonoro_audio_seconds_total{model="sine"}') == pytest.approx(7.5)
            assert 'sonoro_engine_frame_seconds{quantile="0.95",replica="0"}' in text

    run(ask())


@pytest.mark.usefixtures("nothing_left")
def test_metrics_count_what_prompts_share() -> None:
    """Of 40 characters that two texts begin with, one page of 32 is shared; another engine knows nothing of them."""
    text, names = "x" * 40 + "|", ("prompt_tokens_prefilled_total", "prompt_tokens_cached_total", "prefix_hits_total",
                                   "prefix_misses_total", "prefix_evictions_total", "prefix_bytes")  # fmt: skip

    async def counts(server: Server) -> list[float]:
        return [await server.metric(f"sonoro_engine_{name}") for name in names]

    async def ask() -> None:
        async with serving("prefixed") as server:
            answers = [(await server.speak(text + words)).content for words in ("one", "two", "one")]
            assert answers[0] == answers[2]
            assert await counts(server) == [44 + 12 + 12, 64, 2, 1, 0, 32 * 64]
            (worker,) = engines()
            os.kill(worker, signal.SIGKILL)
            await until(lambda: server.has("sonoro_engine_restarts_total", 1))
            await until(server.is_ready)
            assert (await server.speak(text + "one")).content == answers[0]
            assert await counts(server) == [44, 0, 0, 1, 0, 32 * 64]

    run(ask())


@pytest.mark.parametrize(
    ("arrivals_s", "speed", "underruns"),
    [
        ([0.0, 0.5, 1.0, 1.5], 1.0, 0),
        ([0.0, 0.9, 1.9, 2.9], 1.0, 0),
        ([0.0, 1.1, 1.2, 1.3], 1.0, 1),
        ([0.0, 1.1, 2.2, 3.3], 1.0, 3),
        ([0.0, 0.6, 1.2, 1.8], 2.0, 3),
        ([0.0, 1.9, 3.9, 5.9], 0.5, 0),
    ],
)
def test_underruns_are_those_of_a_listener_without_a_buffer(
    arrivals_s: list[float], speed: float, underruns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of one second each, sent at these times."""
    now_s = 0.0
    monkeypatch.setattr("sonoro.server.stream.time.perf_counter", lambda: now_s)
    metrics = Metrics()
    observation = Observation(metrics, 8000, 0.0, speed)
    for now_s in arrivals_s:  # noqa: B007
        observation.add_audio(bytes(16000))
        observation.mark_sent()
    observation.end("stop", is_whole=True)
    text = metrics.exposition([EngineState(None, 0, 4)], queued=2).decode()
    assert f'sonoro_underruns_total{{model=""}} {float(underruns)}' in text
    assert "sonoro_queue_depth 2.0" in text


def test_what_an_encoder_holds_back_is_not_heard_yet() -> None:
    metrics = Metrics()
    observation = Observation(metrics, 8000, 0.0)
    observation.add_audio(bytes(1600))
    assert observation.first_packet_s is None
    observation.add_audio(bytes(1600))
    observation.mark_sent()
    assert observation.first_packet_s is not None
    assert observation.audio_s == 0.2
