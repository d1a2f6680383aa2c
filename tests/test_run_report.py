"""What a run's report counts."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_report import RunReport


def ended(name: str, when: str, outcome: str, why: object = None) -> pytest.TestReport:
    return pytest.TestReport(name, ("file", 1, name), {}, outcome, why, when)


def test_every_test_is_counted_once_by_the_worst_of_its_phases(tmp_path: Path) -> None:
    report = RunReport(tmp_path / "run.json", commit="abc")
    for when, outcome in (("setup", "passed"), ("call", "passed"), ("teardown", "failed")):
        report.pytest_runtest_logreport(ended("left something behind", when, outcome))
    for when in ("setup", "call", "teardown"):
        report.pytest_runtest_logreport(ended("good", when, "passed"))
    report.pytest_runtest_logreport(ended("without a GPU", "setup", "skipped", ("file", 1, "no GPU")))
    report.pytest_runtest_logreport(ended("broken fixture", "setup", "failed"))
    report.pytest_sessionfinish(SimpleNamespace(config=SimpleNamespace(option=SimpleNamespace(markexpr="gpu"))))
    facts = json.loads((tmp_path / "run.json").read_text())
    assert {name: facts[name] for name in ("passed", "failed", "skipped", "commit", "marks")} == {
        "passed": 1, "failed": 2, "skipped": 1, "commit": "abc", "marks": "gpu",
    }  # fmt: skip
    assert facts["failures"] == ["broken fixture", "left something behind"]
    assert facts["skipped_why"] == {"no GPU": 1}
