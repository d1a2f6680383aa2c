"""Plot results of the load generator: TTFP, end-to-end latency, RTF and throughput over load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

from sonoro.core.errors import OutputError

_PANELS = (
    ("first packet (TTFP), ms", ("ttfp_p50_ms", "ttfp_p95_ms")),
    ("whole request (E2E), ms", ("e2e_p50_ms", "e2e_p99_ms")),
    ("RTF", ("rtf_p50", "rtf_p99")),
    ("audio seconds a second (xRT)", ("xrt",)),
)
_LINES = ("-", "--")
_LOADS = {"open": "requests a second", "closed": "clients"}


def check(path: Path) -> None:
    """Raise `OutputError` if no plot can be written to `path`; call it before measuring."""
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise OutputError(f"cannot write {path}: its suffix must be one of {', '.join(sorted(formats))}")
    if not path.parent.is_dir():
        raise OutputError(f"cannot write {path}: there is no folder {path.parent}")


def draw(arms: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Plot results files by arm, and write the figure to `path` in the format of its suffix.
    Open and closed loop each have a row of panels. Raises `OutputError` if it cannot be written."""
    rows = [(arm, row) for arm, values in arms.items() for row in values["rows"]]
    modes = sorted({row["mode"] for _, row in rows})
    figure = Figure(figsize=(14, 3.2 * len(modes) + 0.6), layout="constrained")
    panels = figure.subplots(len(modes), len(_PANELS), squeeze=False)
    for mode, line in zip(modes, panels, strict=True):
        for axes, (title, names) in zip(line, _PANELS, strict=True):
            _draw_panel(axes, [(arm, row) for arm, row in rows if row["mode"] == mode], list(arms), names)
            axes.set_title(title)
            axes.set_xlabel(_LOADS[mode])
    entries = {
        text: handle for axes in panels.flat for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4)
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot write {path}: {error}") from error


def _draw_panel(axes: Axes, rows: list[tuple[str, Any]], arms: list[str], names: tuple[str, ...]) -> None:
    """Plot the fields `names` of `rows` (arm, row) over the load: a colour per arm, a line style per percentile."""
    for color, arm in enumerate(arms):
        for style, name in zip(_LINES, names, strict=False):
            points = sorted((_load(row), row[name]) for of, row in rows if of == arm and row[name] is not None)
            if points:
                label = f"{arm} {name.split('_')[1]}" if len(names) > 1 else None  # the percentile
                axes.plot(*zip(*points, strict=True), style, color=f"C{color}", marker="o", markersize=4, label=label)
    ticks = sorted({_load(row) for _, row in rows})
    axes.set_xscale("log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize="small")
    if len(names) > 1:
        # Arms may differ by a factor of ten.
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_ylim(bottom=0)
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def _load(row: Mapping[str, Any]) -> float:
    load: float = row["rps"] if row["mode"] == "open" else row["concurrency"]
    return load
