"""Time to first packet through each dialect, against the native API of the same server, in one run.

    python benchmarks/dialects.py --model qwen3-tts-1.7b-customvoice --load-format dummy \\
        --rps 1 24 --rps 20 120 --out benchmarks/results/dialects-qwen3-tts-1.7b-customvoice.json

`--rps RATE COUNT`: requests arrive at random (exponential gaps), COUNT for each dialect in turn, so that all see the
same load. Dialects over HTTP are compared with `native`, over WebSocket with `native-live`; sockets are open before
their text, as clients keep them. All ask for PCM at the model's rate in the default voice. `ttfp` is from the request,
or the first piece of text, to the first audio; `over_native_p50_ms` is the difference of the medians. An underrun is
audio that arrives after playback from the first packet on has run out. Ends with a table and one JSON line; exits with
1 if a dialect is more than `--limit-ms` above native at the median, has underruns that native has not, or failed. Needs
the extra `test`.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import datetime
import json
import math
import random
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import ClientConnection, connect

from sonoro.bench.machine import commit_of_checkout, processor, rounded

GUARD_S = 120.0
TEXT = "The birch canoe slid on the smooth planks, and the boats came home before the rain did."
PIECES = [word + " " for word in TEXT.split()]
ANY = "some-voice-of-theirs"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as sonoro serve takes it; the built-in voice if none")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument(
        "--rps",
        type=float,
        nargs=2,
        action="append",
        metavar=("RATE", "REQUESTS"),
        help="requests a second, and how many of each way; may be repeated; 1 24 and 20 120 if none",
    )
    parser.add_argument("--commit", help="what is run, where there is no checkout to ask")
    parser.add_argument("--facts", type=json.loads, default={}, help="JSON object: arm, gpu, driver, torch, dtype")
    parser.add_argument("--warmup", type=int, default=3, help="requests of each way before those that are measured")
    parser.add_argument("--limit-ms", type=float, default=3.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="results file")
    return parser.parse_args()


@dataclass
class Heard:
    """One response: time of its first packet, and number of underruns."""

    rate: int
    started_s: float = field(default_factory=time.perf_counter)
    first_s: float | None = None
    underruns: int = 0
    audio_s: float = 0.0

    def audio(self, pcm: bytes) -> None:
        """Take `pcm` that has just arrived."""
        if not pcm:
            return
        now_s = time.perf_counter()
        if self.first_s is None:
            self.first_s = now_s
        elif now_s > self.first_s + self.audio_s:
            self.underruns += 1
        self.audio_s += len(pcm) / 2 / self.rate


class Ways:
    """Clients of all dialects for the server at `url` and `wyoming_port`, whose model's sample rate is `rate` Hz."""

    def __init__(self, url: str, wyoming_port: int, rate: int) -> None:
        self._socket_url, self._wyoming_port, self._rate = url.replace("http", "ws", 1), wyoming_port, rate
        self._http = httpx.AsyncClient(base_url=url, timeout=GUARD_S, limits=httpx.Limits(max_connections=None))
        self._idle: dict[str, list[ClientConnection]] = {}
        raw = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": rate}
        cartesia = {"model_id": "sonic-3", "voice": {"mode": "id", "id": ANY}, "output_format": raw}
        self._cartesia = cartesia
        linear = f"encoding=linear16&sample_rate={rate}"
        speak = f"/v1/text-to-speech/{ANY}"
        post = self._post
        self.all: dict[str, Callable[[], Awaitable[Heard]]] = {
            "native": lambda: post("/v1/audio/speech", {"input": TEXT, "response_format": "pcm"}),
            "elevenlabs": lambda: post(f"{speak}/stream?output_format=pcm_{rate}", {"text": TEXT}),
            "elevenlabs-timestamps": lambda: post(
                f"{speak}/stream/with-timestamps?output_format=pcm_{rate}", {"text": TEXT}, "audio_base64"
            ),
            "cartesia": lambda: post("/tts/bytes", {"transcript": TEXT, **cartesia}),
            "cartesia-sse": lambda: post("/tts/sse", {"transcript": TEXT, **cartesia}, "data"),
            "deepgram": lambda: post(f"/v1/speak?container=none&{linear}", {"text": TEXT}),
            "native-live": lambda: self._live("/v1/audio/speech/stream", self._native),
            "elevenlabs-live": lambda: self._live(
                f"{speak}/multi-stream-input?output_format=pcm_{rate}", self._elevenlabs
            ),
            "cartesia-live": lambda: self._live("/tts/websocket", self._cartesia_context),
            "deepgram-live": lambda: self._live(f"/v1/speak?{linear}", self._deepgram),
            "vllm_omni-live": lambda: self._live("/v1/audio/speech/stream?", self._vllm_omni),
            "wyoming-live": self._wyoming,
        }

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()
        for connections in self._idle.values():
            for connection in connections:
                await connection.close()

    async def _post(self, path: str, body: dict[str, Any], encoded_in: str | None = None) -> Heard:
        heard, left = Heard(self._rate), ""
        async with self._http.stream("POST", path, json=body) as answer:
            answer.raise_for_status()
            async for part in answer.aiter_raw():
                if encoded_in is None:
                    heard.audio(part)
                    continue
                *lines, left = (left + part.decode()).split("\n")
                for line in lines:
                    if line.startswith(("{", "data: ")):
                        told = json.loads(line.removeprefix("data: "))
                        heard.audio(base64.b64decode(told.get(encoded_in) or ""))
        return heard

    async def _live(self, path: str, speak: Callable[[ClientConnection, Heard], Awaitable[None]]) -> Heard:
        # The server closes sockets that were idle for too long.
        idle = self._idle[path] = [one for one in self._idle.get(path, []) if one.close_code is None]
        connection = idle.pop() if idle else await connect(self._socket_url + path, proxy=None, compression=None)
        heard = Heard(self._rate)
        await asyncio.wait_for(speak(connection, heard), GUARD_S)
        self._idle[path].append(connection)
        return heard

    async def _native(self, connection: ClientConnection, heard: Heard) -> None:
        for piece in PIECES:
            await connection.send(json.dumps({"type": "input.text", "text": piece}))
        await connection.send(json.dumps({"type": "input.done"}))
        await self._listen(connection, heard, lambda told: told["type"] == "audio.done")

    async def _elevenlabs(self, connection: ClientConnection, heard: Heard) -> None:
        name = {"context_id": str(random.random())}
        for piece in PIECES:
            await connection.send(json.dumps({"text": piece, **name}))
        await connection.send(json.dumps({"flush": True, **name}))
        await connection.send(json.dumps({"close_context": True, **name}))
        await self._listen(connection, heard, lambda told: bool(told["isFinal"]), "audio")

    async def _cartesia_context(self, connection: ClientConnection, heard: Heard) -> None:
        common = {**self._cartesia, "context_id": str(random.random())}
        for piece in PIECES:
            await connection.send(json.dumps({**common, "transcript": piece, "continue": True}))
        await connection.send(json.dumps({**common, "transcript": "", "continue": False}))
        await self._listen(connection, heard, lambda told: told["type"] == "done", "data")

    async def _deepgram(self, connection: ClientConnection, heard: Heard) -> None:
        for piece in PIECES:
            await connection.send(json.dumps({"type": "Speak", "text": piece}))
        await connection.send(json.dumps({"type": "Flush"}))
        await self._listen(connection, heard, lambda told: told["type"] == "Flushed")

    async def _vllm_omni(self, connection: ClientConnection, heard: Heard) -> None:
        await connection.send(json.dumps({"type": "session.config", "response_format": "pcm", "stream_audio": True}))
        for piece in PIECES:
            await connection.send(json.dumps({"type": "input.text", "text": piece}))
        await connection.send(json.dumps({"type": "input.done"}))
        await self._listen(connection, heard, lambda told: told["type"] == "session.done")

    async def _wyoming(self) -> Heard:
        """One connection per text, as Home Assistant does."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._wyoming_port)
        heard = Heard(self._rate)
        events = [{"type": "synthesize-chunk", "data": {"text": piece}} for piece in PIECES]
        for event in ({"type": "synthesize-start"}, *events, {"type": "synthesize-stop"}):
            writer.write(json.dumps(event).encode() + b"\n")
        try:
            async with asyncio.timeout(GUARD_S):
                while (told := json.loads(await reader.readline()))["type"] != "synthesize-stopped":
                    data = await reader.readexactly(told.get("data_length", 0))
                    if told["type"] == "error":
                        raise RuntimeError(data)
                    heard.audio(await reader.readexactly(told.get("payload_length", 0)))
        finally:
            writer.close()
        return heard

    @staticmethod
    async def _listen(
        connection: ClientConnection, heard: Heard, is_end: Callable[[dict[str, Any]], bool], encoded_in: str = ""
    ) -> None:
        async for message in connection:
            if isinstance(message, bytes):
                heard.audio(message)
                continue
            told = json.loads(message)
            if told.get("type") in ("error", "Error") or told.get("error"):
                raise RuntimeError(message)
            heard.audio(base64.b64decode(told.get(encoded_in) or ""))
            if is_end(told):
                return


async def measure(ways: Ways, rps: float, requests: int, chance: random.Random) -> list[dict[str, Any]]:
    """Measure all dialects at one rate; returns a row for each."""
    turns = [name for _ in range(requests) for name in chance.sample(list(ways.all), len(ways.all))]
    tasks: list[tuple[str, asyncio.Task[Heard]]] = []
    for name in turns:
        tasks.append((name, asyncio.ensure_future(ways.all[name]())))
        await asyncio.sleep(chance.expovariate(rps))
    await asyncio.wait([task for _, task in tasks])
    found: dict[str, list[Heard]] = {name: [] for name in ways.all}
    failed = dict.fromkeys(ways.all, 0)
    for name, task in tasks:
        if task.exception() is None and task.result().first_s is not None:
            found[name].append(task.result())
        else:
            failed[name] += 1
            print(f"{name}: {task.exception()!r}", file=sys.stderr)
    rows = []
    for name, heard in found.items():
        first_ms = sorted(1000 * (one.first_s - one.started_s) for one in heard if one.first_s is not None)
        row = {"way": name, "rps": rps, "requests": len(heard), "failed": failed[name]}
        if first_ms:
            row |= {
                "ttfp_p50_ms": statistics.median(first_ms),
                "ttfp_p95_ms": first_ms[math.ceil(0.95 * len(first_ms)) - 1],
            }
            row |= {"underruns": sum(one.underruns for one in heard), "audio_s": sum(one.audio_s for one in heard)}
        rows.append(row)
    return judged(rows)


def judged(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`rows` of one rate with their differences from native."""
    by_way = {row["way"]: row for row in rows}
    for row in rows:
        ours = by_way["native-live" if row["way"].endswith("-live") else "native"]
        if "ttfp_p50_ms" in row and "ttfp_p50_ms" in ours:
            row["over_native_p50_ms"] = row["ttfp_p50_ms"] - ours["ttfp_p50_ms"]
            row["underruns_over_native"] = row["underruns"] - ours["underruns"]
    return rows


