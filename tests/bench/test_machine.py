"""The cores that may be used, and what results files say of the machine."""

import os
import subprocess
import sys

import pytest

from sonoro.bench.machine import commit_of_checkout, processor, rounded
from sonoro.core.config import usable_cores


def test_the_commit_is_that_of_the_checkout() -> None:
    commit = commit_of_checkout()
    assert commit is None or len(commit.removesuffix("-dirty")) >= 7


def test_the_processor_has_a_name() -> None:
    assert processor()


def test_fractions_are_kept_to_four_digits_and_counts_whole() -> None:
    value = {"ms": 1.23456, "count": 123456, "parts": {"a": 0.00012345, "none": None}}
    assert rounded(value) == {"ms": 1.235, "count": 123456, "parts": {"a": 0.0001234, "none": None}}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a system without cpusets")
def test_cores_are_those_that_this_process_may_run_on() -> None:
    given = os.sched_getaffinity(0)
    assert usable_cores() == len(given)
    code = f"import os, sonoro.core.config as m; os.sched_setaffinity(0, {{{min(given)}}}); print(m.usable_cores())"
    one = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert one.stdout == b"1\n"
