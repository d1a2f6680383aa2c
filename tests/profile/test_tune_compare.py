"""`benchmarks/tune_compare.py`: what it writes, and that it goes on. Nothing here measures."""

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import tune_compare
from sonoro.compile.variants import card_named
from sonoro.ops.plans import CublasPlan, Plan, Product, TilePlan
from sonoro.profile import tune

CARD = card_named("NVIDIA H200")
LINES = {shape: (TilePlan(16, 16, 128, 4, 1, 4, 4, False),) * 3 for shape in ((2048, 1024), (512, 256), (512, 512))}


class Clock:
    """The library takes 2 us, every other plan 1."""

    def __init__(self) -> None:
        self.compiled: set[tuple[Product, Plan]] = set()

    def compile(self, product: Product, plans: Iterable[Plan]) -> None:
        self.compiled |= {(product, plan) for plan in plans}

    def seconds(self, product: Product, plan: Plan) -> float:
        assert (product, plan) in self.compiled
        return 2e-6 if isinstance(plan, CublasPlan) else 1e-6


def test_shapes_are_tuned_one_after_the_other_and_compared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tune, "card", lambda device: CARD)
    monkeypatch.setattr(tune_compare, "card", lambda device: CARD)
    monkeypatch.setattr(tune_compare, "measured", lambda on: LINES)
    # One is known that the package has no plans of, and is left out.
    monkeypatch.setattr(tune_compare, "known_shapes", lambda: dict.fromkeys([*LINES, (64, 64)], False))
    out, tuned = tmp_path / "out.json", tmp_path / "tuned.json"
    arguments = ["--out", str(out), "--tuned", str(tuned), "--seconds", "0", "--commit", "abc"]
    for count in (1, 2, 3, 3):
        tune_compare.main(tune_compare.parsed(arguments), torch.device("cuda"), Clock())
        found = json.loads(out.read_text(encoding="utf-8"))
        assert len(found["shapes"]) == count
        # Seven numbers of rows each; from 64 on the package's plan is the library's.
        assert [row["package_us"] for row in found["rows"]] == [1, 1, 1, 2, 2, 2, 2] * count
        assert all(row["tuned_us"] == 1 for row in found["rows"])
        assert set(found["shapes"].values()) == {round(7 / 11, 3)}
        assert (found["known_shapes"], found["commit"], found["device"]) == (3, "abc", "NVIDIA H200")
