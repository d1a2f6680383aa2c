"""`benchmarks/markup.py`: every part, and a last line of JSON."""

import json
import sys
from pathlib import Path

from processes import run_command

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "markup.py"


def test_every_text_is_timed_and_memory_is_told(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--rounds", "1", "--requests", "20", "--out", tmp_path / "made.json"]
    ended = run_command(command, ("torch",))
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "made.json").read_text())
    assert json.loads(ended.stdout.splitlines()[-1]) == results
    assert {row["part"].split()[0] for row in results["rows"]} == {"plain", "marked", "lexicon"}
    assert all(row["cpu_ms"] > 0 for row in results["rows"])
    assert results["memory"].keys() == {"mib_after_2", "mib_after_20"}
