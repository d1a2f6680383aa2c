"""Kernels compiled in forks: what a failure leaves, and that nobody compiles for one who has gone."""

import subprocess
import sys

import pytest

PREPARED = """
import time
from sonoro.runtime.ahead import Variant, compile_all

class Kernel:
    src, __name__ = "", "kernel"

    def __init__(self, act):
        self.preload = lambda data: act()

def fail(error):
    raise error

def sleep():
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("act", "codes"),
    [
        ("lambda: fail(RuntimeError('too many registers'))", "[0, 0]"),
        # One takes the only kernel there is.
        ("lambda: fail(OSError(28, 'No space left on device'))", "[0, 1]"),
    ],
)
def test_a_cache_that_cannot_be_written_fails_and_a_kernel_does_not(act: str, codes: str) -> None:
    """One that this GPU cannot have will not be had the next time either."""
    assert run(f"print(sorted(compile_all([Variant(Kernel({act}), '')], 2)))") == codes


def test_forks_end_once_nobody_wants_what_they_compile() -> None:
    assert run("print(compile_all([Variant(Kernel(sleep), '')] * 2, 2, lambda: False))") == "[-9, -9]"


def run(code: str) -> str:
    """What `code` prints, in a process without threads, which may be forked."""
    done = subprocess.run([sys.executable, "-c", PREPARED + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
