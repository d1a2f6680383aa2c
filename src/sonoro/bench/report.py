"""The load generator's results file and table, and the comparison of two files. docs/benchmark.md defines the
fields."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sonoro.bench import results as report
from sonoro.bench.machine import processor, rounded
from sonoro.core.errors import ConfigError

HIGHER_IS_BETTER = ("request_throughput", "xrt", "continuity")
LOWER_IS_BETTER = (
    *("ttfb_p50_ms", "ttfb_p95_ms", "ttfp_mean_ms", "ttfp_p50_ms", "ttfp_p95_ms", "ttfp_p99_ms"),
    *("ttfa_p50_ms", "ttfa_p95_ms", "e2e_mean_ms", "e2e_p50_ms", "e2e_p99_ms", "rtf_mean", "rtf_p50", "rtf_p99"),
    *("underruns", "requests_underrun", "gaps_50ms", "gaps_100ms", "gaps_200ms", "failed"),
)
_LOADS = ("mode", "rps", "concurrency")
_HEADLINES = {
    **{"ttfp_mean_ms": "TTFP mean, ms", "ttfp_p95_ms": "TTFP p95, ms", "e2e_mean_ms": "E2E mean, ms"},
    **{"rtf_mean": "RTF mean", "xrt": "audio s/s"},
}


class Report(report.Report):
    """The report of a load on a server, with the client's machine; its table has a line per metric."""

    def __init__(self, top: Mapping[str, Any], **more: Any) -> None:
        super().__init__({**top, "client": processor()}, **more)

    def show_table(self, title: str) -> None:
        _show(title, [load_of(row) for row in self.rows], self.rows)


def read_results(path: Path) -> dict[str, Any]:
    """Read the results file at `path`. Raises `ConfigError` if it is not from `bench serve`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError("compare", str(path), f"it must be a readable file of JSON ({error})") from error
    if not isinstance(values, dict) or values.get("bench") != "serve" or not isinstance(values.get("rows"), list):
        raise ConfigError("compare", str(path), "it must be a results file of bench serve")
    return values


def load_of(row: Mapping[str, Any]) -> str:
    """The load of a row, such as `10 req/s` or `8 clients`; else its mode."""
    if "rps" in row:
        return f"{row['rps']:g} req/s"
    return f"{row['concurrency']} clients" if "concurrency" in row else str(row["mode"])


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Improvement of `after` over `before` by load, in percent of `before`; positive is better for every metric.
    None where either value is missing or that of `before` is 0. Lists settings that differ. Raises `ConfigError` if no
    load is in both."""
    later = {load_of(row): row for row in after["rows"]}
    pairs = [(row, later[load_of(row)]) for row in before["rows"] if load_of(row) in later]
    if not pairs:
        raise ConfigError("compare", [load_of(row) for row in after["rows"]], "the two files have no load in common")
    shown, rows = [], []
    for old, new in pairs:
        load = {name: old[name] for name in _LOADS if name in old}
        shown.append(load | {name: [old.get(name), new.get(name)] for name in _HEADLINES})
        gains = {name: _gain(old.get(name), new.get(name), 1) for name in HIGHER_IS_BETTER}
        gains |= {name: _gain(old.get(name), new.get(name), -1) for name in LOWER_IS_BETTER}
        rows.append(rounded(load | gains))
    first, second = before["settings"], after["settings"]
    settings = {name: [first.get(name), second.get(name)] for name in sorted({*first, *second})}
    return {
        "bench": "serve",
        "compares": [before["model"], after["model"]],
        "settings": {name: pair for name, pair in settings.items() if pair[0] != pair[1]},
        "before_after": shown,
        "improved_pct": rows,
    }


def show_comparison(comparison: Mapping[str, Any]) -> None:
    """Print a comparison as a table, then as one line of JSON."""
    for name, (first, second) in comparison["settings"].items():
        print(f"settings differ: {name}: {json.dumps(first)} and {json.dumps(second)}")
    rows = comparison["improved_pct"]
    _show_headlines(comparison["before_after"], rows)
    _show("improvement of the second over the first, percent", [load_of(row) for row in rows], rows)
    print(json.dumps(comparison), flush=True)


def _show_headlines(pairs: Sequence[Mapping[str, Any]], gains: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a line per load: before, after, and improvement."""
    table = Table(title="before > after, and what it improves", title_justify="left")
    for name in ("", *_HEADLINES.values()):
        table.add_column(name, justify="right" if name else "left")
    for pair, gain in zip(pairs, gains, strict=True):
        percents = {name: "-" if gain[name] is None else f"{gain[name]:+.1f}%" for name in _HEADLINES}
        cells = (f"{_shown(pair[name][0])} > {_shown(pair[name][1])} ({percents[name]})" for name in _HEADLINES)
        table.add_row(load_of(pair), *cells)
    Console(width=160, highlight=False).print(table)


def _gain(old: float | None, new: float | None, sign: int) -> float | None:
    return None if old is None or new is None or not old else 100.0 * sign * (new - old) / old


def _show(title: str, loads: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a line per metric and a column per load."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for load in loads:
        table.add_column(load, justify="right", overflow="fold")
    names = {name: None for row in rows for name in row if name not in _LOADS}
    for name in names:
        table.add_row(name, *(_shown(row.get(name)) for row in rows))
    Console(width=max(80, 24 + 16 * len(rows)), highlight=False).print(table)


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {count}" for name, count in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)
