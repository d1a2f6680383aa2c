"""Options that all tests share, and how a run begins."""

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest
from durations import Keeper, Meter, begins_first, cores, forecast

collect_ignore = ["clients"]
"""Those of unmodified clients have an environment of their own: `make clients`."""

DEFAULT_MARKS = "not gpu and not weights and not slow"


def pytest_configure(config: pytest.Config) -> None:
    """One CPU thread for what tests start, too."""
    os.environ["OMP_NUM_THREADS"] = "1"
    if config.getoption("--keep-durations"):
        config.pluginmanager.register(Meter())
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Keeper())
    if hands_out(config):
        config.pluginmanager.import_plugin("aside")
    if not hands_out(config) or config.getoption("--report"):
        config.pluginmanager.import_plugin("with_torch")


def hands_out(config: pytest.Config) -> bool:
    """Whether this process only hands out tests to others."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--reference",
        type=Path,
        metavar="DIR",
        help="what the official implementation computed, as written by tools/reference (default: that in the tree)",
    )
    parser.addoption("--report", type=Path, metavar="FILE", help="write what the tests became (run_report.py)")
    parser.addoption("--commit", help="what is run, where there is no checkout to ask")
    parser.addoption("--keep-durations", action="store_true", help="write what the tests took (durations.py)")
    parser.addoption(
        "--rounding", type=int, default=0, metavar="STEPS", help="products round by their shape, so much (rounding.py)"
    )
    parser.addoption(
        "--kokoro", type=Path, metavar="DIR", help="the voice's teacher, as builtin_voice.kokoro.prepare leaves it"
    )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Of several processes each reads the files of a folder from another on: what one has compiled, the others find."""
    report = yield
    worker, workers = (int(os.environ.get(f"PYTEST_XDIST_WORKER{name}", "1").strip("gw")) for name in ("", "_COUNT"))
    if isinstance(collector, pytest.Directory) and report.result:
        first = worker * len(report.result) // workers
        report.result = report.result[first:] + report.result[:first]
    return report


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the same order in every process."""
    items.sort(key=lambda item: (begins_first(item.path), item.path))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected lasts to the end: it is not searched for garbage now, nor whenever a model is closed."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """And so does what a file's tests have left: imported, read, remembered."""
    try:
        return (yield)
    finally:
        if nextitem is None or nextitem.path != item.path:
            gc.collect()
            gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    is_all = config.args == config.getini("testpaths") and config.option.markexpr == DEFAULT_MARKS
    if is_all and terminal is not None and not hasattr(config, "workerinput"):
        terminal.write_line(forecast(getattr(config.option, "numprocesses", None) or 1, cores()))
