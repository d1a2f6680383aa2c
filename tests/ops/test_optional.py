"""Triton is imported where kernels can run, or where it has been imported before; each in a process of its own."""

import subprocess
import sys

import pytest

from sonoro.ops.optional import may_have_gpu


def imports(code: str) -> list[str]:
    """What is printed by a new process that runs `code`."""
    return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.split()


@pytest.mark.skipif(may_have_gpu(), reason="kernels can run here")
def test_without_a_gpu_a_model_is_spoken_without_triton() -> None:
    found = imports(
        "import sys; from sonoro.models import registry; print('torch' in sys.modules, 'triton' in sys.modules)"
    )
    assert found == ["True", "False"]


def test_a_process_that_has_triton_has_kernels() -> None:
    pytest.importorskip("triton")
    assert imports("import triton; from sonoro.ops import norm; print(norm.triton is triton)") == ["True"]
