"""The verdict on an overload, from figures that are known."""

import pytest

from sonoro.bench.metrics import judge

ROW = {"succeeded": 60, "failed": 0, "ttfp_p50_ms": 10.0, "ttfp_p95_ms": 15.0}
REFUSED = {"succeeded": 30, "failed": 90, "errors": {"status 429": 90}}


def verdict(before: dict[str, object], during: dict[str, object], after: dict[str, object]) -> dict[str, object]:
    return judge([{**ROW, **before}, {**ROW, **REFUSED, **during}, {**ROW, **after}], max_queue_wait_ms=100)


def test_twice_the_unloaded_figure_and_the_wait_are_allowed_and_refusals_counted() -> None:
    made = verdict({}, {"ttfp_p50_ms": 120.0, "ttfp_p95_ms": 130.0}, {"ttfp_p50_ms": 12.0})
    assert made == {
        **{"is_met": True, "accepted": 30, "refused": 90, "failed_but_429": [0, 0], "refused_unloaded": [0, 0]},
        **{"overload_ttfp_p50_ms": [120.0, 120.0], "overload_ttfp_p95_ms": [130.0, 130.0]},
        **{"recovery_ttfp_p50_ms": [12.0, 12.0]},
    }


@pytest.mark.parametrize(
    ("before", "during", "after"),
    [
        ({}, {"ttfp_p50_ms": 121.0}, {}),
        ({}, {"ttfp_p95_ms": 131.0}, {}),
        ({}, {"ttfp_p95_ms": None}, {}),
        ({}, {"failed": 91, "errors": {"status 429": 90, "timeout": 1}}, {}),
        ({}, {}, {"ttfp_p50_ms": 12.1}),
        ({}, {}, {"failed": 1, "errors": {"status 429": 1}}),
        ({"failed": 1, "errors": {"status 503": 1}}, {}, {}),
        ({"ttfp_p50_ms": None}, {}, {}),
    ],
)
def test_anything_beyond_its_limit_misses(
    before: dict[str, object], during: dict[str, object], after: dict[str, object]
) -> None:
    assert verdict({}, {}, {})["is_met"] is True
    assert verdict(before, during, after)["is_met"] is False
