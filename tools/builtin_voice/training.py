"""What both training loops share: how many steps fit before a deadline, the learning rate over them, and one descent.

Knows no model and no data.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

__all__ = ["Log", "Run", "Step", "cosine_schedule", "descend", "steps_of"]

Log = Callable[[dict[str, float]], None]


@dataclass(frozen=True)
class Run:
    """`deadline_s`, on the clock of `time.monotonic`, is when a stage has to be done; figures go to `log`."""

    deadline_s: float
    log: Log


class Step(NamedTuple):
    """`rate` is the learning rate of step `number`, counted from 0."""

    number: int
    rate: float
    is_last: bool


def cosine_schedule(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then half a cosine down to 2% of the peak."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def steps_of(steps: int, peak_rate: float, warmup: int, run: Run, timed: range) -> Iterator[Step]:
    """At most `steps` steps: fewer if, at the pace of the steps `timed`, that many do not fit before the deadline.

    The number is settled, and logged, once those steps are done; compilation lies before them.
    """
    began = 0.0
    for number in itertools.count():
        if number == timed.start:
            began = time.monotonic()
        if number == timed.stop:
            step_s = (time.monotonic() - began) / len(timed)
            steps = min(steps, number + int((run.deadline_s - time.monotonic()) / step_s))
            run.log({"step": number, "steps": steps, "steps_per_s": 1 / step_s})
        if number >= steps:
            return
        yield Step(number, peak_rate * cosine_schedule(number, steps, warmup), number == steps - 1)


def descend(module: nn.Module, optimizer: torch.optim.Optimizer, rate: float, loss: Tensor) -> Tensor:
    """One step of `optimizer` down `loss` with gradients clipped to norm 1; returns the norm they had."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    return norm
