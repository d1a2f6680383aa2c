"""Bytes made to keep the event loop busy or to be kept in memory: no callback takes long, and nothing grows."""

import asyncio
import base64
import contextlib
import gc
import os
import platform
import subprocess
import sys
import tracemalloc

import pytest
from servers import Server, never_blocked, serving
from sessions import PATH
from sine_engines import nothing_left, run, until

from sonoro.server.connection import Connection
from sonoro.server.websocket import WebSocketConnection

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
        upgrade(PATH) + long_frame(b'{"type": "session.config", "x": "' + b"a" * 12_000_000 + b'"}'),
        upgrade(PATH)
        + long_frame(b'{"type": "session.config", "stream_audio": true, "x": "' + b"a" * 12_000_000 + b'"}'),
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
        "a long configuration",
        "a long configuration of vLLM-Omni",
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
                # The server may close the connection before all is sent.
                with contextlib.suppress(OSError):
                    writer.write_eof()
                    while await reader.read(2**16):
                        pass
            writer.close()
            assert await server.is_ready()

    run(ask())


LONG = b"a" * 8_000_000
URL = b"data:audio/wav;base64," + LONG


@pytest.mark.parametrize(
    "sent",
    [
        with_body(POST, b'{"input": "a", "ref_text": "a", "ref_audio": "' + URL + b'"}'),
        with_body(POST, b'{"input": 7, "x": "' + LONG + b'"}'),
        with_body(BATCH, b'{"items": [{"input": "a", "ref_text": "a", "ref_audio": "' + URL + b'"}]}'),
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + (b"400000\r\n" + bytes(2**22) + b"\r\n") * 5,
        upgrade(PATH) + long_frame(b'{"type": "session.config", "ref_text": "a", "ref_audio": "' + URL + b'"}'),
        upgrade(PATH) + long_frame(LONG)[:-1],
    ],
    ids=["no recording", "a wrong field", "a batch", "too long a body", "no recording in a session", "no end"],
)
def test_what_is_refused_is_freed_at_once(sent: bytes) -> None:
    async def ask() -> None:
        async with serving() as server:
            for is_measured in (False, True):  # the first fills caches
                gc.collect()
                tracemalloc.start()
                reader, writer = await connect(server)
                writer.write(sent)
                with contextlib.suppress(OSError):
                    writer.write_eof()
                    while await reader.read(2**16):
                        pass
                writer.transport.abort()
                del reader, writer
                assert await server.is_ready()
                # Some may still be in a thread that decodes.
                most = 2_000_000 if is_measured else 1e9
                await until(lambda most=most: tracemalloc.get_traced_memory()[0] < most)
                tracemalloc.stop()

    gc.disable()
    try:
        run(ask())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "sent",
    [b"", POST[:20], POST + b"Content-Length: 2\r\n\r\n{}", upgrade(PATH)],
    ids=["nothing", "half a head", "a request", "a WebSocket"],
)
def test_lost_connections_are_freed_at_once(sent: bytes) -> None:
    def connections() -> int:
        return sum(issubclass(type(each), (Connection, WebSocketConnection)) for each in gc.get_objects())

    async def ask() -> None:
        async with serving() as server:
            before = connections()
            for _ in range(5):
                reader, writer = await connect(server)
                writer.write(sent)
                if len(sent) > 20:
                    await reader.read(1)
                writer.transport.abort()
                del reader, writer
            await until(lambda: connections() <= before)

    gc.disable()
    try:
        run(ask())
    finally:
        gc.enable()


HOLES = """
from sonoro.server.app import return_freed_buffers
if %d: return_freed_buffers()
def resident_mb():
    return sum(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024
large = bytes(30_000_000)
del large  # glibc then takes shorter ones from its heap
before, buffers, small = resident_mb(), [], []
for _ in range(20):
    buffers.append(b"a" * 4_000_000)
    small.append(b"a" * 100_000)
del buffers
print(resident_mb() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such limit")
def test_buffers_go_back_to_the_system_once_they_are_freed() -> None:
    kept = [float(subprocess.check_output([sys.executable, "-c", HOLES % is_set], timeout=60)) for is_set in (0, 1)]
    assert kept[0] > 40  # what the server avoids
    assert kept[1] < 10
