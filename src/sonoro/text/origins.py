"""Where the characters of a text were written, as runs: a few numbers for a text of any length. Knows no markup."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from sonoro.core.script import Run, Script, Span


class Origins:
    """Where each character of a text was written, as few runs. The text may grow."""

    def __init__(self, runs: Iterable[Run] = ()) -> None:
        self._runs: list[Run] = []
        self._ends: list[int] = []
        """The characters up to the end of each run."""
        for run in runs:
            self.add_run(*run)

    @property
    def runs(self) -> tuple[Run, ...]:
        return tuple(self._runs)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def end(self) -> int:
        """Where the last character ends; 0 if there is none."""
        if not self._runs:
            return 0
        length, start, step, width = self._runs[-1]
        return start + step * (length - 1) + width

    def __getitem__(self, at: int) -> Span:
        at += len(self) * (at < 0)
        number = bisect_right(self._ends, at)
        length, start, step, width = self._runs[number]
        start += step * (at + length - self._ends[number])
        return start, start + width

    def __iter__(self) -> Iterator[Span]:
        for length, start, step, width in self._runs:
            for at in range(length):
                yield start + step * at, start + step * at + width

    def add(self, length: int, start: int, end: int | None = None) -> None:
        """Add `length` characters that were written from `start` on, or, up to `end`, all together."""
        step, width = (1, 1) if end is None or end - start == length else (0, end - start)
        self.add_run(length, start, step, width)

    def add_run(self, length: int, start: int, step: int = 1, width: int = 1) -> None:
        """Add the characters of a `Run`."""
        runs, ends = self._runs, self._ends
        if length and runs:
            of_last, begin, by, wide = runs[-1]
            if step == by and width == wide and start == begin + of_last * step:
                runs[-1] = of_last + length, begin, step, width
                ends[-1] += length
            else:
                runs.append((length, start, step, width))
                ends.append(ends[-1] + length)
        elif length:
            runs.append((length, start, step, width))
            ends.append(length)

    def cut(self, length: int) -> None:
        """Keep the first `length` characters."""
        while self._ends and self._ends[-1] > length:
            of_last, start, step, width = self._runs.pop()
            kept = of_last - (self._ends.pop() - length)
            if kept > 0:
                self._runs.append((kept, start, step, width))
                self._ends.append(length)

    def part(self, first: int, last: int) -> list[Run]:
        """The runs of characters `first` to `last`."""
        runs = []
        for number in range(bisect_right(self._ends, first), len(self._runs)):
            length, start, step, width = self._runs[number]
            end = self._ends[number]
            begin = end - length
            if begin >= last:
                break
            at = max(first, begin)
            runs.append((min(last, end) - at, start + step * (at - begin), step, width))
        return runs

    def append(self, origins: Origins) -> None:
        """Add the characters of `origins`."""
        for run in origins._runs:
            self.add_run(*run)

    def extend(self, origins: Origins, through: Origins) -> None:
        """Add characters of which `origins` tells the places in a text that has the origins `through` itself."""
        for length, start, step, width in origins._runs:
            if step and width:
                for run in through.part(start, start + length):
                    self.add_run(*run)
            else:
                self.add(length, *through.span(start, start + width))

    def span(self, start: int, end: int) -> Span:
        """Where characters `start` to `end` were written."""
        if start >= end:
            return self.position(start), self.position(start)
        return self[start][0], self[end - 1][1]

    def position(self, at: int) -> int:
        """Where character `at` was written; behind the last if it is the end."""
        return self[at][0] if at < len(self) else self.end

    def find(self, position: int) -> int:
        """The first character that was written at `position` or behind it."""
        number = bisect_left(self._runs, position, key=lambda run: run[1] + (run[0] - 1) * run[2])
        if number == len(self._runs):
            return len(self)
        length, start, step, _ = self._runs[number]
        return self._ends[number] - length + max(position - start, 0) * step


def shown(script: Script, source: str) -> str:
    """`source`, from which `script` was read, as it is shown: with a null for each character of its markup."""
    text = ["\0"] * len(source)
    for character, (start, end) in zip(script.text, Origins(script.origins), strict=True):
        if start < end:
            text[start] = character
    return "".join(text)
