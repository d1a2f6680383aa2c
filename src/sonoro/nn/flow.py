"""Flow matching by Euler's method, from noise to data: when, and how far. Knows no network but what reads the time."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.linear import Linear

__all__ = ["TimeMLP", "calls", "schedule", "sinusoids"]


def calls(steps: int) -> int:
    """How often a solver of so many `steps` calls the network: the first goes nowhere, of 49 and more one in 25."""
    return steps - max(1, int((steps + 1) * 0.04))


def schedule(steps: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """When a solver of so many `steps` calls the network, and how far it goes from there: [calls] each, `dtype`.

    On the CPU, every operation rounded to `dtype`, as the official code has it: times are counted down by sizes that
    were themselves rounded.
    """
    index = torch.arange(steps + 1, dtype=dtype)
    size = torch.tensor(-1 / steps, dtype=dtype)
    even = torch.where(index < (steps + 1) // 2, 1 + size * index, 0 - size * (steps - index))
    ends = even + 1.0 * (torch.cos(torch.pi / 2 * even) - 1 + even)
    times, sizes = [ends[0] - (ends[0] - ends[1])], []
    for end in ends[2:]:
        sizes.append(times[-1] - end)
        times.append(times[-1] - sizes[-1])
    still = steps - 1 - calls(steps)
    return torch.tensor(times[still:-1], dtype=dtype), torch.tensor(sizes[still:], dtype=dtype)


def sinusoids(times: Tensor, width: int) -> Tensor:
    """Sines, then cosines, of `times` [n] at width / 2 rates: [n, width] in the dtype of `times`, which rounds them."""
    half = width // 2
    rates = torch.exp(torch.arange(half, dtype=times.dtype) * -(math.log(10000) / (half - 1)))
    angles = 1000 * times[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class TimeMLP(nn.Module):
    """Two layers over embedded times [..., width], as wide."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = Linear(width, width), Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))
