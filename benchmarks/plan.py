"""Predict time to first packet and throughput of many GPUs from measurements of one. Needs no GPU.

python benchmarks/plan.py --model qwen3-tts-1.7b-customvoice --gpus 1,8,1000 --rps 160,1280,160000
python benchmarks/plan.py --model qwen3-tts-1.7b-customvoice --check
python benchmarks/plan.py --model qwen3-tts-1.7b-customvoice --check --measured gpus-qwen3-tts-1.7b-customvoice.json
python benchmarks/plan.py --model qwen3-tts-1.7b-customvoice --peak-rps 5000 --target-ms 100
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from fleet_day import Autoscaler, Day, fewest_hosts, levels_of, rates_by_hour, rates_of, rows_of, walk
from simulation import Load, Times, simulate
from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError
from sonoro.profile.report import Report

__all__ = ["PlanBench", "run"]


@dataclass(frozen=True)
class PlanBench:
    """Loads of `rps` requests a second on each number of `gpus`, with `slots` slots per GPU (None: the largest measured
    batch).

    Times of a GPU come from `frame-<model>.json` and `engine-<model>.json` in `results`, a server's overhead from
    `serve-<model>.json`, if present. Lengths of requests are the lines of the file `lengths`, in seconds, or random in
    `frames`. `checks` takes the loads of `serve-<model>.json` instead of `rps`, to compare with what was measured.

    `measured` is a file in `results` with rows of servers of one and more `gpus`, in sets of equal cards. Ticks then
    take the times of the closed loops of one GPU of the set `card`, by default the first, and `checks` predicts the
    other loads of each set.

    `day` asks for a fleet over 24 hours in place of `rps`; requests then wait for `max_wait_s` at most. Raises
    `ConfigError` naming the field.
    """

    model: str
    results: Path
    gpus: tuple[int, ...] = (1,)
    rps: tuple[float, ...] = ()
    slots: int | None = None
    lengths: Path | None = None
    frames: tuple[int, int] = (30, 90)
    checks: bool = False
    measured: str = ""
    card: str = ""
    day: Day | None = None
    max_wait_s: float = 5.0
    duration_s: float = 20.0
    warm_up_s: float = 3.0
    seed: int = 0
    out: Path | None = None
    commit: str | None = None

    def __post_init__(self) -> None:
        if bool(self.rps) + self.checks + (self.day is not None) != 1:
            raise ConfigError("rps", self.rps, "give rates to plan for, or check, or a day, and only one of them")
        if self.rps and not all(0 < rate < math.inf for rate in self.rps):
            raise ConfigError("rps", self.rps, "each must be above 0")
        if min(self.gpus, default=0) < 1:
            raise ConfigError("gpus", self.gpus, "each must be at least 1")
        if not 1 <= self.frames[0] <= self.frames[1]:
            raise ConfigError("frames", self.frames, "they must ascend, from 1")
        for name in ("duration_s", "warm_up_s", "max_wait_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(name, getattr(self, name), "it must be above 0")


def run(bench: PlanBench) -> dict[str, Any]:
    """Simulate, print and return the results. Raises `ConfigError` for missing or invalid files."""
    frames, engine = _read(bench, "frame"), _read(bench, "engine")
    server = _read(bench, "serve") if bench.checks or _path(bench, "serve").exists() else None
    times, sets = Times.of(frames, engine, server), _sets(bench)
    if sets and not bench.checks:
        times = _paced(bench, times, sets[bench.card or next(iter(sets))])
    config = EngineConfig(slots=bench.slots or max(times.frame))
    lengths = tuple(range(bench.frames[0], bench.frames[1] + 1))
    if bench.lengths is not None:
        lengths = _frames_of(bench.lengths, times.frame_s)
    settings = {**asdict(bench), "results": str(bench.results), "lengths": bench.lengths and str(bench.lengths)}
    settings = {name: value for name, value in settings.items() if name not in ("out", "commit")} | {
        "slots": config.slots
    }
    top = {
        "bench": "plan",
        "model": bench.model,
        "arm": "simulated",
        "dtype": frames["dtype"],
        "of_gpu": frames.get("gpu"),
    }
    report = Report(top, is_gpu=False, settings=settings, commit=bench.commit, out=bench.out)
    if bench.day is not None:
        rows = _of_a_day(bench, times, config, lengths, report.top)
    elif not bench.checks:
        rows = _planned(bench, times, config, lengths)
    elif sets:
        rows = _checked_sets(bench, times, config, lengths, sets)
    else:
        rows = _checked(bench, times, config, lengths, (server or {})["rows"])
    for row in rows:
        report.add(row)
    return report.finish(f"{bench.model}: simulated, {config.slots} slots each")


def _planned(bench: PlanBench, times: Times, config: EngineConfig, lengths: Sequence[int]) -> Iterator[dict[str, Any]]:
    for gpus in bench.gpus:
        for rps in bench.rps:
            load = Load(lengths, rps=rps, duration_s=bench.duration_s, warm_up_s=bench.warm_up_s, seed=bench.seed)
            outcome = simulate(times, config, gpus, load)
            shown = {name: value for name, value in vars(outcome).items() if name != "first_ms"}
            yield {"gpus": gpus, "rps": rps, **shown, "xrt_per_gpu": outcome.xrt / gpus}


def _of_a_day(
    bench: PlanBench, times: Times, config: EngineConfig, lengths: Sequence[int], top: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each hour; note in `top` what is needed, and what it costs."""
    assert bench.day is not None
    load = Load(lengths, clients=1, seed=bench.seed, max_wait_s=bench.max_wait_s)
    levels = levels_of(times, config, bench.day.gpus_per_host, load)
    needed = fewest_hosts(bench.day, levels, bench.seed)
    # One more, so that one may be down.
    hosts = bench.day.hosts or needed + 1
    hours = walk(bench.day, levels, hosts, bench.seed)
    # Two, so that one may be down.
    autoscaler = Autoscaler(levels, config.slots, bench.day.target_ms / 1000, least=2)
    scaled = walk(bench.day, levels, hosts, bench.seed, autoscaler)
    top |= {"hosts_needed": needed, "hosts": hosts}
    for fleet, of_fleet in (("fixed", hours), ("autoscaled", scaled)):
        top[f"gpu_hours_{fleet}"] = sum(hour.paid for hour in of_fleet)
        yield from rows_of(fleet, of_fleet)


