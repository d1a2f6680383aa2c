"""Streams, crowds and faults: first bytes early, a client gone, a reader asleep, an engine killed, a server ended."""

import asyncio
import dataclasses
import json
import os
import signal
import socket
import time

import httpx
import pytest
from processes import GUARD_S
from servers import SETTINGS, check_error, serving
from sine_engines import CONFIG, LONG, alone, engines, nothing_left, run, until

from sonoro.core.types import SpeechRequest
from sonoro.server.errors import TooManyRequests
from sonoro.server.gate import Gate

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")

SPEECH = "/v1/audio/speech"
LASTING = {"input": LONG, "response_format": "pcm", "max_new_tokens": 400, "ignore_eos": True}
"""Two seconds of the slow model."""
ENDLESS = dataclasses.replace(CONFIG, max_positions=2400, max_frames=2000, prefill_tokens=2400)
FOREVER = {**LASTING, "max_new_tokens": 2000}
"""At least ten seconds of the slow model, for what is not let end by itself; on a busy machine it takes longer too."""


def test_first_bytes_of_every_format_come_before_the_last_frame() -> None:
    formats = ("pcm", "wav", "mp3", "opus", "aac", "flac")

    async def listen() -> None:
        async with serving("slow", config=dataclasses.replace(CONFIG, slots=len(formats))) as server:

            async def arrivals(format: str) -> list[float]:
                started_s = time.perf_counter()
                async with server.http.stream("POST", SPEECH, json={**LASTING, "response_format": format}) as answer:
                    # So that nginx passes on what has come.
                    assert answer.headers["x-accel-buffering"] == "no"
                    return [time.perf_counter() - started_s async for part in answer.aiter_raw() if part]

            for times in await asyncio.gather(*map(arrivals, formats)):
                # 400 frames of 5 ms; the slowest format needs 128 ms of audio, thirteen frames, for its first packet.
                assert len(times) > 10
                assert times[-1] > 2.0
                assert times[0] < times[-1] / 2
            assert await server.metric('sonoro_first_packet_seconds_count{model="sine"}') == 6
            assert await server.metric('sonoro_rtf_count{model="sine"}') == 6
            assert await server.metric('sonoro_audio_seconds_total{model="sine"}') == pytest.approx(24.0)
            assert await server.metric('sonoro_requests_total{model="sine",reason="length"}') == 6
            assert await server.metric('sonoro_engine_launches_total{how="eager",kind="frame"}') >= 400

    run(listen())


@pytest.mark.parametrize("format", ["pcm", "mp3"])
def test_a_client_that_leaves_frees_its_slot(format: str) -> None:
    async def leave() -> None:
        async with serving("slow", config=ENDLESS) as server:
            async with server.http.stream("POST", SPEECH, json={**FOREVER, "response_format": format}) as answer:
                await anext(answer.aiter_raw())
            await until(server.is_idle)
            assert await server.metric('sonoro_requests_total{model="sine",reason="disconnected"}') == 1
            assert await server.metric("sonoro_requests_in_flight") == 0

    run(leave())


def test_a_client_that_leaves_before_its_turn_gives_it_up() -> None:
    async def leave() -> None:
        async with serving("slow", dataclasses.replace(SETTINGS, max_concurrency=1), ENDLESS) as server:
            first = asyncio.create_task(server.http.post(SPEECH, json=FOREVER))
            await until(lambda: server.metric("sonoro_engine_running"))
            second = asyncio.create_task(server.http.post(SPEECH, json=FOREVER))
            await until(lambda: server.has("sonoro_queue_depth", 1))
            second.cancel()
            await until(lambda: server.has("sonoro_queue_depth", 0))
            third = asyncio.create_task(server.speak())
            await until(lambda: server.has("sonoro_queue_depth", 1))
            first.cancel()
            assert (await third).status_code == 200
            assert await server.metric('sonoro_requests_total{model="sine",reason="disconnected"}') == 2

    run(leave())


