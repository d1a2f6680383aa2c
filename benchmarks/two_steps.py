"""The command line of benchmarks with two steps: one writes raw lines of readings, in any number of runs, the other a
report of all of them. Each benchmark adds arguments of its own.
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
    """The command line: `making` is the parser of the step that writes raw lines, `reporting` that of the report."""

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
        """Add the arguments of a step that processes some of many texts per run, and appends to a file."""
        self.making.add_argument("--first", type=int, default=0)
        self.making.add_argument("--count", type=int, default=count)
        self.making.add_argument("--raw", type=Path, required=True)

    def run(self) -> None:
        """Run the step given on the command line."""
        options = self._parser.parse_args()
        options.run(options)


def read_lines(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All lines of the existing `files`, except incomplete last lines, which another process may be writing."""
    lines = [line for file in files if file.is_file() for line in file.open(encoding="utf-8")]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def add_lines(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append a JSON line for each of `rows`."""
    with file.open("a", encoding="utf-8") as raw:
        raw.writelines(json.dumps(row) + "\n" for row in rows)


def finish(options: argparse.Namespace, bench: str, **facts: Any) -> None:
    """Write the results of `bench` to the path in `options`, and print them, ending with one JSON line."""
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
    """The processor's name in /proc/cpuinfo."""
    file = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", file.read_text(encoding="utf-8")) if file.is_file() else None
    return found[1] if found else platform.machine()
