"""Measure the start of `sonoro serve`, with an empty and with a full kernel cache.

    python benchmarks/start.py --model qwen3-tts-1.7b-customvoice --load-format dummy --slots 256 --out results

Arms, in this order: `compile` fills a cache with `sonoro compile`; `empty` starts a server with an empty cache; `full`
starts one with the cache that `empty` left; `compiled` starts one with the cache of `compile`.
Seconds count from the command: to /ready, to the first byte of a request sent then, and until all graphs are captured;
`phases` are those of the engine process, from its start. `bytecode`: whether Python writes .pyc files
(PYTHONDONTWRITEBYTECODE is not set): imports take twice as long without. Writes start-<model>.json and the servers'
logs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sonoro.bench import results as report
from sonoro.bench.machine import processor
from sonoro.core.config import usable_cores

SONORO = (sys.executable, "-m", "sonoro")
ARMS = ("compile", "empty", "full", "compiled")
TEXT = "Hello there, how are you today?"
POLL_S = 0.01
END_S = 60.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="as sonoro serve takes it; the built-in voice if none")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--arms", default="empty,full", help=f"of {','.join(ARMS)}")
    parser.add_argument("--repeats", type=int, default=1, help="starts of each arm but compile")
    parser.add_argument("--port", type=int, default=8765)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one start")
    parser.add_argument("--commit", help="what is run, where there is no checkout to ask")
    parser.add_argument("--out", type=Path, default=Path("results"))
    args = parser.parse_args()
    if unknown := set(args.arms.split(",")) - set(ARMS):
        parser.error(f"--arms: {', '.join(sorted(unknown))}: unknown; known are {', '.join(ARMS)}")
    return args


def get(url: str) -> Any:
    """The JSON at `url`; None if there is no answer yet."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return json.load(answer)
    except (urllib.error.URLError, OSError):
        return None


def is_whole(answer: Any) -> bool:
    """Whether all engines in a server's `answer` have captured all graphs."""
    return answer is not None and not any(engine["graphs_to_come"] for engine in answer["replicas"])


class Report(report.Report):
    """A report with a row per start."""

    def show_table(self, title: str) -> None:
        print(f"{title}:")
        for row in self.rows:
            print(*(f"{name}={row[name]}" for name in row if name.endswith(("arm", "_s", "seconds"))))


def hear(url: str) -> float:
    """Request speech and read it to the end; returns the seconds to its first byte."""
    body = {"input": TEXT, "response_format": "pcm", "stream": True, "max_new_tokens": 30}
    headers = {"Content-Type": "application/json"}
    asked = urllib.request.Request(f"{url}/v1/audio/speech", json.dumps(body).encode(), headers)
    asked_s = time.monotonic()
    with urllib.request.urlopen(asked, timeout=END_S) as answer:
        first = answer.read(1)
        heard_s = time.monotonic() - asked_s
        answer.read()
    if not first:
        raise SystemExit("the server has answered without audio")
    return heard_s


@contextlib.contextmanager
def serving(args: argparse.Namespace, cache: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A context with a server that has just been started, with the kernel cache `cache`."""
    config = args.out / "config-start.yaml"
    # JSON is YAML.
    config.write_text(json.dumps({"engine": {"slots": args.slots}, "server": {"port": args.port}}))
    command = [*SONORO, "serve", *([args.model] if args.model else []), "--load-format", args.load_format]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    with (
        log.open("w") as file,
        subprocess.Popen([*command, "--config", config], stdout=file, stderr=file, env=environment) as server,
    ):
        try:
            yield server
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()


def start(args: argparse.Namespace, arm: str, cache: Path) -> dict[str, Any]:
    """The row of a start with the kernel cache `cache`."""
    url, log, began_s = f"http://127.0.0.1:{args.port}", args.out / f"server-{arm}.log", time.monotonic()

    def until(path: str, is_over: Any) -> tuple[Any, float]:
        while not is_over(answer := get(url + path)):
            if server.poll() is not None or time.monotonic() > began_s + args.limit:
                raise SystemExit(f"{arm}: no server that is ready, see {log}:\n{log.read_text()[-2000:]}")
            time.sleep(POLL_S)
        return answer, time.monotonic() - began_s

    with serving(args, cache, log) as server:
        ready, ready_s = until("/ready", lambda answer: answer is not None)
        first_s, second_s = hear(url), hear(url)
        _, whole_s = until("/ready", is_whole)
        configuration = get(f"{url}/v1/models")["configuration"]
    compiled = re.findall(r"event=kernel_compiled_at_launch kernel=(\S+) seconds=(\S+)", log.read_text())
    return {
        "arm": arm,
        "ready_s": ready_s,
        "first_audio_s": ready_s + first_s,
        "second_answer_ms": 1000 * second_s,
        "all_graphs_s": whole_s,
        "graphs_to_come": sum(engine["graphs_to_come"] for engine in ready["replicas"]),
        "engine_ready_s": configuration["ready"]["seconds"],
        "phases": configuration["ready"]["phases"],
        "compiled_at_launch": len(compiled),
        "compiled_at_launch_s": sum(float(seconds) for _, seconds in compiled),
    }


def compile_ahead(args: argparse.Namespace, cache: Path) -> dict[str, Any]:
    """The row of filling `cache` with `sonoro compile`."""
    began_s = time.monotonic()
    command = [*SONORO, "compile", *([args.model] if args.model else []), "--slots", str(args.slots)]
    subprocess.run(command, check=True, env={**os.environ, "TRITON_CACHE_DIR": str(cache)})
    return {"arm": "compile", "seconds": time.monotonic() - began_s}


def gpu() -> dict[str, str]:
    try:
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        names = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        names = []
    return dict(zip(("gpu", "driver"), names[0].split(", "), strict=True)) if names else {}


def triton_version() -> str | None:
    try:
        return version("triton")
    except PackageNotFoundError:
        return None


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    model = Path(args.model).name if args.model else "builtin"
    settings = {
        "slots": args.slots,
        "load_format": args.load_format,
        "cores": usable_cores(),
        "triton": triton_version(),
        "bytecode": not sys.dont_write_bytecode,
    }
    facts = {**gpu(), "cpu": processor(), "torch": version("torch")}
    results = Report(
        {"bench": "start", "model": model, **facts},
        settings=settings,
        commit=args.commit,
        out=args.out / f"start-{model}.json",
    )
    with tempfile.TemporaryDirectory(prefix="sonoro-kernels-") as folder:
        caches = {arm: Path(folder) / ("served" if arm in ("empty", "full") else "compiled") for arm in ARMS}
        for arm in (arm for arm in ARMS if arm in args.arms.split(",")):
            for _ in range(1 if arm == "compile" else args.repeats):
                results.add(compile_ahead(args, caches[arm]) if arm == "compile" else start(args, arm, caches[arm]))
    results.finish(f"{model}, seconds after the command")


if __name__ == "__main__":
    main()