def test_a_crowd_waits_then_is_refused_and_nobody_is_forgotten() -> None:
    settings = dataclasses.replace(SETTINGS, max_queue_wait_ms=1000)
    config = dataclasses.replace(CONFIG, slots=8)

    async def crowd() -> None:
        async with serving("slow", settings, config) as server:
            limits = httpx.Limits(max_connections=200)
            async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=GUARD_S, trust_env=False) as many:
                text = {"input": "Some more words, said by many at once.", "response_format": "pcm"}
                answers = await asyncio.gather(*(many.post(SPEECH, json={**text, "seed": seed}) for seed in range(200)))
            refused = [answer for answer in answers if answer.status_code == 429]
            assert 0 < len(refused) <= 192
            assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
            assert refused[0].json()["error"]["type"] == "rate_limit_error"
            for seed, answer in enumerate(answers):
                if answer.status_code != 429:
                    assert answer.status_code == 200
                    assert answer.content == alone(SpeechRequest(id="a", text=text["input"], seed=seed))
            await until(server.is_idle)
            assert await server.metric("sonoro_queue_depth") == 0
            assert (await server.speak()).status_code == 200

    run(crowd())


def test_a_place_is_waited_for_no_longer_than_said_and_not_by_too_many() -> None:
    async def wait() -> None:
        gate = Gate(1, max_waiting=1, wait_s=0.1)
        async with gate.acquire():
            with pytest.raises(TooManyRequests, match="no request ended"):
                async with gate.acquire():
                    pass
            waiting = asyncio.create_task(gate.acquire().__aenter__())
            await asyncio.sleep(0)
            with pytest.raises(TooManyRequests, match="1 requests"):
                async with gate.acquire():
                    pass
        await waiting

    run(wait())


def test_a_client_that_takes_nothing_is_given_up() -> None:
    settings = dataclasses.replace(SETTINGS, slow_reader_timeout_s=0.5)

    async def stall() -> None:
        async with serving("sine", settings, ENDLESS, queue_s=0.5, slow_reader_timeout_s=0.5) as server:
            port = int(server.url.rpartition(":")[2])
            streams = []
            for seed in range(CONFIG.slots):
                # A small buffer, which stops the system from making the one at the other end larger.
                sock = socket.socket()
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.connect(("127.0.0.1", port))
                reader, writer = await asyncio.open_connection(sock=sock, limit=1024)
                fields = f'"seed": {seed}, "sample_rate": 48000, "response_format": "pcm"'
                text = f'{{"input": "{LONG}", "max_new_tokens": 2000, "ignore_eos": true, {fields}}}'.encode()
                head = f"POST {SPEECH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
                writer.write(head.encode() + text)
                streams.append((reader, writer))
            given_up = 'sonoro_requests_total{model="sine",reason="slow_reader"}'
            async with asyncio.timeout(GUARD_S):
                while await server.metric(given_up) < CONFIG.slots:
                    await asyncio.sleep(0.05)
            await until(server.is_idle)
            assert (await server.speak()).status_code == 200
            for _, writer in streams:
                writer.transport.abort()

    run(stall())


def test_a_killed_engine_ends_what_it_held_and_is_replaced() -> None:
    async def kill() -> None:
        async with serving("slow", dataclasses.replace(SETTINGS, max_concurrency=3), ENDLESS) as server:

            async def hear(**fields: object) -> tuple[int, bytes, Exception | None]:
                heard = b""
                async with server.http.stream("POST", SPEECH, json={**FOREVER, **fields}) as answer:
                    try:
                        async for part in answer.aiter_raw():
                            heard += part
                    except httpx.RemoteProtocolError as error:
                        return answer.status_code, heard, error
                return answer.status_code, heard, None

            begun = [asyncio.create_task(hear(stream_format=kind)) for kind in ("audio", "sse", "json")]
            await until(lambda: server.has('sonoro_first_packet_seconds_count{model="sine"}', 2))
            await until(lambda: server.has("sonoro_engine_running", 3))
            waiting = [asyncio.create_task(hear(max_new_tokens=400)) for _ in range(3)]
            await until(lambda: server.has("sonoro_queue_depth", 3))
            (worker,) = engines()
            os.kill(worker, signal.SIGKILL)
            audio, events, whole = await asyncio.gather(*begun)
            # They were allowed to wait for longer than a restart takes.
            answers = await asyncio.gather(*waiting)
            status, heard, failure = audio
            assert status == 200
            assert heard
            assert isinstance(failure, httpx.RemoteProtocolError), "a body that was cut off must not look whole"
            assert events[0] == 200
            assert events[2] is None
            assert b'"type": "error"' in events[1].rstrip().rpartition(b"\n")[2]
            assert b"engine_crashed" in events[1]
            # Nothing of it was sent, so it has a status of its own.
            assert (whole[0], whole[2], json.loads(whole[1])["error"]["code"]) == (503, None, "engine_crashed")
            assert [(answer[0], len(answer[1]), answer[2]) for answer in answers] == [(200, 400 * 160, None)] * 3
            assert (await server.http.get("/health")).status_code == 200
            await until(server.is_ready)
            assert (await server.speak()).status_code == 200
            assert await server.metric("sonoro_engine_restarts_total") == 1
            await until(server.is_idle)

    run(kill())


