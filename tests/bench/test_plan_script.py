"""Simulated engines: as fast as those that were measured, the same each time, and more of them do more."""

import json
from pathlib import Path
from typing import Any

import pytest

from plan import PlanBench, arguments, run
from simulation import Load, Times, simulate
from sonoro.core.config import EngineConfig, Tuning
from sonoro.core.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
MODEL = "qwen3-tts-1.7b-customvoice"
FRAMES = tuple(range(30, 91))
WITHIN = 0.15
CONFIG = EngineConfig(
    slots=256,
    chunk_frames=(1, 2, 4, 12),
    codec_batches=(1, 4, 16, 64),
    tuning=Tuning(codec_wait=0, codec_overlap=0),
)
"""What was measured ran so."""


def measured(kind: str, gpus: int = 0) -> dict[str, Any]:
    name = f"{kind}-{MODEL}-{gpus}" if gpus else f"{kind}-{MODEL}"
    values: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return values


def rows(kind: str, field: str, *loads: float, gpus: int = 0) -> list[tuple[str, int, dict[str, Any]]]:
    found = [row for row in measured(kind, gpus)["rows"] if row.get(field) in loads]
    assert len(found) == len(loads)
    return [(kind, gpus or 1, row) for row in found]


@pytest.fixture(scope="module")
def times() -> Times:
    return Times.of(measured("frame"), measured("engine"), measured("serve"))


@pytest.mark.parametrize(
    ("kind", "gpus", "row"),
    [
        *rows("serve", "rps", 20.0, 40.0, 80.0),
        *rows("serve", "concurrency", 16, 64),
        *rows("engine", "concurrency", 64, 256),
        *rows("scale", "concurrency", 32, 64, 256, gpus=1),
        *rows("scale", "concurrency", 64, 128, 256, gpus=2),
    ],
    ids=lambda value: f"{value.get('rps', '')}{value.get('concurrency', '')}" if isinstance(value, dict) else value,
)
def test_what_is_predicted_is_what_was_measured(kind: str, gpus: int, row: dict[str, Any]) -> None:
    """Nothing of these rows was used: the times are those of a frame, of audio, and of one request alone."""
    times = Times.of(measured("frame"), measured("engine"), None if kind == "engine" else measured("serve"))
    load = Load(FRAMES, rps=row.get("rps", 0.0), clients=row.get("concurrency", 0), duration_s=8, warm_up_s=2)
    outcome = simulate(times, CONFIG, gpus, load)
    assert outcome.ttfp_p95_ms == pytest.approx(row["ttfp_p95_ms"], rel=WITHIN)
    assert outcome.ttfp_p50_ms == pytest.approx(row["ttfp_p50_ms"], rel=WITHIN)
    assert outcome.xrt == pytest.approx(row["xrt"], rel=WITHIN)


def test_the_same_seed_gives_the_same_and_another_another(times: Times) -> None:
    load = {"frames": FRAMES, "rps": 40.0, "duration_s": 4.0}
    first = simulate(times, CONFIG, 1, Load(**load, seed=3))
    assert simulate(times, CONFIG, 1, Load(**load, seed=3)) == first
    assert simulate(times, CONFIG, 1, Load(**load, seed=4)) != first


def test_as_many_times_the_gpus_do_as_many_times_the_load(times: Times) -> None:
    """At the same share for each: more of them even out who comes when, so packets come no later."""
    one = simulate(times, CONFIG, 1, Load(FRAMES, rps=40.0, duration_s=10))
    for gpus in (4, 1000):
        more = simulate(times, CONFIG, gpus, Load(FRAMES, rps=40.0 * gpus, duration_s=10))
        assert more.xrt == pytest.approx(gpus * one.xrt, rel=0.1)
        assert more.ttfp_p95_ms <= 1.02 * one.ttfp_p95_ms


