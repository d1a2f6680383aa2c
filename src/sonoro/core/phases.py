"""How long each phase of a start takes. Knows no phase."""

from __future__ import annotations

import time

__all__ = ["Phases"]


class Phases:
    """The seconds of phases that follow each other, the first of which began at `began_s` on the monotonic clock."""

    def __init__(self, began_s: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        """Of each phase that has ended, in order."""
        self._began_s = time.monotonic() if began_s is None else began_s

    def end(self, name: str) -> None:
        """The current phase was `name` and ends now; the next begins."""
        now_s = time.monotonic()
        self.seconds[name] = self.seconds.get(name, 0.0) + now_s - self._began_s
        self._began_s = now_s
