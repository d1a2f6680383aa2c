"""Choosing between a fused kernel and its torch reference, once per operation. Knows no operation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from sonoro.ops.device import is_recorded

try:
    import triton
except ImportError:
    triton = None

__all__ = ["Operation", "references_alone"]

logger = logging.getLogger(__name__)


class Operation:
    """Calls `kernel` where it can run and `reference` elsewhere; both take the same arguments.

    The kernel serves tensors on a GPU, or without memory where launches `is_recorded`, without gradients, that
    `is_supported` accepts. One that fails, or that `check` finds to disagree, warns once and is not tried again: the
    reference serves from then on.
    """

    has_kernels: ClassVar[bool] = True
    """Whether any kernel may serve: see `references_alone`."""

    known: ClassVar[list[Operation]] = []
    """All operations there are, in the order they were made."""

    def __init__(
        self,
        name: str,
        kernel: Callable[..., Any],
        reference: Callable[..., Any],
        is_supported: Callable[..., bool] = lambda *args, **kwargs: True,
    ) -> None:
        self.name, self.kernel, self.reference, self.is_supported = name, kernel, reference, is_supported
        self.is_broken = triton is None
        self.failure = ""
        """Why the reference serves in place of a kernel that there is."""
        self.difference: float | None = None
        """The largest that `check` has found, in units of the largest value."""
        Operation.known.append(self)

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The operation on `x` and what follows it. Capturable once it has run at these shapes."""
        is_plain = self.is_broken or not Operation.has_kernels or not _is_launched(x) or torch.is_grad_enabled()
        if is_plain or not self.is_supported(x, *args, **kwargs):
            return self.reference(x, *args, **kwargs)
        try:
            return self.kernel(x, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler's failure can be of any type, and the reference can always serve
            self._fall_back(f"status=failed error={error!r}")
            return self.reference(x, *args, **kwargs)

    def check(self, arguments: Callable[[], tuple[Any, ...]], tolerance: float) -> None:
        """Run kernel and reference on equal `arguments()` (made twice, as both may write into them) and compare.

        Compared are what they return and the tensors they were given; the largest difference may be `tolerance` times
        the largest value. Synchronises. Does nothing where the kernel would not serve, and compares nothing without
        memory.
        """
        ours, theirs = arguments(), arguments()
        if self.is_broken or not Operation.has_kernels or not _is_launched(ours[0]) or not self.is_supported(*ours):
            return
        try:
            results = (*_tensors(self.kernel(*ours)), *_tensors(ours))
        except Exception as error:
            self._fall_back(f"status=failed error={error!r}")
            return
        if ours[0].is_meta:
            return
        expected = (*_tensors(self.reference(*theirs)), *_tensors(theirs))
        worst = max(_difference(ours, theirs) for ours, theirs in zip(results, expected, strict=True))
        self.difference = worst if self.difference is None else max(self.difference, worst)
        if not worst <= tolerance:
            self._fall_back(f"status=disagrees difference={worst:.3g} limit={tolerance:.3g}")

    def _fall_back(self, reason: str) -> None:
        self.is_broken, self.failure = True, reason
        logger.warning("kernel=%s fallback=reference %s", self.name, reason)


@contextmanager
def references_alone() -> Iterator[None]:
    """Within, every operation is its reference, in graphs captured meanwhile for good. For comparisons."""
    Operation.has_kernels = False
    try:
        yield
    finally:
        Operation.has_kernels = True


def _is_launched(x: Tensor) -> bool:
    return x.is_cuda or (x.is_meta and is_recorded())


def _tensors(value: Any) -> tuple[Tensor, ...]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)):
        return tuple(tensor for item in value for tensor in _tensors(item))
    return ()


def _difference(result: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest finite value; equal infinities do not differ."""
    result, expected = result.double(), expected.double()
    if not expected.numel():
        return 0.0
    apart = torch.where(result == expected, 0.0, (result - expected).abs()).nan_to_num(torch.inf)
    largest = torch.where(expected.isfinite(), expected.abs(), 0.0).max()
    return float(apart.max() / largest.clamp_min(1e-30))
