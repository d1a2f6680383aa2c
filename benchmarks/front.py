"""What the HTTP side of `sonoro serve` costs and adds, over engines that only keep a GPU's pace (paced_engine.py).

    python benchmarks/front.py cost --requests 200
    python benchmarks/front.py load --engines 8 --fronts 8 --rps 1200,2000 --client-processes 16

`cost` asks by each response format and dialect in turn, from `--clients` connections, and prints the CPU time of all
processes of the server but its engines, by request. `load` sends an open loop of PCM requests from processes of its
own. It prints the first packet at the client, the same at the engines (from the arrival of a request to the sending of
its audio), their difference, and the CPU time of fronts, engines and clients in cores. Ends with one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sonoro.bench.client import SpeechClient, Target
from sonoro.bench.load import ServeBench
from sonoro.bench.load import run as run_load
from sonoro.bench.machine import commit_of_checkout, processor

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
TEXT = "The birch canoe slid on the smooth planks, and the boats came home before the rain."
FRAMES = 60
FORMATS = ("pcm", "wav", "mp3", "opus", "aac", "flac")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("cost", "load", "serve"))
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--fronts", type=int, default=1, help="as --front-processes of sonoro serve")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--requests", type=int, default=200, help="of each format and dialect")
    parser.add_argument("--clients", type=int, default=16, help="connections at once, for cost")
    parser.add_argument("--only", default="", help="of cost, names with this in them")
    parser.add_argument("--rps", default="80,240")
    parser.add_argument("--duration", type=float, default=10.0)
    parser.add_argument("--client-processes", type=int, default=0, help="0 chooses")
    parser.add_argument("--commit", help="what is run, where there is no checkout to ask")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def serve(options: argparse.Namespace) -> None:
    """Be `sonoro serve` over paced engines."""
    import paced_engine  # noqa: PLC0415

    fronts = ["--front-processes", str(options.fronts)] if options.fronts > 1 else []
    paced_engine.serve(options.engines, options.slots, *fronts, "--max-queue-wait-ms", "20000")


@dataclass(frozen=True)
class Tree:
    """The processes of a server."""

    root: int

    def _below(self, parent: int) -> Iterator[int]:
        with contextlib.suppress(OSError):
            for child in map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()):
                yield child
                yield from self._below(child)

    def cpu_s(self) -> tuple[float, float, float]:
        """CPU seconds of fronts (with their parent), of these outside of the kernel, and CPU seconds of engines."""
        fronts_s = user_s = engines_s = 0.0
        for pid in (self.root, *self._below(self.root)):
            with contextlib.suppress(OSError):
                spent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                is_engine = b"paced_engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
                used_s = (int(spent[11]) + int(spent[12])) * TICK_S
                fronts_s, engines_s = fronts_s + used_s * (not is_engine), engines_s + used_s * is_engine
                user_s += int(spent[11]) * TICK_S * (not is_engine)
        return fronts_s, user_s, engines_s


@contextlib.contextmanager
def server(script: str, **options: object) -> Iterator[tuple[Tree, str]]:
    """What `script serve` is with `options`, in processes of its own: these, and its address. It is drained at the
    end."""
    own = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    environment = {**os.environ, "SONORO_LOG_LEVEL": os.environ.get("SONORO_LOG_LEVEL", "ERROR")}
    command = [sys.executable, script, "serve", *own]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found, "the server has ended"
            while not is_ready(found[0]):
                assert process.poll() is None, "the server has ended"
                time.sleep(0.1)
            yield Tree(process.pid), found[0]
        finally:
            process.terminate()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


Ask = Callable[[], Awaitable[None]]


def ways(url: str) -> dict[str, Ask]:
    """A request by each response format, and of each dialect over HTTP."""
    client, http = SpeechClient(Target(url)), httpx.AsyncClient(base_url=url, timeout=60)
    common = {"model": "tts-1", "input": TEXT, "voice": "alloy", "max_new_tokens": FRAMES, "ignore_eos": True}

    def native(**fields: Any) -> Ask:
        async def ask() -> None:
            exchange = await client.speak({**common, **fields}, time.perf_counter())
            assert exchange.error is None or "instead of pcm" in exchange.error, exchange.error

        return ask

    def other(path: str, body: dict[str, Any]) -> Ask:
        async def ask() -> None:
            answer = await http.post(path, json=body)
            answer.raise_for_status()

        return ask

    raw = {"container": "raw", "encoding": "pcm_s16le", "sample_rate": 24000}
    cartesia = {"transcript": TEXT, "model_id": "sonic-3", "voice": {"mode": "id", "id": "any"}, "output_format": raw}
    return {
        **{name: native(response_format=name) for name in FORMATS},
        "pcm, sse": native(response_format="pcm", stream_format="sse"),
        "pcm, json": native(response_format="pcm", stream_format="json"),
        "elevenlabs": other("/v1/text-to-speech/any/stream?output_format=pcm_24000", {"text": TEXT}),
        "cartesia": other("/tts/bytes", cartesia),
        "cartesia, sse": other("/tts/sse", cartesia),
        "deepgram": other("/v1/speak?container=none&encoding=linear16&sample_rate=24000", {"text": TEXT}),
    }


async def repeated(ask: Ask, requests: int, clients: int) -> None:
    """Ask so often, from so many clients."""
    left = iter(range(requests))

    async def client() -> None:
        for _ in left:
            await ask()

    await asyncio.gather(*(client() for _ in range(clients)))


async def costs(options: argparse.Namespace, tree: Tree, url: str) -> list[dict[str, Any]]:
    """CPU time by request of each way."""
    rows = []
    for name, ask in ways(url).items():
        if options.only not in name:
            continue
        await repeated(ask, options.clients, options.clients)
        before = tree.cpu_s()
        await repeated(ask, options.requests, options.clients)
        spent, user, _ = (
            1000 * (end - start) / options.requests for start, end in zip(before, tree.cpu_s(), strict=True)
        )
        rows.append({"way": name, "cpu_ms": round(spent, 2), "user_ms": round(user, 2)})
        print(f"{name:16} {spent:6.2f} ms of CPU a request, {user:6.2f} of it outside of the kernel", flush=True)
    return rows


def loads(options: argparse.Namespace, tree: Tree, url: str) -> list[dict[str, Any]]:
    """First packets and CPU time at each rate."""
    rows = []
    for rate in map(float, options.rps.split(",")):
        bench = ServeBench(
            Target(url),
            rps=(rate,),
            duration_s=(options.duration,),
            frames=(30, 90),
            processes=options.client_processes,
        )
        began, clients_s, began_s = tree.cpu_s(), clients_cpu_s(), time.perf_counter()
        row = run_load(bench)["rows"][0]
        took_s = time.perf_counter() - began_s
        fronts, user, engines = (after - before for after, before in zip(tree.cpu_s(), began, strict=True))
        own_s, count = clients_cpu_s() - clients_s, row["requests"] * (1 + bench.warm_up_s / options.duration)
        at_engines = engine_first_ms(url)
        known = {name: row[name] for name in ("requests", "failed", "underruns", "lag_p95_ms") if name in row}
        first = {f"first_packet_{part}_ms": row[f"ttfp_{part}_ms"] for part in ("p50", "p95", "p99")}
        cores = {"fronts_cores": fronts / took_s, "engines_cores": engines / took_s, "clients_cores": own_s / took_s}
        spent = {"cpu_ms_a_request": 1000 * fronts / count, "user_ms_a_request": 1000 * user / count}
        added = {
            f"added_{part}_ms": first[f"first_packet_{part}_ms"] - at_engines[part] for part in ("p50", "p95", "p99")
        }
        rows.append({"rps": rate, **known, **first, **added, **cores, **spent})
        rows[-1] = {name: round(value, 2) if isinstance(value, float) else value for name, value in rows[-1].items()}
        print(json.dumps(rows[-1]), flush=True)
    return rows


def clients_cpu_s() -> float:
    """CPU seconds of this process and of its children that have ended, the clients among them."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def engine_first_ms(url: str) -> dict[str, float]:
    """Time from a request's arrival at an engine to its first audio, of the slowest engine."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = re.findall(r'sonoro_engine_tick_seconds\{quantile="0\.(\d+)",replica="\d+"\} (\S+)', text)
    return {
        f"p{part}": max(1000 * float(value) for name, value in found if name == part) for part in ("50", "95", "99")
    }


def main() -> None:
    options = arguments()
    if options.what == "serve":
        serve(options)
        return
    with server(__file__, engines=options.engines, fronts=options.fronts, slots=options.slots) as (tree, url):
        rows = asyncio.run(costs(options, tree, url)) if options.what == "cost" else loads(options, tree, url)
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "commit")}
    facts = {"commit": options.commit or commit_of_checkout(), "cpu": processor(), "cores": os.cpu_count()}
    line = json.dumps({"bench": "front", **facts, "settings": settings, "rows": rows})
    if options.out is not None:
        options.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
