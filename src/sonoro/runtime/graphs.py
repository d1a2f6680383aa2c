"""CUDA graphs of a function of slots: captured once per batch size, replayed for any batch up to the largest size.

Sizes can be captured one at a time: a batch is padded to the next captured size. The slots are the function's only
input; all else that it reads and writes must be in tensors that never move. Knows neither the function nor what a slot
is."""

from __future__ import annotations

import bisect
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sonoro.ops.dispatch import Operation
from sonoro.runtime.ring import upload

logger = logging.getLogger(__name__)

# The first run compiles and loads kernels and creates handles, the second shows that nothing of the kind is left.
_WARM_UPS = 2


@dataclass(frozen=True)
class Captured:
    """The cost of capturing one size, warm-up included; `error` is why it runs eagerly, "" if it was captured."""

    size: int
    seconds: float
    memory_bytes: int
    error: str


class Recorded(NamedTuple):
    """A captured graph: `replay` launches it on the current stream and overwrites the `outputs`."""

    replay: Callable[[], None]
    outputs: Any
    memory_bytes: int


class Compiled(NamedTuple):
    """A function of slots in compiled code, for a CPU: the same results as the set's own, up to rounding, for at most
    `most` slots."""

    function: Callable[[Tensor], Any]
    most: int


class GraphPool:
    """A private memory pool for graphs that never run at the same time, such as those of one stream. Keeps them all."""

    def __init__(self) -> None:
        self._handle: Any = None
        # Keep every graph, some 2 MiB each: the graphs of a stream share a workspace of cuBLAS, which torch 2.12 and
        # 2.13 free with the first graph that is freed (pytorch#193402).
        self._graphs: list[torch.cuda.CUDAGraph] = []

    def can_record(self, device: torch.device) -> bool:
        """Whether `device` supports graphs."""
        return device.type == "cuda"

    def record(self, function: Callable[[], Any], device: torch.device) -> Recorded:
        """Capture `function` on the current stream, which must not be the default one. Synchronises.
        Raises what `function` or the capture raises; call `recover` before the next capture then."""
        stream = torch.cuda.current_stream(device)
        assert stream != torch.cuda.default_stream(device), "the default stream cannot be captured"
        for _ in range(_WARM_UPS):
            function()
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before_bytes = torch.cuda.memory_reserved(device)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread of the process may use the device meanwhile.
        with torch.cuda.graph(graph, self.handle, stream, capture_error_mode="thread_local"):
            outputs = function()

        def replay() -> None:
            assert torch.cuda.current_stream(device) == stream
            graph.replay()

        self._graphs.append(graph)
        # The first replay uploads the graph, which running requests should not wait for.
        replay()
        torch.cuda.synchronize(device)
        # What the pool has grown by: the card's free memory changes with other processes, too.
        return Recorded(replay, outputs, torch.cuda.memory_reserved(device) - before_bytes)

    @property
    def handle(self) -> Any:
        """The pool's handle in torch."""
        if self._handle is None:
            self._handle = torch.cuda.graph_pool_handle()
        return self._handle

    def recover(self, device: torch.device) -> None:
        """Make captures possible again after one has failed.
        If CUDA invalidates a capture, torch's allocator can stay in its recording state, in which nothing can be
        captured into the pool and no memory is returned to the device. The existing graphs then keep that pool, and
        later ones get a new one."""
        index = torch.cuda.current_device() if device.index is None else device.index
        with suppress(RuntimeError):  # raised if the allocator is not recording: the pool is sound
            torch._C._cuda_endAllocateToPool(index, self.handle)
            torch._C._cuda_releasePool(index, self.handle)
            self._handle = None


