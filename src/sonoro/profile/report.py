"""Results files of what is measured in this process: the machine, and a table of a line for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sonoro.core import report
from sonoro.core.machine import gpu_driver, processor

__all__ = ["Report", "has_gpu"]

_WIDTH = 170


class Report(report.Report):
    """That of a bench in this process, on a GPU or not; a row is a line of its table."""

    def __init__(self, top: Mapping[str, Any], *, is_gpu: bool, **more: Any) -> None:
        where = {"gpu": torch.cuda.get_device_name()} if is_gpu else {"cpu": processor()}
        facts = {"driver": gpu_driver() if is_gpu else None, "torch": torch.__version__}
        super().__init__(top, machine={**where, **facts}, **more)

    def show_table(self, title: str) -> None:
        table = Table(title=title, title_justify="left")
        columns = {name: value for row in self.rows for name, value in row.items()}
        for name, value in columns.items():
            # A field of fields is one column.
            parts = "/".join(value) if isinstance(value, Mapping) else ""
            table.add_column(f"{name}\n{parts}", justify="right", overflow="fold")
        for row in self.rows:
            table.add_row(*(_shown(row.get(name)) for name in columns))
        Console(width=_WIDTH, highlight=False).print(table)


def has_gpu(device: str) -> bool:
    """Whether `device`, as models are loaded on it, is a GPU."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return "/".join(map(_shown, value.values()))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