def test_an_engine_killed_under_load_leaves_nobody_without_an_answer() -> None:
    """Every request, begun, waiting or just sent, is answered, those that waited whole; then all is as it was."""
    settings = dataclasses.replace(SETTINGS, max_waiting=16, max_queue_wait_ms=100_000)
    formats = ("pcm", "mp3", "opus", "flac")

    async def kill() -> None:
        async with serving("slow", settings, ENDLESS) as server:

            async def hear(number: int) -> tuple[int, bool]:
                """The status, and whether the body had an end."""
                kind = {"response_format": formats[number % 4], "stream_format": "sse" if number % 5 == 4 else "audio"}
                try:
                    answer = await many.post(SPEECH, json={**LASTING, **kind, "seed": number})
                except httpx.RemoteProtocolError:
                    return 0, False
                return answer.status_code, answer.headers["content-type"].startswith("audio/")

            limits = httpx.Limits(max_connections=100)
            async with httpx.AsyncClient(base_url=server.url, limits=limits, timeout=GUARD_S, trust_env=False) as many:
                asking = [asyncio.create_task(hear(number)) for number in range(30)]
                await until(lambda: server.metric('sonoro_first_packet_seconds_count{model="sine"}'))
                await until(lambda: server.metric("sonoro_queue_depth"))
                (worker,) = engines()
                os.kill(worker, signal.SIGKILL)
                ends = await asyncio.gather(*asking)
            assert {status for status, _ in ends} <= {0, 200, 429, 503}
            assert (0, False) in ends
            # Those that only waited were not lost; of events the status says nothing.
            assert ends.count((200, True)) <= settings.max_waiting
            assert (200, True) in ends
            await until(server.is_ready)
            assert (await server.speak()).content == alone(SpeechRequest(id="a", text="Some words.", voice="low"))
            await until(server.is_idle)
            assert len(engines()) == 1
            for name in ("sonoro_requests_in_flight", "sonoro_queue_depth"):
                assert await server.metric(name) == 0

    run(kill())


@pytest.mark.parametrize("wait_ms", [0, 100_000])
def test_while_an_engine_is_replaced_requests_wait_as_long_as_they_may(wait_ms: int) -> None:
    async def kill() -> None:
        async with serving("slow", dataclasses.replace(SETTINGS, max_queue_wait_ms=wait_ms)) as server:
            answer = await server.speak("It must die.")
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_crashed"
            assert (await server.http.get("/ready")).status_code == 503
            answer = await server.speak()
            if wait_ms:
                assert answer.content == alone(SpeechRequest(id="a", text="Some words."))
            else:
                check_error(answer, 503)
                assert answer.json()["error"]["code"] == "not_ready"
                await until(server.is_ready)
                assert (await server.speak()).status_code == 200

    run(kill())


def test_an_ended_server_finishes_what_is_under_way() -> None:
    async def end() -> None:
        async with serving("slow") as server:

            async def is_closed() -> bool:
                try:
                    async with httpx.AsyncClient(trust_env=False, timeout=GUARD_S) as other:
                        await other.get(f"{server.url}/health")
                except httpx.TransportError:
                    return True
                return False

            async with server.http.stream("POST", SPEECH, json=LASTING) as answer:
                parts = answer.aiter_raw()
                heard = await anext(parts)
                server.process.should_exit = True
                await until(is_closed)
                async for part in parts:
                    heard += part
            assert len(heard) == 400 * 160

    run(end())