@contextlib.asynccontextmanager
async def serving(options: argparse.Namespace) -> AsyncIterator[tuple[str, int]]:
    """A context with a ready server: its address and Wyoming port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "sonoro", "serve", *([options.model] if options.model else []), "--port", "0"]
    command += ["--load-format", options.load_format, "--device", options.device, "--slots", str(options.slots)]
    command += ["--wyoming", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = await asyncio.to_thread(process.stdout.readline)
            found = re.search(r"http://\S+", line)
            assert found, line
            async with httpx.AsyncClient(base_url=found[0]) as http:
                while (await http.get("/ready")).status_code != 200:
                    assert process.poll() is None, "the server has ended"
                    await asyncio.sleep(0.2)
            yield found[0], port
        finally:
            process.terminate()


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all rates; returns the results."""
    chance = random.Random(options.seed)
    async with serving(options) as (url, wyoming_port), httpx.AsyncClient(base_url=url) as http:
        model = (await http.get("/v1/models")).json()["data"][0]
        ways = Ways(url, wyoming_port, model["sample_rate"])
        try:
            for _ in range(options.warmup):  # connections, and what is created on first use
                for ask in ways.all.values():
                    await ask()
            rows = []
            for rps, requests in options.rps or [(1.0, 24), (20.0, 120)]:
                for row in await measure(ways, rps, int(requests), chance):
                    rows.append(rounded(row))
                    print(" ".join(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
        finally:
            await ways.close()
    settings = {
        name: value
        for name, value in vars(options).items()
        if name not in {"out", "commit", "facts"} and value is not None
    }
    commit, date = options.commit or commit_of_checkout(), datetime.datetime.now(datetime.UTC).date()
    facts = {"commit": commit, "date": date.isoformat()}
    return {
        "bench": "dialects",
        "model": model["root"],
        **options.facts,
        "client": processor(),
        **facts,
        "settings": settings,
        "rows": rows,
    }


def is_passed(rows: list[dict[str, Any]], limit_ms: float) -> bool:
    """Whether no dialect failed, exceeds the limit, or has more underruns than native."""
    return all(
        # Without native there is nothing to compare with.
        not row["failed"] and row.get("over_native_p50_ms", math.inf) <= limit_ms and row["underruns_over_native"] <= 0
        for row in rows
    )


def main() -> None:
    options = arguments()
    results = asyncio.run(run(options))
    results["is_passed"] = is_passed(results["rows"], options.limit_ms)
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results))
    sys.exit(not results["is_passed"])


if __name__ == "__main__":
    main()
