"""A small HTTP server that answers speech requests as a test scripts it, on a thread and an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from guard import GUARD_S

RATE = 8000
BYTES_PER_S = 2 * RATE


def tone(duration_s: float, silence_s: float = 0.0) -> bytes:
    """PCM16 of `duration_s`, the first `silence_s` of it below what is heard."""
    samples = np.full(round(duration_s * RATE), 3000, dtype="<i2")
    samples[: round(silence_s * RATE)] = 100
    return samples.tobytes()


@dataclass(frozen=True)
class Answer:
    """After each delay in seconds, these bytes, once `after` requests have come. `ending`: `whole`, `broken` (cut
    without an end) or `never`."""

    parts: Sequence[tuple[float, bytes]] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=lambda: {"Content-Type": "audio/pcm", "X-Sample-Rate": str(RATE)})
    ending: str = "whole"
    after: int = 0


@dataclass
class Server:
    """`bodies` and `headers` of the speech requests so far; `models` is what GET /v1/models answers."""

    answer: Callable[[int], Answer]
    models: object = field(default_factory=lambda: {"data": [{"id": "spoken"}]})
    bodies: list[dict[str, object]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, with all its requests."""
        try:
            while await self._exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request and its answer; whether another may follow."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head[1:] if line)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.paths.append(head[0].split()[1])
        if head[0].startswith("GET"):
            models = json.dumps(self.models).encode()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(models) + models)
            return True
        self.headers.append(headers)
        self.bodies.append(json.loads(body))
        answer = self.answer(len(self.bodies) - 1)
        lines = [f"HTTP/1.1 {answer.status} status", "Transfer-Encoding: chunked"]
        lines += [f"{name}: {value}" for name, value in answer.headers.items()]
        begun = False
        while len(self.bodies) < answer.after:
            await asyncio.sleep(0.01)
        for delay_s, data in answer.parts:
            await asyncio.sleep(delay_s)
            if not begun:
                writer.write("\r\n".join([*lines, "", ""]).encode())
                begun = True
            writer.write(b"%x\r\n" % len(data) + data + b"\r\n")
            await writer.drain()
        if answer.ending == "never":
            await reader.read()
        if answer.ending != "whole":
            return False
        writer.write(b"" if begun else "\r\n".join([*lines, "", ""]).encode())
        writer.write(b"0\r\n\r\n")
        return True


@contextlib.contextmanager
def served(answer: Callable[[int], Answer] | Answer) -> Iterator[Server]:
    """A server that gives request number n the answer `answer(n)`."""
    server = Server(answer if callable(answer) else lambda number: answer)
    loop, is_up, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def live() -> None:
        connections: set[asyncio.Task[None]] = set()

        async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            connections.add(task)
            task.add_done_callback(connections.discard)
            with contextlib.suppress(asyncio.CancelledError):
                await server.serve(reader, writer)

        listener = await asyncio.start_server(connect, "127.0.0.1", 0)
        server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        is_up.set()
        await stop.wait()
        # What has been accepted becomes a connection first: a listener closed before that leaves its socket open.
        for accepting in listener.sockets:
            loop.remove_reader(accepting)
        while len(asyncio.all_tasks()) > 1:
            while connections:
                connections.pop().cancel()
            await asyncio.sleep(0.001)
        listener.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(live(),))
    thread.start()
    assert is_up.wait(GUARD_S)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(GUARD_S)
        loop.close()
        assert not thread.is_alive()
