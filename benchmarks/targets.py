"""Compile every kernel variant of the three families, in each weight format, for every kind of GPU; needs no GPU.

    python benchmarks/targets.py --out benchmarks/results/targets.json --seconds 240
    python benchmarks/targets.py --out sample.json --target sm_90 --model voxcpm2 --sample 3

Each target is represented by one card. A row per variant: shared memory of a block and its limit, registers and spilled
bytes of a thread, or the compile error. An operation whose kernel cannot be launched is a row without numbers. Variants
that are in `--out` already, by what they compute, are kept, and it is written often, so that runs can be interrupted;
after `--seconds` no compilation is started. `--sample` compiles only that many variants of each kernel and target, for
an engine with few batch sizes. Exits with 1 if a row has an error or exceeds its limit.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import functools
import hashlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Any

import msgspec
import torch
import triton
import triton.language as tl

from sonoro.bench.machine import commit_of_checkout
from sonoro.compile.kernels import list_variants
from sonoro.compile.variants import Card, Variant, card_named, compile_variant, compilers, source_of
from sonoro.core.config import QUANTIZATIONS, EngineConfig, usable_cores
from sonoro.models import registry
from sonoro.ops.dispatch import Operation
from sonoro.transport.messages import WorkerSettings

MODELS = {"qwen3-tts-1.7b-base": 256, "fish-s2-pro": 64, "voxcpm2": 64}
"""Models, and slots of a large server. Other released configurations use the same variants."""

TARGETS = {
    "sm_80": "NVIDIA A100-SXM4-80GB",
    "sm_86": "NVIDIA GeForce RTX 3060",
    "sm_89": "NVIDIA L4",
    "sm_90": "NVIDIA H200",
    "sm_100": "NVIDIA B200",
    "sm_120": "NVIDIA GeForce RTX 5090",
    "gfx942": "AMD Instinct MI300X",
    "gfx1100": "AMD Radeon RX 7900 XTX",
}
ROW = ("target", "kernel", "shared_bytes", "shared_limit", "registers", "spilled_bytes", "error", "variant")
WRITTEN_EVERY_S = 20.0
FEW_SIZES = {"codec_batches": (1,), "prefill_buckets": (16,)}


def listed(
    card: Card, models: Iterable[str], quantizations: Sequence[str] | None, **sizes: Any
) -> tuple[dict[Variant, None], dict[str, str]]:
    """The distinct variants that `models` launch on `card`, and the operations that cannot be launched there.

    `quantizations` None: those that each model is offered in."""
    variants: dict[Variant, None] = {}
    wanted = [(model, one) for model in models for one in quantizations or registry.offered(model, card)]
    for model, quantization in wanted:
        config = EngineConfig(slots=MODELS[model], quantization=quantization, **sizes)
        list_variants(WorkerSettings(model=model, device="cuda", config=config), card, variants.setdefault)
    failed = {operation.name: operation.failure for operation in Operation.known if operation.failure}
    return variants, failed


def digest(variant: Variant, card: Card) -> str:
    """A hash of what `variant` computes, its types, options and card; not of names, lines or comments."""
    source = source_of(variant)
    constants = [(path, _value(constant)) for path, constant in source.constants.items()]
    what = (definition(source.fn), variant.signature, constants, variant.attributes, variant.options)
    return hashlib.sha256(msgspec.json.encode((what, card, triton.__version__))).hexdigest()[:16]


@functools.cache
def definition(kernel: Any) -> str:
    """The source of `kernel` and of what it calls, with the globals it reads, without comments and docstrings.

    Neither its module nor its decorators count: what those change is in a variant.
    """
    (function,) = kernel.parse().body
    if ast.get_docstring(function) is not None:
        del function.body[0]
    function.name, function.decorator_list = "", []
    names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
    read = {node.id: kernel.__globals__.get(node.id) for node in names}
    # Functions of Triton's own change with its version.
    used = {name: value for name, value in read.items() if isinstance(value, (triton.JITFunction, tl.constexpr))}
    numbers = {name: f"global{number}" for number, name in enumerate(used)}
    for node in names:
        node.id = numbers.get(node.id, node.id)
    return "\n".join([ast.unparse(function), *map(_value, used.values())])


def _value(constant: Any) -> str:
    if not isinstance(constant, triton.JITFunction):
        return repr(constant)
    return repr(constant) if constant.module.startswith("triton.") else definition(constant)


def measure(
    target: str, given: argparse.Namespace, until_s: float, known: Mapping[str, dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield the rows of `target`: first those `known` by digest, then those compiled until `until_s`."""
    card = card_named(TARGETS[target])
    # Fork before listing, which starts threads.
    with tempfile.TemporaryDirectory() as cache, triton.knobs.cache.scope():
        triton.knobs.cache.dir = cache
        with compilers(given.processes) as pool:
            few = FEW_SIZES if given.sample else {}
            variants, failed = listed(card, given.model or MODELS, given.quantization, **few)
            for name, failure in failed.items():
                yield row(target, name, card, error=failure)
            futures, counts = {}, defaultdict(int)
            for variant in variants:
                counts[variant.kernel] += 1
                key = digest(variant, card)
                if key in known:
                    yield {**known[key], "kernel": variant.kernel}
                elif not given.sample or counts[variant.kernel] <= given.sample:
                    futures[pool.submit(compile_variant, variant, card, is_measured=True)] = variant, key
            for future in as_completed(futures):
                variant, key = futures[future]
                if future.cancelled():
                    continue
                done = future.result()
                taken = dict(zip(("shared_bytes", "registers", "spilled_bytes"), done[2:], strict=True))
                yield row(target, variant.kernel, card, **taken, error=done.error, variant=key)
                if time.monotonic() > until_s:
                    for waiting in futures:
                        waiting.cancel()


