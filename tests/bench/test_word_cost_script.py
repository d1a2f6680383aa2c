"""`benchmarks/word_cost.py` over a tiny checkpoint: every arm of both parts."""

import json
import sys
from pathlib import Path

from processes import run_command
from tiny_checkpoint import write_checkpoint

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "word_cost.py"


def test_every_arm_is_measured_beside_the_one_that_watches_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_checkpoint(folder)
    options = ("--model", folder, "--device", "cpu", "--batch", "1", "3", "--context", "64", "--concurrency", "1", "2")
    more = ("--frames", "4", "--requests", "1", "--rounds", "2", "--out", tmp_path)
    command = [sys.executable, SCRIPT, *options, *more]
    ended = run_command(command, ("triton", "sonoro.engine.engine", "sonoro.models.registry"))
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "words-cost-tiny.json").read_text())
    assert json.loads(ended.stdout.splitlines()[-1]) == results
    assert results["settings"]["heads"] == ["layer 1 head 0", "layer 1 head 3"]
    rows = results["rows"]
    assert [row["batch"] for row in rows if row["part"] == "frame"] == [1, 3]
    assert [row["concurrency"] for row in rows if row["part"] == "first packet"] == [1, 2]
    for row in rows:
        arms = {"none", "chosen"} if row["part"] == "frame" else {"none", "again", "chosen", "asked"}
        assert {name.removesuffix("_ms") for name in row if name.endswith("_ms")} == arms
        assert all(row[f"{arm}_ms"] > 0 for arm in arms)
        for arm in arms - {"none"}:
            least, most = row[f"{arm}_cost_range"].values()
            assert least <= row[f"{arm}_cost_percent"] <= most
