"""Measures the phases of a start."""

import time


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
