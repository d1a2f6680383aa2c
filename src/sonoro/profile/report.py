"""Results files of benchmarks in this process: the machine, and a printed table of the rows."""

from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sonoro.bench import results as report
from sonoro.bench.machine import gpu_driver, processor

_WIDTH = 170


class Report(report.Report):
    """The report of a benchmark in this process, with GPU or CPU, driver and torch; prints its rows as a table."""

    def __init__(self, top: Mapping[str, Any], *, is_gpu: bool, **more: Any) -> None:
        where = {"gpu": torch.cuda.get_device_name()} if is_gpu else {"cpu": processor()}
        facts = {"driver": gpu_driver() if is_gpu else None, "torch": torch.__version__}
        super().__init__({**top, **where, **facts}, **more)

    def show_table(self, title: str) -> None:
        table = Table(title=title, title_justify="left")
        columns = {name: value for row in self.rows for name, value in row.items()}
        for name, value in columns.items():
            # A nested mapping is one column.
            parts = "/".join(value) if isinstance(value, Mapping) else ""
            table.add_column(f"{name}\n{parts}", justify="right", overflow="fold")
        for row in self.rows:
            table.add_row(*(_shown(row.get(name)) for name in columns))
        Console(width=_WIDTH, highlight=False).print(table)


def has_gpu(device: str) -> bool:
    """Whether a model loaded with `device` is on a GPU."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return "/".join(map(_shown, value.values()))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
