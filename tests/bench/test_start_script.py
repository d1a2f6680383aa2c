"""`benchmarks/start.py` over the built-in voice: it starts a server, hears it and says what the start took."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "start.py"


@pytest.fixture
def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def test_each_phase_of_a_start_is_told(tmp_path: Path, unused_port: int) -> None:
    options = ("--slots", "2", "--arms", "full", "--port", str(unused_port), "--out", tmp_path)
    ended = subprocess.run([sys.executable, SCRIPT, *options], check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    results = json.loads((tmp_path / "start-builtin.json").read_text())
    assert json.loads(ended.stdout.splitlines()[-1]) == results
    (row,) = results["rows"]
    assert 0 < row["engine_ready_s"] < row["ready_s"] < row["first_audio_s"]
    assert list(row["phases"]) == ["imports", "memory", "weights", "state", "checks", "graphs", "voices"]
    assert row["phases"]["imports"] > 0
    assert sum(row["phases"].values()) <= row["engine_ready_s"]


def test_an_arm_that_is_not_known_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, "--arms", "empty,half", "--out", tmp_path]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "half: unknown" in ended.stderr
