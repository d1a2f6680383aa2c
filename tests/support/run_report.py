"""What became of a run of tests, as a results file: `pytest --report FILE`."""

import collections
import datetime
import json
import time
from pathlib import Path

import pytest
import torch

from sonoro.bench.machine import commit_of_checkout, gpu_driver, processor


class RunReport:
    """Counts what every test became and writes it in the end: with several processes, where they are counted."""

    def __init__(self, file: Path, commit: str | None) -> None:
        self._file, self._commit, self._since = file, commit, time.monotonic()
        self._outcomes: dict[str, str] = {}
        self._skipped = collections.Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
        elif report.skipped:
            self._outcomes.setdefault(report.nodeid, "skipped")
            self._skipped[report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)] += 1
        elif report.when == "call":
            self._outcomes.setdefault(report.nodeid, "passed")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        counts = collections.Counter(self._outcomes.values())
        has_gpu = torch.cuda.is_available()
        facts = {
            "marks": session.config.option.markexpr,
            **({"gpu": torch.cuda.get_device_name(), "driver": gpu_driver()} if has_gpu else {"cpu": processor()}),
            "torch": torch.__version__,
            "commit": self._commit or commit_of_checkout(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "seconds": round(time.monotonic() - self._since, 1),
            **{name: counts[name] for name in ("passed", "failed", "skipped")},
            "failures": sorted(name for name, outcome in self._outcomes.items() if outcome == "failed"),
            "skipped_why": dict(sorted(self._skipped.items())),
        }
        self._file.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
