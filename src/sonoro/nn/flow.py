"""Flow matching solved by Euler's method: the ODE steps from noise to data, and the embedding of their times."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.linear import Linear


def calls(steps: int) -> int:
    """Network calls of a solver of `steps` ODE steps: CFG-Zero* skips the first 4% of them, at least one."""
    return steps - max(1, int((steps + 1) * 0.04))


def schedule(steps: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Times at which a solver of `steps` ODE steps calls the network, and the step sizes: [calls] each, on the CPU.
    Every operation is rounded to `dtype` as in the official code: each time is the one before less its rounded size."""
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
    """Sinusoidal embedding of `times` [n]: width / 2 sines, then as many cosines, [n, width], computed in its dtype."""
    half = width // 2
    rates = torch.exp(torch.arange(half, dtype=times.dtype) * -(math.log(10000) / (half - 1)))
    angles = 1000 * times[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), dim=-1)


class TimeMLP(nn.Module):
    """Two linear layers with a SiLU between them over embedded times [..., width], to the same shape."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1, self.linear_2 = Linear(width, width), Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))
