"""`benchmarks/arms.py` over a tiny checkpoint: every arm at every level, and a picture of them."""

import json
import sys
from pathlib import Path

import tiny_fish
from processes import run_command

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "arms.py"


def test_every_arm_is_measured_at_every_level(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    tiny_fish.write_checkpoint(folder)
    options = ("--model", folder, "--device", "cpu", "--concurrency", "1", "2", "--frames", "9", "--rounds", "1")
    command = [sys.executable, SCRIPT, *options, "--prompts", "16", "--max-positions", "512", "--out", tmp_path]
    ended = run_command(command, ("triton", "sonoro.engine.engine", "sonoro.models.registry"))
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "arms-tiny.json").read_text())
    assert json.loads(ended.stdout.splitlines()[-1]) == results
    arms = ("eager", "graph, plain operations", "graph, fused kernels")
    levels, prompts = ([row for row in results["rows"] if key in row] for key in ("concurrency", "prompt"))
    assert [(row["arm"], row["concurrency"], row["requests"]) for row in levels] == [
        (arm, clients, clients) for arm in arms for clients in (1, 2)
    ]
    assert {row["frames"] for row in levels} == {9}
    texts = [f"{length}, {language}" for length in ("short", "medium", "long") for language in ("en", "zh")]
    assert [(row["arm"], row["prompt"]) for row in prompts] == [(arm, text) for arm in arms for text in texts]
    assert [row["frames"] for row in prompts] == [2, 2, 6, 6, 16, 16] * 3
    for row in results["rows"]:
        assert 0 < row["rtf_min"] <= row["rtf_mean"]
        assert 0 < row["first_audio_mean_ms"] < row["latency_mean_ms"] <= row["latency_max_ms"]
    assert (tmp_path / "arms-tiny.png").read_bytes().startswith(b"\x89PNG")
