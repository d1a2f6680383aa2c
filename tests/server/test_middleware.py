"""Connections that say nothing, too little, or something that is no HTTP; ids of requests; what sockets inherit."""

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import signal
import socket
from collections.abc import AsyncIterator

import pytest
from processes import GUARD_S
from servers import SETTINGS, Server, serving
from sine_engines import engines, nothing_left, run, until

from sonoro.server.app import BACKLOG, LoopErrors
from sonoro.server.config import ServerConfig
from sonoro.server.listening import SEND_BUFFER_BYTES, listen

__all__ = ["nothing_left"]

SPEECH = "/v1/audio/speech"
IMPATIENT = dataclasses.replace(SETTINGS, head_timeout_s=1, keep_alive_timeout_s=1, body_timeout_s=1)


@contextlib.asynccontextmanager
async def connection(server: Server) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection, gone with the block."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def closed(reader: asyncio.StreamReader) -> bytes:
    """What was answered until the server closed the connection."""
    heard = b""
    async with asyncio.timeout(GUARD_S):
        try:
            while part := await reader.read(65536):
                heard += part
        except ConnectionError:
            pass
    return heard


def test_accepted_sockets_send_at_once_and_keep_little() -> None:
    with listen(SETTINGS) as sock, socket.create_connection(sock.getsockname()) as client:
        accepted, _ = sock.accept()
        with accepted:
            assert client.fileno() > 0
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            # The system doubles what it is asked for.
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 2 * SEND_BUFFER_BYTES
            timeout_ms = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert timeout_ms == 2000 * SETTINGS.slow_reader_timeout_s


@pytest.mark.usefixtures("nothing_left")
def test_connections_that_keep_the_server_waiting_are_let_go() -> None:
    """The head of a first request and of a later one, an idle connection, and the rest of a body already refused: all
    at once, each after as long as it was given, and not before."""

    async def trickle(server: Server, first: bytes) -> None:
        clock = asyncio.get_running_loop().time
        started_s = clock()
        async with connection(server) as (reader, writer):
            writer.write(first)

            async def drip() -> None:
                while True:
                    await asyncio.sleep(0.1)
                    writer.write(b"a")

            dripping = asyncio.create_task(drip())
            await closed(reader)
            dripping.cancel()
            await asyncio.gather(dripping, return_exceptions=True)
            assert clock() - started_s >= 1, first

    async def wait() -> None:
        async with serving(settings=IMPATIENT) as server:
            health = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
            refused = f"POST {SPEECH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n".encode()

            async def rest(first: bytes) -> bytes:
                async with connection(server) as (reader, writer):
                    writer.write(first)
                    return await closed(reader)

            dripping = [trickle(server, first) for first in (b"GET ", b"GET /hea", health + b"GET /hea", refused)]
            silent, answered, *_ = await asyncio.gather(rest(b""), rest(health), *dripping)
            assert silent == b""
            assert answered.startswith(b"HTTP/1.1 200")
            await until(lambda: len(server.process.server_state.connections) <= 1)

    run(wait())


@pytest.mark.usefixtures("nothing_left")
def test_an_answer_may_take_longer_than_a_head() -> None:
    async def speak() -> None:
        async with serving("slow", IMPATIENT) as server:
            # 400 frames of 5 ms.
            answer = await server.speak("Some words.", max_new_tokens=400, ignore_eos=True)
            assert len(answer.content) == 400 * 160

    run(speak())


@pytest.mark.usefixtures("nothing_left")
def test_what_is_no_http_is_refused_as_everything_else_is(caplog: pytest.LogCaptureFixture) -> None:
    async def ask() -> None:
        async with serving() as server:
            for payload in (
                b"HELO there\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
                b"GET /health HTTP/1.1\r\n\r\n",
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
                f"POST {SPEECH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n".encode(),
                f"POST {SPEECH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n".encode(),
                b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000,
            ):
                async with connection(server) as (reader, writer):
                    writer.write(payload)
                    heard = await closed(reader)
                assert heard.startswith(b"HTTP/1.1 400"), payload[:40]
                assert json.loads(heard.partition(b"\r\n\r\n")[2])["error"]["code"] == "http"
            # A body that ends before it should is the client's own end: there is nobody to answer.
            async with connection(server) as (_, writer):
                writer.write(
                    f'POST {SPEECH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n{{"input": "a'.encode()
                )
                await writer.drain()
            assert (await server.speak()).status_code == 200
            await until(server.is_idle)
            await until(lambda: "code=body_too_slow" in caplog.text)
            assert "Traceback" not in caplog.text

    with caplog.at_level("INFO"):
        run(ask())


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(
    ("version", "headers"),
    [
        ("1.1", ["Content-Length: 5", "Transfer-Encoding: chunked"]),
        ("1.1", ["Transfer-Encoding: chunked", "Content-Length: 0"]),
        ("1.1", ["transfer-encoding: chunked", "content-length: 42"]),
        ("1.0", ["Transfer-Encoding: chunked", "Connection: keep-alive"]),
    ],
)
def test_a_body_whose_end_is_said_twice_closes_the_connection(version: str, headers: list[str]) -> None:
    """Whatever came behind it, which a proxy may have taken for its body, is no request of anybody's."""

    async def smuggle() -> None:
        async with serving(waits=False) as server:
            for path in (SPEECH, "/health", "/v1/nothing"):
                async with connection(server) as (reader, writer):
                    head = [f"POST {path} HTTP/{version}", "Host: localhost", *headers]
                    hidden = "0\r\n\r\nGET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
                    writer.write("\r\n".join([*head, "", hidden]).encode())
                    heard = await closed(reader)
                assert heard.startswith(b"HTTP/1.1 400"), heard
                assert heard.count(b"HTTP/1.1 ") == 1
                assert b"connection: close" in heard.lower()

    run(smuggle())


