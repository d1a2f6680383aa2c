"""A function of slots, captured once for each of a few batch sizes and replayed for any batch up to the largest.

Not all sizes need be captured at once: until one is, a batch is padded to the next that is. Knows neither the function
nor what a slot is. What the function reads and writes must lie in tensors that stay where they are; the slots are its
only input.
"""

from __future__ import annotations

import bisect
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sonoro.ops.dispatch import Operation
from sonoro.runtime.ring import upload

__all__ = ["Captured", "GraphPool", "GraphSet", "Recorded", "no_garbage_collection"]

logger = logging.getLogger(__name__)

# The first run compiles and loads kernels and creates handles, the second shows that nothing of the kind is left.
_WARM_UPS = 2


@dataclass(frozen=True)
class Captured:
    """What capturing one size took, warm-up included; `error` says why that size runs eagerly, "" if it does not."""

    size: int
    seconds: float
    memory_bytes: int
    error: str


class Recorded(NamedTuple):
    """A graph: what launches it on the current stream, what it writes its results to, and its memory."""

    replay: Callable[[], None]
    outputs: Any
    memory_bytes: int


class GraphPool:
    """Private memory for graphs that never run at the same time: those of one stream."""

    def __init__(self) -> None:
        self._handle: Any = None

    def can_record(self, device: torch.device) -> bool:
        """Whether there are graphs on `device`."""
        return device.type == "cuda"

    def record(self, function: Callable[[], Any], device: torch.device) -> Recorded:
        """A graph of `function` on the current stream, which may not be the default one. Synchronises.

        Whatever `function` or the capture raises is raised; `recover` lets the next follow then.
        """
        stream = torch.cuda.current_stream(device)
        assert stream != torch.cuda.default_stream(device), "the default stream cannot be captured"
        for _ in range(_WARM_UPS):
            function()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before_bytes = torch.cuda.mem_get_info(device)[0]
        graph = torch.cuda.CUDAGraph()
        # Another thread of the process may use the device meanwhile.
        with torch.cuda.graph(graph, self.handle, stream, capture_error_mode="thread_local"):
            outputs = function()

        def replay() -> None:
            assert torch.cuda.current_stream(device) == stream
            graph.replay()

        # The first replay moves the graph to the device, which a live stream should not wait for.
        replay()
        torch.cuda.synchronize(device)
        return Recorded(replay, outputs, before_bytes - torch.cuda.mem_get_info(device)[0])

    @property
    def handle(self) -> Any:
        """What torch calls the pool."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def recover(self, device: torch.device) -> None:
        """After a failed capture: see that the next can begin.

        When CUDA itself invalidates a capture, torch's allocator can be left recording to the pool: then nothing could
        be captured into it, nor any memory be returned to the device. Such a pool is left to the graphs it has.
        """
        index = torch.cuda.current_device() if device.index is None else device.index
        with suppress(RuntimeError):  # raised if it does not record: the pool is sound
            torch._C._cuda_endAllocateToPool(index, self.handle)
            torch._C._cuda_releasePool(index, self.handle)
            self._handle = None


class GraphSet:
    """Calls `function` on batches of slots: from a graph where its size was captured, directly elsewhere.

    `function` takes slots [size] int64 on `device` and returns a tensor, a tuple of them, or None. A batch is padded
    with `scratch` to the next of `sizes` (ascending) that is not `to_come`; one longer than the largest runs directly
    at its own length, as any does if `sizes` is empty. `is_eager` pads alike and captures nothing. Sets that share a
    `pool` must run on one stream. Use it in inference mode, on the stream it was captured on.
    """

    def __init__(
        self,
        name: str,
        function: Callable[[Tensor], Any],
        sizes: Sequence[int],
        scratch: int,
        device: torch.device,
        *,
        pool: GraphPool | None = None,
        is_eager: bool = False,
    ) -> None:
        assert all(low < high for low, high in zip((0, *sizes), sizes, strict=False)), f"{name}: sizes {sizes}"
        self.name, self.sizes = name, tuple(sizes)
        self._function, self.scratch, self._device = function, scratch, torch.device(device)
        self._pool, self._serving = pool or GraphPool(), self.sizes
        self.graph_launches = 0
        """Batches replayed from a graph since the set was made."""
        self.reference_launches = 0
        """Of those from a graph, the batches whose graph has references in it, in place of kernels that failed."""
        self.eager_launches = 0
        """Batches that called the function."""
        self.captured: list[Captured] = []
        """What each size took, in order of capture."""
        self.can_capture = bool(sizes) and not is_eager and self._pool.can_record(self._device)
        """Whether `capture` captures anything."""
        self.to_come: tuple[int, ...] = ()
        """Sizes that `capture` was not asked for yet, ascending: nothing is padded to them."""
        largest = max(sizes, default=0)
        # Every graph reads the head of one vector, of which the host keeps a copy to know when it must be written.
        self._slots = torch.full((largest,), scratch, dtype=torch.int64, device=device)
        self._known = [scratch] * largest
        self._with_references: set[int] = set()
        self._graphs: dict[int, Recorded] = {}

    def count_on(self, other: GraphSet) -> None:
        """Let launches be counted from those of `other`, in whose place this comes."""
        self.graph_launches, self.reference_launches = other.graph_launches, other.reference_launches
        self.eager_launches = other.eager_launches

    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Capture those of `sizes` that are not captured yet, or all, the largest first; the rest are `to_come`.

        On the current stream, which may not be the default one, and the same each time. The largest must be among the
        first. The function runs on scratch slots alone. A size that cannot be captured warns and runs directly.
        Synchronises. Captures nothing on a CPU or if `is_eager`, and nothing is to come then.
        """
        assert torch.is_inference_mode_enabled()
        if not self.can_capture:
            return
        wanted = set(self.sizes if sizes is None else sizes)
        self._write([self.scratch] * len(self._known))
        with no_garbage_collection():
            for size in sorted(wanted.difference(one.size for one in self.captured), reverse=True):
                self.captured.append(self._capture(size))
        tried = {one.size for one in self.captured}
        assert self.sizes[-1] in tried, f"{self.name}: the largest size must be captured first"
        self._serving = tuple(size for size in self.sizes if size in tried)
        self.to_come = tuple(size for size in self.sizes if size not in tried)

    def run(self, slots: Sequence[int]) -> Any:
        """What the function returns for `slots`, padded: its first len(slots) lines are theirs. No sync.

        The result of a graph is overwritten by the next batch of that size.
        """
        assert torch.is_inference_mode_enabled()
        assert slots
        size = self.padded(len(slots))
        if size > len(self._known):
            self.eager_launches += 1
            return self._function(upload(slots, torch.int64, self._device))
        self._write([*slots, *[self.scratch] * (size - len(slots))])
        if size not in self._graphs:
            self.eager_launches += 1
            return self._function(self._slots[:size])
        self.graph_launches += 1
        self.reference_launches += size in self._with_references
        graph = self._graphs[size]
        graph.replay()
        return graph.outputs

    def padded(self, count: int) -> int:
        """The size at which `count` slots run."""
        at = bisect.bisect_left(self._serving, count)
        return count if at == len(self._serving) else self._serving[at]

    def report(self) -> Iterator[str]:
        """A line for each size that capture was tried at."""
        for captured in self.captured:
            outcome = f"eager ({captured.error})" if captured.error else "graph"
            yield (
                f"{self.name} {captured.size}: {outcome}, {captured.seconds:.2f} s, "
                f"{captured.memory_bytes / 2**20:.1f} MiB"
            )

    def _write(self, slots: list[int]) -> None:
        """Let the head of the static vector hold `slots`."""
        if self._known[: len(slots)] == slots:
            return
        self._slots[: len(slots)].copy_(upload(slots, torch.int64, self._device))
        self._known[: len(slots)] = slots

    def _capture(self, size: int) -> Captured:
        started_s, references = time.perf_counter(), Operation.references
        memory_bytes, error = 0, ""
        try:
            self._graphs[size] = graph = self._pool.record(lambda: self._function(self._slots[:size]), self._device)
            memory_bytes = graph.memory_bytes
            if Operation.references > references:
                self._with_references.add(size)
        except Exception as raised:  # whatever cannot be captured can still be called
            error = " ".join(f"{type(raised).__name__}: {raised}".split())
        if error:
            # By now nobody holds the graph.
            self._pool.recover(self._device)
            logger.warning("graphs=%s size=%d status=eager error=%s", self.name, size, error)
        return Captured(size, time.perf_counter() - started_s, memory_bytes, error)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """What dies within a capture may ask the device something that a capturing stream must not be asked.

    Collected is once, at the begin of the outermost of such blocks.
    """
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
