"""Dispatch of an operation to its fused kernel or its torch reference, by shape."""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sonoro.ops.device import card, is_recorded
from sonoro.ops.optional import triton

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Fallback(NamedTuple):
    """What runs for a shape whose launch failed: the kernel with blocks `shrink` steps smaller, or the reference if
    that is 0; and the reason."""

    shrink: int
    reason: str


class _NothingSmaller(Exception):
    pass


def shrunk(blocks: T, smaller: Callable[[T], T | None], steps: int) -> T:
    """`blocks` after `steps` times `smaller`. Raises `_NothingSmaller`, which `Operation` handles, if it runs out."""
    for _ in range(steps):
        made = smaller(blocks)
        if made is None:
            raise _NothingSmaller
        blocks = made
    return blocks


class Operation:
    """Calls `kernel` where it can run, and `reference` elsewhere; both take the same arguments.

    The kernel runs for tensors on a GPU (or on the meta device while launches are recorded), without gradients, if
    `is_supported` accepts them. If a launch fails, then for those shapes alone smaller blocks are tried, if the kernel
    `can_shrink` (it takes the number of steps as `shrink`), and then the reference runs; one warning says which, and
    the cost, unless a second call would add to what the first wrote (not `is_repeatable`). A kernel that fails `check`
    is disabled for all shapes. `name` is by default that of the kernel's function without "_kernel"."""

    has_kernels: ClassVar[bool] = True
    """Whether kernels are enabled: see `references_alone`."""

    references: ClassVar[int] = 0
    """Number of calls that ran a reference because a kernel had failed or disagreed."""

    known: ClassVar[list[Operation]] = []
    """All operations, in order of creation."""

    def __init__(
        self,
        kernel: Callable[..., Any],
        reference: Callable[..., Any],
        is_supported: Callable[..., bool] = lambda *args, **kwargs: True,
        *,
        can_shrink: bool = False,
        is_repeatable: bool = True,
        name: str = "",
    ) -> None:
        self.name = name or kernel.__name__.removesuffix("_kernel")
        self.kernel, self.reference, self.is_supported = kernel, reference, is_supported
        self.can_shrink, self.is_repeatable, self.is_broken = can_shrink, is_repeatable, triton is None
        self.fallbacks: dict[Hashable, Fallback] = {}
        """By shapes, what runs since a launch failed."""
        self.disagreement = ""
        """Why `check` disabled the kernel; empty if it did not."""
        self.difference: float | None = None
        """The largest difference that `check` has found, relative to the largest value."""
        Operation.known.append(self)

    @property
    def failure(self) -> str:
        """Why the kernel, with its chosen blocks, does not run for some or all shapes; empty if it always does."""
        reasons = dict.fromkeys(fallback.reason for fallback in self.fallbacks.values())
        return self.disagreement or "; ".join(reasons)

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the operation. Capturable once it has run at these shapes."""
        is_plain = self.is_broken or not Operation.has_kernels or not _is_launched(x) or torch.is_grad_enabled()
        if is_plain or not self.is_supported(x, *args, **kwargs):
            Operation.references += bool(self.disagreement)
            return self.reference(x, *args, **kwargs)
        fallback = self.fallbacks.get(_shapes((x, args, kwargs))) if self.fallbacks else None
        if fallback is None:
            result, error = self._launch(x, args, kwargs)
            return result if error is None else self._fall_back(error, x, args, kwargs)
        if fallback.shrink:
            return self.kernel(x, *args, **kwargs, shrink=fallback.shrink)
        Operation.references += 1
        return self.reference(x, *args, **kwargs)

    def _launch(self, x: Tensor, args: Any, kwargs: Any) -> tuple[Any, Exception | None]:
        """The kernel's result, or the exception of a failed launch. Raises `torch.OutOfMemoryError`."""
        try:
            return self.kernel(x, *args, **kwargs), None
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler's failure can be of any type, and the reference can always serve
            return None, error

    def check(self, arguments: Callable[[], tuple[Any, ...]], tolerance: float) -> None:
        """Run kernel and reference on equal `arguments()` (called twice, as both may write to them); disable the kernel
        if they disagree.

        Compares results and arguments: the largest difference may be `tolerance` times the largest value. The reference
        uses references alone. Synchronises. Does nothing if the kernel would not run; on the meta device it only
        launches."""
        ours, theirs = arguments(), arguments()
        if self.is_broken or not Operation.has_kernels or not _is_launched(ours[0]) or not self.is_supported(*ours):
            return
        with torch.no_grad():
            results = (*_tensors(self(*ours)), *_tensors(ours))
        fallback = self.fallbacks.get(_shapes((ours[0], ours[1:], {})))
        if ours[0].is_meta or (fallback is not None and not fallback.shrink):
            return
        # Without cuDNN's attention, which builds a plan for each shape; each shape is compared once.
        with references_alone(), sdpa_kernel(_ATTENTION):
            expected = (*_tensors(self.reference(*theirs)), *_tensors(theirs))
        # Skip tensors that both share, such as weights: their float64 copies would take gigabytes.
        pairs = [(ours, theirs) for ours, theirs in zip(results, expected, strict=True) if ours is not theirs]
        worst = max(_difference(ours, theirs) for ours, theirs in pairs)
        self.difference = worst if self.difference is None else max(self.difference, worst)
        if not worst <= tolerance:
            self.is_broken, self.disagreement = True, f"status=disagrees difference={worst:.3g} limit={tolerance:.3g}"
            logger.warning("kernel=%s fallback=reference %s", self.name, self.disagreement)

    def _fall_back(self, error: Exception, x: Tensor, args: Any, kwargs: Any) -> Any:
        """Choose what runs for these shapes from now on, after a launch failed with `error`; returns its result."""
        reason = f"status=failed error={error!r}"
        for shrink in itertools.count(1) if self.can_shrink else ():
            result, again = self._launch(x, args, {**kwargs, "shrink": shrink})
            if again is None:
                self._note(Fallback(shrink, reason), x, args, kwargs, f"smaller_blocks steps={shrink}")
                return result
            if isinstance(again, _NothingSmaller):
                break
        result = self.reference(x, *args, **kwargs)
        self._note(Fallback(0, reason), x, args, kwargs, f"reference cost={self._cost(x, args, kwargs)}")
        return result

    def _note(self, fallback: Fallback, x: Tensor, args: Any, kwargs: Any, serving: str) -> None:
        self.fallbacks[_shapes((x, args, kwargs))] = fallback
        shape = "x".join(map(str, x.shape))
        logger.warning("kernel=%s shape=%s fallback=%s %s", self.name, shape, serving, fallback.reason)

    def _cost(self, x: Tensor, args: Any, kwargs: Any) -> str:
        """Time of the reference, and the bandwidth floor of reading its tensors, as text."""
        is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if x.is_meta or is_captured or not self.is_repeatable:
            return "unknown"
        # A second call: the first may have loaded libraries. It writes the same values again.
        began_s = _synchronised_s()
        self.reference(x, *args, **kwargs)
        taken_ms = 1000 * (_synchronised_s() - began_s)
        read_bytes = sum(tensor.nbytes for tensor in _tensors((x, *args, *kwargs.values())))
        return f"{taken_ms:.3g}ms bandwidth_floor={1000 * read_bytes / card(x.device).bandwidth:.3g}ms"


