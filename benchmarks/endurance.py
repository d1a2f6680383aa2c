"""Mixed load on `sonoro serve` while its engine is killed repeatedly: is every request answered, does memory grow?

    python benchmarks/endurance.py --minutes 30 --kill-every-s 30 --out endurance.json
    python benchmarks/endurance.py --minutes 5 --kill-every-s 20 --default-limit      # until the server gives up

Clients concurrently ask for whole files, streams, events, batches and live text; some disconnect in mid-speech, some
send invalid requests. Responses are counted as `whole`, `refused` (with the right status), `named` (an error that says
what happened), `broken` (a body that HTTP marks as incomplete, as its headers were sent before the engine died), `left`
(cancelled by the client), or `silent`: one that ends as if whole but is too short, one the request does not allow, or
none within `GUARD_S`. There must be no `silent` one. With `--kill fronts` a `broken` one whose connection was not the
killed front's is `silent` too. Memory is that of the server process, in medians per minute after
`SETTLED_S`. With `--default-limit` the crashes must end the server with an exit code other than 0; without it the
server must not end. Ends with one JSON line. Needs the extra `test`."""

from __future__ import annotations

import argparse
import asyncio
import base64
import collections
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosedError, WebSocketException

from sonoro.bench.machine import commit_of_checkout, processor

GUARD_S = 240.0
SETTLED_S = 180.0
ENDING_S = 10.0
"""Limit for a server from its last connection to the end of its process."""

WAV_HEADER_BYTES = 44
TEXTS = (
    "Yes.",
    "The last train leaves at half past nine.",
    "She put the kettle on, opened the window, and waited for the rain to stop.",
    "It was a long way down to the harbour. Nobody spoke until the boats came into sight, and then everybody did.",
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as sonoro serve takes it; the built-in voice if none")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--kill-every-s", type=float, default=30.0)
    parser.add_argument("--default-limit", action="store_true", help="leave the limit of crashes as it is")
    parser.add_argument("--front-processes", type=int, default=1, help="as sonoro serve takes it")
    parser.add_argument("--kill", choices=("engines", "fronts"), default="engines", help="all engines, or one front")
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--port", type=int, default=8791)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", help="what is run, where there is no checkout to ask")
    parser.add_argument("--out", type=Path, help="file for the JSON line")
    return parser.parse_args()


