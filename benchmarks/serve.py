"""Measure `sonoro serve` on this machine: start it, load it level by level, stop it. Results are written as they come.

    python benchmarks/serve.py --model qwen3-tts-1.7b-customvoice --load-format dummy --out results
    python benchmarks/serve.py ... --arm eager --concurrency 1,2,4,6,8,10 --rps ""
    python benchmarks/serve.py ... --devices 0,1 --concurrency 128,512 --rps 80
    python benchmarks/serve.py ... --rps 20 --concurrency "" -- --ref voice.wav --ref-text "What is said in it."

Writes serve-<model>.json and .png (closed loop, then open loop), overload-<model>.json if `--overload` gives the rate
that the server sustains, live-<model>.json with `--live`, and the server's log. Arguments after `--` go to `sonoro
bench serve`. A level takes `--duration` plus `--warm-up`; after `--limit` seconds the run is stopped, and finished
levels are kept. `--devices` starts an engine on each, which share all levels; files are then named
scale-<model>-<engines>, and with `--codec-device` scale-<model>-<engines>-codec.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sonoro.bench.plot import draw

SONORO = (sys.executable, "-m", "sonoro")
END_S = 40.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as sonoro serve takes it; the built-in voice if none")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--devices", help='as sonoro serve takes them, as "0,1"')
    parser.add_argument("--codec-device", help='as sonoro serve takes it, as "1"')
    parser.add_argument("--arm", choices=("graph", "eager"), default="graph")
    parser.add_argument("--engine", type=json.loads, default={}, help="JSON object over the engine's configuration")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--front-processes", type=int, default=0, help="as sonoro serve takes them")
    parser.add_argument("--concurrency", default="1,2,4,6,8,10,16,64,256", help="levels; empty for none")
    parser.add_argument("--rps", default="1,10,20,40,80", help="rates; empty for none")
    parser.add_argument("--frames", default="30-90")
    parser.add_argument("--duration", default="15", help="seconds of a level that count")
    parser.add_argument("--warm-up", default="3", help="seconds before them that do not")
    parser.add_argument("--overload", type=float, help="the rate that the server sustains")
    parser.add_argument("--factor", type=float, default=4.0, help="of that rate")
    parser.add_argument(
        "--overload-duration", default="60", help="seconds of it; what is before and after takes --duration"
    )
    parser.add_argument("--queue-wait-ms", type=int, default=500, help="how long the server lets a request wait")
    parser.add_argument("--live", action="store_true", help="measure live text too")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--limit", type=float, default=570.0, help="seconds for all of it")
    parser.add_argument("--commit", help="what is run, where there is no checkout to ask")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("more", nargs="*", help="after --: further options of sonoro bench serve")
    return parser.parse_args()


@contextlib.contextmanager
def serving(args: argparse.Namespace, url: str, ends_s: float) -> Iterator[None]:
    """A context with a server at `url` that is ready and has captured all graphs."""
    engine = {"slots": args.slots, "is_eager": args.arm == "eager", **args.engine}
    config = args.out / f"config-{args.arm}.yaml"
    # JSON is YAML.
    server = {"port": args.port, "max_queue_wait_ms": args.queue_wait_ms, "front_processes": args.front_processes}
    config.write_text(json.dumps({"engine": engine, "server": server}))
    log = args.out / f"server-{args.arm}.log"
    command = [*SONORO, "serve", *([args.model] if args.model else []), "--load-format", args.load_format]
    command += ["--devices", args.devices] if args.devices else []
    command += ["--codec-device", args.codec_device] if args.codec_device else []
    with log.open("w") as file, subprocess.Popen([*command, "--config", config], stdout=file, stderr=file) as process:
        try:
            began_s = time.monotonic()
            while not is_whole(url):
                if process.poll() is not None or time.monotonic() > ends_s:
                    raise SystemExit(f"the server is not ready, see {log}:\n{log.read_text()[-2000:]}")
                time.sleep(0.2)
            print(f"ready, with every graph, after {time.monotonic() - began_s:.1f} s", flush=True)
            yield
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def is_whole(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as answer:
            return not any(engine["graphs_to_come"] for engine in json.load(answer)["replicas"])
    except (urllib.error.URLError, OSError):
        return False


def label(args: argparse.Namespace, model: str) -> tuple[str, str]:
    """Prefix and name of the files of `model`."""
    arm = ("-codec" if args.codec_device else "") + ("-eager" if args.arm == "eager" else "")
    return ("scale", f"{model}-{len(args.devices.split(','))}{arm}") if args.devices else ("serve", f"{model}{arm}")


def facts(arm: str) -> dict[str, str]:
    """Facts that a client cannot see: GPU or CPU, dtype and arm."""
    try:
        names = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], check=True, capture_output=True, text=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        names = []
    known = {"gpu": names[0], "dtype": "bfloat16"} if names else {"dtype": "float32"}
    return {"arm": arm if names else "eager", "torch": version("torch"), **known}


def measure(kind: str, options: Sequence[object], out: Path, ends_s: float) -> bool:
    """Run `sonoro bench` until `ends_s` at most; returns whether it succeeded. Results are at `out` either way."""
    if time.monotonic() > ends_s:
        print(f"{out}: out of time", flush=True)
        return False
    with subprocess.Popen([*SONORO, "bench", kind, *map(str, options), "-o", out]) as bench:
        try:
            return bench.wait(ends_s - time.monotonic()) == 0
        except subprocess.TimeoutExpired:
            print(f"{out}: out of time, the levels before are kept", flush=True)
            # On SIGINT it also stops its worker processes.
            bench.send_signal(signal.SIGINT)
            return False


def merged(parts: Sequence[Path]) -> dict[str, Any]:
    """Merge results of the same server: the head of the first, loads and rows of all."""
    files = [json.loads(path.read_text()) for path in parts if path.exists()]
    settings = {name: value for file in files for name, value in file["settings"].items()}
    return {**files[0], "settings": settings, "rows": [row for file in files for row in file["rows"]]}


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    url, ends_s = f"http://127.0.0.1:{args.port}", time.monotonic() + args.limit
    common = ["--url", url, "--facts", json.dumps(facts(args.arm)), "--frames", args.frames]
    common += ["--commit", args.commit] if args.commit else []
    is_well = True
    with serving(args, url, ends_s):
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
            kind, name = label(args, json.load(answer)["data"][0]["id"])
        parts = []
        for load, levels in (("--concurrency", args.concurrency), ("--rps", args.rps)):
            if levels:
                parts.append(args.out / f"{kind}-{name}{load}.part.json")
                timing = [load, levels, "--duration", args.duration, "--warm-up", args.warm_up]
                is_well &= measure("serve", [*common, *timing, *args.more], parts[-1], ends_s)
        if any(part.exists() for part in parts):
            results = merged(parts)
            if args.devices:
                where = {"devices": args.devices.split(","), "codec_device": args.codec_device}
                results = {**results, **where, "rows": results["rows"]}
            (args.out / f"{kind}-{name}.json").write_text(json.dumps(results, indent=2) + "\n")
            for part in parts:
                part.unlink(missing_ok=True)
            if results["rows"]:
                draw({name: results}, args.out / f"{kind}-{name}.png")
        if args.overload:
            rates = f"1,{args.factor * args.overload:g},1"
            durations = f"{args.duration},{args.overload_duration},{args.duration}"
            timing = ["--rps", rates, "--overload", args.queue_wait_ms, "--duration", durations]
            out = args.out / f"overload-{name}.json"
            is_well &= measure("serve", [*common, *timing, *args.more], out, ends_s)
        if args.live:
            is_well &= measure("live", common, args.out / f"live-{name}.json", ends_s)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
