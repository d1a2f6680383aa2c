"""Compare what `sonoro tune` finds from nothing with the package's plans, on this GPU.

    python benchmarks/tune_compare.py --tuned FILE --out benchmarks/results/tune-compare.json --seconds 330

Tunes the shapes that the package has measured plans for into FILE, then times each product by both plans, in turns.
What FILE and `--out` hold already is kept, so that it can be interrupted; after `--seconds` no further shape is tuned.
A row per product: its plans and times in microseconds. `shapes`: time of the tuned plans over that of the package's,
summed over numbers of rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from sonoro.bench.machine import commit_of_checkout
from sonoro.compile.variants import compilers
from sonoro.core.config import usable_cores
from sonoro.ops.device import card
from sonoro.ops.plans import LIMITS, CublasPlan, Plan, Product, from_text, known_shapes, measured, to_text
from sonoro.profile.tune import MOST_ROWS, Bench, Gpu, TuneSettings, parse_shape, run

TURNS = 3
Plans = dict[tuple[int, int], tuple[Plan, ...]]


class _Over(Exception):
    """The time is over."""


def tune(file: Path, shapes: dict[tuple[int, int], bool], seconds: float, device: torch.device, bench: Bench) -> float:
    """Tune `shapes` (by [N, K], is gated) into `file` until `seconds` have passed; returns the time it took in s."""
    began = time.monotonic()

    def say(line: str) -> None:
        print(line, flush=True)
        if time.monotonic() - began > seconds:
            raise _Over

    try:
        run(TuneSettings(shapes=tuple(shapes.items()), out=file), device, say, bench)
    except _Over:
        print("the time is over", flush=True)
    return time.monotonic() - began


def compare(products: list[tuple[Product, Plan, Plan]], bench: Bench, note: Callable[[dict[str, Any]], None]) -> None:
    """Time each product by its two plans, the package's first; `note` gets its row."""
    for product, *plans in products:
        bench.compile(product, plans)
    for product, *plans in products:
        turns = [[bench.seconds(product, plan) for plan in plans] for _ in range(TURNS)]
        row: dict[str, Any] = {"shape": list(product.shape), "rows": product.rows}
        for name, plan, times in zip(("package", "tuned"), plans, zip(*turns, strict=True), strict=True):
            row |= {name: to_text(plan), f"{name}_us": round(1e6 * median(times), 2)}
        note(row)


def summed(rows: list[dict[str, Any]]) -> dict[str, float]:
    """By shape, the time of the tuned plans over that of the package's."""
    shapes: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        shapes.setdefault("x".join(map(str, row["shape"])), []).append(row)
    return {
        name: round(sum(row["tuned_us"] for row in own) / sum(row["package_us"] for row in own), 3)
        for name, own in shapes.items()
    }


def missing(known: Plans, file: Path, gated: dict[tuple[int, int], bool], done: list[dict[str, Any]]) -> list[Any]:
    """The products of the shapes in `file` that are not `done`, each with the package's plan and the tuned one."""
    tuned = {
        parse_shape(name)[0]: plans for name, plans in json.loads(file.read_text(encoding="utf-8"))["plans"].items()
    }
    have = {(*row["shape"], row["rows"]) for row in done}
    products = []
    for shape, plans in tuned.items():
        for column, (rows, text) in enumerate(zip(LIMITS, plans, strict=False)):
            if (*shape, rows) not in have:
                line = known[shape]
                before = line[column] if column < len(line) else CublasPlan()
                products.append((Product(rows, shape, gated[shape]), before, from_text(text)))
    return products


def main(given: argparse.Namespace, device: torch.device, bench: Bench) -> None:
    """Tune, compare and write, a product at a time."""
    on = card(device)
    known = measured(on)
    shapes = {shape: is_gated for shape, is_gated in known_shapes().items() if shape in known}
    before = json.loads(given.out.read_text(encoding="utf-8")) if given.out.exists() else {"rows": [], "tune_s": 0}
    rows = before["rows"]
    tune_s = round(before["tune_s"] + tune(given.tuned, shapes, given.seconds, device, bench))

    def note(row: dict[str, Any]) -> None:
        rows.append(row)
        top = {
            "bench": "tune-compare",
            "device": on.name,
            "torch": torch.__version__,
            "commit": given.commit or commit_of_checkout(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "settings": {"cores": usable_cores(), "most_rows": MOST_ROWS, "turns": TURNS},
            "tune_s": tune_s,
            "known_shapes": len(shapes),
            "shapes": summed(rows),
        }
        lines = ",\n".join(json.dumps(one) for one in rows)
        head = json.dumps(top, indent=1).removesuffix("\n}")
        given.out.write_text(f'{head},\n "rows": [\n{lines}\n]}}\n', encoding="utf-8")

    compare(missing(known, given.tuned, shapes, rows), bench, note)
    print(json.dumps(summed(rows)))


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", type=Path, required=True, help="the file of plans that is written")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no further shape is tuned")
    parser.add_argument("--commit", help="what is run, where there is no checkout")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parsed()
    with compilers(usable_cores()) as pool:
        main(options, torch.device("cuda"), Gpu(torch.device("cuda"), pool))
