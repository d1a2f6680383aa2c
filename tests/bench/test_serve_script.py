"""`benchmarks/serve.py` over the built-in voice: it serves, loads, and keeps what there is when its time is over."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve.py"


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def run(folder: Path, port: int, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, "--out", folder, "--port", str(port), "--slots", "4", "--frames", "4", *options]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_server_is_measured_in_both_loops_and_what_is_not_over_in_time_is_left(
    tmp_path: Path, unused_port: int
) -> None:
    short = ("--concurrency", "1,2", "--rps", "2", "--duration", "1", "--warm-up", "0.5")
    ended = run(tmp_path, unused_port, *short, "--arm", "eager", "--", "--processes", "2")
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "serve-builtin-eager.json").read_text())
    assert [(row["mode"], row.get("concurrency", row.get("rps"))) for row in results["rows"]] == [
        *(("closed", 1), ("closed", 2), ("open", 2))
    ]
    assert all(row["failed"] == 0 and row["processes"] == 2 for row in results["rows"])
    assert (results["settings"]["concurrency"], results["settings"]["rps"]) == ([1, 2], [2])
    assert not list(tmp_path.glob("*.part.json"))
    assert (tmp_path / "serve-builtin-eager.png").read_bytes().startswith(b"\x89PNG")

    ended = run(tmp_path, unused_port, "--concurrency", "1", "--rps", "1", "--duration", "60", "--limit", "20")
    assert ended.returncode == 1
    assert "out of time, the levels before are kept" in ended.stdout
    assert json.loads((tmp_path / "serve-builtin.json").read_text())["rows"] == []


@pytest.mark.slow
def test_several_engines_are_measured_as_one_and_the_file_says_how_many(tmp_path: Path, unused_port: int) -> None:
    short = ("--concurrency", "2", "--rps", "", "--duration", "1", "--warm-up", "0.5")
    ended = run(tmp_path, unused_port, *short, "--devices", "cpu,cpu")
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "scale-builtin-2.json").read_text())
    assert results["devices"] == ["cpu", "cpu"]
    assert [(row["concurrency"], row["failed"]) for row in results["rows"]] == [(2, 0)]


def test_a_server_that_does_not_come_up_is_told_with_its_log(tmp_path: Path, unused_port: int) -> None:
    ended = run(tmp_path, unused_port, "--model", "none/of/these")
    assert ended.returncode == 1
    assert "the server is not ready" in ended.stderr
    assert "none/of/these" in ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config-graph.yaml", "server-graph.log"]
