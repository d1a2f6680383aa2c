"""Options and fixtures that all tests share, and how a run begins."""

import contextlib
import functools
import gc
import inspect
import json
import os
import runpy
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from datetime import date
from pathlib import Path
from typing import Any

import pytest

collect_ignore = ["clients"]
"""Tests of unmodified clients have an environment of their own: `make clients`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reference",
        type=Path,
        metavar="DIR",
        help="what the official implementation computed, as written by tools/reference (default: that in the tree)",
    )
    parser.addoption("--report", type=Path, metavar="FILE", help="write counts and failures as JSON")
    parser.addoption("--commit", help="the commit under test, where there is no checkout to ask")
    parser.addoption(
        "--rounding", type=int, default=0, metavar="STEPS", help="products round by their shape, by up to so many steps"
    )
    parser.addoption(
        "--front-processes", type=int, metavar="N", help="servers of sines have so many; what looks into one is skipped"
    )
    parser.addoption(
        "--kokoro", type=Path, metavar="DIR", help="the voice's teacher, as builtin_voice.kokoro.prepare leaves it"
    )


def pytest_configure(config: pytest.Config) -> None:
    """One CPU thread for every test and what it starts: at these sizes waking a second takes longer than the work."""
    os.environ["OMP_NUM_THREADS"] = "1"
    # `sonoro say` must find no server but that of its own test.
    os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="sonoro-run-")
    config.add_cleanup(functools.partial(shutil.rmtree, os.environ["XDG_RUNTIME_DIR"], ignore_errors=True))
    if not hasattr(config, "workerinput"):
        _compile_native()
    hands_out = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if not hands_out:
        import torch  # noqa: PLC0415, a process that only hands out tests does not wait for it

        with contextlib.suppress(ImportError):
            # Kernels are interpreted, and compiled for GPUs that are not here.
            import triton  # noqa: F401, PLC0415

        torch.set_num_threads(1)
        if steps := config.getoption("--rounding"):
            from parity import round_by_shape  # noqa: PLC0415, it imports torch

            round_by_shape(steps)
        if fronts := config.getoption("--front-processes"):
            from servers import FRONTS  # noqa: PLC0415, it imports torch

            FRONTS.append(fronts)


def _compile_native() -> None:
    """Compile the C code if it has changed since the package was installed, and there is a compiler: the tests are to
    run what is in the tree."""
    build = runpy.run_path(str(Path(__file__).parents[1] / "src" / "sonoro" / "native" / "build.py"))
    if build["compiler"]() is not None and not all(map(build["is_current"], build["levels"]())):
        build["build"]()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether to leave a file out. With `-m gpu` only files with such tests are imported: the others need packages
    that a GPU machine may lack."""
    is_left_out = (
        config.option.markexpr == "gpu"
        and collection_path.suffix == ".py"
        and "mark.gpu" not in collection_path.read_text(encoding="utf-8")
    )
    return is_left_out or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files in the same order in every process, those that are marked `long` first: the others fill what they leave."""
    if config.getoption("--front-processes"):
        reason = pytest.mark.skip(reason="it changes the process that serves, or reads its log")
        for item in items:
            given = inspect.signature(getattr(item, "function", print)).parameters
            if given.keys() & {"monkeypatch", "caplog", "said", "exporter"}:
                item.add_marker(reason)
    items.sort(key=lambda item: (item.get_closest_marker("long") is None, item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected lasts to the end: the garbage collector does not search it now, nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """What the tests of a file have imported, read and cached lasts too."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Write the results file of `--report`."""
    if file := config.getoption("--report"):
        import torch  # noqa: PLC0415

        from sonoro.bench.machine import commit_of_checkout, gpu_driver, processor  # noqa: PLC0415

        stats = {name: terminalreporter.stats.get(name, []) for name in ("passed", "failed", "error", "skipped")}
        has_gpu = torch.cuda.is_available()
        facts = {
            "marks": config.option.markexpr,
            **({"gpu": torch.cuda.get_device_name(), "driver": gpu_driver()} if has_gpu else {"cpu": processor()}),
            "torch": torch.__version__,
            "commit": config.getoption("--commit") or commit_of_checkout(),
            "date": date.today().isoformat(),
            "seconds": round(time.time() - config.stash[BEGAN_S], 1),
            "passed": len(stats["passed"]),
            "failed": len(failed := {report.nodeid for report in stats["failed"] + stats["error"]}),
            "skipped": len(stats["skipped"]),
            "failures": sorted(failed),
            "skipped_why": Counter(str(report.longrepr[2]) for report in stats["skipped"]),
        }
        file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


BEGAN_S = pytest.StashKey[float]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[BEGAN_S] = time.time()


@pytest.fixture(scope="session")
def reference_root(pytestconfig: pytest.Config) -> Path:
    """The folder of stored official results that this run compares with."""
    from parity import ROOT  # noqa: PLC0415, it imports torch

    root: Path = pytestconfig.getoption("--reference") or ROOT
    return root.resolve()


@pytest.fixture(scope="session")
def reference(reference_root: Path) -> Callable[[str], dict[str, Any]]:
    """`reference(group)` gives the cases of a group by name; parity.py lists groups and tensors."""
    from parity import load  # noqa: PLC0415

    return lambda group: load(group, reference_root)