def _checked(
    bench: PlanBench, times: Times, config: EngineConfig, lengths: Sequence[int], loads: Sequence[Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each measured load, with errors in percent of the measurement."""
    for measured in loads:
        clients, rps = measured.get("concurrency", 0), measured.get("rps", 0.0)
        duration_s, warm_up_s = measured.get("duration_s", bench.duration_s), bench.warm_up_s
        load = Load(lengths, rps=rps, clients=clients, duration_s=duration_s, warm_up_s=warm_up_s, seed=bench.seed)
        outcome = simulate(times, config, measured.get("gpus", 1), load)
        row: dict[str, Any] = {"mode": "closed" if clients else "open", "load": clients or rps}
        for name in ("ttfp_p50_ms", "ttfp_p95_ms", "xrt"):
            if name in measured:
                predicted = getattr(outcome, name)
                row |= {name: predicted, f"{name}_measured": measured[name]}
                row[f"{name}_error_pct"] = 100 * (predicted / measured[name] - 1)
        yield row


def _checked_sets(
    bench: PlanBench, times: Times, config: EngineConfig, lengths: Sequence[int], sets: _Sets
) -> Iterator[dict[str, Any]]:
    """Yield rows of the loads in `sets` that were not used."""
    for name, rows in sets.items():
        loads = [row for row in rows if not _is_used(row)]
        for load, row in zip(loads, _checked(bench, _paced(bench, times, rows), config, lengths, loads), strict=True):
            yield {"set": name, "gpus": load["gpus"], **row}


def _is_used(row: Mapping[str, Any]) -> bool:
    """Whether times are taken from a measured row."""
    return row["gpus"] == 1 and "concurrency" in row


def _paced(bench: PlanBench, times: Times, rows: Sequence[Mapping[str, Any]]) -> Times:
    return times.paced([row for row in rows if _is_used(row)], sum(bench.frames) / 2)


_Sets = Mapping[str, Sequence[Mapping[str, Any]]]


def _sets(bench: PlanBench) -> _Sets:
    """The rows of the file `measured`, by set; none without the file. Raises `ConfigError`."""
    sets: dict[str, list[Mapping[str, Any]]] = {}
    if bench.measured:
        for row in _json(bench.results / bench.measured, "measured", "gpus")["rows"]:
            sets.setdefault(row["set"], []).append(row)
        ConfigError.unless(not bench.card or bench.card in sets, "card", bench.card, f"sets are {', '.join(sets)}")
    return sets


def _path(bench: PlanBench, kind: str) -> Path:
    return bench.results / f"{kind}-{bench.model}.json"


def _read(bench: PlanBench, kind: str) -> dict[str, Any]:
    return _json(_path(bench, kind), "results", kind)


def _json(path: Path, field: str, kind: str) -> dict[str, Any]:
    """The results of a bench of this `kind`. Raises `ConfigError` of the `field`."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(field, str(path), f"it must be what `sonoro bench {kind}` wrote ({error})") from error
    if not isinstance(values, dict) or values.get("bench") != kind:
        raise ConfigError(field, str(path), f"it must be what `sonoro bench {kind}` wrote")
    return values


def _frames_of(path: Path, frame_s: float) -> tuple[int, ...]:
    """Lengths in frames of the lines of `path`, in seconds. Raises `ConfigError`."""
    try:
        seconds = [float(line) for line in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            "lengths", str(path), f"it must hold seconds of audio, one number a line ({error})"
        ) from error
    if not seconds or not all(0 < length < math.inf for length in seconds):
        raise ConfigError("lengths", str(path), "it must hold seconds of audio, one number a line, each above 0")
    return tuple(max(1, round(length / frame_s)) for length in seconds)


def arguments(argv: Sequence[str] | None = None) -> PlanBench:
    """Parse the command line."""

    def numbers(kind: type[int] | type[float]) -> Callable[[str], tuple[Any, ...]]:
        return lambda text: tuple(kind(number) for number in text.split(","))

    def span(text: str) -> tuple[int, int]:
        first, _, last = text.partition("-")
        return int(first), int(last or first)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the model of the results files")
    results = Path(__file__).parent / "results"
    parser.add_argument("--results", type=Path, default=results, help="folder of frame-, engine- and serve-MODEL.json")
    parser.add_argument("--gpus", type=numbers(int), default=(1,), help="how many, one number after the other")
    parser.add_argument("--rps", type=numbers(float), default=(), help="requests a second on all of them, by level")
    parser.add_argument("--slots", type=int, help="of each GPU; the largest measured batch if not given")
    parser.add_argument("--lengths", type=Path, help="file of audio lengths, in seconds, one a line")
    parser.add_argument("--frames", type=span, default=(30, 90), help="without it, frames of a request: 30-90")
    parser.add_argument("--check", dest="checks", action="store_true", help="predict the loads that were measured")
    parser.add_argument("--measured", default="", help="file in results with rows of servers of one GPU, and of more")
    parser.add_argument("--card", default="", help="its set of rows to take times from; the first if not given")
    day = parser.add_argument_group("a fleet over a day")
    day.add_argument(
        "--peak-rps", type=float, help="requests a second at 16:00, a fifth of it at 4:00, a cosine between"
    )
    day.add_argument("--day", type=Path, help="or a file of requests a second over 24 hours, one number a line")
    day.add_argument(
        "--max-wait", dest="max_wait_s", type=float, default=5.0, help="seconds, then a request is refused"
    )
    for entry in fields(Day)[1:]:
        kind = type(entry.default)
        day.add_argument(
            f"--{entry.name.replace('_', '-')}", type=kind, default=entry.default, help=entry.metadata["help"]
        )
    parser.add_argument("--duration", dest="duration_s", type=float, default=20.0, help="seconds of a level that count")
    parser.add_argument("--warm-up", dest="warm_up_s", type=float, default=3.0, help="seconds before them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the results here too")
    parser.add_argument("--commit", help="what is run, where there is no checkout to ask")
    given = vars(parser.parse_args(argv))
    of_day = {entry.name: given.pop(entry.name) for entry in fields(Day)[1:]}
    peak_rps, path = given.pop("peak_rps"), given.pop("day")
    if path is not None or peak_rps is not None:
        given["day"] = Day(rates_of(path) if path is not None else rates_by_hour(peak_rps), **of_day)
    return PlanBench(**given)


if __name__ == "__main__":
    try:
        run(arguments())
    except ConfigError as error:
        sys.exit(str(error))
