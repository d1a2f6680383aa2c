"""Cost of HTTP clients for the load generator: `python benchmarks/http_clients.py [--connections 256]`.

A server in another process sends each connection a chunk every 80 ms, as with speech; each chunk begins with the time
at which it was written. The clients run in turn, several times. Printed for each: CPU time per chunk, delay until a
chunk is noted (p50, p95), and lag of the event loop (p95).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import struct
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

PART_BYTES, PERIOD_S = 3840, 0.08
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: audio/pcm\r\nTransfer-Encoding: chunked\r\n\r\n"

Send = Callable[[Callable[[bytes], None]], Coroutine[Any, Any, None]]
"""Sends one request and calls back for each chunk of the response."""


def _serve(pipe: Any, parts: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].split()[0])
                await reader.readexactly(length)
                writer.write(_HEAD)
                begin_s = time.perf_counter()
                for number in range(parts):
                    await asyncio.sleep(max(0.0, begin_s + number * PERIOD_S - time.perf_counter()))
                    part = struct.pack("=d", time.perf_counter()).ljust(PART_BYTES, b"\0")
                    writer.write(b"%x\r\n%b\r\n" % (PART_BYTES, part))
                writer.write(b"0\r\n\r\n")
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=1024)
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


async def _http1(port: int, load: Callable[[Send], Coroutine[Any, Any, None]]) -> None:
    from sonoro.bench.http1 import Connections  # noqa: PLC0415

    connections = Connections("127.0.0.1", port, is_tls=False)

    async def send(note: Callable[[bytes], None]) -> None:
        await connections.exchange("POST /", {}, b"{}", on_part=lambda _, data: note(data))

    await load(send)
    connections.close()


async def _aiohttp(port: int, load: Callable[[Send], Coroutine[Any, Any, None]]) -> None:
    import aiohttp  # noqa: PLC0415

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), auto_decompress=False) as session:

        async def send(note: Callable[[bytes], None]) -> None:
            async with session.post(f"http://127.0.0.1:{port}/", data=b"{}") as response:
                async for data in response.content.iter_any():
                    note(data)

        await load(send)


CLIENTS = {"http1": _http1, "aiohttp": _aiohttp}


def _measure(client: Any, port: int, connections: int) -> dict[str, float]:
    late_ms, lag_ms, bytes_heard = [], [], 0

    def note(data: bytes) -> None:
        nonlocal bytes_heard
        if bytes_heard % PART_BYTES == 0 or len(data) >= PART_BYTES:
            (sent_s,) = struct.unpack_from("=d", data)
            if 0 < (late_s := time.perf_counter() - sent_s) < 60:
                late_ms.append(1000 * late_s)
        bytes_heard += len(data)

    async def watch() -> None:
        while True:
            due_s = time.perf_counter() + 0.005
            await asyncio.sleep(0.005)
            lag_ms.append(1000 * (time.perf_counter() - due_s))

    async def load(send: Send) -> None:
        watching = asyncio.create_task(watch())
        async with asyncio.TaskGroup() as tasks:
            for number in range(connections):
                # Streams of a server are not synchronous.
                await asyncio.sleep(PERIOD_S / connections if number else 0)
                tasks.create_task(send(note))
        watching.cancel()

    begin_s = time.process_time()
    asyncio.run(client(port, load))
    cpu_s, parts = time.process_time() - begin_s, bytes_heard / PART_BYTES
    return {
        "cpu_us_a_part": 1e6 * cpu_s / parts,
        "late_p50_ms": _percentile(late_ms, 50),
        "late_p95_ms": _percentile(late_ms, 95),
        "lag_p95_ms": _percentile(lag_ms, 95),
    }


def _percentile(values: list[float], percent: int) -> float:
    return sorted(values)[(len(values) - 1) * percent // 100]


def main() -> None:
    """Measure and print, last of all one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--connections", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    parts = round(options.seconds / PERIOD_S)
    server = multiprocessing.get_context("spawn").Process(target=_serve, args=(theirs, parts), daemon=True)
    server.start()
    port, rows = ours.recv(), defaultdict(list)
    for _ in range(options.rounds):
        for name, client in CLIENTS.items():
            rows[name].append(_measure(client, port, options.connections))
            print(name, {key: round(value, 2) for key, value in rows[name][-1].items()}, flush=True)
    server.terminate()
    medians = {
        name: {key: round(_percentile([row[key] for row in taken], 50), 2) for key in taken[0]}
        for name, taken in rows.items()
    }
    print(json.dumps({"connections": options.connections, "seconds": options.seconds, "median": medians}))


if __name__ == "__main__":
    main()
