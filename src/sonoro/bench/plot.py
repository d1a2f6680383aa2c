"""Results of the load generator drawn: first packet, whole request, RTF and throughput over load."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from sonoro.core.errors import OutputError

__all__ = ["check", "draw"]

_PANELS = (
    ("first packet (TTFP), ms", ("ttfp_p50_ms", "ttfp_p95_ms")),
    ("whole request (E2E), ms", ("e2e_p50_ms", "e2e_p99_ms")),
    ("RTF", ("rtf_p50", "rtf_p99")),
    ("audio seconds a second (xRT)", ("xrt",)),
)
_LINES = ("-", "--")
_LOADS = {"open": "requests a second", "closed": "clients"}


def check(path: Path) -> None:
    """Raises `OutputError` if no picture can be written at `path`: to be asked before what it shows is measured."""
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise OutputError(f"cannot write {path}: its suffix must be one of {', '.join(sorted(formats))}")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}")


def draw(arms: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write a picture of results files by the name of their arm, in the format of the suffix of `path`.

    Raises `OutputError` if it cannot be written.
    """
    figure = Figure(figsize=(11, 8), layout="constrained")
    all_rows = [row for values in arms.values() for row in values["rows"]]
    modes = sorted({row["mode"] for row in all_rows})
    # A rate and a number of clients are two loads, whatever their values: each has lines of its own.
    series = [(arm, mode, values["rows"]) for arm, values in arms.items() for mode in modes]
    for axes, (title, names) in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
        for color, (arm, mode, rows) in enumerate(series):
            for line, name in zip(_LINES, names, strict=False):
                points = [(row.get("rps", row.get("concurrency")), row[name]) for row in rows if row["mode"] == mode]
                points = sorted(point for point in points if point[1] is not None)
                label = " ".join(filter(None, (arm, _LOADS[mode] if len(modes) > 1 else "", _percentile(name))))
                axes.plot(
                    [load for load, _ in points],
                    [value for _, value in points],
                    line,
                    color=f"C{color}",
                    marker="o",
                    label=label,
                )
        axes.set_title(title)
        axes.set_xlabel(", ".join(_LOADS[mode] for mode in modes))
        axes.set_xscale("log")
        ticks = sorted({row.get("rps", row.get("concurrency")) for row in all_rows})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {path}: {error}") from error


def _percentile(name: str) -> str:
    return next((part for part in name.split("_") if part.startswith("p") and part[1:].isdigit()), "")
