"""Results files: whole on disk after every row, and on stdout at the end."""

import json
from pathlib import Path

import pytest

from sonoro.core.errors import OutputError
from sonoro.profile.report import Report


def report(out: Path | None, **settings: object) -> Report:
    return Report({"bench": "test", "model": "none"}, is_gpu=False, settings=settings, commit="abc", out=out)


def test_every_row_is_on_disk_as_soon_as_it_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "test.json"
    made = report(out, seed=1, left_out=None)
    assert json.loads(out.read_text())["rows"] == []
    for batch in (1, 2):
        made.add({"batch": batch, "eager_ms": 1.23456, "codec_ms": {"1": 0.0012345, "4": None}})
        stored = json.loads(out.read_text())
        assert stored == made.values
        assert stored["rows"][-1] == {"batch": batch, "eager_ms": 1.235, "codec_ms": {"1": 0.001234, "4": None}}
    assert stored["settings"] == {"seed": 1}
    assert (stored["commit"], stored["driver"], stored["bench"]) == ("abc", None, "test")
    assert stored["cpu"]


def test_stdout_begins_with_the_settings_and_ends_with_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    made = report(None, seed=1)
    made.add({"batch": 1, "xrt": 2.5})
    made.add({"batch": 2, "error": "it failed"})
    assert made.finish("a table") == made.values
    lines = capsys.readouterr().out.splitlines()
    order = [lines.index('settings: {"seed": 1}'), lines.index("batch=1 xrt=2.5")]
    order.append(next(at for at, line in enumerate(lines) if line.startswith("a table")))
    assert order == sorted(order)
    assert json.loads(lines[-1]) == made.values
    table = "\n".join(lines[lines.index('batch=2 error="it failed"') :])
    assert "xrt" in table
    assert "it failed" in table


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=r"none/test\.json: No such file"):
        report(tmp_path / "none" / "test.json")
