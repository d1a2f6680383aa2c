"""A benchmark in two steps: raw lines of what is spoken, in as many runs as it takes, then a report of all of them.

Knows no benchmark: each says which arguments its steps take besides those that all have.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Steps:
    """The command line: `making` takes what a step that makes raw lines needs, `reporting` what the report does."""

    def __init__(self, doc: str | None, report: Callable[[argparse.Namespace], None], **makes: Any) -> None:
        self._parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        commands = self._parser.add_subparsers(required=True)
        ((name, make),) = makes.items()
        self.making, self.reporting = commands.add_parser(name), commands.add_parser("report")
        self.making.set_defaults(run=make)
        self.reporting.set_defaults(run=report)
        self.reporting.add_argument("raw", type=Path, nargs="+")
        self.reporting.add_argument("--cpu", help="on which the raw lines were made; this one if none")
        self.reporting.add_argument("--commit", help="at which the raw lines were made; that of this tree if none")
        self.reporting.add_argument("--out", type=Path)

    def take_some(self, count: int) -> None:
        """Some of many texts are spoken in a run, and added to a file."""
        self.making.add_argument("--first", type=int, default=0)
        self.making.add_argument("--count", type=int, default=count)
        self.making.add_argument("--raw", type=Path, required=True)

    def run(self) -> None:
        """The step that the command line says."""
        options = self._parser.parse_args()
        options.run(options)


def read_lines(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All lines of those of `files` that are there, but for one that another process is at."""
    lines = [line for file in files if file.is_file() for line in file.open(encoding="utf-8")]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def add_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Add a line for each of `rows`."""
    with file.open("a", encoding="utf-8") as raw:
        raw.writelines(json.dumps(row) + "\n" for row in rows)


def finish(options: argparse.Namespace, bench: str, **facts: Any) -> None:
    """Write the result of `bench` where the report's `options` say, and print it, at last in one line."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "bench": bench,
        "model": "builtin",
        "cpu": options.cpu or cpu_name(),
        "commit": options.commit or git.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
        **facts,
    }
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    print(json.dumps(result))


def cpu_name() -> str:
    """As Linux calls the processor."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", file.read_text(encoding="utf-8")) if file.is_file() else None
    return found[1] if found else platform.machine()
