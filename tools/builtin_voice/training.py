"""The shared part of all training loops: steps and learning rates, resuming, snapshots, and the optimiser step.

Random numbers of a step depend on the seed and the step alone, so that an interrupted run of a fixed number of steps
resumes exactly. A run may also be fitted into its time.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

__all__ = [
    "Average",
    "Captured",
    "Course",
    "Log",
    "Run",
    "Step",
    "Unfinished",
    "adam",
    "cosine_schedule",
    "descend",
    "halved",
    "save",
    "steps_of",
]

Log = Callable[[dict[str, float]], None]

SNAPSHOT_S = 60.0


class Stateful(Protocol):
    """A module or an optimizer: has a state_dict."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@dataclass(frozen=True)
class Run:
    """`deadline_s` (`time.monotonic`): when a stage must stop; its state for resuming is saved to `state`, to be
    removed once the result exists. Metrics go to `log`.

    A run that `is_fitted` takes as many steps as there is time for: its learning rate follows the time, and it ends at
    the deadline. Every `SNAPSHOT_S` it writes its weights, in 16 bits, to `snapshot`.
    """

    deadline_s: float
    log: Log
    state: Path
    is_fitted: bool = False
    snapshot: Path | None = None


class Unfinished(Exception):
    """The time is up. The stage resumes from `Run.state` when it is run again."""


class Step(NamedTuple):
    """Step `number`, from 0: its learning rate `rate`, and the share `progress` of the course before it. In a fitted
    run the last step is not known in advance."""

    number: int
    rate: float
    progress: float
    is_last: bool

    def is_logged(self, every: int) -> bool:
        """Whether to log: the first and last step, one in `every`, and five times as many before the first of these."""
        return self.is_last or self.number % (every if self.number > every else every // 5) == 0


def cosine_schedule(step: int, warmup: int, falling: float) -> float:
    """Learning-rate factor: linear warm-up, then half a cosine to 2% of the peak at share `falling` of the decay."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, falling)))


@dataclass(frozen=True)
class Course:
    """A training course: `steps` steps, `warmup_steps` of them up to `learning_rate`, random numbers from `seed`. The
    rate decays over `decay_steps` if given. `further_rate` is the peak for weights that are trained already, whose
    last, slow steps a full rate would undo."""

    steps: int
    learning_rate: float
    warmup_steps: int
    seed: int
    decay_steps: int | None = None
    further_rate: float | None = None

    def further(self) -> Self:
        """The course for weights that are trained already."""
        return replace(self, learning_rate=self.further_rate or self.learning_rate)


def steps_of(
    course: Course, run: Run, parts: Mapping[str, Stateful], learned: Callable[[], Mapping[str, Any]] | None = None
) -> Iterator[Step]:
    """Restore `parts` from the state of an earlier run, if there is one, and yield the missing steps.

    Seeds torch's generators for each step; `learned` gives the contents of a snapshot. Raises `Unfinished`, after
    saving the state, when the deadline of a run that is not fitted has passed."""
    first, spent_s = 0, 0.0
    if run.state.exists():
        # On their device: optimizers keep the rate's tensor as loaded, and a CUDA graph needs it on its own device.
        kept = torch.load(run.state, weights_only=True)
        first, spent_s = kept.pop("step"), kept.pop("spent_s")
        for name, part in parts.items():
            part.load_state_dict(kept[name])
    began_s = time.monotonic()
    snapped_s = began_s
    for number in itertools.count(first):
        now_s = time.monotonic()
        if run.is_fitted:
            progress = falling = (spent_s + now_s - began_s) / max(1e-9, spent_s + run.deadline_s - began_s)
            is_over = progress >= 1
        else:
            decay_steps = (course.decay_steps or course.steps) - course.warmup_steps
            progress, falling = number / course.steps, (number - course.warmup_steps) / max(1, decay_steps)
            is_over = number >= course.steps
        if is_over:
            return
        if now_s > run.deadline_s:
            state = {name: part.state_dict() for name, part in parts.items()}
            save(state | {"step": number, "spent_s": spent_s + now_s - began_s}, run.state)
            raise Unfinished(f"{number} of {course.steps} steps")
        if learned and run.snapshot and now_s > snapped_s + SNAPSHOT_S:
            save(halved(learned()), run.snapshot)
            snapped_s = now_s
        torch.manual_seed(course.seed * 10_000_000 + number)
        rate = course.learning_rate * cosine_schedule(number, course.warmup_steps, falling)
        yield Step(number, rate, progress, not run.is_fitted and number == course.steps - 1)


def halved(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values`, possibly nested, with every float tensor on the CPU in float16."""
    return {
        name: halved(value)
        if isinstance(value, Mapping)
        else value.to("cpu", torch.float16)
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in values.items()
    }


def save(values: Mapping[str, Any], path: Path) -> None:
    """Save `values` to `path` atomically, for `torch.load`."""
    partial = path.with_suffix(".partial")
    torch.save(values, partial)
    partial.rename(path)


class Average:
    """Exponential moving average of the weights of `module`, as a module; buffers keep their initial values.

    The decay is lower in early steps, so that the initial weights are forgotten."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.module = copy.deepcopy(module).eval().requires_grad_(False)
        self._followed, self._decay = module, decay

    @torch.no_grad()
    def follow(self, step: int) -> None:
        """Update the average with the weights after step `step`."""
        weight = 1 - min(self._decay, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(self.module.parameters()), list(self._followed.parameters()), weight)

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> object:
        return self.module.load_state_dict(state_dict)


def adam(module: nn.Module, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """AdamW with a tensor learning rate, set before every step; capturable, and able to skip a step."""
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
    """One optimiser step on `loss`, with gradients clipped to norm 1; returns their norm before that. Capturable.

    A step with a gradient that is not finite is skipped: it would destroy all weights."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]  # what fused steps look at
    optimizer.step()
    return norm


@dataclass
class Captured:
    """`step`, from tensors to metrics, as a CUDA graph: small steps would be launch-bound.

    The first calls on a GPU are eager warm-ups, the next is captured; on a CPU all are eager. Metrics are valid until
    the next call. Graphs that never run concurrently may share a `pool` (`torch.cuda.graph_pool_handle`)."""

    step: Callable[..., dict[str, Tensor]]
    warm_up_calls: int = 8
    pool: Any = None
    _graph: torch.cuda.CUDAGraph | None = None
    _given: list[Tensor] = field(default_factory=list)
    _figures: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, *given: Tensor) -> dict[str, Tensor]:
        if given[0].device.type != "cuda":
            return self.step(*given)
        if self.warm_up_calls:
            self.warm_up_calls -= 1
            return self._beside(*given)
        if self._graph is None:
            # Capturing runs nothing: the graph is then replayed for this call.
            self._given, self._graph = [tensor.clone() for tensor in given], torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, pool=self.pool):
                self._figures = self.step(*self._given)
        for kept, tensor in zip(self._given, given, strict=True):
            kept.copy_(tensor)
        self._graph.replay()
        return self._figures

    def _beside(self, *given: Tensor) -> dict[str, Tensor]:
        """One call on a side stream, the warm-up that a capture needs."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            figures = self.step(*given)
        torch.cuda.current_stream().wait_stream(stream)
        return figures
