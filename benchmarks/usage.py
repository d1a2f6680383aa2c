"""Whether usage by key is exact, and shares are as weights say: over several fronts, killed fronts and restarts.

    python benchmarks/usage.py --requests 100000 --starts 4 --fronts 4

Two keys of weights 1 and 3 always ask, over engines that only keep a GPU's pace (paced_engine.py), more than the server
may run at once. It is started several times over one file of usage. Each start begins with requests that take long, so
that the engine is what all wait for: there the shares are measured. A front is killed once all answers
have come, and in the last one another while requests run. What the clients counted must be what `GET /v1/usage`, the
metrics and, after the end, the file have; each answer that the last kill cut off may have been counted or not. Ends
with one JSON line."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import sqlite3
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from front import Tree, is_ready, server
from sonoro.bench.machine import commit_of_checkout, processor
from sonoro.server.quotas.limits import key_name

WEIGHTS = {"one": 1, "three": 3}
ADMIN = "root"
TEXT = "Yes."


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("measure", "serve"), default="measure")
    parser.add_argument("--requests", type=int, default=100_000, help="in all")
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--fronts", type=int, default=4)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--clients", type=int, default=48, help="connections of each key")
    parser.add_argument("--at-once", type=int, default=8, help="requests that the server runs at once")
    parser.add_argument("--shared", type=int, default=1000, help="of the requests of a start, those that take long")
    parser.add_argument("--frames", type=int, default=40, help="of these; the others have one")
    parser.add_argument("--usage-file", default="")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def serve(options: argparse.Namespace) -> None:
    """Be `sonoro serve` over paced engines."""
    import paced_engine  # noqa: PLC0415

    flags = ["--front-processes", str(options.fronts), "--max-concurrency", str(options.at_once)]
    flags += ["--usage-file", options.usage_file, "--admin-key", ADMIN, "--max-queue-wait-ms", "60000"]
    for key, weight in WEIGHTS.items():
        flags += ["--api-key", key, "--quota", f"{key}=weight:{weight}"]
    paced_engine.serve(options.engines, 256, *flags)


@dataclass
class Heard:
    """What clients counted: answers that came whole, and that broke."""

    whole: Counter[str] = field(default_factory=Counter)
    broken: Counter[str] = field(default_factory=Counter)


async def ask(address: tuple[str, int], key: str, left: Iterator[int], frames: int, heard: Heard) -> None:
    """Ask until none is `left`, over one connection, and over another when it breaks."""
    body = json.dumps({"input": TEXT, "response_format": "pcm", "max_new_tokens": frames, "ignore_eos": True})
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {key}\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    reader = writer = None
    for _ in left:
        try:
            if writer is None or reader is None:
                reader, writer = await asyncio.open_connection(*address, limit=2**22)
            writer.write(request)
            answer = await reader.readuntil(b"\r\n0\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200"), answer[:200]
            heard.whole[key] += 1
        except (OSError, asyncio.IncompleteReadError):
            heard.broken[key] += 1
            writer = None
    if writer is not None:
        writer.close()


async def load(url: str, options: argparse.Namespace, left: Iterator[int], frames: int, heard: Heard) -> None:
    """Requests of so many frames from all clients of both keys, until none is `left`."""
    host, _, port = url.removeprefix("http://").partition(":")
    address = host, int(port)
    await asyncio.gather(*(ask(address, key, left, frames, heard) for key in WEIGHTS for _ in range(options.clients)))


async def share(url: str, options: argparse.Namespace, heard: Heard) -> float:
    """How many answers the second key gets for each of the first, while all clients ask for what takes long."""
    before: Counter[str] = Counter()

    def numbers() -> Iterator[int]:
        yield from range(options.shared)
        # From now on clients stop, and those that still wait are served whatever their weight.
        before.update(heard.whole)

    await load(url, options, numbers(), options.frames, heard)
    one, three = (before[key] for key in WEIGHTS)
    return three / one


def counted(url: str) -> dict[str, tuple[int, int]]:
    """Requests and characters of each key, by the route; the metrics must have the same."""
    asked = urllib.request.Request(f"{url}/v1/usage", headers={"Authorization": f"Bearer {ADMIN}"})
    with urllib.request.urlopen(asked, timeout=30) as answer:
        data = json.load(answer)["data"]
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    names = {key_name(key): key for key in WEIGHTS}
    found = {
        names[one["key"]]: (one["requests"]["total"], one["characters"]["total"]) for one in data if one["key"] in names
    }
    for name, key in names.items():
        shown = re.search(rf'sonoro_key_requests_total{{key="{name}"}} (\S+)', text)
        assert shown, "the metrics lack a key"
        assert float(shown[1]) == found[key][0], "the metrics have another count"
    return found


def in_file(file: Path) -> dict[str, tuple[int, int]]:
    names = {key_name(key): key for key in WEIGHTS}
    with contextlib.closing(sqlite3.connect(file)) as read:
        rows = read.execute("SELECT key, sum(requests), sum(characters) FROM usage GROUP BY key").fetchall()
    return {names[name]: (requests, characters) for name, requests, characters in rows if name in names}


def fronts(tree: Tree) -> list[int]:
    """The front processes of the server."""
    processes = tree._below(tree.root)
    return [one for one in processes if b"sonoro.server.front" in Path(f"/proc/{one}/cmdline").read_bytes()]


def kill_one(tree: Tree, count: int) -> None:
    """Kill a front, and wait for the one in its place."""
    os.kill(killed := fronts(tree)[0], signal.SIGKILL)
    while len(found := fronts(tree)) < count or killed in found:
        time.sleep(0.1)


async def start(options: argparse.Namespace, number: int, file: Path, heard: Heard) -> dict[str, Any]:
    """One start of the server, its share of the requests, and what was counted."""
    own, before_s = Heard(), time.perf_counter()
    counts = {"fronts": options.fronts, "engines": options.engines, "at_once": options.at_once}
    with server(__file__, **counts, usage_file=file) as (tree, url):
        ratio, count = await share(url, options, own), options.requests // options.starts
        loading = asyncio.create_task(load(url, options, iter(range(options.shared, count)), 1, own))
        if number == options.starts - 1:
            while sum(own.whole.values()) < count // 2:
                await asyncio.sleep(0.05)
            await asyncio.to_thread(kill_one, tree, options.fronts)
        await loading
        heard.whole += own.whole
        heard.broken += own.broken
        found = [counted(url)]
        kill_one(tree, options.fronts)
        while not is_ready(url):
            time.sleep(0.1)
        found.append(counted(url))
    found.append(in_file(file))
    row = {
        "whole": dict(heard.whole),
        "broken": dict(heard.broken),
        "counted": [{key: one[key][0] for key in WEIGHTS} for one in found],
        "characters": found[-1],
        "three_for_one": round(ratio, 3),
        "took_s": round(time.perf_counter() - before_s, 1),
    }
    for one in found:
        for key in WEIGHTS:
            assert heard.whole[key] <= one[key][0] <= heard.whole[key] + heard.broken[key], row
            assert one[key][1] == one[key][0] * len(TEXT), row
            assert one[key] == found[0][key], row
    assert 0.9 < ratio / (WEIGHTS["three"] / WEIGHTS["one"]) < 1.1, row
    print(json.dumps(row), flush=True)
    return row


def main() -> None:
    options = arguments()
    if options.what == "serve":
        serve(options)
        return
    heard, rows = Heard(), []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.starts):
            rows.append(asyncio.run(start(options, number, Path(folder) / "usage.sqlite", heard)))
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    settings = {name: value for name, value in vars(options).items() if name not in ("out", "what", "usage_file")}
    facts = {"commit": commit_of_checkout(), "cpu": processor(), "cores": os.cpu_count()}
    spent = {"servers_cpu_s": round(usage.ru_utime + usage.ru_stime, 1)}
    line = json.dumps({"bench": "usage", **facts, "settings": settings, **spent, "rows": rows})
    if options.out is not None:
        options.out.write_text(line + "\n")
    print(line)


if __name__ == "__main__":
    main()