class GraphSet:
    """Runs `function` on batches of slots: by graph replay where the padded size was captured, by `compiled` code where
    that is given and takes the batch, else eagerly.

    `function` takes slots [size] int64 on `device` and returns a tensor, a tuple of them, or None. A batch is padded
    with `scratch` to the next of `sizes` (ascending) that is not `to_come`; one beyond the largest runs eagerly at its
    own length. `is_eager` pads alike and captures nothing. Sets that share a `pool` must run on one stream. Use it in
    inference mode, on the stream of the capture."""

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
        compiled: Compiled | None = None,
    ) -> None:
        assert all(low < high for low, high in zip((0, *sizes), sizes, strict=False)), f"{name}: sizes {sizes}"
        self.name, self.sizes = name, tuple(sizes)
        self._function, self.scratch, self._device = function, scratch, torch.device(device)
        self._pool, self._serving = pool or GraphPool(), self.sizes
        self._compiled = None if is_eager else compiled
        self.graph_launches = 0
        """Batches replayed from a graph since the set was made."""
        self.reference_launches = 0
        """Those of `graph_launches` whose graph holds a torch reference in place of a kernel that failed."""
        self.compiled_launches = 0
        """Batches that ran in compiled code."""
        self.eager_launches = 0
        """Batches that ran eagerly."""
        self.captured: list[Captured] = []
        """The sizes that were tried, in order of capture."""
        self.can_capture = bool(sizes) and not is_eager and self._pool.can_record(self._device)
        """Whether `capture` captures anything."""
        self.to_come = self.sizes if self.can_capture else ()
        """Sizes that were not tried yet, ascending: once one was, no batch is padded to them."""
        largest = max(sizes, default=0)
        # Every graph reads the head of one vector; `_known` is the host's copy, which avoids needless uploads.
        self._slots = torch.full((largest,), scratch, dtype=torch.int64, device=device)
        self._known = [scratch] * largest
        self._with_references: set[int] = set()
        self._graphs: dict[int, Recorded] = {}

    def count_on(self, other: GraphSet) -> None:
        """Continue the launch counts of `other`, which this set replaces."""
        self.graph_launches, self.reference_launches = other.graph_launches, other.reference_launches
        self.compiled_launches, self.eager_launches = other.compiled_launches, other.eager_launches

    def capture(self, sizes: Sequence[int] | None = None) -> None:
        """Capture `sizes` (default: all) that were not tried yet, the largest first; the rest are `to_come`.
        Uses the current stream: never the default one, and the same at each call. The first call must include the
        largest size. The function runs on scratch slots only. A size whose capture fails logs a warning and runs
        eagerly. Synchronises. Does nothing on a CPU or if `is_eager`."""
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
        """The function's result for `slots` padded to a size; the first len(slots) rows are theirs. No sync.
        The next batch of the same size overwrites the result of a graph."""
        assert torch.is_inference_mode_enabled()
        assert slots
        size = self.padded(len(slots))
        if size > len(self._known):
            return self._run_uncaptured(upload(slots, torch.int64, self._device))
        self._write([*slots, *[self.scratch] * (size - len(slots))])
        if size not in self._graphs:
            return self._run_uncaptured(self._slots[:size])
        self.graph_launches += 1
        self.reference_launches += size in self._with_references
        graph = self._graphs[size]
        graph.replay()
        return graph.outputs

    def _run_uncaptured(self, slots: Tensor) -> Any:
        if self._compiled is not None and slots.shape[0] <= self._compiled.most:
            self.compiled_launches += 1
            return self._compiled.function(slots)
        self.eager_launches += 1
        return self._function(slots)

    @property
    def is_captured(self) -> bool:
        """Whether any batch that fits is replayed from a graph."""
        return bool(self._graphs) and self.sizes[-1] in self._graphs

    def padded(self, count: int) -> int:
        """The size at which `count` slots run."""
        at = bisect.bisect_left(self._serving, count)
        return count if at == len(self._serving) else self._serving[at]

    def report(self) -> Iterator[str]:
        """A line of text for each size that was tried."""
        for captured in self.captured:
            outcome = f"eager ({captured.error})" if captured.error else "graph"
            yield (
                f"{self.name} {captured.size}: {outcome}, {captured.seconds:.2f} s, "
                f"{captured.memory_bytes / 2**20:.1f} MiB"
            )

    def _write(self, slots: list[int]) -> None:
        """Write `slots` to the head of the static vector, unless it holds them already."""
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
        except Exception as raised:  # a function that cannot be captured still runs eagerly
            error = " ".join(f"{type(raised).__name__}: {raised}".split())
        if error:
            # Recover outside the handler: inside, the exception's traceback holds the graph.
            self._pool.recover(self._device)
            logger.warning("graphs=%s size=%d status=eager error=%s", self.name, size, error)
        return Captured(size, time.perf_counter() - started_s, memory_bytes, error)


class Steps:
    """Decode steps: `frames`, and, by number of prompt tokens, the set that also prefills them for large batches.
    `packed` has the vector of staged tokens that its graphs read, padded with `padding`. `is_eager` captures nothing.

    One pass over the weights serves both. Smaller batches would need many graphs, one for each pair of sizes."""

    def __init__(
        self, frames: GraphSet, packed: Mapping[int, tuple[Tensor, GraphSet]], padding: int, *, is_eager: bool
    ) -> None:
        self._frames, self._packed, self._padding, self._is_eager = frames, packed, padding, is_eager

    @property
    def packed_sets(self) -> list[GraphSet]:
        """The sets with prompts, the smallest first."""
        return [graphs for _, graphs in self._packed.values()]

    def take(self, batch: int, tokens: int) -> bool:
        """Whether `of` has a set for so many slots and prompt tokens at once."""
        size = self._size(tokens)
        if size is None:
            return False
        graphs = self._packed[size][1]
        return self._frames.padded(batch) >= graphs.sizes[0] and (self._is_eager or graphs.is_captured)

    def of(self, tokens: int) -> GraphSet:
        """The set to run: one that also prefills the first `tokens` staged tokens, if there are any. No sync."""
        if not tokens:
            return self._frames
        size = self._size(tokens)
        assert size is not None
        vector, graphs = self._packed[size]
        padded = [*range(tokens), *[self._padding] * (size - tokens)]
        vector.copy_(upload(padded, torch.int64, vector.device))
        return graphs

    def _size(self, tokens: int) -> int | None:
        return next((size for size in self._packed if size >= tokens), None)


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage once, then disable collection in the block; nested blocks do nothing.
    A finaliser that runs within a capture may make a CUDA call that invalidates it."""
    if not gc.isenabled():
        yield
        return
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
