"""Hooks and fixtures that need PyTorch, whose import a process that only hands out tests does not wait for."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from reference_assets import ROOT, Case, load
from rounding import round_by_shape
from run_report import RunReport


def pytest_configure(config: pytest.Config) -> None:
    """One CPU thread for every test: at these sizes waking a second takes longer than the work."""
    torch.set_num_threads(1)
    if most := config.getoption("--rounding"):
        round_by_shape(most)
    if (file := config.getoption("--report")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunReport(file, config.getoption("--commit")))


@pytest.fixture(scope="session")
def reference_root(pytestconfig: pytest.Config) -> Path:
    """The folder of stored official results that this run compares with."""
    root: Path = pytestconfig.getoption("--reference") or ROOT
    return root.resolve()


@pytest.fixture(scope="session")
def reference(reference_root: Path) -> Callable[[str], dict[str, Case]]:
    """`reference(group)` gives the cases of a group by name; reference_assets.py lists groups and tensors."""
    return lambda group: load(group, reference_root)
