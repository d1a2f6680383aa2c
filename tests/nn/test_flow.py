"""Schedules and embedded times of flow matching, against what is known of them."""

import math

import pytest
import torch

from sonoro.nn.flow import calls, schedule, sinusoids


def test_the_schedule_of_ten_steps_is_the_documented_one() -> None:
    times, sizes = schedule(10, torch.bfloat16)
    expected = [0.953125, 0.91015625, 0.8515625, 0.7890625, 0.70703125, 0.609375, 0.4921875, 0.349609375, 0.1884765625]
    assert times.tolist() == expected
    assert float(sizes.float().sum()) == 0.953125
    assert sizes.tolist()[0] == 0.04296875


def test_sines_are_of_rounded_rates() -> None:
    exact, rounded = sinusoids(torch.tensor([0.5]), 1024), sinusoids(torch.tensor([0.5], dtype=torch.bfloat16), 1024)
    likeness = torch.cosine_similarity(exact, rounded.float())
    assert 0.86 < float(likeness) < 0.99


@pytest.mark.parametrize(("steps", "still"), [(1, 1), (2, 1), (48, 1), (49, 2), (73, 2), (74, 3), (100, 4)])
def test_the_first_steps_of_many_go_nowhere(steps: int, still: int) -> None:
    """As in the official solver, which was run at 1 to 100 steps; times are those of an even count behind them."""
    times, sizes = schedule(steps, torch.float64)
    assert calls(steps) == len(times) == len(sizes) == steps - still
    even = [1 - index / steps for index in range(still, steps)]
    expected = [one + math.cos(math.pi / 2 * one) - 1 + one for one in even]
    torch.testing.assert_close(times, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("steps", [2, 3, 7, 10, 25, 48])
def test_a_solver_ends_where_time_does(steps: int) -> None:
    """Float64: steps and what the first leaves out make up all of time; times lie on the warped line."""
    times, sizes = schedule(steps, torch.float64)
    assert len(times) == len(sizes) == steps - 1
    expected = []
    for index in range(1, steps):
        even = 1 - index / steps
        expected.append(even + math.cos(math.pi / 2 * even) - 1 + even)
    torch.testing.assert_close(times, torch.tensor(expected, dtype=torch.float64))
    torch.testing.assert_close(times[0] - sizes.sum(), torch.tensor(0.0, dtype=torch.float64), atol=1e-12, rtol=0)
