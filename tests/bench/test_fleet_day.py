"""A fleet over a day: enough hosts for the peak, failures that cost what they take away, and the same each time."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from fleet_day import MOST_REFUSED, Autoscaler, Day, Level, fewest_hosts, levels_of, rates_by_hour, rates_of, walk
from plan import PlanBench, arguments, run
from simulation import Load, Times
from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MODEL = "qwen3-tts-1.7b-customvoice"
NEVER = 1e12


def level(rps: float, first_ms: float, refused: float = 0.0, dry: float = 0.0) -> Level:
    return Level(rps, refused, dry, 0.5, np.linspace(first_ms / 2, first_ms, 1000))


LEVELS = [level(10, 20), level(100, 40), level(200, 80, dry=0.01), level(260, 3000, refused=0.2, dry=0.01)]
"""A GPU that is full at 200 requests a second."""


def steady(rps: float, **more: float) -> Day:
    return Day((rps,), **{"gpus_per_host": 8, "gpu_mtbf_h": NEVER, "host_mtbf_h": NEVER, "days": 1, **more})


def test_arrivals_follow_the_hours_and_go_on_at_midnight() -> None:
    day = Day((100.0, 300.0, 200.0))
    assert [day.rps(hour) for hour in (0, 4, 8, 12, 16, 20, 24, 28)] == [100, 200, 300, 250, 200, 150, 100, 200]
    shape = rates_by_hour(1000)
    assert (max(shape), shape.index(max(shape)), shape.index(min(shape))) == (pytest.approx(1000), 16, 4)
    assert min(shape) == pytest.approx(200)


def test_an_hour_has_the_first_packets_of_what_a_gpu_then_does() -> None:
    (hour, *rest) = walk(steady(1600), LEVELS, hosts=2)
    assert rest[-1].ttfp_p95_ms == hour.ttfp_p95_ms == pytest.approx(20 + 0.95 * 20, rel=0.01)
    assert (hour.ran, hour.paid, hour.refused_permille, hour.broken_permille) == (16, 16, 0, 0)
    between = walk(steady(2400), LEVELS, hosts=2)[0]
    assert hour.ttfp_p99_ms < between.ttfp_p99_ms < 80
    assert between.dry_permille == pytest.approx(5)


def test_what_a_fleet_cannot_do_is_refused() -> None:
    """It serves as much as at the highest rate that was simulated, 208 of 520 a GPU."""
    hour = walk(steady(8 * 520), LEVELS, hosts=1)[0]
    assert hour.refused_permille == pytest.approx(1000 * (1 - 208 / 520))
    assert hour.ttfp_p99_ms > 2900


def test_failures_take_gpus_away_and_break_what_they_speak() -> None:
    """An engine that fails every 10 hours and takes one hour to come back is there for ten elevenths of the time."""
    failing = steady(400, gpu_mtbf_h=10.0, gpu_restart_s=3600.0, days=20)
    hours = walk(failing, LEVELS, hosts=1, seed=1)
    assert np.mean([hour.ran for hour in hours]) == pytest.approx(8 * 10 / 11, rel=0.02)
    # Of each failure half a second of the arrivals of its GPU breaks off.
    assert np.mean([hour.broken_permille for hour in hours]) == pytest.approx(1000 * 0.5 / 36_000, rel=0.2)
    hosts = steady(400, host_mtbf_h=10.0, host_restart_s=3600.0, days=20)
    assert np.mean([hour.ran for hour in walk(hosts, LEVELS, hosts=4, seed=1)]) == pytest.approx(32 * 10 / 11, rel=0.05)
    assert walk(failing, LEVELS, hosts=1, seed=1) == hours != walk(failing, LEVELS, hosts=1, seed=2)


def test_as_few_hosts_as_keep_the_target_in_every_hour() -> None:
    day = Day(rates_by_hour(3000), target_ms=70.0, gpu_mtbf_h=NEVER, host_mtbf_h=NEVER, days=1)
    needed = fewest_hosts(day, LEVELS)
    kept = [all(hour.ttfp_p95_ms <= 70 for hour in walk(day, LEVELS, hosts)) for hosts in (needed - 1, needed)]
    assert kept == [False, True]
    assert fewest_hosts(steady(1.0), LEVELS) == 1
    # While a host is down another must be there, at a rate at which one never refuses anything.
    often = Day((800.0,), host_mtbf_h=50.0, days=20)
    assert any(hour.refused_permille > 1000 * MOST_REFUSED for hour in walk(often, LEVELS, 1))
    assert fewest_hosts(often, LEVELS) > 1
    with pytest.raises(ConfigError, match=r"target_ms: 10\b.*at least 19.5"):
        fewest_hosts(Day((1.0,), target_ms=10), LEVELS)


def test_an_autoscaled_fleet_follows_the_day() -> None:
    """It pays for fewer hosts by night and for enough by day, asks for them in time, and does not swing."""
    day = Day(rates_by_hour(8000), gpu_mtbf_h=NEVER, host_mtbf_h=NEVER, days=2)
    fixed = walk(day, LEVELS, fewest_hosts(day, LEVELS))
    scaled = walk(day, LEVELS, 2, 0, Autoscaler(LEVELS, slots=100, target_s=0.1, least=1))
    assert sum(hour.paid for hour in scaled) < 0.9 * sum(hour.paid for hour in fixed)
    assert scaled[4].paid < 0.5 * scaled[16].paid
    assert all(hour.ttfp_p95_ms <= 100 and hour.refused_permille == 0 for hour in scaled)
    rising, falling = [hour.paid for hour in scaled[5:17]], [hour.paid for hour in scaled[17:]]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)


def test_a_step_of_load_is_late_until_a_host_has_started() -> None:
    """From one hour to the next five times as many come: requests are refused, and then they are not."""
    rates = (400.0,) * 12 + (2000.0,) * 12
    scaler = {"levels": LEVELS, "slots": 100, "target_s": 0.1, "least": 1}
    slow, quick = (
        walk(
            Day(rates, gpu_mtbf_h=NEVER, host_mtbf_h=NEVER, days=1, host_start_s=start_s),
            LEVELS,
            1,
            0,
            Autoscaler(**scaler),
        )
        for start_s in (3600.0, 60.0)
    )
    assert sum(hour.refused_permille for hour in quick) < sum(hour.refused_permille for hour in slow)
    assert quick[-2].refused_permille == slow[-2].refused_permille == 0


def test_a_lost_host_is_replaced_by_another() -> None:
    """A fixed fleet waits for its own."""
    day = Day((1500.0,), gpu_mtbf_h=NEVER, host_mtbf_h=20.0, host_restart_s=36_000.0, days=10)
    fixed = walk(day, LEVELS, 2, 3)
    scaled = walk(day, LEVELS, 2, 3, Autoscaler(LEVELS, slots=100, target_s=0.1, least=2))
    refused = [sum(hour.refused_permille for hour in hours) for hours in (fixed, scaled)]
    assert refused[1] < 0.5 * refused[0]


def test_a_host_is_simulated_from_idle_to_more_than_it_can_do() -> None:
    frame, engine = (json.loads((RESULTS / f"{kind}-{MODEL}.json").read_text()) for kind in ("frame", "engine"))
    times = Times.of(frame, engine)
    levels = levels_of(times, EngineConfig(slots=8), 2, Load((5, 15), clients=1, max_wait_s=0.5))
    rates, p95_ms = [level.rps for level in levels], [level.first_ms[950] for level in levels]
    assert rates == sorted(rates)
    assert [level.refused > 0 for level in levels] == [False] * (len(levels) - 1) + [True]
    assert 0.1 < levels[-1].refused < 1 - 1 / 1.3
    assert p95_ms[0] < p95_ms[-2] < p95_ms[-1] < 600


def test_the_bench_plans_a_day(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "day").write_text("20\n60\n40\n")
    given = ["--model", MODEL, "--day", str(tmp_path / "day"), "--gpus-per-host", "1", "--days", "1"]
    bench = arguments([*given, "--slots", "4", "--frames", "5-9", "--max-wait", "0.5", "--target-ms", "60"])
    result = run(bench)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"] == result["rows"]
    assert result["hosts"] == result["hosts_needed"] + 1
    assert result["gpu_hours_fixed"] == 24 * result["hosts"]
    assert result["gpu_hours_autoscaled"] >= 24 * 2
    assert {row["fleet"] for row in result["rows"]} == {"fixed", "autoscaled"}
    rows = [row for row in result["rows"] if row["fleet"] == "fixed"]
    assert [row["hour"] for row in rows] == [*range(24)]
    assert all(row["ttfp_p95_ms"] <= 60 for row in rows)


def test_what_is_no_day_is_refused(tmp_path: Path) -> None:
    for changes, field in (
        ({"rates": ()}, "rates"),
        ({"rates": (0.0,)}, "rates"),
        ({"rates": (1.0, -1.0)}, "rates"),
        ({"rates": (math.inf,)}, "rates"),
        ({"hosts": -1}, "hosts"),
        ({"gpus_per_host": 0}, "gpus_per_host"),
        ({"target_ms": 0}, "target_ms"),
        ({"gpu_mtbf_h": 0.0}, "gpu_mtbf_h"),
    ):
        with pytest.raises(ConfigError) as refusal:
            Day(**{"rates": (1.0,), **changes})
        assert refusal.value.field == field
    (tmp_path / "day").write_text("noon: 5")
    for path in (tmp_path / "day", tmp_path / "none"):
        with pytest.raises(ConfigError, match="requests a second"):
            rates_of(path)
    with pytest.raises(ConfigError, match="only one of them"):
        PlanBench(model=MODEL, results=RESULTS, rps=(1.0,), day=Day((1.0,)))
