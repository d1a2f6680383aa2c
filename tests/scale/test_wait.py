"""Replicas by the wait that listeners are predicted to have: what is learnt of a replica, and what follows from it."""

import math
import random
from dataclasses import replace

import pytest

from sonoro.scale_wait import LoadEstimate, ReplicaLoad, replicas_for

CALM = ReplicaLoad(running=40, waiting=0, capacity=256, first_packet_s=0.02, held_s=0.4, growth=0.4, least_growth=0.3)


def estimate(loads: list[float], fixed: float, by_running: float, seed: int = 0) -> LoadEstimate:
    """What is known after seconds with such loads, on a GPU that takes `fixed` and `by_running` a request for a second
    of audio."""
    draw, known = random.Random(seed), LoadEstimate()
    for mean in loads:
        running = max(0.0, draw.gauss(mean, math.sqrt(mean)))
        rtf = fixed + by_running * running
        known.note(running, 0, 20, 20 * 0.2 * rtf)
        known.note_ended(running, 5 * rtf, rtf)
    return known


def test_nothing_is_known_of_a_new_replica_and_nobody_waits_at_an_idle_one() -> None:
    new = LoadEstimate().load(256)
    assert (new.wait_s, new.growth, new.least_growth) == (0, 0, 0)
    assert replicas_for([new, new], 0.1) == 1
    busy = LoadEstimate()
    for _ in range(200):
        busy.note(5, 0, 1, 0.02)
    assert (busy.load(256).growth, busy.load(256).least_growth) == (1, 0)
    assert replicas_for([busy.load(256)] * 2, 0.1) == 2, "no request has ended: how long they take is unknown"
    for _ in range(300):
        busy.note(0, 0, 0, 0)
    assert replicas_for([busy.load(256), new], 0.1) == 1
    known = estimate([100.0] * 60, 0.05, 0.0004)
    late_s = known.load(256).wait_s
    for _ in range(300):
        known.note(1, 0, 0, 0)
    assert late_s > 0.015
    assert known.load(256).wait_s == 0


def test_rare_requests_count_as_much_as_many() -> None:
    rare = LoadEstimate()
    for second in range(100):
        is_ended = second % 20 == 9
        rare.note(running=0.5, waiting=0, first_packets=second % 20 == 0, first_packets_s=0.3 * (second % 20 == 0))
        if is_ended:
            rare.note_ended(running=1, held_s=10, rtf=2)
    load = rare.load(4)
    assert (load.first_packet_s, load.held_s) == (pytest.approx(0.3), 10)


@pytest.mark.parametrize("mean", [5.0, 40.0, 180.0])
def test_how_times_grow_is_learnt_from_the_ups_and_downs_of_the_load(mean: float) -> None:
    load = estimate([mean] * 600, 0.05, 0.0005).load(256)
    assert load.running == pytest.approx(mean, rel=0.2)
    assert load.held_s == pytest.approx(5 * (0.05 + 0.0005 * load.running), rel=0.05)
    truth = 0.0005 * load.running / (0.05 + 0.0005 * load.running)
    # The less the load varies, the further apart.
    assert truth - 0.12 <= load.least_growth <= truth + 0.01
    assert truth - 0.01 <= load.growth <= truth + 0.12


def test_a_load_that_never_varied_may_be_all_that_a_replica_can_do() -> None:
    known = LoadEstimate()
    for _ in range(300):
        known.note(100, 0, 200, 200 * 0.03)
        known.note_ended(100, 0.5, 0.1)
    assert (known.load(256).growth, known.load(256).least_growth) == (pytest.approx(1, abs=1e-3), 0)
    assert replicas_for([known.load(256)] * 2, 0.1) == 2
    for _ in range(180):
        known.note(0, 0, 0, 0)
    assert known.load(256).running > 0, "it fades"
    assert replicas_for([known.load(256)] * 2, 0.1) == 1, "both did as much as one does now, many times over"


@pytest.mark.parametrize("times", [1.5, 2.0])
def test_the_wait_with_more_requests_is_that_of_a_gpu_whose_ticks_grow(times: float) -> None:
    """As many requests run as come in the time for which one runs: 100 a second, of .1 s and .001 s for each."""
    running = 100 * 0.1 / (1 - 100 * 0.001)
    growth = 0.001 * running / (0.1 + 0.001 * running)
    load = ReplicaLoad(running, 0, 1e6, 0.02, 0.1 + 0.001 * running, growth, growth)
    more = times * 100 * 0.1 / (1 - times * 100 * 0.001)
    assert load.wait_with_s(times, growth) == pytest.approx(0.02 * (0.1 + 0.001 * more) / (0.1 + 0.001 * running))
    assert load.wait_with_s(2, growth=0.6) == math.inf


def test_a_full_replica_makes_requests_wait() -> None:
    """By Erlang's C, of four places with two taken in the mean, 4 of 23 requests wait, for half of what one takes."""
    two = ReplicaLoad(running=1, waiting=0, capacity=4, first_packet_s=0, held_s=3, growth=0, least_growth=0)
    assert two.wait_with_s(2, growth=0) == pytest.approx(4 / 23 * 3 / 2)
    assert two.wait_with_s(4, growth=0) == math.inf
    assert replace(CALM, waiting=64).wait_s == pytest.approx(0.02 + 64 * 0.4 / 256)
    assert replace(CALM, capacity=0).wait_s == math.inf


@pytest.mark.parametrize(
    ("count", "changes", "target_s", "wanted"),
    [
        (1, {}, 0.1, 1),
        (4, {}, 0.1, 3),
        (4, {}, 0.03, 4),
        (4, {"growth": 1.0}, 0.1, 4),
        (4, {"first_packet_s": 0.11}, 0.1, 7),
        (4, {"first_packet_s": 0.5}, 0.1, 8),
        (4, {"running": 160}, 0.1, 4),
        (4, {"running": 180}, 0.1, 5),
        (4, {"running": 190, "least_growth": 0.5}, 0.1, 5),
        (4, {"waiting": 500}, 0.1, 8),
        (2, {"running": 100}, 0.1, 2),
        (2, {"running": 0, "first_packet_s": 0.0}, 0.1, 1),
        (2, {"capacity": 0}, 0.1, 4),
    ],
    ids=[
        *("the last stays", "one fewer would do", "one fewer would be late", "nothing learnt", "late", "far too late"),
        *(
            "one fewer would be full",
            "soon full",
            "soon full as times grow",
            "a queue",
            "one could not hold all",
            "idle",
        ),
        "no engine",
    ],
)
def test_replicas_follow_the_predicted_wait(
    count: int, changes: dict[str, float], target_s: float, wanted: int
) -> None:
    assert replicas_for([replace(CALM, **changes)] * count, target_s) == wanted


def test_replicas_count_by_their_mean() -> None:
    late = replace(CALM, first_packet_s=0.3)
    assert replicas_for([late, CALM, CALM, CALM], 0.085) == 6
    assert replicas_for([late, CALM, CALM, CALM], 0.12) == 4
