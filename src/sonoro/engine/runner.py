"""Executes the scheduler's plans on the device: prefill, decode step, codec, and the copies back to pinned memory.

Owns the per-slot device state and the graphs that advance it. Depends on the protocols of `models.base` and on no
model. Everything is launched in order on one stream, but for a codec with a stream of its own. No sync except in
`Launched.entry.wait`, captures and `watch`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sonoro.core.config import EngineConfig
from sonoro.core.errors import border
from sonoro.engine.decoding import Decoding
from sonoro.engine.device_state import allocate_device_state
from sonoro.engine.pages import NewPages
from sonoro.engine.phases import Phases
from sonoro.engine.request import Allocation, Request
from sonoro.engine.scheduler import LateText, Plan
from sonoro.models.base import LiveTextModel, Pages, SlotState, SpeechModel, TextPromptModel
from sonoro.models.words import ShowsWords
from sonoro.runtime.graphs import GraphPool, GraphSet, no_garbage_collection
from sonoro.runtime.kernels import shared_limit
from sonoro.runtime.ring import Entry, PinnedRing, upload

logger = logging.getLogger(__name__)

_IN_FLIGHT = 2
"""Ticks in flight at once: the one being launched and the one before."""

_ALIGNMENT_BYTES = 64


class BatchItem(NamedTuple):
    """A request in the batch of one launch. The results are valid while it still holds that allocation."""

    request: Request
    allocation: Allocation

    @property
    def is_current(self) -> bool:
        return self.request.allocation is self.allocation


@dataclass(frozen=True)
class Decoded:
    """The results of one codec launch: `frames` frames of each of `items`.

    In pinned memory: `pcm` [B, frames * hop] int16; `broken` [B] int64, the count of non-finite samples, which are
    silenced in `pcm`; `made` [B, frames, ...], the decoded frames, if a request keeps them.
    """

    items: list[BatchItem]
    frames: int
    pcm: npt.NDArray[np.int16]
    broken: npt.NDArray[np.int64]
    made: npt.NDArray[Any] | None

    def pcm_of(self, at: int, frames: int) -> bytes:
        """The first `frames` frames at batch index `at` as PCM16 little-endian."""
        samples = self.pcm.shape[1] // self.frames * frames
        return self.pcm[at, :samples].astype("<i2", copy=False).tobytes()

    def frames_of(self, at: int, frames: int) -> npt.NDArray[Any]:
        """A copy of the first `frames` frames at batch index `at`, [frames, ...]."""
        assert self.made is not None
        return self.made[at, :frames].copy()


@dataclass
class Launched:
    """The results of one tick, valid after `entry.wait`. `failed` maps requests whose launch raised to the error.

    `was_idle`: the device had finished the tick before when this one was launched. For the requests `stepped`, in batch
    order: `length` [B] frames so far, `done` [B], and, if one of them asks for words, `attention` [B, H, W] of the
    watched heads to the first W text positions.
    """

    entry: Entry
    was_idle: bool = True
    failed: dict[Request, Exception] = field(default_factory=dict)
    stepped: list[BatchItem] = field(default_factory=list)
    length: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    done: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))
    attention: npt.NDArray[np.float32] | None = None
    decoded: list[Decoded] = field(default_factory=list)

    def border(self, items: Sequence[BatchItem]) -> AbstractContextManager[None]:
        """A context in which an exception fails the requests of `items` alone."""
        return border(lambda error: self.failed.update({request: error for request, _ in items}))

    def items(self, batch: Sequence[Request]) -> list[BatchItem]:
        """Batch items for the requests of `batch` that have not failed in this tick."""
        return [
            BatchItem(request, request.allocation)
            for request in batch
            if request.allocation is not None and request not in self.failed
        ]


class Runner:
    """A model's device state and the graphs that advance it. Ready once constructed.

    Construction captures all sizes or, if `config.is_ready_early`, some of each kind including the largest;
    `capture_next` captures the others. The attribute `config` is resolved, with the batch sizes to pad to. `phases`
    receives the durations. Raises `ConfigError` naming the field if the model does not fit the device.
    """

    def __init__(self, model: SpeechModel, config: EngineConfig, phases: Phases | None = None) -> None:
        self._model, phases = model, phases or Phases()
        shared_limit(config.max_shared_bytes)
        with torch.inference_mode():
            self._state = allocate_device_state(model, config.resolve())
        self.device = self._state.device
        phases.end("state")
        self.pages, self.cached_pages = self._state.pages, self._state.cached_pages
        self.config = _with_sizes(config, self.device)
        # Graphs cannot be captured on the default stream, and this one must wait for the weights loaded there.
        # It has priority over all other work of the process on the device.
        self._stream = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        self._ended: torch.cuda.Event | None = None
        self._pool = pool = GraphPool()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._decoding = Decoding(model.codec, self._state.codec, self.config, pool, self._stream)
        self._frames: GraphSet
        with self.active():
            self._make_graphs(self.config, pool)
            self._check_kernels(self._state.state, self._first_sizes(self._frames))
            phases.end("checks")
            self._capture_first()
            phases.end("graphs")
        self._max_batch = max(self.config.codec_batches, default=config.slots)
        for line in self.report.splitlines():
            logger.info("event=allocated what=%r", line)
        self.ring = self._make_ring()

    @property
    def codec_device(self) -> torch.device:
        """The device of the codec."""
        return self._decoding.device

    @property
    def streams(self) -> list[torch.cuda.Stream]:
        """The CUDA streams in use: the codec's own, if it has one, then the model's; none on a CPU."""
        streams = self._decoding.stream if self._decoding.has_own_stream else None, self._stream
        return [stream for stream in streams if stream is not None]

    @property
    def ticks_late(self) -> int:
        """Launches between a tick and the collection of its results: 1 on a GPU, which hides the wait; 0 on a CPU."""
        return 0 if self._stream is None else _IN_FLIGHT - 1

    @property
    def launches(self) -> dict[str, dict[str, int]]:
        """Launches so far by kind: of a graph of kernels alone, of one that holds a torch reference, or eager."""
        return {
            kind: {
                "graph": sum(graphs.graph_launches - graphs.reference_launches for graphs in sets),
                "reference_graph": sum(graphs.reference_launches for graphs in sets),
                "eager": sum(graphs.eager_launches for graphs in sets),
            }
            for kind, sets in self._kinds.items()
        }

    @property
    def report(self) -> str:
        """Lines of text: memory by part, and the seconds and MiB of each captured size."""
        lines = [line for sets in self._kinds.values() for graphs in sets for line in graphs.report()]
        return "\n".join([*self._state.report, *lines])

    @property
    def graph_memory_mib(self) -> float:
        """Device memory of all captured graphs."""
        captured = [size for sets in self._kinds.values() for graphs in sets for size in graphs.captured]
        return sum(size.memory_bytes for size in captured) / 2**20

    @property
    def _kinds(self) -> dict[str, list[GraphSet]]:
        prefills = [self._prefills, *([self._text_prefills] if self._text_prefills else [])]
        kinds = {"admit": [self._admits], "prefill": prefills, "frame": [self._frames]}
        return {**kinds, **self._decoding.sets}

    @property
    def _sets(self) -> list[GraphSet]:
        """All graph sets in the order of capture: those that take the most memory first."""
        decoding = [graphs for sets in self._decoding.sets.values() for graphs in reversed(sets)]
        return [*decoding, self._admits, *self._kinds["prefill"], self._frames]

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context with inference mode and this runner's streams; the model must be called in it."""
        with torch.inference_mode(), self._decoding.active(), torch.cuda.stream(self._stream):
            yield

    def warm_up(self) -> None:
        """Run every size of every kind once on the scratch slot, so that all kernels are compiled and loaded."""
        with self.active():
            for graphs in self._sets:
                with self._beside(graphs):
                    for size in graphs.sizes:
                        graphs.run([graphs.scratch] * size)

    @property
    def to_come(self) -> int:
        """How many sizes are not captured yet; batches are padded to a larger one until they are."""
        return sum(len(graphs.to_come) for graphs in self._sets)

    def capture_next(self) -> None:
        """Capture one of the sizes `to_come`: prefills first, then the smallest. Synchronises.

        Takes some hundred milliseconds: call it only while no request runs.
        """
        waiting, prompts = [graphs for graphs in self._sets if graphs.to_come], self._kinds["prefill"]
        graphs = min(waiting, key=lambda graphs: (graphs not in prompts, graphs.to_come[0]))
        with self.active():
            if graphs is self._frames:
                self._check_kernels(self._state.state, graphs.to_come[:1])
            self._capture(graphs, graphs.to_come[:1])

    def watch(self) -> None:
        """Watch the model's `word_heads` from now on. The model had none before, and no slot may be in use.

        Recaptures the frame graphs: two sizes now, the others are `to_come`. Synchronises.
        """
        assert isinstance(self._model, ShowsWords)
        with self.active():
            state = self._model.watching(self._state.state)
            frames = self._make_frames(state)
            first = sorted({*frames.sizes[:1], *frames.sizes[-1:]})
            self._check_kernels(state, first)
            frames.capture(first)
        frames.count_on(self._frames)
        self._state = dataclasses.replace(self._state, state=state)
        self._frames = frames
        self.ring = self._make_ring()

    def run(self, plan: Plan) -> Launched:
        """Launch `plan` and the copies of its results. An exception fails only the requests of that launch.

        Call it while `active`. No sync.
        """
        launched = Launched(self.ring.acquire())
        with ExitStack() as stack:
            stack.callback(launched.entry.release)
            self._give_pages(plan.pages)
            self._prefill(plan.admit, launched)
            self._append(plan.text, launched)
            self._step(plan.frame, launched)
            for frames, batch in plan.codec.items():
                for start in range(0, len(batch), self._max_batch):
                    self._decode(batch[start : start + self._max_batch], frames, launched)
            self._decoding.lead(len(launched.stepped))
            launched.was_idle, self._ended = self._ended is None or self._ended.query(), None
            if self._stream is not None:
                self._ended = self._stream.record_event()
            stack.pop_all()
        launched.entry.close()
        return launched

    def reset(self, slots: Sequence[int]) -> None:
        """Reset `slots`, in stream order after all that was launched for them."""
        with self.active():
            self._model.reset(self._state.state, slots)

    def join(self, chunks: Sequence[npt.NDArray[Any]]) -> Tensor:
        """Concatenate the frames of a segment's chunks into [T, ...], on the CPU."""
        frames = self._state.state.frames
        empty = torch.empty((0, *frames.shape[2:]), dtype=frames.dtype)
        return torch.cat([empty, *map(torch.from_numpy, chunks)])

    def _prefill(self, batch: Sequence[Request], launched: Launched) -> None:
        """Prefill the slots of `batch`. If a launch of several raises, each is tried alone, so only the faulty fail."""
        if not batch:
            return

        def fail(error: Exception) -> None:
            if len(batch) == 1:
                launched.failed[batch[0]] = error
                return
            for request in batch:
                self._prefill([request], launched)

        items = launched.items(batch)
        slots, prompts = _slots(items), [request.progress.prompt for request, _ in items]
        voices = [prompt.voice or request.voice for prompt, (request, _) in zip(prompts, items, strict=True) if prompt]
        with border(fail):
            pages = [Pages(allocation.pages, allocation.cached) for _, allocation in items]
            tokens = self._model.stage(self._state.state, prompts, slots, pages)
            self._admits.run(slots)
            if tokens:
                self._prefills_of(prompts, pages).run(range(tokens))
            with self._decoding.active():
                if self._decoding.has_own_stream:
                    self._decoding.admits.run(slots)
                self._decoding.prime(slots, voices)

    def _prefills_of(self, prompts: Sequence[Any], pages: Sequence[Pages]) -> GraphSet:
        """The graph set for `prompts`, some of whose tokens may be cached on `pages` already."""
        if self._text_prefills is None:
            return self._prefills
        assert isinstance(self._model, TextPromptModel)
        return self._text_prefills if self._model.is_text_alone(prompts, pages) else self._prefills

    def _give_pages(self, grown: Sequence[NewPages]) -> None:
        """Write newly acquired pages into the page tables of their slots."""
        entries = [
            (request.allocation.slot, start + at, number)
            for request, start, numbers in grown
            if request.allocation is not None
            for at, number in enumerate(numbers)
        ]
        if entries:
            slots, indices, numbers = upload(entries, torch.int64, self.device).unbind(1)
            table = self._state.state.page_table
            table.index_put_((slots, indices), numbers.to(table.dtype))

    def _append(self, text: Sequence[LateText], launched: Launched) -> None:
        """Append late live text to its slots, except for requests that failed in this tick."""
        late = {request: (start, ids) for request, start, ids in text}
        items = launched.items([*late])
        if not items:
            return
        starts, ids = zip(*(late[request] for request, _ in items), strict=True)
        with launched.border(items):
            assert isinstance(self._model, LiveTextModel)
            self._model.append_text(self._state.state, _slots(items), starts, ids)

    def _step(self, batch: Sequence[Request], launched: Launched) -> None:
        """Launch the frame graph for `batch`, and the copies of its results."""
        items = launched.items(batch)
        if not items:
            return
        with launched.border(items):
            length, done, attention, *newest = self._frames.run(_slots(items))
            self._decoding.follow()
            if self._decoding.is_apart:
                self._decoding.send(length, *newest)
                with self._decoding.active():
                    self._decoding.receives.run(_slots(items))
            launched.stepped = items
        if not launched.stepped:
            return
        launched.length = launched.entry.copy(length[: len(items)])
        launched.done = launched.entry.copy(done[: len(items)])
        columns = max((request.words.columns for request, _ in items if request.words is not None), default=0)
        if attention is not None and columns:
            launched.attention = launched.entry.copy(attention[: len(items), :, :columns])

    def _decode(self, batch: Sequence[Request], frames: int, launched: Launched) -> None:
        """Launch the codec graph for the next `frames` frames of each of `batch`, and the copies of its results."""
        items = launched.items(batch)
        if not items:
            return
        results: tuple[Tensor, ...] = ()
        with self._decoding.active():
            with launched.border(items):
                results = self._decoding.decodes[frames].run(_slots(items))
            if not results:
                return
            pcm, made, broken = results
            is_kept = any(request.keeps_frames for request, _ in items)
            heard, *counted = (launched.entry.copy(part[: len(items)]) for part in (pcm, broken, *[made] * is_kept))
        launched.decoded.append(Decoded(items, frames, heard, counted[0], counted[1] if is_kept else None))

    def _make_graphs(self, config: EngineConfig, pool: GraphPool) -> None:
        """Make the graph sets with the sizes of `config`. All run on one stream, so they share `pool`."""
        model, state, scratch, decoding = self._model, self._state.state, self._state.scratch, self._decoding
        device, is_eager = self.device, config.is_eager

        def admit(slots: Tensor) -> None:
            model.admit(state, slots)
            if not decoding.has_own_stream:
                decoding.clear(slots)

        def prefill(tokens: Tensor) -> None:
            model.prefill(state, tokens)

        def graphs(name: str, function: Callable[[Tensor], Any], sizes: Sequence[int], scratch: int) -> GraphSet:
            return GraphSet(name, function, sizes, scratch, device, pool=pool, is_eager=is_eager)

        self._admits = graphs("admit", admit, config.frame_batches, scratch)
        self._prefills = graphs("prefill", prefill, config.prefill_buckets, config.prefill_tokens)
        self._text_prefills = None
        if isinstance(model, TextPromptModel):
            text = functools.partial(model.prefill_text, state)
            self._text_prefills = graphs("prefill text", text, config.prefill_buckets, config.prefill_tokens)
        self._frames = self._make_frames(state)

    def _make_frames(self, state: SlotState) -> GraphSet:
        """The graph set of a decode step on `state`."""
        model, decoding, config = self._model, self._decoding, self.config
        watched = model.attention(state) if isinstance(model, ShowsWords) else None

        def frame(slots: Tensor) -> tuple[Tensor | None, ...]:
            model.frame(state, slots)
            length, done = state.length[slots], state.done[slots]
            attention = None if watched is None else watched[slots]
            return length, done, attention, *decoding.newest(state.frames, slots, length)

        sizes, scratch = config.frame_batches, self._state.scratch
        return GraphSet("frame", frame, sizes, scratch, self.device, pool=self._pool, is_eager=config.is_eager)

    def _make_ring(self) -> PinnedRing:
        devices, beside = {self.device, self._decoding.device}, self._decoding.beside
        return PinnedRing(_IN_FLIGHT, self._entry_bytes(self.config), *devices, beside=beside)

    def _first_sizes(self, graphs: GraphSet) -> Sequence[int]:
        """The sizes of `graphs` to capture at start: all of them, or, if `config.is_ready_early`, the largest, to which
        any batch can be padded, and the smallest (not of longer codec chunks)."""
        if not (graphs.can_capture and self.config.is_ready_early):
            return graphs.sizes
        if graphs in self._kinds["prefill"]:
            return self.config.first_sizes.prefill_buckets
        is_longer = graphs in self._decoding.sets["codec"][1:]
        return graphs.sizes[-1:] if is_longer else sorted({graphs.sizes[0], graphs.sizes[-1]})

    def _capture_first(self) -> None:
        """Capture the first sizes of every kind. Call it while `active`."""
        is_captured = any(graphs.can_capture for graphs in self._sets)
        with no_garbage_collection() if is_captured else nullcontext():
            for graphs in self._sets:
                self._capture(graphs, self._first_sizes(graphs))
        if not self._frames.can_capture:
            return
        # Longer prompts run eagerly. Load their kernels now: running streams would wait 400 ms for it later.
        prefills = [functools.partial(self._model.prefill, self._state.state)]
        if isinstance(self._model, TextPromptModel):
            prefills.append(functools.partial(self._model.prefill_text, self._state.state))
        for length in self.config.long_prefills:
            for run in prefills:
                run(torch.full((length,), self.config.prefill_tokens, device=self.device))
        # These were the largest activations; do not keep their memory.
        torch.cuda.empty_cache()

    def _check_kernels(self, state: SlotState, sizes: Sequence[int]) -> None:
        for size in sizes:
            self._model.check_kernels(state, size)

    def _capture(self, graphs: GraphSet, sizes: Sequence[int]) -> None:
        with self._beside(graphs):
            graphs.capture(sizes)

    def _beside(self, graphs: GraphSet) -> AbstractContextManager[None]:
        """The stream context of one of the `_sets`."""
        is_of_codec = any(graphs in sets for sets in self._decoding.sets.values())
        return self._decoding.active() if is_of_codec else nullcontext()

    def _entry_bytes(self, config: EngineConfig) -> int:
        """Bytes of a ring entry for a tick in which every slot is stepped and decodes the longest chunk."""
        state, slots, frames = self._state.state, config.slots, config.chunk_frames[-1]
        made_bytes = state.frames[0, 0].nbytes * frames
        request_bytes = (
            2 * state.length.itemsize + state.done.itemsize + frames * self._model.codec.hop * 2 + made_bytes
        )
        watched = self._model.attention(state) if isinstance(self._model, ShowsWords) else None
        request_bytes += 0 if watched is None else watched[0].nbytes
        launches = len(config.chunk_frames) + -(-slots // self._max_batch)
        return slots * request_bytes + 2 * (launches + 2) * _ALIGNMENT_BYTES


def _with_sizes(config: EngineConfig, device: torch.device) -> EngineConfig:
    """`config` resolved. Without a GPU, where nothing is captured, it keeps only the sizes that were set explicitly."""
    resolved = config.resolve()
    if device.type == "cuda":
        return resolved
    return dataclasses.replace(
        resolved,
        frame_batches=config.frame_batches,
        prefill_buckets=config.prefill_buckets,
        codec_batches=config.codec_batches,
    )


def _slots(items: Sequence[BatchItem]) -> list[int]:
    return [allocation.slot for _, allocation in items]
