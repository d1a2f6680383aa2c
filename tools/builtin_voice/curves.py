"""The logs of all trainings as one picture."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

__all__ = ["draw"]

_PANELS = {
    "encoder.jsonl": ("encoder", ("sketch", "phones", "first_phones", "commitment", "books_used")),
    "codec.jsonl": ("codec", ("spectral", "passing", "matching", "critic")),
    "talker.jsonl": ("talker", ("first", "rest", "held_out_first", "held_out_rest")),
}


def read(path: Path) -> list[dict[str, float]]:
    """The records of a log in the order of their steps; of a step that was logged twice, the last."""
    records = [json.loads(line) for line in path.read_text("ascii").splitlines()]
    return sorted({record["step"]: record for record in records}.values(), key=lambda record: record["step"])


def draw(work: Path, output: Path) -> None:
    """Figures over steps, one panel a log of `work`, to the PNG `output`."""
    figure, panels = pyplot.subplots(1, len(_PANELS), figsize=(11, 4), layout="constrained")
    for panel, (log, (title, names)) in zip(panels, _PANELS.items(), strict=True):
        records = read(work / log)
        for name in names:
            points = [(record["step"], record[name]) for record in records if name in record]
            if points:
                panel.plot(*zip(*points, strict=True), label=name)
        panel.set(title=title, xlabel="step", yscale="log")
        panel.legend(fontsize="small")
    figure.savefig(output, dpi=110)
    pyplot.close(figure)
