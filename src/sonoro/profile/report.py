"""Results files: what every bench says of the machine, and rows that are kept as soon as they are measured.

Knows no bench. The fields are those of docs/results.md.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from sonoro.core.errors import OutputError
from sonoro.core.machine import commit_of_checkout, gpu_driver, processor, rounded

__all__ = ["Report", "dtype_name", "has_gpu"]

_WIDTH = 170


class Report:
    """The top level of a results file and its `rows`, printed as they come and written to `out` after each.

    `settings` are those the bench resolved. Raises `OutputError` if `out` cannot be written.
    """

    def __init__(
        self, top: Mapping[str, Any], *, is_gpu: bool, settings: Mapping[str, Any], commit: str | None, out: Path | None
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.top: dict[str, Any] = {
            **top,
            **({"gpu": torch.cuda.get_device_name()} if is_gpu else {"cpu": processor()}),
            "driver": gpu_driver() if is_gpu else None,
            "torch": torch.__version__,
            "commit": commit or commit_of_checkout(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "settings": {name: value for name, value in settings.items() if value is not None},
        }
        self._out = out
        self._write()
        for name, value in self.top.items():
            print(f"{name}: {json.dumps(value)}", flush=True)

    @property
    def values(self) -> dict[str, Any]:
        """The whole file."""
        return {**self.top, "rows": self.rows}

    def add(self, row: dict[str, Any]) -> None:
        """Keep and show a row, its numbers to four digits."""
        row = rounded(row)
        self.rows.append(row)
        self._write()
        print(" ".join(f"{name}={json.dumps(value)}" for name, value in row.items()), flush=True)

    def finish(self, title: str) -> dict[str, Any]:
        """Show all rows as a table, then the whole as one line of JSON, the last of stdout; returns the whole."""
        self._write()
        show_table(title, self.rows)
        print(json.dumps(self.values), flush=True)
        return self.values

    def _write(self) -> None:
        if self._out is None:
            return
        try:
            self._out.write_text(json.dumps(self.values, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write {self._out}: {error.strerror}") from error


def show_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print `rows` below the names of their fields; a field of fields is one column."""
    table = Table(title=title, title_justify="left")
    columns = {name: value for row in rows for name, value in row.items()}
    for name, value in columns.items():
        parts = "/".join(value) if isinstance(value, Mapping) else ""
        table.add_column(f"{name}\n{parts}", justify="right", overflow="fold")
    for row in rows:
        table.add_row(*(_shown(row.get(name)) for name in columns))
    Console(width=_WIDTH, highlight=False).print(table)


def has_gpu(device: str) -> bool:
    """Whether `device`, as models are loaded on it, is a GPU."""
    return device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())


def dtype_name(dtype: torch.dtype) -> str:
    """`dtype` as people write it."""
    return str(dtype).removeprefix("torch.")


def _shown(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return "/".join(map(_shown, value.values()))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
