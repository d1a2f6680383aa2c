"""Results files of the benchmarks: machine, settings and rows, written after each row. Knows no benchmark.

The fields are those of docs/results.md and docs/benchmark.md."""

import datetime
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sonoro.bench.machine import commit_of_checkout, rounded
from sonoro.core.errors import OutputError


class Report(ABC):
    """A results file: top-level fields and `rows`, printed as they are added and written to `out` after each.
    `top` includes the hardware. `settings` are the resolved settings of the benchmark; None values are left out.
    Raises `OutputError` if `out` cannot be written."""

    def __init__(
        self, top: Mapping[str, Any], *, settings: Mapping[str, Any], commit: str | None, out: Path | None
    ) -> None:
        self.rows: list[dict[str, Any]] = []
        self.top: dict[str, Any] = {
            **top,
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
        """The contents of the file."""
        return {**self.top, "rows": self.rows}

    def add(self, row: dict[str, Any]) -> None:
        """Add and print a row, its floats rounded to four digits."""
        row = rounded(row)
        self.rows.append(row)
        self._write()
        print(" ".join(f"{name}={json.dumps(value)}" for name, value in row.items()), flush=True)

    def note(self, name: str, value: Any) -> None:
        """Set a top-level field, for what the rows show together."""
        self.top[name] = rounded(value)
        self._write()

    def finish(self, title: str) -> dict[str, Any]:
        """Print all rows as a table, then the whole file as one line of JSON, the last of stdout; return it."""
        self._write()
        self.show_table(title)
        print(json.dumps(self.values), flush=True)
        return self.values

    @abstractmethod
    def show_table(self, title: str) -> None:
        """Print the rows below `title`."""

    def _write(self) -> None:
        if self._out is None:
            return
        try:
            self._out.write_text(json.dumps(self.values, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"cannot write {self._out}: {error.strerror}") from error
