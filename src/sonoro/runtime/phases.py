"""Durations: those of the phases of a start, and percentiles of many."""

import time
from collections.abc import Iterable


class Phases:
    """Durations of consecutive phases; the first began at `began_s` on the monotonic clock (default: now)."""

    def __init__(self, began_s: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        """Seconds of each ended phase by name, in order."""
        self._began_s = time.monotonic() if began_s is None else began_s

    def end(self, name: str) -> None:
        """End the current phase, named `name`, and begin the next. Times of equal names add up."""
        now_s = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._began_s
        self._began_s = now_s


def percentiles_ms(durations_s: Iterable[float]) -> dict[str, float]:
    """p50, p95 and p99 by nearest rank, in ms; zeros without data."""
    ordered = sorted(durations_s) or [0.0]
    return {f"p{percent}": 1000 * ordered[(len(ordered) - 1) * percent // 100] for percent in (50, 95, 99)}
