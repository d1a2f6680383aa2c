"""Tests that run Triton's interpreter: one of a file, all of them in a process of their own (test_interpreter.py).

Whether a kernel is compiled or interpreted is decided by the environment when its module is imported.
"""

import os

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether this process interprets kernels."""

in_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="run by test_interpreter.py, in a process of its own")
