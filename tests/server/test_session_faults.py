"""Sessions that go wrong: keys, silence, clients that leave or rest, engines and servers that end."""

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import re
import signal
from types import SimpleNamespace

import httpx
import pytest
from processes import GUARD_S
from servers import FRONTS, SETTINGS, serving
from sessions import TEXT, Session, ended, session, socket, whole
from sine_engines import LONG, engines, nothing_left, run, until
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from sonoro.server.sessions import LiveSession

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_session_in_which_nothing_is_said_is_closed_but_who_listens_is_not_idle() -> None:
    settings = dataclasses.replace(SETTINGS, session_idle_timeout_s=0.5)

    async def idle() -> None:
        async with serving("slow_live", settings) as server:
            for text in ("", "A text that is never ended"):
                async with session(server) as client:
                    if text:
                        await client.say("input.text", text=text)
                    said, code = await ended(client)
                    *_, failed, done = (event for event in said if isinstance(event, dict))
                    assert failed["error"]["code"] == "idle_session"
                    assert done == {"type": "session.done", "reason": "idle"}
                    assert code == 1001
                await until(server.is_idle)
            async with session(server) as client:
                # 200 frames of 5 ms.
                assert (await client.speak(LONG[:200]))[0] == whole(LONG[:200])

    run(idle())


def test_a_client_that_leaves_frees_its_slot_within_a_second() -> None:
    async def leave() -> None:
        async with serving("slow_live") as server:
            async with session(server) as client:
                await client.say("input.text", text=LONG)
                assert (await client.hear())["type"] == "audio.start"
                client.socket.transport.abort()
            await until(server.is_idle)
            assert await server.metric('sonoro_requests_total{model="sine",reason="disconnected"}') == 1
            assert await server.metric("sonoro_requests_in_flight") == 0

    run(leave())


def test_a_client_that_takes_nothing_is_given_up() -> None:
    settings = dataclasses.replace(SETTINGS, slow_reader_timeout_s=0.5, max_characters=100_000)

    async def stall() -> None:
        async with serving("live", settings, slow_reader_timeout_s=0.5, queue_s=0.5) as server:
            async with session(server, max_queue=1) as client:
                await client.say("session.config", sample_rate=48000)
                await client.say("input.text", text=LONG * 20)
                await client.say("input.done")
                given_up = 'sonoro_requests_total{model="sine",reason="slow_reader"}'
                await until(lambda: server.metric(given_up))
                await until(server.is_idle)
                client.socket.transport.abort()
            async with session(server) as client:
                assert (await client.speak(TEXT))[0] == whole()

    run(stall())


def test_a_key_comes_as_a_header_or_as_a_protocol_and_other_origins_need_a_permission(
    caplog: pytest.LogCaptureFixture,
) -> None:
    settings = dataclasses.replace(SETTINGS, api_keys=("hush",), cors_origins=("https://friend.example",))
    key = {"additional_headers": {"Authorization": "Bearer hush"}}
    protocols = ["sonoro", "openai-insecure-api-key.hush"]

    async def knock() -> None:
        async with serving("live", settings) as server:
            for wrong in (
                {},
                {"additional_headers": {"Authorization": "Bearer loud"}},
                {"subprotocols": ["sonoro", "openai-insecure-api-key.loud"]},
            ):
                with pytest.raises(InvalidStatus) as refused:
                    async with session(server, **wrong):
                        pass
                assert refused.value.response.status_code == 401
                assert json.loads(refused.value.response.body)["error"]["code"] == "invalid_api_key"
            async with session(server, **key) as client:
                assert (await client.speak(TEXT))[0] == whole()
            async with session(server, subprotocols=protocols) as client:
                assert client.socket.subprotocol == "sonoro"
                assert (await client.speak(TEXT))[0] == whole()

            for foreign in ("https://foe.example", "null", "http://["):
                with pytest.raises(InvalidStatus) as refused:
                    async with session(server, origin=foreign, **key):
                        pass
                assert refused.value.response.status_code == 403
                assert json.loads(refused.value.response.body)["error"]["code"] == "foreign_origin"
            for origin in (server.url, "https://friend.example"):
                async with session(server, origin=origin, **key) as client:
                    assert (await client.speak(TEXT))[0] == whole()

    run(knock())
    assert not [record for record in caplog.records if record.levelname == "ERROR"], "strangers may not fill the log"


