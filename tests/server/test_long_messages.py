"""Long messages of WebSockets and long bodies: sent in fragments or pieces, whole for the client, and never half."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import uvicorn
from processes import GUARD_S
from sine_engines import run
from starlette.types import Message, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect

from sonoro.server.errors import SlowReader
from sonoro.server.stream import SEND_BYTES, send_body
from sonoro.server.websocket import FRAGMENT_BYTES, websocket_connection

LENGTHS = (1, FRAGMENT_BYTES, FRAGMENT_BYTES + 1, 5 * FRAGMENT_BYTES + 3)


class Sender:
    """An application that accepts one WebSocket; `send` sends on it once `is_open`."""

    def __init__(self) -> None:
        self.is_open, self.is_over = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        self._send, self.receive = send, receive
        self.is_open.set()
        await self.is_over.wait()

    async def send(self, message: bytes | str) -> None:
        await self._send({"type": "websocket.send", "text" if isinstance(message, str) else "bytes": message})


@contextlib.asynccontextmanager
async def sending(stall_s: float = GUARD_S) -> AsyncIterator[tuple[Sender, ClientConnection]]:
    """An application and its client."""
    app = Sender()
    kind = websocket_connection(2**24, stall_s)
    server = uvicorn.Server(uvicorn.Config(app, port=0, ws=kind, lifespan="off", log_config=None))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        async with connect(f"ws://127.0.0.1:{port}", proxy=None, compression=None, max_size=None) as client:
            await app.is_open.wait()
            yield app, client
            app.is_over.set()
    finally:
        server.should_exit = True
        await serving


def test_long_messages_are_sent_in_fragments() -> None:
    async def speak() -> None:
        async with sending() as (app, client):
            for length in LENGTHS:
                for message in (bytes(range(256)) * (length // 256) + bytes(length % 256), "é" + "a" * (length - 1)):
                    sent = asyncio.create_task(app.send(message))
                    parts: list[Any] = [part async for part in client.recv_streaming(decode=False)]
                    await sent
                    assert b"".join(parts) == (message.encode() if isinstance(message, str) else message)
                    assert max(map(len, parts)) <= FRAGMENT_BYTES + 1  # a letter of two bytes

    run(speak())


def test_messages_of_several_tasks_are_not_mixed() -> None:
    async def speak() -> None:
        async with sending() as (app, client):
            messages = [bytes([number]) * length for number, length in enumerate(LENGTHS)]
            tasks = [asyncio.create_task(app.send(message)) for message in messages]
            assert [await asyncio.wait_for(client.recv(), GUARD_S) for _ in messages] == messages
            await asyncio.gather(*tasks)

    run(speak())


def test_a_message_that_is_cancelled_is_sent_to_its_end() -> None:
    long = bytes(2**24)

    async def speak() -> None:
        async with sending() as (app, client):
            sent = asyncio.create_task(app.send(long))
            await asyncio.sleep(0.1)
            assert not sent.done()  # nobody reads
            sent.cancel()
            after = asyncio.create_task(app.send("after"))
            assert await asyncio.wait_for(client.recv(), GUARD_S) == long
            assert await asyncio.wait_for(client.recv(), GUARD_S) == "after"
            await after

    run(speak())


def test_who_reads_nothing_of_a_long_message_is_given_up() -> None:
    async def speak() -> None:
        async with sending(stall_s=0.2) as (app, client):
            with pytest.raises(SlowReader):
                await app.send(bytes(2**24))
            client.transport.abort()
            assert (await app.receive())["type"] == "websocket.disconnect"

    run(speak())


@pytest.mark.parametrize("length", [0, 1, SEND_BYTES, 2 * SEND_BYTES + 1])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_long_body_is_sent_in_pieces(length: int, is_last: bool) -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    body = bytes(range(256)) * (length // 256) + bytes(length % 256)
    run(send_body(send, bytearray(body), GUARD_S, is_last=is_last))
    assert b"".join(message["body"] for message in sent) == body
    assert all(len(message["body"]) <= SEND_BYTES for message in sent)
    assert [message["more_body"] for message in sent] == [True] * -(-length // SEND_BYTES) + [False] * is_last
