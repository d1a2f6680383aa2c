"""The kernels equal their references in Triton's interpreter: the tests that need it, in one process that interprets.

Of one file: `TRITON_INTERPRET=1 pytest -k interpreted FILE`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

TESTS = Path(__file__).parent


def test_the_kernels_equal_the_references_in_the_interpreter() -> None:
    """One test of each file that has any; none is left out."""
    pytest.importorskip("triton")
    files = [path for path in TESTS.rglob("test_*.py") if "@in_the_interpreter\n" in path.read_text(encoding="utf-8")]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-k", "interpreted", *map(str, files)]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert len(files) > 10
    assert f"\n{len(files)} passed" in run.stdout