@pytest.mark.parametrize(
    "row",
    [row for row in measured("gpus")["rows"] if row["gpus"] == 2],
    ids=lambda row: f"{row['set']}, {row.get('rps', '')}{row.get('concurrency', '')}",
)
def test_two_gpus_are_forecast_from_one(row: dict[str, Any], times: Times) -> None:
    """Only the closed loops of one of them were used."""
    alone = [one for one in measured("gpus")["rows"] if (one["set"], one["gpus"]) == (row["set"], 1)]
    paced = times.paced([one for one in alone if "concurrency" in one], frames=60)
    load = Load(FRAMES, rps=row.get("rps", 0.0), clients=row.get("concurrency", 0), duration_s=4, warm_up_s=2)
    outcome = simulate(paced, EngineConfig(slots=256), 2, load)
    assert outcome.xrt == pytest.approx(row.get("xrt", outcome.xrt), rel=0.1)
    if "one front" not in row["set"]:  # whose process was full
        assert outcome.ttfp_p95_ms == pytest.approx(row["ttfp_p95_ms"], rel=0.1)


def test_a_server_of_one_gpu_that_was_measured_is_simulated_as_measured(times: Times, tmp_path: Path) -> None:
    known = [{"concurrency": 32, "xrt": 350.0}, {"concurrency": 1, "xrt": 27.0, "ttfp_p50_ms": 12.0}]
    paced = times.paced(known, frames=60)
    for row in known:
        outcome = simulate(paced, CONFIG, 1, Load(FRAMES, clients=row["concurrency"], duration_s=6))
        assert outcome.xrt == pytest.approx(row["xrt"], rel=0.1)
    assert simulate(paced, CONFIG, 1, Load(FRAMES, clients=1)).ttfp_p50_ms == pytest.approx(12, rel=0.02)
    rows = [{"set": "a", "gpus": 1, **row} for row in known] + [{"set": "a", "gpus": 2, "rps": 40.0, "ttfp_p95_ms": 99}]
    rows += [{**row, "set": "b", "xrt": row["xrt"] / 2} for row in rows[:2]]
    (tmp_path / "rows").write_text(json.dumps({"bench": "gpus", "rows": rows}))
    bench = {"model": MODEL, "results": RESULTS, "duration_s": 3.0, "measured": str(tmp_path / "rows")}
    (checked,) = run(PlanBench(**bench, checks=True))["rows"]
    assert (checked["set"], checked["gpus"], checked["ttfp_p95_ms_measured"]) == ("a", 2, 99)
    fast, slow = (run(PlanBench(**bench, rps=(20.0,), card=card))["rows"][0] for card in ("", "b"))
    assert fast["ttfp_p95_ms"] < slow["ttfp_p95_ms"]
    with pytest.raises(ConfigError, match="one client"):
        times.paced(known[:1], frames=60)


def test_requests_that_would_wait_too_long_are_refused(times: Times) -> None:
    """Twice what the slots serve: half of it is, and without the limit all of it, later and later."""
    small, load = EngineConfig(slots=8), {"frames": (10, 20), "rps": 200.0, "duration_s": 6.0}
    patient = simulate(times, small, 1, Load(**load))
    bounded = simulate(times, small, 1, Load(**load, max_wait_s=0.5))
    assert patient.refused == 0 < bounded.refused
    assert bounded.requests + bounded.refused == patient.requests
    assert max(bounded.first_ms) < 500 + 100 < patient.ttfp_p50_ms
    assert bounded.ttfp_p50_ms <= bounded.ttfp_p95_ms <= bounded.ttfp_p99_ms


def test_playback_runs_dry_once_ticks_last_longer_than_frames(times: Times) -> None:
    slow = times.paced([{"concurrency": 1, "xrt": 27.0, "ttfp_p50_ms": 12.0}, {"concurrency": 8, "xrt": 6.0}], 60)
    load = {"frames": (60,), "duration_s": 30.0}
    assert simulate(slow, EngineConfig(slots=8), 1, Load(**load, clients=8)).underruns > 0
    assert simulate(slow, EngineConfig(slots=8), 1, Load(**load, clients=1)).underruns == 0


def test_what_does_not_fit_waits(times: Times) -> None:
    small = EngineConfig(slots=8)
    crowded = simulate(times, small, 1, Load(FRAMES, rps=100.0, duration_s=5.0))
    assert crowded.longest_queue > 50
    assert crowded.slots_held > 0.9
    assert crowded.ttfp_p95_ms > 1000
    relieved = simulate(times, small, 6, Load(FRAMES, rps=100.0, duration_s=5.0))
    assert relieved.ttfp_p95_ms < 100


