"""The figures of exchanges whose times are known."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from sonoro.bench.metrics import Exchange, Window, figures

RATE = 1000


def pcm(samples: int, silent: int = 0) -> bytes:
    values = np.full(samples, 20000, dtype="<i2")
    values[:silent] = 320
    return values.tobytes()


def exchange(
    *parts: tuple[float, bytes], due_s: float = 10.0, sent_s: float | None = 10.001, error: str | None = None
) -> Exchange:
    """Sent a millisecond late, with `parts` at their seconds after it was due; ended with the last of them."""
    made = Exchange(due_s, sent_s=sent_s, sample_rate=RATE)
    for after_s, data in parts:
        made.take(data, due_s + after_s)
    made.error = error
    made.end(due_s + (parts[-1][0] if parts else 0.5))
    return made


def row(*exchanges: Exchange) -> dict[str, object]:
    return figures(exchanges, Window(10.0, 20.0))


def test_a_request_that_is_never_late_has_its_times_and_no_underrun() -> None:
    heard = row(exchange((0.021, pcm(100, silent=40)), (0.121, pcm(100)), (0.151, pcm(300))))
    expected = {
        **{"requests": 1, "succeeded": 1, "failed": 0, "lag_p95_ms": 1, "lag_max_ms": 1, "ttfb_p50_ms": 20},
        **{"ttfp_mean_ms": 20, "ttfp_p95_ms": 20, "ttfa_p95_ms": 60, "leading_silence_p50_ms": 40, "e2e_mean_ms": 150},
        **{"rtf_mean": 0.3, "audio_s_mean": 0.5, "audio_s_total": 0.5, "xrt": 0.05, "request_throughput": 0.1},
        **{"underruns": 0, "requests_underrun": 0, "gaps_50ms": 0, "continuity": 1, "peak_in_flight": 1},
    }
    assert {name: heard[name] for name in expected} == pytest.approx(expected, rel=1e-9)


def test_audio_that_comes_late_is_an_underrun_and_its_wait_a_gap() -> None:
    # Plays from 0.02: over at 0.12, resumes at 0.15; over at 0.25, resumes at 0.37; over at 0.47, resumes at 0.7.
    made = exchange((0.02, pcm(100)), (0.15, pcm(100)), (0.37, pcm(100)), (0.7, pcm(100)))
    assert made.playback.gaps_s == pytest.approx((0.03, 0.12, 0.23))
    heard = row(made, exchange((0.02, pcm(100)), (0.19, pcm(10))), exchange((0.02, pcm(100))))
    names = ("underruns", "requests_underrun", "gaps_50ms", "gaps_100ms", "gaps_200ms", "continuity")
    assert [heard[name] for name in names] == pytest.approx([4, 2, 3, 2, 1, 2 / 3])


def test_the_first_audible_sample_waits_for_the_stalls_before_it() -> None:
    # 100 silent samples from 0.02, then a gap until 0.2, then 50 silent ones before the first that is heard.
    made = exchange((0.02, pcm(100, silent=100)), (0.2, pcm(100, silent=50)))
    heard = row(made)
    assert heard["ttfa_p50_ms"] == pytest.approx(249)
    assert heard["leading_silence_p50_ms"] == pytest.approx(150)


def test_a_byte_is_not_yet_a_sample() -> None:
    made = exchange((0.011, pcm(1)[:1]), (0.031, pcm(1)[1:]), (0.032, pcm(9)))
    heard = row(made)
    assert (heard["ttfb_p50_ms"], heard["ttfp_p50_ms"]) == pytest.approx((10, 30))
    assert made.samples == 10
    assert made.error is None
    made.take(b"\0", 11.0)
    made.end(11.0)
    assert (made.error, made.samples) == ("ended inside a sample", 10)


def test_an_answer_that_failed_keeps_its_cause_and_hears_nothing_more() -> None:
    made = Exchange(10.0, sample_rate=RATE)
    made.fail("status 429")
    made.take(pcm(5), 10.1)
    made.fail("timeout")
    made.end(10.2)
    assert (made.error, made.samples, made.first_byte_s) == ("status 429", 0, None)


def test_silence_is_never_audible_and_has_no_time_of_it() -> None:
    heard = row(exchange((0.02, pcm(100, silent=100))))
    assert (heard["ttfa_p95_ms"], heard["leading_silence_p50_ms"], heard["succeeded"]) == (None, None, 1)


def test_rates_count_what_came_in_the_window_and_latencies_what_was_due_in_it() -> None:
    before = exchange((0.5, pcm(200)), (1.5, pcm(300)), due_s=9.0, sent_s=9.0)
    inside = exchange((0.1, pcm(1000)), due_s=12.0, sent_s=12.0)
    across = exchange((0.2, pcm(400)), (0.7, pcm(400)), due_s=19.5, sent_s=19.5)
    after = exchange((0.1, pcm(5000)), due_s=20.0, sent_s=20.0)
    heard = row(before, inside, across, after)
    assert (heard["requests"], heard["duration_s"]) == (2, 10)
    # Of `before` its second part, of `across` its first.
    assert heard["audio_s_total"] == pytest.approx(0.3 + 1.0 + 0.4)
    assert heard["request_throughput"] == pytest.approx(0.2)
    assert heard["ttfp_mean_ms"] == pytest.approx(150)


def test_failures_are_counted_by_their_cause_and_have_no_latency() -> None:
    refused = [exchange(error="status 429"), exchange(error="status 429"), exchange(sent_s=None, error="ConnectError")]
    broken = exchange((0.1, pcm(100)), (3.0, pcm(100)), error="broken stream")
    heard = row(*refused, broken, exchange((0.011, pcm(100))))
    assert (heard["requests"], heard["succeeded"], heard["failed"]) == (5, 1, 4)
    assert heard["errors"] == {"status 429": 2, "ConnectError": 1, "broken stream": 1}
    assert heard["ttfp_p99_ms"] == pytest.approx(10)
    assert heard["underruns"] == 0


def test_nothing_heard_is_no_figure_instead_of_a_good_one() -> None:
    heard = row(exchange(error="timeout"))
    assert heard["failed"] == 1
    for name in ("ttfp_mean_ms", "ttfa_p95_ms", "e2e_p99_ms", "rtf_p50", "continuity"):
        assert heard[name] is None
    assert row()["lag_p95_ms"] is None


def test_the_peak_is_of_requests_at_one_time_within_the_window() -> None:
    spans = [(8.0, 9.5), (8.5, 10.5), (10.2, 10.4), (10.4, 11.0), (19.9, 25.0), (20.5, 25.0), (20.6, 25.0)]
    made = []
    for sent_s, ended_s in spans:
        made.append(exchange((0.0, pcm(1)), due_s=sent_s, sent_s=sent_s))
        made[-1].ended_s = ended_s
    assert row(*made)["peak_in_flight"] == 2


def test_percentiles_are_linear_between_ranks() -> None:
    made = [exchange((number / 1000, pcm(10)), sent_s=10.0) for number in range(1, 102)]
    heard = row(*made)
    assert (heard["ttfp_p50_ms"], heard["ttfp_p95_ms"], heard["ttfp_p99_ms"]) == pytest.approx((51, 96, 100))


def test_a_row_has_every_documented_field() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")
    [entry] = re.findall(r"^- `serve-<model>.json`.*?concurrency,\s(.*?)`$", documented, re.MULTILINE | re.DOTALL)
    names = re.split(r",\s+", entry)
    assert "peak_in_flight" in names
    heard = row(exchange((0.02, pcm(100))))
    assert set(names) <= set(heard)
    assert json.loads(json.dumps(heard)) == heard