@pytest.mark.usefixtures("nothing_left")
def test_nonsense_after_an_answer_ends_the_connection_alone(caplog: pytest.LogCaptureFixture) -> None:
    """The rest of a body that was refused, sent at once or later."""
    settings = dataclasses.replace(SETTINGS, max_body_bytes=2048)
    head = f"POST {SPEECH} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    refused, nonsense = head + b"1000\r\n" + b" " * 0x1000 + b"\r\n", b"no length\r\n"

    async def ask() -> None:
        async with serving(settings=settings) as server:
            for first, later in ((refused + nonsense, b""), (refused, nonsense)):
                async with connection(server) as (reader, writer):
                    writer.write(first)
                    heard = await reader.read(12)
                    writer.write(later)
                    heard += await closed(reader)
                assert heard[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 413")
                assert heard.count(b"HTTP/1.1") == 1
            assert (await server.speak()).status_code == 200

    run(ask())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize(("version", "first"), [("1.0", b"HTTP/1.1 200"), ("1.1", b"HTTP/1.1 100")])
def test_a_client_is_told_to_go_on_in_a_version_that_knows_it(version: str, first: bytes) -> None:
    """RFC 9110, 10.1.1."""
    body = b'{"input": "Some words."}'
    head = f"POST {SPEECH} HTTP/{version}\r\nHost: localhost\r\nExpect: 100-continue\r\nConnection: close\r\n"

    async def ask() -> None:
        async with serving() as server, connection(server) as (reader, writer):
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            assert (await closed(reader)).startswith(first)

    run(ask())


@pytest.mark.usefixtures("nothing_left")
def test_where_a_body_ends_with_its_connection_one_that_was_cut_off_is_reset() -> None:
    body = b'{"input": "Some words.", "response_format": "pcm", "max_new_tokens": %d, "ignore_eos": true}'

    async def hear(server: Server, frames: int) -> AsyncIterator[bytes]:
        text = body % frames
        async with connection(server) as (reader, writer):
            writer.write(f"POST {SPEECH} HTTP/1.0\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text)
            while part := await reader.read(65536):
                yield part

    async def cut() -> None:
        async with serving("slow") as server:
            whole = b"".join([part async for part in hear(server, 20)])
            assert len(whole.partition(b"\r\n\r\n")[2]) == 20 * 160
            parts = hear(server, 400)
            assert (await anext(parts)).startswith(b"HTTP/1.1 200")
            (worker,) = engines()
            os.kill(worker, signal.SIGKILL)
            with pytest.raises(ConnectionResetError):
                async for _ in parts:
                    pass
            await until(server.is_ready)

    run(cut())


@pytest.mark.usefixtures("nothing_left")
def test_a_request_keeps_the_id_its_client_gave_if_it_is_sane() -> None:
    async def ask() -> None:
        async with serving() as server:
            for given, is_kept in (
                ("job-7:part_2.a", True),
                ("a" * 64, True),
                ("a" * 65, False),
                ("with space", False),
                ("semi;colon", False),
                ("", False),
            ):
                for path in ("/health", "/v1/nothing", SPEECH):
                    body = {"input": "Some words."}
                    answer = await server.http.request(
                        "POST" if path == SPEECH else "GET", path, json=body, headers={"x-request-id": given}
                    )
                    made = answer.headers["x-request-id"]
                    assert (made == given) == is_kept
                    assert is_kept or len(made) == 32
            twins = [server.http.post(SPEECH, json={"input": "Twins."}, headers={"x-request-id": "twin"}) for _ in "ab"]
            assert [answer.status_code for answer in await asyncio.gather(*twins)] == [200, 200]

    run(ask())


@pytest.mark.usefixtures("nothing_left")
def test_idle_connections_beyond_the_budget_are_closed_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sonoro.server.connection.MAX_IDLE", 3)

    async def ask() -> None:
        async with serving() as server:
            await server.http.aclose()
            host, port = server.url.removeprefix("http://").split(":")
            sockets = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
            for reader, writer in (sockets[1], sockets[0]):
                writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                assert await reader.readuntil(b"alive") is not None
            sockets += [await asyncio.open_connection(host, int(port)) for _ in range(2)]
            for gone in (2, 1):
                assert await asyncio.wait_for(sockets[gone][0].read(1), GUARD_S) in (b"", b'"')
            for kept in (0, 3, 4):
                sockets[kept][1].write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                assert b"alive" in await sockets[kept][0].readuntil(b"alive")
            for _, writer in sockets:
                writer.close()

    run(ask())


def test_a_pool_may_keep_an_idle_connection_for_a_minute() -> None:
    assert ServerConfig().keep_alive_timeout_s == 75


def test_without_file_descriptors_one_line_is_logged_a_second(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(LoopErrors())
        full = OSError(errno.EMFILE, "Too many open files")
        for _ in range(100):
            loop.call_exception_handler({"message": "socket.accept() out of system resource", "exception": full})
        assert [record.getMessage() for record in caplog.records] == ["event=not_accepted reason='Too many open files'"]
        loop.call_exception_handler({"message": "a defect", "exception": ValueError()})
        assert caplog.records[-1].getMessage() == "a defect"

    run(fail())
    assert BACKLOG <= 512