def test_the_bench_prints_what_it_predicts_and_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lengths").write_text("2.4\n4.8\n7.2\n")
    out = tmp_path / "plan.json"
    bench = {"model": MODEL, "results": RESULTS, "duration_s": 4.0, "out": out}
    planned = run(PlanBench(**bench, gpus=(1, 2), rps=(20.0, 40.0), slots=64, lengths=tmp_path / "lengths"))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == json.loads(out.read_text())
    assert [(row["gpus"], row["rps"]) for row in planned["rows"]] == [(1, 20.0), (1, 40.0), (2, 20.0), (2, 40.0)]
    assert planned["settings"]["slots"] == 64
    checked = run(PlanBench(**bench, checks=True))["rows"]
    assert [row["ttfp_p95_ms_measured"] for row in checked] == [row["ttfp_p95_ms"] for row in measured("serve")["rows"]]
    assert all(abs(row["xrt_error_pct"]) < 50 for row in checked)


def test_what_cannot_be_planned_is_refused(tmp_path: Path) -> None:
    known = {"model": MODEL, "results": RESULTS}
    for changes, field in (
        ({"rps": ()}, "rps"),
        ({"rps": (1.0,), "checks": True}, "rps"),
        ({"rps": (0.0,)}, "rps"),
        ({"rps": (1.0,), "gpus": (0,)}, "gpus"),
        ({"rps": (1.0,), "frames": (9, 3)}, "frames"),
        ({"rps": (1.0,), "duration_s": 0.0}, "duration_s"),
    ):
        with pytest.raises(ConfigError) as refusal:
            PlanBench(**{**known, **changes})
        assert refusal.value.field == field
    (tmp_path / "lengths").write_text("2.4 x")
    (tmp_path / f"frame-{MODEL}.json").write_text('{"bench": "engine"}')
    for changes, words in (
        ({"lengths": tmp_path / "lengths"}, "seconds of audio"),
        ({"lengths": tmp_path / "none"}, "seconds of audio"),
        ({"results": tmp_path}, "what `sonoro bench frame` wrote"),
        ({"model": "unheard-of"}, "unheard-of"),
        ({"measured": "none.json"}, "none.json"),
        ({"measured": f"gpus-{MODEL}.json", "card": "abacus"}, "card: 'abacus'.*two H100s"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(PlanBench(**{**known, "rps": (1.0,), **changes}))
    (tmp_path / "lengths").write_text("100000")
    for changes, field in (({"lengths": tmp_path / "lengths"}, "lengths"), ({"rps": (1e-9,)}, "duration_s")):
        with pytest.raises(ConfigError) as refusal:
            run(PlanBench(**{**known, "rps": (1.0,), **changes}))
        assert refusal.value.field == field


def test_batches_that_could_not_be_measured_are_passed_over(times: Times) -> None:
    frames = measured("frame")
    *_, largest = frames["rows"]
    for failed in ({"graph_ms": None, "xrt": None}, {"codec_ms": largest["codec_ms"] | {"12": None}}):
        backwards = [largest | failed, *frames["rows"][-2::-1]]
        known = Times.of(frames | {"rows": backwards}, measured("engine"), measured("serve"))
        assert list(known.frame) == list(times.frame)[:-1] == sorted(known.frame)
        with pytest.raises(ConfigError, match="one request alone"):
            Times.of(frames | {"rows": backwards[:-1]}, measured("engine"))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--model", "x"], ["rps", "give rates to plan for, or check"]),
        (["--model", "x", "--rps", "1", "--gpus", "0"], ["gpus", "(0,)", "at least 1"]),
        (["--model", "x", "--rps", "1", "--results", "none"], ["results", "frame-x.json", "bench frame"]),
    ],
)
def test_the_command_line_is_checked(given: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        run(arguments(given))
    assert all(word in str(error.value) for word in words)


def test_the_command_line_names_loads() -> None:
    bench = arguments(["--model", MODEL, "--gpus", "1,8", "--rps", "1.5,20", "--frames", "30-90"])
    assert (bench.gpus, bench.rps, bench.frames) == ((1, 8), (1.5, 20.0), (30, 90))
