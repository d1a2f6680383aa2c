"""`benchmarks/speed.py` over a tiny checkpoint: every arm of every part that needs no GPU, in turn."""

import json
import sys
from pathlib import Path

import tiny_vox
from processes import run_command

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "speed.py"


def test_every_arm_is_measured_in_turn(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny_vox.write_checkpoint(folder)
    sizes = "--concurrency 2 --frames 3 6 --repeats 1 --warm-up 0 --duration 0.2 --max-positions 512"
    command = [sys.executable, SCRIPT, "--model", folder, "--device", "cpu", *sizes.split(), "--out", tmp_path]
    ended = run_command(command, ("triton", "sonoro.engine.engine", "sonoro.models.registry"))
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "speed-tiny.json").read_text())
    assert json.loads(ended.stdout.splitlines()[-1]) == results
    rows = results["rows"]
    prefills = [(row["part"], row["prompts"], row["is_prefill_fused"]) for row in rows if "prefill" in row["part"]]
    assert prefills == [
        (part, count, is_fused)
        for count in (1, 8)
        for is_fused in (False, True)
        for part in ("prefill", "prefill text")
    ]
    arms = [row["arm"] for row in rows if row["part"] == "ready"]
    assert arms[0] == "before"
    assert [row["arm"] for row in rows if row["part"] == "engine"] == arms
    assert not any("error" in row for row in rows)
    for row in rows:
        if row["part"] == "engine":
            assert row["requests"] > 0
            assert row["xrt"] > 0
            assert row["launches_per_tick"].keys() == row["eager_per_tick"].keys() >= {"prefill", "frame", "codec"}
