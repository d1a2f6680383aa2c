"""What benchmarks/dialects.py makes of what it measured."""

from typing import Any

import dialects


def row(way: str, p50_ms: float | None, *, failed: int = 0, underruns: int = 0) -> dict[str, Any]:
    """What is known of a way before it is judged; no median where every request failed."""
    times = {} if p50_ms is None else {"ttfp_p50_ms": p50_ms, "underruns": underruns}
    return {"way": way, "failed": failed, **times}


def passes(*rows: dict[str, Any]) -> bool:
    return dialects.is_passed(dialects.judged(list(rows)), limit_ms=3)


def test_a_way_is_judged_by_ours_over_the_same_transport() -> None:
    ours = row("native", 10), row("native-live", 30)
    assert passes(*ours, row("cartesia", 12.9), row("cartesia-live", 32.9))
    assert not passes(*ours, row("cartesia", 13.1))
    assert not passes(*ours, row("cartesia-live", 33.1))
    assert not passes(*ours, row("cartesia", 9, underruns=1))
    assert not passes(*ours, row("cartesia", 9, failed=1))


def test_where_ours_failed_nothing_passes() -> None:
    assert not passes(row("native", None, failed=2), row("cartesia", 12))
