"""Whether a server stood more than it can bear: three levels of an open loop, judged as docs/benchmark.md says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["REFUSED", "judge"]

REFUSED = "status 429"
"""The one way in which a request may fail under overload."""

_TIMES_UNLOADED = 2.0
_RECOVERED = 1.2


def judge(rows: Sequence[Mapping[str, Any]], max_queue_wait_ms: float) -> dict[str, Any]:
    """A verdict on the levels before, during and after an overload; `is_met` is the whole of it.

    Each part is a list of a figure and its limit; a figure of which there is no case misses.
    """
    before, during, after = rows
    failures = [row["failed"] - row.get("errors", {}).get(REFUSED, 0) for row in rows]
    wrong = {"failed_but_429": [sum(failures), 0], "refused_unloaded": [before["failed"] + after["failed"], 0]}
    limits = {
        f"overload_ttfp_{part}_ms": [
            during[f"ttfp_{part}_ms"],
            _over(before[f"ttfp_{part}_ms"], _TIMES_UNLOADED, max_queue_wait_ms),
        ]
        for part in ("p50", "p95")
    }
    limits["recovery_ttfp_p50_ms"] = [after["ttfp_p50_ms"], _over(before["ttfp_p50_ms"], _RECOVERED, 0.0)]
    checks = wrong | limits
    is_met = all(figure is not None and limit is not None and figure <= limit for figure, limit in checks.values())
    return {"is_met": is_met, "accepted": during["succeeded"], "refused": during["failed"] - failures[1], **checks}


def _over(figure: float | None, times: float, more: float) -> float | None:
    return None if figure is None else round(times * figure + more, 3)
