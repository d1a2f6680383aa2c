"""What all training loops share: their steps and rates, going on where a run that was out of time stopped, one descent.

Knows no model and no data. Draws of a step hang on the seed and the step alone, so an interrupted run goes on as if
it had not been.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

__all__ = [
    "Captured",
    "Course",
    "Log",
    "Run",
    "Step",
    "Unfinished",
    "adam",
    "cosine_schedule",
    "descend",
    "save",
    "steps_of",
]

Log = Callable[[dict[str, float]], None]


class Stateful(Protocol):
    """A module or an optimizer."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@dataclass(frozen=True)
class Run:
    """`deadline_s`, on the clock of `time.monotonic`, is when a stage must stop; what it then needs to go on is kept in
    `state`, to be removed once the result is in its place. Figures go to `log`."""

    deadline_s: float
    log: Log
    state: Path


class Unfinished(Exception):
    """The time is up. The stage goes on from its `Run.state` when it is run again."""


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


@dataclass(frozen=True)
class Course:
    """So many `steps`, the first `warmup_steps` of them towards the `learning_rate`, all draws from `seed`. The rate
    falls as if there were `decay_steps`, where that is given."""

    steps: int
    learning_rate: float
    warmup_steps: int
    seed: int
    decay_steps: int | None = None


def steps_of(course: Course, run: Run, parts: Mapping[str, Stateful]) -> Iterator[Step]:
    """The steps that are missing, after `parts` have been put where an earlier run left them.

    Seeds torch's own generators for each. Raises `Unfinished`, with the state kept, once the deadline has passed.
    """
    first = 0
    if run.state.exists():
        # Where they were: optimizers keep the rate's tensor as it is loaded, and a graph reads one of its own device.
        kept = torch.load(run.state, weights_only=True)
        first = kept.pop("step")
        for name, part in parts.items():
            part.load_state_dict(kept[name])
    for number in range(first, course.steps):
        if time.monotonic() > run.deadline_s:
            save({name: part.state_dict() for name, part in parts.items()} | {"step": number}, run.state)
            raise Unfinished(f"{number} of {course.steps} steps")
        torch.manual_seed(course.seed * 10_000_000 + number)
        rate = course.learning_rate * cosine_schedule(number, course.decay_steps or course.steps, course.warmup_steps)
        yield Step(number, rate, number == course.steps - 1)


def save(values: Mapping[str, Any], path: Path) -> None:
    """What `torch.load` reads at `path`, whole or not at all."""
    partial = path.with_suffix(".partial")
    torch.save(values, partial)
    partial.rename(path)


def adam(module: nn.Module, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """AdamW whose rate is set before every step, whose step may be captured, and which can be told to pass one over."""
    parameters = list(module.parameters())
    is_cuda = parameters[0].device.type == "cuda"
    rate = torch.zeros((), device=parameters[0].device)
    return torch.optim.AdamW(
        parameters, rate, betas, weight_decay=weight_decay, foreach=False, fused=True, capturable=is_cuda
    )


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"].fill_(rate)


def descend(module: nn.Module, optimizer: torch.optim.AdamW, loss: Tensor) -> Tensor:
    """One step of `optimizer` down `loss` with gradients clipped to norm 1; returns the norm they had. Capturable.

    A gradient that is not finite moves nothing: one such step would be the end of all weights."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]  # what fused steps look at
    optimizer.step()
    return norm


class Captured:
    """`step`, tensors to figures, as a CUDA graph: small steps are bound by their launches otherwise.

    The first calls on a GPU run as they are, the next is recorded; on a CPU all run as they are. Figures are valid
    until the next call.
    """

    _WARM_UP_CALLS = 8

    def __init__(self, step: Callable[..., dict[str, Tensor]]) -> None:
        self._step, self._calls = step, 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._given, self._figures = list[Tensor](), dict[str, Tensor]()

    def __call__(self, *given: Tensor) -> dict[str, Tensor]:
        if given[0].device.type != "cuda":
            return self._step(*given)
        if self._calls < self._WARM_UP_CALLS:
            return self._beside(*given)
        if self._graph is None:
            # Recording runs nothing: what is recorded is then replayed for this very call.
            self._given, self._graph = [tensor.clone() for tensor in given], torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._figures = self._step(*self._given)
        for kept, tensor in zip(self._given, given, strict=True):
            kept.copy_(tensor)
        self._graph.replay()
        return self._figures

    def _beside(self, *given: Tensor) -> dict[str, Tensor]:
        """One call on another stream, as what is to be recorded must have run."""
        self._calls += 1
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            figures = self._step(*given)
        torch.cuda.current_stream().wait_stream(stream)
        return figures
