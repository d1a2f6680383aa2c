"""How many CPU threads torch uses, and an executor without any. Knows no model."""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from sonoro.core.errors import border

Result = TypeVar("Result")

SMALL_MODEL_PARAMETERS = 50_000_000
"""Smaller models run best on one CPU thread: a second gains little (built-in voice in torch: RTF .33 to .27), and on
shared cores the two wait for each other (RTF .39 with one, 9 with two). Compiled code has one."""


@contextmanager
def one_thread() -> Iterator[None]:
    """A block in which torch uses one CPU thread: for many small operations, whose threads would spin between them.
    Loading the built-in voice takes .7 s of CPU with one, 2.5 to 3.2 with two on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_small(module: nn.Module) -> bool:
    """Whether `module` is one for a single CPU thread."""
    return sum(parameter.numel() for parameter in module.parameters()) < SMALL_MODEL_PARAMETERS


def spare_threads(device: torch.device, parameters: int) -> None:
    """Use one CPU thread from now on, if a model of so many parameters on `device` is a small one on a CPU."""
    if device.type == "cpu" and parameters < SMALL_MODEL_PARAMETERS:
        torch.set_num_threads(1)


class Inline(Executor):
    """An executor that runs each job at once, in the submitting thread."""

    def submit(self, function: Callable[..., Result], /, *args: Any, **kwargs: Any) -> Future[Result]:
        future: Future[Result] = Future()
        with border(future.set_exception):
            future.set_result(function(*args, **kwargs))
        return future
