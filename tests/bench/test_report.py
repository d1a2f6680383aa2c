"""Results files of servers: shown, compared and drawn."""

import json
from pathlib import Path

import pytest

from sonoro.bench.plot import check, draw
from sonoro.bench.report import Report, compare, read_results, show_comparison
from sonoro.core.errors import ConfigError, OutputError


def results(*rows: dict[str, object], **settings: object) -> dict[str, object]:
    return {"bench": "serve", "model": "m", "settings": {"url": "http://h", **settings}, "rows": list(rows)}


def row(clients: int, **figures: object) -> dict[str, object]:
    shown = {"ttfp_p50_ms": 10.0, "ttfp_p95_ms": 20.0, "e2e_p50_ms": 100.0, "e2e_p99_ms": None}
    return {"mode": "closed", "concurrency": clients, **shown, "rtf_p50": 0.1, "rtf_p99": 0.2, "xrt": 5.0, **figures}


def test_an_improvement_is_above_zero_whatever_is_measured() -> None:
    before = results(row(1), row(8, underruns=4, xrt=10.0, continuity=0.5), seed=1)
    after = results(row(8, ttfp_p95_ms=15.0, xrt=12.0, e2e_p50_ms=150.0, underruns=0, continuity=0.6), row(9), seed=2)
    comparison = compare(before, after)
    assert comparison["settings"] == {"seed": [1, 2]}
    (made,) = comparison["improved_pct"]
    expected = {"ttfp_p95_ms": 25, "ttfp_p50_ms": 0, "xrt": 20, "e2e_p50_ms": -50, "underruns": 100, "continuity": 20}
    assert {name: made[name] for name in expected} == pytest.approx(expected)
    assert (made["mode"], made["concurrency"], made["e2e_p99_ms"]) == ("closed", 8, None)


def test_from_nothing_there_is_no_percentage() -> None:
    (made,) = compare(results(row(1, underruns=0)), results(row(1, underruns=3)))["improved_pct"]
    assert made["underruns"] is None


def test_a_comparison_shows_what_was_and_is_by_load(capsys: pytest.CaptureFixture[str]) -> None:
    loads = (1, 2, 4, 6, 8, 10)
    before = results(*(row(load, ttfp_mean_ms=562.8, e2e_mean_ms=4000.0, rtf_mean=0.465, xrt=18.99) for load in loads))
    after = results(*(row(load, ttfp_mean_ms=499.5, e2e_mean_ms=3000.0, rtf_mean=0.407, xrt=21.61) for load in loads))
    comparison = compare(before, after)
    assert [pair["concurrency"] for pair in comparison["before_after"]] == list(loads)
    assert comparison["before_after"][5]["ttfp_mean_ms"] == [562.8, 499.5]
    show_comparison(comparison)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│ 10 clients")]
    for cell in ("562.8 > 499.5 (+11.2%)", "4000 > 3000 (+25.0%)", "0.465 > 0.407 (+12.5%)", "18.99 > 21.61 (+13.8%)"):
        assert cell in line


def test_files_without_a_common_load_are_not_compared() -> None:
    with pytest.raises(ConfigError, match="no load in common"):
        compare(results(row(1)), results({**row(1), "mode": "open", "rps": 1.0}))


def test_a_comparison_ends_in_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = compare(results(row(2), seed=1), results(row(2, xrt=7.5), seed=2))
    show_comparison(comparison)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "settings differ: seed: 1 and 2"
    assert any("xrt" in line and "50" in line and "2 clients" not in line for line in lines)
    assert any("2 clients" in line for line in lines)
    assert json.loads(lines[-1]) == comparison


def test_a_report_is_on_disk_after_each_row_and_ends_in_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r.json"
    report = Report({"bench": "serve", "model": "m"}, settings={"url": "http://h", "seed": None}, commit="abc", out=out)
    assert read_results(out)["rows"] == []
    report.add(row(4, xrt=1.23456, errors={"status 429": 2}))
    assert read_results(out) == report.values
    assert report.values["rows"][0]["xrt"] == 1.235
    assert report.values["settings"] == {"url": "http://h"}
    assert report.finish("m at http://h") == report.values
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1]) == report.values
    table = "\n".join(lines)
    for words in ("4 clients", "ttfp_p95_ms", "status 429: 2"):
        assert words in table


@pytest.mark.parametrize("content", ["{", "[]", '{"bench": "engine", "rows": []}', '{"bench": "serve"}'])
def test_other_files_are_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    # A refusal shows no more than the beginning of a long path.
    monkeypatch.chdir(tmp_path)
    path = Path("r.json")
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"compare: .*r\.json"):
        read_results(path)
    with pytest.raises(ConfigError, match="readable"):
        read_results(Path("none.json"))


def test_one_arm_or_two_are_drawn_with_what_there_is(tmp_path: Path) -> None:
    arms = {"before": results(row(1), row(8)), "after": results(row(8), row(1, ttfp_p50_ms=None))}
    for suffix, begin in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        path = tmp_path / f"r{suffix}"
        draw(arms, path)
        assert path.read_bytes().startswith(begin)
    svg = (tmp_path / "r.svg").read_text()
    for words in ("before p50", "after p95", "RTF", "clients"):
        assert f"<!-- {words}" in svg
    open_loop = [{**row(1), "mode": "open", "rps": rate} for rate in (0.5, 10.0)]
    draw({"only": results(*open_loop)}, tmp_path / "o.svg")
    assert "<!-- requests a second -->" in (tmp_path / "o.svg").read_text()


def test_a_rate_and_clients_in_one_file_are_drawn_apart(tmp_path: Path) -> None:
    both = results(row(1), row(8), {**row(1), "mode": "open", "rps": 1.0}, {**row(1), "mode": "open", "rps": 20.0})
    draw({"m": both}, tmp_path / "r.svg")
    drawn = (tmp_path / "r.svg").read_text()
    for words, times in (("clients", 4), ("requests a second", 4), ("first packet (TTFP), ms", 2), ("m p50", 1)):
        assert drawn.count(f"<!-- {words} -->") == times


def test_where_no_picture_can_be_written_is_told_beforehand(tmp_path: Path) -> None:
    check(tmp_path / "r.png")
    with pytest.raises(OutputError, match=r"suffix must be one of .*png"):
        check(tmp_path / "r.picture")
    with pytest.raises(OutputError, match="no folder"):
        check(tmp_path / "none" / "r.png")
    with pytest.raises(OutputError, match="cannot write"):
        draw({"a": results(row(1))}, tmp_path / "none" / "r.png")
