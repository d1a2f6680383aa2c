"""Clients that have shown no key: what they may hold, for how long, and that nobody with a key is kept out by them."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator

import pytest
from processes import GUARD_S
from servers import SETTINGS, Server, serving
from sessions import PATH, Socket, socket
from sine_engines import nothing_left, run, until

from sonoro.server import service as service_module

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("tmp_path", "nothing_left")

LATE = "/v1/text-to-speech/low/multi-stream-input"
WITH_KEY = {"additional_headers": {"Authorization": "Bearer ключ".encode().decode("latin-1")}}
KEYED = dataclasses.replace(SETTINGS, api_keys=("ключ",), max_sessions=2)


@contextlib.asynccontextmanager
async def crowd(server: Server, count: int) -> AsyncIterator[list[Socket]]:
    """Sockets that show no key."""
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(socket(server, LATE)) for _ in range(count)]


async def is_served(server: Server) -> bool:
    """Whether a client with a key is."""
    async with socket(server, PATH, **WITH_KEY) as one:
        return (await one.hear())["type"] == "session.created"


def test_clients_without_a_key_take_no_place_from_those_with_one() -> None:
    async def ask() -> None:
        async with serving(settings=KEYED) as server, crowd(server, 20):
            assert await is_served(server)

    run(ask())


def test_an_invalid_message_before_the_key_ends_the_connection() -> None:
    async def ask() -> None:
        async with serving(settings=KEYED) as server, crowd(server, 5) as sockets:
            for one, message in zip(sockets, ("{", b"{", "{}", '{"xi_api_key": "\\ud800"}', "[" * 9000), strict=True):
                await one.say(message)
                await one.hear_until()
                assert one.closed == 1000, message

    run(ask())


def test_a_key_must_come_in_time_whatever_is_sent_before_it() -> None:
    async def ask() -> None:
        settings = dataclasses.replace(KEYED, head_timeout_s=0.5)
        async with serving(settings=settings) as server, crowd(server, 2) as (silent, dripping):

            async def message() -> AsyncIterator[str]:
                while True:
                    yield " "
                    await asyncio.sleep(0.1)

            drip = asyncio.create_task(dripping.connection.send(message()))
            for one in (silent, dripping):
                await one.hear_until()
                assert one.closed == 1001
            await asyncio.wait({drip})
            assert drip.exception() is not None

    run(ask())


def test_a_key_of_any_script_in_a_message_is_one() -> None:
    async def ask() -> None:
        async with serving("live", settings=KEYED) as server, crowd(server, 3) as (right, wrong, late):
            await right.say({"text": "Hello. ", "context_id": "a", "xi_api_key": "ключ"})
            await right.say({"context_id": "a", "close_context": True})
            assert (await right.hear_until(isFinal=True))[-1]["contextId"] == "a"
            await wrong.say({"text": "Hello. ", "xi_api_key": "другой"})
            assert "API keys" in (await wrong.hear())["error"]
            # One with a key takes a place of a session, of which two are there.
            assert await is_served(server)
            async with socket(server, PATH, **WITH_KEY) as one:
                await one.hear()
                await late.say({"text": " ", "xi_api_key": "ключ"})
                assert "2 sessions" in (await late.hear_until())[0]["error"]
                assert late.closed == 1000

    run(ask())


def test_messages_are_bounded_before_and_after_the_key() -> None:
    async def ask() -> None:
        async with serving(settings=KEYED) as server, crowd(server, 2) as (early, known):
            await early.say(json.dumps({"text": " " * 17_000}))
            await early.hear_until()
            assert early.closed == 1009
            await known.say({"context_id": "a", "flush": True, "xi_api_key": "ключ"})
            await known.say({"context_id": None, "text": 1})
            assert "valid string" in (await known.hear())["error"]
            await known.say({"text": " " * 20_000, "context_id": "a"})
            assert "at most 4096" in (await known.hear())["error"]
            await known.say(json.dumps({"text": " " * KEYED.max_message_bytes}))
            await known.hear_until()
            assert known.closed == 1009

    run(ask())


def test_unfinished_messages_of_all_together_are_bounded() -> None:
    async def ask() -> None:
        settings = dataclasses.replace(SETTINGS, max_total_body_bytes=100_000)
        async with contextlib.AsyncExitStack() as stack:
            server = await stack.enter_async_context(serving(settings=settings))
            sockets = [await stack.enter_async_context(socket(server, PATH)) for _ in range(4)]
            go_on = asyncio.Event()

            async def message() -> AsyncIterator[str]:
                yield '{"type": "input.text", "text": "'
                yield " " * 30_000
                await go_on.wait()
                yield '"}'

            sending = [asyncio.create_task(one.connection.send(message())) for one in sockets]
            held = server.process.config.ws_protocol_class.all
            await until(lambda: any(one.connection.close_code == 1013 for one in sockets))
            assert held.bytes <= 100_000
            go_on.set()
            await asyncio.wait(sending)
            await until(lambda: held.bytes == 0)

    run(ask())


def test_answers_to_pings_that_nobody_reads_are_not_kept() -> None:
    async def ask() -> None:
        async with serving() as server, socket(server, PATH) as one:
            await one.hear()
            transport = one.connection.transport
            transport.pause_reading()
            ping = bytes([0x89, 0x80 + 125]) + bytes(4 + 125)
            for _ in range(400):
                transport.write(ping * 500)
                await asyncio.sleep(0)
            sockets = [each for each in server.process.server_state.connections if hasattr(each, "queue")]
            await until(lambda: transport.get_write_buffer_size() == 0)
            assert max(each.transport.get_write_buffer_size() for each in sockets) < 2**18
            transport.resume_reading()

    run(ask())


def test_the_oldest_without_a_key_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_module, "MAX_KEYLESS", 3)

    async def ask() -> None:
        async with serving("live", settings=KEYED) as server, crowd(server, 3) as silent, crowd(server, 1) as (late,):
            assert "others came" in (await silent[0].hear())["error"]
            await late.say({"text": "Hello. ", "context_id": "a", "xi_api_key": "ключ"})
            await late.say({"context_id": "a", "close_context": True})
            assert (await late.hear_until(isFinal=True))[-1]["contextId"] == "a"
            assert server.service.newcomers.taken == 2

    run(ask())


@pytest.mark.parametrize(
    "headers",
    [b"Sec-WebSocket-Protocol: " + b"," * 9000 + b"\r\n", b"a: b\r\n" * 200],
    ids=["a long header", "many headers"],
)
def test_a_handshake_that_cannot_be_read_ends_the_connection(headers: bytes) -> None:
    async def ask() -> None:
        async with serving(settings=KEYED) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
            head = f"GET {PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            writer.write(head.encode() + headers + b"\r\n")
            async with asyncio.timeout(GUARD_S):
                assert b"431" in await reader.readline()
                await reader.read()
            writer.close()

    run(ask())
