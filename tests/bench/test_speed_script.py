"""`benchmarks/speed.py` over a tiny checkpoint: every arm of every part that needs no GPU, in turn."""

import json
import subprocess
import sys
from pathlib import Path

import tiny_vox

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "speed.py"


def test_every_arm_is_measured_in_turn(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny_vox.write_checkpoint(folder)
    options = ("--model", folder, "--device", "cpu", "--concurrency", "2", "--frames", "5", "--rounds", "1")
    command = [sys.executable, SCRIPT, *options, "--repeats", "1", "--max-positions", "512", "--out", tmp_path]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
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
    assert [row["arm"] for row in rows if row["part"] == "engine"] == ["before", "prefill", "pages", "both"]
    assert [row.get("error") for row in rows if "error" in row] == ["no GPU"]
    assert all(row["requests"] == 2 for row in rows if row["part"] == "engine")
