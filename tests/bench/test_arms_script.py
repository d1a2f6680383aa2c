"""`benchmarks/arms.py` over a tiny checkpoint: every arm at every level, and a picture of them."""

import json
import subprocess
import sys
from pathlib import Path

import tiny_fish

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "arms.py"


def test_every_arm_is_measured_at_every_level(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny_fish.write_checkpoint(folder)
    options = ("--model", folder, "--device", "cpu", "--concurrency", "1", "2", "--frames", "9", "--rounds", "1")
    command = [sys.executable, SCRIPT, *options, "--max-positions", "256", "--out", tmp_path]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "arms-tiny.json").read_text())
    assert json.loads(ended.stdout.splitlines()[-1]) == results
    assert [(row["arm"], row["concurrency"], row["requests"]) for row in results["rows"]] == [
        (arm, clients, clients)
        for arm in ("eager", "graph, plain operations", "graph, fused kernels")
        for clients in (1, 2)
    ]
    for row in results["rows"]:
        assert 0 < row["first_audio_mean_ms"] < row["latency_mean_ms"] <= row["latency_max_ms"]
    assert (tmp_path / "arms-tiny.png").read_bytes().startswith(b"\x89PNG")
