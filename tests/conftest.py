"""Options and fixtures that all tests share."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from reference_assets import ROOT, Case, load
from rounding import round_by_shape


def pytest_configure(config: pytest.Config) -> None:
    """One CPU thread for every test and what it starts: at these sizes waking a second takes longer than the work."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    if most := config.getoption("--rounding"):
        round_by_shape(most)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reference",
        type=Path,
        default=ROOT,
        metavar="DIR",
        help="what the official implementation computed, as written by tools/reference (default: %(default)s)",
    )
    parser.addoption(
        "--rounding", type=int, default=0, metavar="STEPS", help="products round by their shape, so much (rounding.py)"
    )
    parser.addoption(
        "--kokoro", type=Path, metavar="DIR", help="the voice's teacher, as builtin_voice.kokoro.prepare leaves it"
    )


LONGEST = ("test_ray.py", "test_cli_fleet.py", "test_interpreter.py", "test_compile.py")
"""The files whose tests are best begun first: one of them begun last would leave the other process without work."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


@pytest.fixture(scope="session")
def reference_root(pytestconfig: pytest.Config) -> Path:
    """The folder of stored official results that this run compares with."""
    root: Path = pytestconfig.getoption("--reference")
    return root.resolve()


@pytest.fixture(scope="session")
def reference(reference_root: Path) -> Callable[[str], dict[str, Case]]:
    """`reference(group)` gives the cases of a group by name; reference_assets.py lists groups and tensors."""
    return lambda group: load(group, reference_root)
