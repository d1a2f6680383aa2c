"""Flow matching by Euler's method, from noise to data: when, how far, and guided by what. Knows no network but for what
reads the time.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["TimeMLP", "guide", "schedule", "sinusoids"]


def guide(conditional: Tensor, free: Tensor, cfg: Tensor) -> Tensor:
    """The velocity [B, P, D] to follow, `cfg` [B] float32 times as far from the `free` one as the `conditional` one is.

    The free one is first scaled to be as near to the other as it can. Follows Fan et al., "CFG-Zero*: Improved
    Classifier-Free Guidance for Flow Matching Models" (2025).
    """
    product, square = (conditional * free).sum((1, 2), keepdim=True), free.square().sum((1, 2), keepdim=True)
    scaled = free * (product / (square + 1e-8))
    apart = cfg[:, None, None] * (conditional - scaled)
    return scaled + apart.to(scaled.dtype)


def schedule(steps: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """When a solver of so many `steps` calls the network, and how far it goes from there: [steps - 1] each, `dtype`.

    On the CPU, every operation rounded to `dtype`, as the official code has it: the first step goes nowhere, the times
    are counted down by sizes that were themselves rounded.
    """
    index = torch.arange(steps + 1, dtype=dtype)
    size = torch.tensor(-1 / steps, dtype=dtype)
    even = torch.where(index < (steps + 1) // 2, 1 + size * index, 0 - size * (steps - index))
    ends = even + 1.0 * (torch.cos(torch.pi / 2 * even) - 1 + even)
    times, sizes = [ends[0] - (ends[0] - ends[1])], []
    for end in ends[2:]:
        sizes.append(times[-1] - end)
        times.append(times[-1] - sizes[-1])
    return torch.stack(times[:-1]), torch.stack(sizes)


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
        self.linear_1, self.linear_2 = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))
