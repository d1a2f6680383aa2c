"""Tests that run Triton's interpreter, each in a process of its own.

Whether a kernel is compiled or interpreted is decided by the environment when its module is imported.
"""

import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process interprets kernels."""

in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by the file's other test, in a process of its own")


def interpret(file: str) -> None:
    """Run the one test of `file` whose name holds "interpreted" in a process that interprets kernels."""
    pytest.importorskip("triton")
    code = "import pytest, sys; sys.exit(pytest.main(['-q', '-m', '', '-k', 'interpreted', sys.argv[1]]))"
    command, environment = [sys.executable, "-c", code, file], os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "1 passed" in run.stdout
