"""What the server counts, as Prometheus reads it."""

import json

import msgspec

from sonoro.core.events import Fault, Timings
from sonoro.core.types import Finished
from sonoro.server.bodies import JSONBody
from sonoro.server.metrics import EngineState, Metrics
from sonoro.server.stream import Observation
from sonoro.transport.messages import PrefixCounts, Stats


def stats(broken_samples: int) -> Stats:
    facts = {"running": 0, "waiting": 0, "paused": 0, "free_slots": 1, "free_pages": 1, "gpu_memory_mib": 0.0}
    empty = {"launches": {}, "prefixes": PrefixCounts(), "tick_ms": {}, "frame_ms": {}}
    return Stats(**facts, **empty, broken_samples=broken_samples)


def test_samples_that_were_not_finite_are_counted_by_engine() -> None:
    states = [EngineState(stats(7), 0, 1), EngineState(None, 1, 1), EngineState(stats(0), 0, 1)]
    text = Metrics().exposition(states, queued=0).decode()
    found = [line for line in text.splitlines() if line.startswith("sonoro_engine_broken_samples_total")]
    assert found == [
        'sonoro_engine_broken_samples_total{replica="0"} 7.0',
        'sonoro_engine_broken_samples_total{replica="2"} 0.0',
    ]


def test_preemptions_are_counted_by_engine() -> None:
    states = [EngineState(msgspec.structs.replace(stats(0), preemptions=3), 0, 1)]
    assert 'sonoro_engine_put_back_total{replica="0"} 3.0' in Metrics().exposition(states, queued=0).decode()


def test_kernels_that_could_not_be_launched_are_counted_by_what_serves() -> None:
    states = [EngineState(msgspec.structs.replace(stats(0), fallbacks={"conv": {"smaller": 2, "reference": 1}}), 0, 1)]
    text = Metrics().exposition(states, queued=0).decode()
    found = [line for line in text.splitlines() if line.startswith("sonoro_engine_kernel_fallbacks{")]
    assert found == [
        'sonoro_engine_kernel_fallbacks{operation="conv",replica="0",served_by="smaller"} 2.0',
        'sonoro_engine_kernel_fallbacks{operation="conv",replica="0",served_by="reference"} 1.0',
    ]


def test_kernels_that_were_compiled_late_are_counted() -> None:
    states = [EngineState(msgspec.structs.replace(stats(0), compiled={"_conv": 2, "decode": 1}), 0, 1)]
    text = Metrics().exposition(states, queued=0).decode()
    found = [line for line in text.splitlines() if line.startswith("sonoro_engine_kernels_compiled_total{")]
    assert found == ['sonoro_engine_kernels_compiled_total{replica="0"} 3.0']


def test_what_was_caught_is_counted_and_told() -> None:
    metrics = Metrics()
    metrics.model = "tiny"
    faults = (
        Fault(kind="ending", start=0, end=5, spoken_again=True),
        Fault(kind="straying", start=0, end=5, attempt=1),
        Fault(kind="dwelling", start=5, end=9, continued_at=7),
    )
    Observation(metrics, 24000, 0.0).count_faults(faults)
    lines = metrics.exposition([], queued=0).decode().splitlines()
    assert 'sonoro_faults_total{kind="ending",model="tiny",outcome="spoken_again"} 1.0' in lines
    assert 'sonoro_faults_total{kind="straying",model="tiny",outcome="marked"} 1.0' in lines
    assert 'sonoro_faults_total{kind="dwelling",model="tiny",outcome="continued"} 1.0' in lines
    ended = Finished(
        request_id="a",
        reason="stop",
        frames=1,
        characters=5,
        timings=Timings(first_audio_s=0, total_s=0),
        faults=faults,
    )
    body = json.loads(JSONBody(1.0, "wav", 0).end(ended, {}))
    told = {"kind": "ending", "start": 0, "end": 5, "attempt": 0, "spoken_again": True, "continued_at": None}
    assert body["faults"][0] == told
    assert body["faults"][2]["continued_at"] == 7
    assert "faults" not in json.loads(JSONBody(1.0, "wav", 0).end(msgspec.structs.replace(ended, faults=()), {}))