def row(target: str, kernel: str, card: Card, **given: Any) -> dict[str, Any]:
    """One row, with the facts of the target and card plus `given`."""
    usual = {"shared_bytes": 0, "registers": 0, "spilled_bytes": 0, "error": "", "variant": ""}
    values = {"target": target, "kernel": kernel, "shared_limit": card.shared_bytes, **usual, **given}
    return {name: values[name] for name in ROW}


def is_wrong(one: dict[str, Any]) -> bool:
    """Whether row `one` has an error or exceeds its limit."""
    return bool(one["error"]) or one["shared_bytes"] > one["shared_limit"]


def write(out: Path, rows: list[dict[str, Any]], missing: list[str], commit: str | None = None) -> None:
    """Write the results file, a row per line. `commit` names the code if there is no checkout."""
    top = {
        "bench": "targets",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": commit or commit_of_checkout(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "settings": {"slots": MODELS, "quantizations": QUANTIZATIONS},
        "unfinished": missing,
    }
    ordered = sorted(rows, key=lambda one: (list(TARGETS).index(one["target"]), one["kernel"], one["variant"]))
    lines = ",\n".join(json.dumps(one) for one in ordered)
    head = json.dumps(top, indent=1).removesuffix("\n}")
    out.write_text(f'{head},\n "rows": [\n{lines}\n]}}\n', encoding="utf-8")


def run(target: str, given: argparse.Namespace, until_s: float) -> None:
    """Update the rows of `target`. Run in a process of its own, since failures on one card would affect the next."""
    before = read(given.out)
    known = {one["variant"]: one for one in before["rows"] if one["target"] == target and one["variant"]}
    others = [one for one in before["rows"] if one["target"] != target]
    missing = [other for other in before["unfinished"] if other != target]
    rows: list[dict[str, Any]] = []
    written_s = time.monotonic()
    for one in measure(target, given, until_s, known):
        rows.append(one)
        # Known rows come first.
        if one["variant"] not in known and time.monotonic() > written_s + WRITTEN_EVERY_S:
            write(given.out, others + rows, [*missing, target], given.commit)
            written_s = time.monotonic()
    is_whole = not (given.sample or given.model or given.quantization or time.monotonic() > until_s)
    write(given.out, others + rows, missing if is_whole else [*missing, target], given.commit)
    print(f"{target}: {len(rows)} rows", flush=True)


def read(out: Path) -> dict[str, Any]:
    """The contents of the results file, if there is one."""
    return json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"rows": [], "unfinished": [*TARGETS]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target", action="append", choices=TARGETS, help="may be repeated; all if none")
    parser.add_argument("--model", action="append", choices=MODELS, help="may be repeated; all if none")
    every = "may be repeated; all that the target takes if none"
    parser.add_argument("--quantization", action="append", choices=QUANTIZATIONS, help=every)
    parser.add_argument("--sample", type=int, default=0, help="variants of a kernel at most; 0 for all")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which nothing more is begun")
    parser.add_argument("--processes", type=int, default=usable_cores())
    parser.add_argument("--commit", help="what is run, where there is no checkout")
    given = parser.parse_args()
    until_s = time.monotonic() + given.seconds
    for target in given.target or TARGETS:
        if time.monotonic() < until_s:
            process = multiprocessing.get_context("fork").Process(target=run, args=(target, given, until_s))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(process.exitcode)
    done = read(given.out)
    wrong = [one for one in done["rows"] if is_wrong(one)]
    for one in wrong:
        print(
            f"{one['target']} {one['kernel']}: {one['error'] or str(one['shared_bytes']) + ' bytes of shared memory'}"
        )
    unfinished = f"; unfinished: {', '.join(done['unfinished'])}" if done["unfinished"] else ""
    print(f"{len(done['rows'])} rows, {len(wrong)} of them wrong{unfinished}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
