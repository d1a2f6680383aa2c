"""The logs of all trainings as one picture and one file of results."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

from builtin_voice.settings import CodecTraining, EncoderTraining, TalkerTraining

__all__ = ["write"]

_PANELS = {
    "encoder.jsonl": ("encoder", ("sketch", "phones", "first_phones", "commitment", "books_used")),
    "codec.jsonl": ("codec", ("spectral", "passing", "matching", "critic")),
    "talker.jsonl": ("talker", ("first", "rest", "held_out_first", "held_out_rest")),
}


def read(path: Path) -> list[dict[str, float]]:
    """The records of a log in the order of their steps; of a step that was logged twice, the last."""
    records = [json.loads(line) for line in path.read_text("ascii").splitlines()]
    return sorted({record["step"]: record for record in records}.values(), key=lambda record: record["step"])


def write(work: Path) -> None:
    """The picture as `curves.png`, the file as `training.json`, from the logs in `work`."""
    draw(work, work / "curves.png")
    (work / "training.json").write_text(json.dumps(gathered(work)) + "\n", "utf-8")


def gathered(work: Path) -> dict[str, Any]:
    """The settings, where and how long each stage ran, and every record of every log as a row."""
    stages = [json.loads(line) for line in (work / "stages.jsonl").read_text("ascii").splitlines()]
    courses = {"encoder": EncoderTraining(), "codec": CodecTraining(), "talker": TalkerTraining()}
    rows = [{"stage": title, **record} for log, (title, _) in _PANELS.items() for record in read(work / log)]
    return {
        "bench": "training",
        "model": "builtin",
        "settings": {name: asdict(course) for name, course in courses.items()},
        "stages": stages,
        "rows": rows,
    }


def draw(work: Path, output: Path) -> None:
    """Figures over steps, one panel a log, as a PNG."""
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


if __name__ == "__main__":
    write(Path(sys.argv[1]))
