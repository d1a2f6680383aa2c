"""Hostile load on `sonoro serve` of the built-in voice: does memory grow, and is a client with a key always served?

    nice python benchmarks/abuse.py --minutes 30 --out abuse.json

Clients without a key drip a message, send 15 MiB of one, or stay silent, on each protocol. Others have the key `bad`:
they do the same, upload recordings, and go on with texts that were refused. Somebody puts sparse files into the folder
of voices. The client with the key `good` speaks a sentence every `EVERY_S`. Memory is that of the server, all its
fronts included, and of its engine, without file mappings, every `SAMPLE_S` after `SETTLED_S`. What the load holds at a
time comes and goes by tens of MB, and what is kept is the least of each minute: it must be flat, by `RULE`. Fails if it
is not, or if the good client was refused. Ends with one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus, WebSocketException

from endurance import SETTLED_S, TEXTS, WAV_HEADER_BYTES, children, ready, resident_mb, whole
from sonoro.bench.machine import commit_of_checkout, processor

EVERY_S, SAMPLE_S, WINDOW, MAX_DRIFT = 10.0, 2.0, 10, 0.05
RULE = (
    f"the median of the minutes' least is in the last {WINDOW} minutes at most {MAX_DRIFT:.0%} above the first {WINDOW}"
)
LIVE, LABS = "/v1/audio/speech/stream", "/v1/text-to-speech/nora/multi-stream-input"
KIB_64, SPARSE = "x" * 2**16, (3 * 2**30, 17 * 2**20, 15 * 2**20)
REFUSED = [json.dumps({"type": "input.text", "text": text}) for text in ("x" * 5000, *[" x" * 25_000] * 40)]

Client = Callable[[], Coroutine[Any, Any, str]]


class Clients:
    """All clients; `kinds` has for each how many there are, and the seconds between its turns; `answers` are counts."""

    def __init__(self, port: int, folder: Path) -> None:
        self.answers: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._port, self._folder, self._turns = port, folder, 0
        self._http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60)
        self.kinds: dict[str, tuple[int, float, Client]] = {
            "good": (1, EVERY_S, self.speak),
            "drip without a key": (20, 0.5, lambda: self.send(LABS, "", ["{", *[" "] * 20], 2.0)),
            "15 MiB without a key": (5, 2.0, lambda: self.send(LABS, "", [KIB_64] * 240)),
            "15 MiB unfinished": (4, 2.0, lambda: self.send(LIVE, "bad", [KIB_64] * 240 + [" "] * 5, 0.05)),
            "silence, ElevenLabs": (15, 0.5, lambda: self.send(LABS, "", [], 60.0)),
            "silence, native": (5, 0.5, lambda: self.send(LIVE, "", [], 60.0)),
            "silence, Cartesia": (5, 0.5, lambda: self.send("/tts/websocket", "", [], 60.0)),
            "silence, Deepgram": (5, 0.5, lambda: self.send("/v1/speak", "", [], 60.0)),
            "silence, HTTP": (50, 0.5, lambda: self.stay_silent(port)),
            "silence, Wyoming": (50, 0.5, lambda: self.stay_silent(port + 1)),
            "text after its refusal, vLLM-Omni": (4, 1.0, self.go_on),
            "uploads of 9 MiB": (2, 3.0, lambda: self.upload(9 * 2**20, "bad")),
            "uploads without a key": (2, 3.0, lambda: self.upload(9 * 2**20, "none")),
            "voices": (2, 1.0, lambda: self.upload(16_000, "bad")),
            "sparse files": (1, 7.0, self.write_sparse_files),
        }

    async def repeat(self, kind: str, pause_s: float, client: Client) -> None:
        """Let `client` take its turns until cancelled."""
        while True:
            try:
                answer = await client()
            except InvalidStatus as error:
                answer = str(error.response.status_code)
            except (httpx.HTTPError, WebSocketException, OSError) as error:
                answer = type(error).__name__
            self.answers[kind][answer] += 1
            await asyncio.sleep(pause_s)

    async def speak(self) -> str:
        body, key = {"input": TEXTS[1], "response_format": "wav"}, {"Authorization": "Bearer good"}
        answer = await self._http.post("/v1/audio/speech", json=body, headers=key)
        heard = whole(len(answer.content) - WAV_HEADER_BYTES, TEXTS[1])
        return heard if answer.status_code == 200 else str(answer.status_code)

    async def send(self, path: str, key: str, parts: list[str], pause_s: float = 0.0) -> str:
        """Send `parts` of a message without its end; returns the code of the close, 1006 if the client came first."""

        async def slowly() -> AsyncIterator[str]:
            for part in parts:
                yield part
                await asyncio.sleep(pause_s)
            socket.transport.abort()

        async with self._socket(path, key) as socket:
            with contextlib.suppress(WebSocketException):
                await (socket.send(slowly()) if parts else asyncio.wait_for(socket.recv(), pause_s))
        return str(socket.close_code)

    async def go_on(self) -> str:
        async with self._socket(LIVE, "bad") as socket:
            for message in ('{"type": "session.config", "stream_audio": true}', *REFUSED):
                await socket.send(message)
            await asyncio.sleep(3)
        return str(socket.close_code)

    async def stay_silent(self, port: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(writer):
            await reader.read()
        return "closed"

    async def upload(self, size: int, key: str) -> str:
        self._turns += 1
        fields = {"name": f"voice{self._turns}", "x_vector_only_mode": "true"}
        files, headers = {"audio": ("a.wav", bytes(size), "audio/wav")}, {"Authorization": f"Bearer {key}"}
        return str((await self._http.post("/v1/audio/voices", data=fields, files=files, headers=headers)).status_code)

    async def write_sparse_files(self) -> str:
        for size in SPARSE:
            path = self._folder / f"sparse{size}.safetensors"
            path.unlink(missing_ok=True)
            path.touch()
            os.truncate(path, size)
        return "written"

    def _socket(self, path: str, key: str) -> connect:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return connect(f"ws://127.0.0.1:{self._port}{path}", additional_headers=headers, max_size=None, proxy=None)


async def measure(args: argparse.Namespace, server: subprocess.Popen[bytes], folder: Path) -> dict[str, Any]:
    while (await asyncio.to_thread(ready, args.port)) != 200:
        assert server.poll() is None, "the server did not start"
    clients, begin_s = Clients(args.port, folder), time.monotonic() + SETTLED_S
    kinds = clients.kinds.items()
    tasks = [asyncio.create_task(clients.repeat(name, *kind)) for name, (count, *kind) in kinds for _ in range(count)]
    await asyncio.sleep(SETTLED_S)
    seen: dict[str, list[float]] = {"server": [], "engine": []}
    while time.monotonic() < begin_s + 60 * args.minutes and server.poll() is None:
        fronts = children(server.pid, b"sonoro.server.front")
        seen["server"].append(resident_mb(server.pid) + sum(map(resident_mb, fronts)))
        seen["engine"].append(sum(map(resident_mb, children(server.pid))))
        await asyncio.sleep(SAMPLE_S)
    [task.cancel() for task in tasks]
    await asyncio.wait(tasks)
    answers = {kind: dict(clients.answers[kind]) for kind in clients.kinds}
    return {"answers": answers, **{process: figures(values) for process, values in seen.items()}}


def figures(seen: list[float]) -> dict[str, Any]:
    """The least MB of each minute, its drift by `RULE`, and for comparison that of the median of all samples."""
    each = round(60 / SAMPLE_S)
    minutes = [seen[start : start + each] for start in range(0, len(seen), each)]
    least, medians = list(map(min, minutes)), list(map(statistics.median, minutes))
    window = max(1, min(WINDOW, len(minutes) // 2))

    def drift(values: list[float]) -> float:
        return round(100 * (statistics.median(values[-window:]) / statistics.median(values[:window]) - 1), 2)

    rounded = {"min_mb_by_minute": [round(value, 1) for value in least], "max_mb": round(max(seen), 1)}
    return {"drift_percent": drift(least), "median_drift_percent": drift(medians), **rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--front-processes", type=int, default=1, help="as sonoro serve takes it")
    parser.add_argument("--port", type=int, default=8793, help="and the next one, for Wyoming")
    parser.add_argument("--out", type=Path, help="file for the JSON line")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "sonoro", "serve", "--port", str(args.port), "--slots", "2"]
        command += ["--api-key", "good", "--api-key", "bad", "--wyoming", str(args.port + 1), "--voices-folder", folder]
        command += ["--front-processes", str(args.front_processes)]
        with subprocess.Popen(command, stdout=log, stderr=log) as server:
            try:
                result = asyncio.run(measure(args, server, Path(folder)))
            finally:
                server.terminate()
        log.seek(0)
        result["tracebacks"] = log.read().count(b"Traceback")
    hardware = {"processor": processor(), "cores": os.cpu_count(), "python": platform.python_version()}
    settings = {"minutes": args.minutes, "settled_s": SETTLED_S, "sample_s": SAMPLE_S}
    settings["front_processes"] = args.front_processes
    is_flat = all(result[process]["drift_percent"] <= 100 * MAX_DRIFT for process in ("server", "engine"))
    facts = {"commit": commit_of_checkout(), "hardware": hardware, "settings": settings}
    line = json.dumps({**facts, **result, "rule": RULE, "is_flat": is_flat})
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    raise SystemExit(0 if is_flat and set(result["answers"]["good"]) == {"whole"} else 1)


if __name__ == "__main__":
    main()