class Load:
    """Clients that send requests until `is_over`, and counts of the outcomes."""

    def __init__(self, port: int, seed: int) -> None:
        self.base, self.is_over = f"127.0.0.1:{port}", False
        self.counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self.notes: list[str] = []
        self._random = random.Random(seed)
        # A connection for each request, so that each may be another front's.
        limits, hooks = httpx.Limits(max_keepalive_connections=0), {"request": [self._follow]}
        self._http = httpx.AsyncClient(
            base_url=f"http://{self.base}", timeout=GUARD_S, limits=limits, event_hooks=hooks
        )
        self._ports: dict[asyncio.Task[None] | None, int] = {}
        self.cut_ports: set[int] | None = None
        """The clients' ports of all connections of killed fronts, where only fronts are killed."""

    async def run(self) -> None:
        """One client."""
        kinds: tuple[Callable[[str], Awaitable[str]], ...] = (
            *(self.file, self.stream, self.events, self.batch, self.live, self.leaver, self.refused),
        )
        while not self.is_over:
            kind, text = self._random.choice(kinds), self._random.choice(TEXTS)
            try:
                async with asyncio.timeout(GUARD_S):
                    how = await kind(text)
            except (httpx.RemoteProtocolError, httpx.ReadError, ConnectionClosedError) as error:
                port = self._ports.get(asyncio.current_task())
                is_cut = self.cut_ports is None or port in self.cut_ports
                how = "broken" if is_cut else f"silent: broken, but not by the end of its front: {error!r}"
            except (httpx.ConnectError, ConnectionError, WebSocketException) as error:
                if not self.is_over:
                    await asyncio.sleep(ENDING_S)
                how = "named" if self.is_over else f"silent: {error!r}"
            except TimeoutError:
                how = "silent: nothing in time"
            self.counts[kind.__name__][how.partition(":")[0]] += 1
            if how.startswith("silent"):
                self.notes.append(f"{kind.__name__}: {how}")
            if how == "named":
                await asyncio.sleep(0.5)

    async def close(self) -> None:
        await self._http.aclose()

    async def _follow(self, request: httpx.Request) -> None:
        """Note the port from which a request is sent."""

        async def note(event: str, facts: dict[str, Any]) -> None:
            if event == "connection.connect_tcp.complete":
                self._ports[asyncio.current_task()] = facts["return_value"].get_extra_info("client_addr")[1]

        request.extensions["trace"] = note

    def _body(self, text: str, **fields: object) -> dict[str, object]:
        return {"input": text, "seed": self._random.randrange(1000), **fields}

    async def file(self, text: str) -> str:
        answer = await self._http.post("/v1/audio/speech", json=self._body(text, response_format="wav"))
        if answer.status_code != 200:
            return named(answer)
        return whole(len(answer.content) - WAV_HEADER_BYTES, text)

    async def stream(self, text: str) -> str:
        async with self._http.stream(
            "POST", "/v1/audio/speech", json=self._body(text, response_format="pcm")
        ) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return named(answer)
            heard = [part async for part in answer.aiter_raw()]
        return whole(sum(map(len, heard)), text)

    async def events(self, text: str) -> str:
        body, last = self._body(text, response_format="pcm", stream_format="sse"), ""
        async with self._http.stream("POST", "/v1/audio/speech", json=body) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return named(answer)
            async for line in answer.aiter_lines():
                last = json.loads(line[6:]).get("type", "error") if line.startswith("data: {") else last
        return {"speech.audio.done": "whole", "error": "named"}.get(last, f"silent: the last event was {last!r}")

    async def batch(self, text: str) -> str:
        items = [{"input": text, "seed": seed} for seed in range(2)]
        answer = await self._http.post("/v1/audio/speech/batch", json={"items": items, "response_format": "wav"})
        if answer.status_code != 200:
            return named(answer)
        results = answer.json()["results"]
        if len(results) != len(items):
            return "silent: items are missing"
        if any("error" in item and item["error"] for item in results):
            return "named"
        ended = {whole(len(base64.b64decode(item["audio_data"])) - WAV_HEADER_BYTES, text) for item in results}
        return ended.pop() if len(ended) == 1 else "silent: an item is not whole"

    async def live(self, text: str) -> str:
        async with connect(f"ws://{self.base}/v1/audio/speech/stream", open_timeout=GUARD_S, max_size=None) as session:
            self._ports[asyncio.current_task()] = session.local_address[1]
            await session.send(json.dumps({"type": "session.config", "seed": self._random.randrange(1000)}))
            for word in text.split(" "):
                await session.send(json.dumps({"type": "input.text", "text": word + " "}))
            await session.send(json.dumps({"type": "input.done"}))
            async for message in session:
                kind = json.loads(message)["type"] if isinstance(message, str) else ""
                if kind in ("audio.done", "error"):
                    return "whole" if kind == "audio.done" else "named"
        return "silent: the session ended without a word"

    async def leaver(self, text: str) -> str:
        async with self._http.stream(
            "POST", "/v1/audio/speech", json=self._body(text, response_format="pcm")
        ) as answer:
            if answer.status_code != 200:
                await answer.aread()
                return named(answer)
            async for _ in answer.aiter_raw():
                break
        return "left"

    async def refused(self, text: str) -> str:
        field, value = self._random.choice(
            [("voice", "nobody"), ("speed", 90), ("input", ""), ("response_format", "gif")]
        )
        answer = await self._http.post("/v1/audio/speech", json=self._body(text) | {field: value})
        if answer.status_code not in (400, 404):
            return f"silent: {field}={value!r} was answered with {answer.status_code}"
        return "refused" if answer.json()["error"]["param"] == field else "silent: the error names another field"


def named(answer: httpx.Response) -> str:
    """The outcome of a response without audio: `named` for 503 or 429 with a message."""
    if answer.status_code in (429, 503) and answer.json()["error"]["message"]:
        return "named"
    return f"silent: {answer.status_code} {answer.text[:200]}"


def whole(audio_bytes: int, text: str) -> str:
    """The outcome of 16-bit audio at 24 kHz of that size for `text`: `whole` if at least 25 ms per letter."""
    seconds = audio_bytes / 2 / 24_000
    return "whole" if seconds >= 0.025 * len(text) else f"silent: {seconds:.2f} s for {len(text)} letters"


def children(parent: int, module: bytes = b"sonoro.engine_process") -> Iterator[int]:
    """PIDs of a server's engine processes, or of those of another `module`."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (process / "stat").read_text().rpartition(")")[2].split()
            if int(after_name[1]) == parent and module in (process / "cmdline").read_bytes():
                yield int(process.name)
        except OSError:
            continue


def resident_mb(process: int) -> float:
    """Resident memory of a process without file mappings, in MB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) / 1024


def client_ports(process: int) -> Iterator[int]:
    """The ports of clients to which a process has accepted connections."""
    own = {os.readlink(file) for file in Path(f"/proc/{process}/fd").iterdir()}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in own:
            yield int(fields[2].rpartition(":")[2], 16)


