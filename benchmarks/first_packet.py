"""Compare the first packet of several versions of the package on one device: each in a process of its own, in turn.

    python benchmarks/first_packet.py --model qwen3-tts-1.7b-customvoice --load-format dummy \\
        --arm before=/old/src --arm now=src --arm again=src

Each arm names the folder that holds its `sonoro`. Two arms with one folder show the spread. A request is one plain
text of 8 frames through an engine process, timed from before it is read to its first audio. Writes
first-packet-<model>.json and ends with one line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sonoro.core.config import EngineConfig
from sonoro.core.types import ModelSpec, SpeechRequest
from sonoro.models.registry import describe
from sonoro.profile.report import Report, has_gpu
from sonoro.profile.requests import Launched

TEXT = "The next train to the coast leaves from platform four in twelve minutes; mind the gap."


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--model", help="as sonoro serve takes it; the built-in voice if none")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--requests", type=int, default=10, help="of each arm in a round")
    parser.add_argument("--commit", help="what is run, where there is no checkout to ask")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def script_of(request: SpeechRequest, spec: ModelSpec) -> SpeechRequest:
    """`request` with its script, where the version of this arm has scripts."""
    try:
        script = importlib.import_module("sonoro.text.script")
    except ModuleNotFoundError:
        return request
    scripted: SpeechRequest = script.scripted(request, spec)
    return scripted


async def serve(args: argparse.Namespace) -> None:
    """One arm: for each line of stdin, time so many requests and print their first packets in ms as JSON."""
    config = EngineConfig(slots=args.slots, max_positions=512, max_frames=256, is_ready_early=False)
    bench = Launched(model=args.model, load_format=args.load_format, device=args.device)
    number = 0
    async with bench.launch(config) as client:
        for line in iter(sys.stdin.readline, ""):
            taken_ms = []
            for _ in range(int(line)):
                number += 1
                began_s = time.perf_counter()
                request = SpeechRequest(id=str(number), text=TEXT, seed=number, max_frames=8, ignore_eos=True)
                first_s = 0.0
                async for _ in client.stream(script_of(client.spec.resolve(request), client.spec)):
                    first_s = first_s or time.perf_counter() - began_s
                taken_ms.append(1000 * first_s)
            print(json.dumps(taken_ms), flush=True)


class Arm:
    """The process of an arm, whose `sonoro` is in `folder`."""

    def __init__(self, folder: str) -> None:
        given = [*sys.argv[1:], "--serve"]
        path = os.pathsep.join([str(Path(folder).resolve()), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, __file__, *given],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.taken_ms: list[float] = []
        self._ask(2)

    def _ask(self, requests: int) -> None:
        assert self._process.stdin is not None
        print(requests, file=self._process.stdin, flush=True)

    def answer(self) -> list[float]:
        """The first packets asked for last, in ms."""
        assert self._process.stdout is not None
        answer: list[float] = json.loads(self._process.stdout.readline())
        return answer

    def measure(self, requests: int) -> None:
        """Add the first packets of so many requests."""
        self._ask(requests)
        self.taken_ms += self.answer()


def run(args: argparse.Namespace) -> None:
    folders = dict(arm.split("=", 1) for arm in args.arm)
    arms = {name: Arm(folder) for name, folder in folders.items()}
    for arm in arms.values():
        arm.answer()
    names = list(arms)
    for turn in range(args.rounds):
        # Each arm is as often first as last.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            arms[name].measure(args.requests)
    name = describe(args.model).spec.name
    settings: dict[str, Any] = {**vars(args), "out": None, "commit": None, "serve": None, "arm": None}
    top = {"bench": "first-packet", "model": name}
    out = args.out / f"first-packet-{name}.json"
    report = Report(top, is_gpu=has_gpu(args.device), settings=settings, commit=args.commit, out=out)
    for name, arm in arms.items():
        cuts = statistics.quantiles(arm.taken_ms, n=20)
        report.add({"arm": name, "mean_ms": statistics.mean(arm.taken_ms), "p50_ms": cuts[9], "p95_ms": cuts[18]})
    report.finish(f"first packet of {args.rounds * args.requests} requests an arm")


if __name__ == "__main__":
    options = arguments()
    if options.serve:
        asyncio.run(serve(options))
    else:
        run(options)
