"""The HTTP client of the load generator against bytes as servers may send them."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest
from processes import GUARD_S

from sonoro.bench.http1 import Connections, HttpError, ResponseHead

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


@contextlib.asynccontextmanager
async def answering(*answers: Sequence[bytes], ends: bool = False) -> AsyncIterator[tuple[Connections, list[bytes]]]:
    """A server that answers request n with the pieces `answers[n]`, and the requests of each connection so far.

    `ends`: it closes the connection after each.
    """
    left, heard, serving = list(answers), [], set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(b"")
        serving.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                request += await reader.readexactly(int(request.partition(b"Content-Length: ")[2].split()[0]))
                heard[-1] += request
                for piece in left.pop(0):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.001)
                if ends:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async with asyncio.timeout(GUARD_S):
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        connections = Connections("127.0.0.1", server.sockets[0].getsockname()[1], is_tls=False)
        try:
            yield connections, heard
        finally:
            connections.close()
            server.close()
            await asyncio.gather(*serving)


async def ask(connections: Connections) -> tuple[ResponseHead, bytes, int]:
    """The answer to a request, its body, and in how many parts it came."""
    parts: list[bytes] = []
    answer = await connections.exchange("POST /a", {"X": "y"}, b"body", on_part=lambda _, data: parts.append(data))
    return answer, b"".join(parts), len(parts)


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (CHUNKED + b"3\r\nabc\r\n0A;x=y\r\n0123456789\r\n0\r\nT: u\r\n\r\n", b"abc0123456789"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b""),
    ],
)
def test_a_body_is_the_same_however_its_bytes_come_and_the_connection_is_kept(
    sent: bytes, body: bytes, size: int
) -> None:
    pieces = [sent[at : at + size] for at in range(0, len(sent), size)]

    async def check() -> None:
        async with answering(pieces, pieces) as (connections, heard):
            for _ in range(2):
                answer, got, _ = await ask(connections)
                assert (answer.status, got) == (200, body)
            assert [requests.count(b"POST /a HTTP/1.1\r\n") for requests in heard] == [2]
            assert heard[0].count(b"body") == 2

    asyncio.run(check())


def test_parts_are_heard_as_they_come_not_when_their_chunk_is_whole() -> None:
    async def check() -> None:
        async with answering([CHUNKED + b"6\r\nab", b"cd", b"ef\r\n0\r\n\r\n"]) as (connections, _):
            assert (await ask(connections))[1:] == (b"abcdef", 3)

    asyncio.run(check())


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"]
)
def test_a_body_may_end_with_its_connection_and_the_next_request_has_another(head: bytes) -> None:
    async def check() -> None:
        async with answering([head, b"abc"], [head, b"d"], ends=True) as (connections, heard):
            assert [(await ask(connections))[1] for _ in range(2)] == [b"abc", b"d"]
            assert len(heard) == 2

    asyncio.run(check())


def test_what_comes_after_an_answer_belongs_to_no_request() -> None:
    whole = CHUNKED + b"1\r\na\r\n0\r\n\r\n"

    async def check() -> None:
        async with answering([whole + b"HTTP/1.1 500 no\r\n\r\n"], [whole]) as (connections, heard):
            for _ in range(2):
                answer, body, _ = await ask(connections)
                assert (answer.status, body) == (200, b"a")
            assert len(heard) == 2

    asyncio.run(check())


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"", "connection closed"),
        (b"HTTP/1.1 200", "connection closed"),
        (CHUNKED + b"5\r\nabc", "connection closed"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nabc", "connection closed"),
        (CHUNKED + b"x\r\nabc", "no HTTP/1.1"),
        (b"SSH-2.0-server\r\n\r\n", "no HTTP/1.1"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"a" * 200_000, "no HTTP/1.1"),
    ],
)
def test_an_answer_that_is_cut_or_none_is_an_error_and_its_connection_is_gone(sent: bytes, words: str) -> None:
    whole = [b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\na"]

    async def check() -> None:
        async with answering([sent], whole, ends=True) as (connections, heard):
            with pytest.raises(HttpError, match=words):
                await ask(connections)
            assert (await ask(connections))[1] == b"a"
            assert len(heard) == 2

    asyncio.run(check())


def test_a_request_that_is_given_up_cuts_its_connection() -> None:
    async def check() -> None:
        closed = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while await reader.read(1000):
                    pass
            closed.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        connections = Connections("127.0.0.1", server.sockets[0].getsockname()[1], is_tls=False)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await ask(connections)
        async with asyncio.timeout(GUARD_S):
            await closed.wait()
        server.close()

    asyncio.run(check())