async def kill_some(
    server: subprocess.Popen[bytes], load: Load, what: str, every_s: float, ends_s: float
) -> tuple[int, int]:
    """Kill the engines, or one front in turn, every `every_s` seconds until `ends_s`; returns how often, and the number
    of connections of the fronts."""
    killed = 0
    load.cut_ports = set() if what == "fronts" else None
    while time.monotonic() + every_s < ends_s and server.poll() is None:
        await asyncio.sleep(every_s)
        fronts = sorted(children(server.pid, b"sonoro.server.front"))
        for process in children(server.pid) if what == "engines" else fronts[:1]:
            if load.cut_ports is not None:
                # Stopped first, so that it accepts no connection that is not noted.
                os.kill(process, signal.SIGSTOP)
                load.cut_ports.update(client_ports(process))
            os.kill(process, signal.SIGKILL)
            killed += 1
    return killed, len(load.cut_ports or ())


async def watch(server: subprocess.Popen[bytes], load: Load, ends_s: float, since: float) -> list[tuple[float, float]]:
    """Sample (seconds since the start, the server's memory in MB) every two seconds; ends the load at the end."""
    seen = []
    while time.monotonic() < ends_s and server.poll() is None:
        seen.append((time.monotonic() - since, resident_mb(server.pid)))
        await asyncio.sleep(2)
    load.is_over = True
    return seen


def by_minute(seen: list[tuple[float, float]]) -> list[float]:
    """Median memory of each minute after `SETTLED_S`."""
    minutes: dict[int, list[float]] = collections.defaultdict(list)
    for at_s, memory in seen:
        if at_s >= SETTLED_S:
            minutes[int((at_s - SETTLED_S) // 60)].append(memory)
    return [round(statistics.median(minute), 1) for _, minute in sorted(minutes.items())]


async def measure(args: argparse.Namespace, server: subprocess.Popen[bytes]) -> dict[str, object]:
    load = Load(args.port, args.seed)
    while (await asyncio.to_thread(ready, args.port)) != 200:
        if server.poll() is not None:
            raise SystemExit("the server did not start")
    since = time.monotonic()
    ends_s = since + args.minutes * 60
    clients = [asyncio.create_task(load.run()) for _ in range(args.clients)]
    seen, (killed, cut) = await asyncio.gather(
        watch(server, load, ends_s, since), kill_some(server, load, args.kill, args.kill_every_s, ends_s)
    )
    gave_up = server.poll()
    await asyncio.gather(*clients)
    await load.close()
    minutes = by_minute(seen)
    totals: collections.Counter[str] = sum(load.counts.values(), collections.Counter())
    return {
        "requests": totals.total(),
        "answers": dict(totals),
        "by_kind": {kind: dict(count) for kind, count in sorted(load.counts.items())},
        "notes": load.notes[:20],
        f"{args.kill}_killed": killed,
        "connections_cut": cut,
        "seconds": round(time.monotonic() - since, 1),
        "server_mb_by_minute": minutes,
        "server_mb_spread": round(max(minutes) / min(minutes) - 1, 4) if minutes else None,
        "exit_code_under_load": gave_up,
    }


def ready(port: int) -> int:
    time.sleep(0.5)
    try:
        return httpx.get(f"http://127.0.0.1:{port}/ready").status_code
    except httpx.TransportError:
        return 0


def main() -> None:
    args = arguments()
    command = [sys.executable, "-m", "sonoro", "serve", *([args.model] if args.model else [])]
    command += ["--port", str(args.port), "--slots", str(args.slots), "--max-queue-wait-ms", "60000"]
    command += ["--front-processes", str(args.front_processes)]
    command += [] if args.default_limit else ["--max-restarts", "100000"]
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log) as server:
        try:
            result = asyncio.run(measure(args, server))
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGTERM)
        result["exit_code"] = server.wait(60)
        log.seek(0)
        result["tracebacks"] = log.read().count(b"Traceback")
    settings = {
        name: getattr(args, name)
        for name in ("model", "minutes", "kill_every_s", "kill", "front_processes", "clients", "slots", "seed")
    }
    hardware = {"processor": processor(), "python": platform.python_version()}
    line = json.dumps(
        {"commit": args.commit or commit_of_checkout(), "hardware": hardware, "settings": settings, **result}
    )
    if args.out is not None:
        args.out.write_text(line + "\n")
    print(line)
    silent = result["answers"].get("silent", 0)  # type: ignore[attr-defined]
    gave_up = result["exit_code_under_load"]
    raise SystemExit(0 if not silent and (bool(gave_up) if args.default_limit else gave_up is None) else 1)


if __name__ == "__main__":
    main()
