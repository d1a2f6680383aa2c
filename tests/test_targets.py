"""`make targets`: a sample of what it compiles, for cards of NVIDIA's and AMD's with the least of everything."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import run_command

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "targets.py"
OF_STEPS = {"_begin", "_finish", "_advance_kernel", "_tile_kernel", "_gemv_kernel", "decode", "varlen", "_attend"}
OF_CODECS = {"_conv", "_snake_beta", "_depthwise", "_window_attention", "_last_conv"}
OF_SLOTS = {"_clear_rows_kernel", "_begin_chunk", "_end_chunk", "_advance_counts"}
"""Newer than `targets.json`."""


def compiled(out: Path, *which: str) -> list[dict[str, Any]]:
    """The rows in `out` after one variant of each kernel was compiled."""
    command = [sys.executable, SCRIPT, "--out", out, "--sample", "1", *which]
    done = run_command(command, ("small_kernels", "torch._dynamo", "sonoro.compile.kernels"))
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text(encoding="utf-8"))["rows"]


def test_every_kernel_compiles_and_fits_the_smallest_cards(tmp_path: Path) -> None:
    """And what was compiled is kept."""
    pytest.importorskip("triton")
    out, amd = tmp_path / "targets.json", ("--target", "gfx1100", "--model", "fish-s2-pro", "--quantization", "int8")
    compiled(out, "--target", "sm_86", "--quantization", "none")
    rows = compiled(out, *amd)
    assert {row["target"]: row["shared_limit"] for row in rows} == {"sm_86": 101_376, "gfx1100": 65_536}
    known = {row["kernel"].partition(":")[2] for row in rows if row["target"] == "sm_86"}
    assert known >= OF_STEPS | OF_CODECS | OF_SLOTS
    for row in rows:
        assert row["error"] == ""
        assert 0 <= row["shared_bytes"] <= row["shared_limit"]
        assert row["registers"] > 0
        assert row["spilled_bytes"] >= 0
    # What is there is not compiled again: what was written of it stays.
    changed = out.read_text(encoding="utf-8").replace('"registers": ', '"registers": 9')
    out.write_text(changed, encoding="utf-8")
    assert compiled(out, *amd) == json.loads(changed)["rows"]


KERNELS = """
import triton
import triton.language as tl

STEP = tl.constexpr(2)
OTHER = 5

@triton.jit
def helper(x):
    return x + STEP

@triton.jit
def kernel(x, BLOCK: tl.constexpr):
    n = tl.arange(0, BLOCK)
    tl.store(x + n, helper(tl.load(x + n)))
"""


@pytest.mark.parametrize(
    ("old", "new", "is_same"),
    [
        ("STEP = tl", "# a comment\nMORE = 1\n\nSTEP = tl", True),
        ("    n = tl", '    """What it does."""\n    # why\n    n = tl', True),
        ("helper(tl.load(x + n))", "helper(\n        tl.load(x + n)\n    )", True),
        ("OTHER = 5", "OTHER = 6", True),
        ("helper", "renamed", True),
        ("kernel(x", "renamed(x", True),
        ("tl.constexpr(2)", "tl.constexpr(3)", False),
        ("x + STEP", "x - STEP", False),
        ("arange(0", "arange(1", False),
    ],
)
def test_the_definition_of_a_kernel_is_what_it_does(tmp_path: Path, old: str, new: str, is_same: bool) -> None:
    pytest.importorskip("triton")
    definition = importlib.import_module("targets").definition
    definitions = []
    for name, text in (("before", KERNELS), ("after", KERNELS.replace(old, new))):
        path = tmp_path / f"{name}.py"
        path.write_text(text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        definitions.append(definition(getattr(module, "kernel", None) or module.renamed))
    assert (definitions[0] == definitions[1]) == is_same


def test_the_results_have_every_target_and_no_failure() -> None:
    results = json.loads((SCRIPT.parent / "results" / "targets.json").read_text(encoding="utf-8"))
    rows = results["rows"]
    assert len({row["target"] for row in rows}) == 8
    for target in {row["target"] for row in rows}:
        assert {row["kernel"].partition(":")[2] for row in rows if row["target"] == target} >= OF_STEPS | OF_CODECS
    assert [row for row in rows if row["error"] or row["shared_bytes"] > row["shared_limit"]] == []