@pytest.mark.parametrize("path", ["/v1/audio/speech/streams", "/v1/audio/speech"])
def test_a_socket_at_a_path_without_one_is_told_so(path: str) -> None:
    async def knock() -> None:
        async with serving("live") as server:
            with pytest.raises(InvalidStatus) as refused:
                async with socket(server, path):
                    pass
            response = refused.value.response
            assert response.status_code == 404
            assert path in json.loads(response.body)["error"]["message"]
            assert len(response.headers["x-request-id"]) == 32

    run(knock())


def test_no_more_sessions_are_open_than_may_be() -> None:
    async def knock() -> None:
        async with serving("live", dataclasses.replace(SETTINGS, max_sessions=2)) as server:
            async with session(server), session(server):
                with pytest.raises(InvalidStatus) as refused:
                    async with session(server):
                        pass
                assert refused.value.response.status_code == 429
                assert int(refused.value.response.headers["retry-after"]) >= 1

            async def speak() -> bool:
                try:
                    async with session(server) as client:
                        return (await client.speak(TEXT))[0] == whole()
                except InvalidStatus:
                    return False  # those that left may not have been noticed yet

            await until(speak)

    run(knock())


def test_a_message_that_is_too_large_ends_the_session_alone() -> None:
    settings = dataclasses.replace(SETTINGS, max_body_bytes=4096)

    async def flood() -> None:
        async with serving("live", settings) as server, session(server) as client:
            with contextlib.suppress(ConnectionClosed):
                await client.say("input.text", text="word " * 2000)
            assert (await ended(client))[1] == 1009
            async with session(server) as other:
                assert (await other.speak(TEXT))[0] == whole()

    run(flood())


def test_a_killed_engine_fails_the_utterance_and_the_session_goes_on() -> None:
    async def kill() -> None:
        async with serving("slow_live") as server, session(server) as client:
            await client.say("input.text", text=LONG)
            assert (await client.hear())["type"] == "audio.start"
            (worker,) = engines()
            os.kill(worker, signal.SIGKILL)
            _, (failed,) = await client.listen()
            assert failed["error"]["code"] == "engine_crashed"
            assert failed["request_id"]
            await client.say("input.done")
            # The next waits for an engine, as for a place.
            assert (await client.speak(TEXT))[0] == whole()
            assert await server.is_ready()

    run(kill())


def test_without_an_engine_there_is_no_session() -> None:
    async def knock() -> None:
        async with serving("lasting", waits=False) as server:
            with pytest.raises(InvalidStatus) as refused:
                async with session(server):
                    pass
            assert refused.value.response.status_code == 503
            assert "retry-after" in refused.value.response.headers

    run(knock())


def test_an_ended_server_lets_sessions_finish_what_they_say() -> None:
    async def end() -> None:
        async with serving("slow_live") as server, session(server) as speaking, session(server) as silent:

            async def refuses() -> bool:
                with contextlib.suppress(httpx.ReadError):
                    try:
                        async with httpx.AsyncClient(trust_env=False, timeout=GUARD_S) as http:
                            await http.get(f"{server.url}/health")
                    except httpx.ConnectError:
                        return True
                return False

            await speaking.say("input.text", text=LONG[:100])
            assert (await speaking.hear())["type"] == "audio.start"
            server.process.should_exit = True
            assert await ended(silent) == ([{"type": "session.done", "reason": "ending"}], 1012)
            if FRONTS:
                await until(refuses)
            else:
                assert await refuses()
            await speaking.say("input.text", text=LONG[100:180])
            await speaking.say("input.done")
            audio, (done,) = await speaking.listen()
            assert audio == whole(LONG[:180])
            assert done["characters"] == 180
            assert await ended(speaking) == ([{"type": "session.done", "reason": "ending"}], 1012)

    run(end())