def fallbacks() -> dict[str, dict[str, int]]:
    """By operation, the number of shapes that run with `smaller` blocks or the `reference` after a failed launch.
    A kernel that disagreed counts once, as `reference`."""
    found = {operation.name: operation for operation in Operation.known if operation.failure}
    return {
        name: dict(
            Counter("smaller" if fallback.shrink else "reference" for fallback in operation.fallbacks.values())
            + Counter({"reference": int(bool(operation.disagreement))})
        )
        for name, operation in found.items()
    }


@contextmanager
def references_alone() -> Iterator[None]:
    """A context in which every operation runs its reference, for comparisons; graphs captured in it keep them."""
    Operation.has_kernels = False
    try:
        yield
    finally:
        Operation.has_kernels = True


def _is_launched(x: Tensor) -> bool:
    return x.is_cuda or (x.is_meta and is_recorded())


def _synchronised_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _shapes(value: Any) -> Hashable:
    """The key of a launch: shapes and dtypes of tensors, and plain values."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, dict):
        return tuple((name, _shapes(item)) for name, item in value.items())
    if isinstance(value, tuple | list):
        return tuple(_shapes(item) for item in value)
    return str(value if isinstance(value, int | float | str | torch.dtype | slice) else type(value))


def _tensors(value: Any) -> tuple[Tensor, ...]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, (tuple, list)):
        return tuple(tensor for item in value for tensor in _tensors(item))
    return ()


def _difference(result: Tensor, expected: Tensor) -> float:
    """The largest difference divided by the largest finite value; equal infinities do not differ. Of rows in E4M3
    [B, terms, K] the sums of terms are compared, as the second makes up for what the first was rounded to; those of one
    do not differ if they were rounded to neighbours."""
    is_e4m3 = result.dtype == torch.float8_e4m3fn
    is_single = is_e4m3 and result.shape[1] == 1
    result, expected = (rows.double().sum(dim=1) if is_e4m3 else rows.double() for rows in (result, expected))
    if not expected.numel():
        return 0.0
    apart = torch.where(result == expected, 0.0, (result - expected).abs()).nan_to_num(torch.inf)
    if is_single:
        # Neighbours differ by an eighth of the smaller at most, or by 2^-9.
        step = torch.minimum(result.abs(), expected.abs()).div(8).clamp_min(2**-9)
        apart = torch.where(apart <= step, 0.0, apart)
    largest = torch.where(expected.isfinite(), expected.abs(), 0.0).max()
    return float(apart.max() / largest.clamp_min(1e-30))
