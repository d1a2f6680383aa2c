"""How far a long text is spoken, on stderr."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

_LINE_S = 2.0
"""How often progress is printed without a terminal."""


@contextlib.contextmanager
def progress(length: int) -> Iterator[Callable[[float, int], None]]:
    """A bar on a terminal, else a line every `_LINE_S`. Yields a function to call with the seconds of audio so far, and
    how many of the `length` characters they cover."""
    console, began_s = Console(stderr=True), time.monotonic()

    def figures(audio_s: float) -> str:
        return f"{audio_s:.1f} s of audio, {audio_s / (time.monotonic() - began_s):.1f} times as fast as it plays"

    if not console.is_terminal:
        due_s = began_s + _LINE_S

        def line(audio_s: float, spoken: int) -> None:
            nonlocal due_s
            if time.monotonic() >= due_s or spoken == length:
                due_s = time.monotonic() + _LINE_S
                print(f"{100 * spoken // length}% of the text, {figures(audio_s)}", file=sys.stderr)

        yield line
        return
    columns = (BarColumn(), TextColumn("{task.percentage:.0f}% of the text, {task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("0.0 s of audio", total=length)
        yield lambda audio_s, spoken: bar.update(task, description=figures(audio_s), completed=spoken)
