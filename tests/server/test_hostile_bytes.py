"""Bytes made to keep the event loop busy or to be kept in memory: no callback takes long, and nothing grows."""

import asyncio
import base64
import contextlib
import os

import pytest
from servers import Server, never_blocked, serving
from sessions import PATH
from sine_engines import nothing_left, run

__all__ = ["nothing_left"]

pytestmark = pytest.mark.usefixtures("tmp_path", "nothing_left")

BATCH = b"POST /v1/audio/speech/batch HTTP/1.1\r\nHost: 127.0.0.1\r\n"
POST = b"POST /v1/audio/speech HTTP/1.1\r\nHost: 127.0.0.1\r\n"


def upgrade(path: str) -> bytes:
    """The handshake of a WebSocket."""
    key = base64.b64encode(os.urandom(16))
    head = b"GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n" % path.encode()
    return head + b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: %s\r\n\r\n" % key


def frame(opcode: int, payload: bytes = b"", *, is_last: bool = True) -> bytes:
    """A client's frame of fewer than 126 bytes, with a mask of zeros."""
    return bytes([128 * is_last + opcode, 128 + len(payload), 0, 0, 0, 0]) + payload


def long_frame(payload: bytes) -> bytes:
    """A client's text frame of any length."""
    return bytes([129, 255]) + len(payload).to_bytes(8, "big") + bytes(4) + payload


def with_body(head: bytes, body: bytes) -> bytes:
    return head + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body


async def connect(server: Server) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = server.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port))


@pytest.mark.parametrize(
    "sent",
    [
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n",
        POST + b"a:\r\n" * 15_000 + b"\r\n",
        with_body(POST, b"[" + b"1," * 4_000_000 + b"1]"),
        with_body(POST, b'{"input": "a", "x": [' + b"[]," * 39_000 + b"1]}"),
        with_body(POST, b'{"input": "a"' + b"".join(b', "%d": 1' % number for number in range(39_000)) + b"}"),
        with_body(
            BATCH, b'{"items": [' + b",".join([b'{"input": "a"}'] * 32) + b', {"x": [' + b"[]," * 39_000 + b"1]}]}"
        ),
        with_body(POST, b'{"input": "' + b"\\n" * 7_000_000 + b'"}'),
        with_body(POST, b'{"input": "' + b"\\n" * 400_000 + b'"}'),
        with_body(POST, b'{"input": "' + "é".encode() * 7_000_000 + b'"}'),
        with_body(POST, b'{"input": "a", "voice": "' + b"a" * 15_000_000 + b'"}'),
        b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 5000,
        upgrade(PATH) + long_frame(b'{"text": "\\ud83d", "ref_audio": "' + b"a" * 12_000_000 + b'"}'),
        upgrade(PATH) + frame(9) * 50_000,
        upgrade(PATH) + frame(1, b"{") * 20_000,
        upgrade(PATH) + frame(1, is_last=False) + frame(0, is_last=False) * 50_000,
    ],
    ids=[
        "chunks of a byte",
        "a long head",
        "many values",
        "many lists",
        "many fields",
        "a batch of lists",
        "many escapes",
        "many empty lines",
        "many letters",
        "a long name",
        "pipelined requests",
        "half a character beside a recording",
        "pings",
        "messages",
        "fragments",
    ],
)
def test_no_bytes_hold_the_event_loop(sent: bytes) -> None:
    async def ask() -> None:
        async with serving() as server:
            reader, writer = await connect(server)
            with never_blocked():
                writer.write(sent)
                writer.write_eof()
                with contextlib.suppress(ConnectionError):
                    while await reader.read(2**16):
                        pass
            writer.close()
            assert await server.is_ready()

    run(ask())