@pytest.mark.parametrize("is_silent", [False, True])
def test_who_is_cut_off_by_a_shutdown_is_told(caplog: pytest.LogCaptureFixture, is_silent: bool) -> None:
    """Also while nothing is spoken, as the client never ends its text."""
    settings = dataclasses.replace(SETTINGS, shutdown_timeout_s=0.1)

    async def end() -> None:
        async with serving("live" if is_silent else "slow_live", settings) as server, session(server) as client:
            await client.say("input.text", text="Some words" if is_silent else LONG)
            assert (started := await client.hear())["type"] == "audio.start"
            server.process.should_exit = True
            said, code = await ended(client)
            failed, done = (event for event in said if isinstance(event, dict))
            assert failed["request_id"] == started["request_id"]
            assert failed["error"]["message"] == "the server is shutting down"
            assert (done, code) == ({"type": "session.done", "reason": "ending"}, 1012)

    run(end())
    assert "Traceback" not in caplog.text


async def ramble(client: Session, seed: int) -> int:
    """Say this and that, at any time; how many cancels were among it."""
    draw, cancels = random.Random(seed), 0
    words = ("word ", "Hello there! ", "?! ", "unspeakable ", "x" * 50)
    for _ in range(draw.randint(3, 40)):
        kind = draw.choices(("input.text", "input.done", "response.cancel", "session.config", ""), (12, 3, 3, 1, 1))[0]
        fields = {"text": draw.choice(words)} if kind == "input.text" else {"response_format": "wav"}
        await client.say(kind, **fields)
        cancels += kind == "response.cancel"
        await asyncio.sleep(draw.choice((0, 0.1)) * draw.random())
    await client.say("session.close")
    return cancels


def test_whatever_is_said_every_session_ends_and_every_cancel_is_answered() -> None:
    settings = dataclasses.replace(SETTINGS, max_concurrency=3, max_queue_wait_ms=300, max_characters=300)

    async def crowd() -> None:
        async with serving("slow_live", settings) as server:

            async def one(seed: int) -> None:
                async with session(server) as client:
                    saying = asyncio.create_task(ramble(client, seed))
                    said, code = await ended(client)
                    answers = [event["type"] for event in said if isinstance(event, dict)]
                    assert answers.count("response.cancelled") == await saying
                    assert (answers[-1], code) == ("session.done", 1000)

            await asyncio.gather(*map(one, range(30)))
            assert await server.is_idle()
            assert await server.metric("sonoro_requests_in_flight") == 0
            assert server.engine.replicas[0].restarts == 0

    run(crowd())


def test_no_text_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="sonoro")

    async def speak() -> None:
        async with serving("live") as server, session(server) as client:
            await client.refused("input.secret", text="a secret")
            await client.speak("A secret ", "that nobody reads.")

    run(speak())
    (ended,) = (record.getMessage() for record in caplog.records if "event=utterance" in record.getMessage())
    assert re.search(r"reason=stop characters=27 audio_s=0\.27", ended)
    assert not any(
        "secret" in record.getMessage() and "input.secret" not in record.getMessage() for record in caplog.records
    )


def test_every_task_that_speaks_to_nobody_is_told_so() -> None:
    """The first to send finds out from the system, the others from what it left."""

    async def receive() -> dict[str, object]:
        return {"type": "websocket.connect"}

    async def send(message: dict[str, object]) -> None:
        if message["type"] == "websocket.send":
            raise ConnectionResetError

    async def speak() -> None:
        socket = WebSocket({"type": "websocket", "state": {"facts": {}}}, receive, send)
        await socket.accept()
        session = LiveSession(socket, SimpleNamespace(config=SETTINGS))
        for _ in range(2):
            with pytest.raises(WebSocketDisconnect):
                await session.send("a")

    run(speak())
