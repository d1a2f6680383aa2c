"""Executes the scheduler's plans on the device: prefill, decode step, codec, and the copies back to pinned memory.

Owns the per-slot device state and the graphs that advance it. Depends on the protocols of `models.base` and on no
model. Everything is launched in order on one stream, but for a codec with a stream of its own. No sync except in
waits of `Launched.entry`, captures and `watch`."""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
from sonoro.engine.graph_sets import GraphSets
from sonoro.engine.pages import NewPages
from sonoro.engine.request import Allocation, Request
from sonoro.engine.scheduler import LateText, Plan
from sonoro.models.base import LiveTextModel, Pages, SpeechModel, TextPromptModel, WatchedModel
from sonoro.runtime.graphs import GraphPool, GraphSet
from sonoro.runtime.kernels import shared_limit
from sonoro.runtime.phases import Phases
from sonoro.runtime.ring import Entry, PinnedRing, upload

logger = logging.getLogger(__name__)

_IN_FLIGHT = 3
"""Ticks in flight at once: the one being launched, the one before, and one whose audio is still to come."""

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
    silenced in `pcm`; `kept` [B, frames, ...], the decoded frames, if a request keeps them."""

    items: list[BatchItem]
    frames: int
    pcm: npt.NDArray[np.int16]
    broken: npt.NDArray[np.int64]
    kept: npt.NDArray[Any] | None

    def pcm_of(self, at: int, frames: int) -> bytes:
        """The first `frames` frames at batch index `at` as PCM16 little-endian."""
        samples = self.pcm.shape[1] // self.frames * frames
        return self.pcm[at, :samples].astype("<i2", copy=False).tobytes()

    def frames_of(self, at: int, frames: int) -> npt.NDArray[Any]:
        """A copy of the first `frames` frames at batch index `at`, [frames, ...]."""
        assert self.kept is not None
        return self.kept[at, :frames].copy()


@dataclass
class Launched:
    """The results of one tick, valid after `entry.wait`. `failed` maps requests whose launch raised to the error.
    `was_idle`: the device had finished the tick before when this one was launched. For the requests `stepped`, in batch
    order: `length` [B] frames so far, `done` [B], and, if one of them asks for words, `attention` [B, H, W] of the
    watched heads to the first W text positions, valid after `entry.wait_until_split`. `has_lengths`: they were taken.
    """

    entry: Entry
    was_idle: bool = True
    has_lengths: bool = False
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
    """A model's device state and the `graphs` that advance it. Ready once constructed.
    Construction captures all sizes or, if `config.is_ready_early`, some of each kind including the largest;
    `graphs.capture_next` captures the others. The attribute `config` is resolved, with the batch sizes to pad to.
    `phases` receives the durations. Raises `ConfigError` naming the field if the model does not fit the device."""

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
        pool = GraphPool()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._decoding = Decoding(model.codec, self._state.codec, self.config, pool, self._stream)
        with self.active():
            self.graphs = GraphSets(model, self._state, self._decoding, self.config, pool)
            self.graphs.capture_first(phases)
        self._max_batch = max(self.config.codec_batches, default=config.slots)
        for line in self.graphs.report.splitlines():
            logger.info("event=allocated what=%r", line)
        self.ring = self._make_ring()

    @property
    def codec_device(self) -> torch.device:
        """The device of the codec."""
        return self._decoding.device

    @property
    def streams(self) -> list[torch.cuda.Stream]:
        """The CUDA streams in use: the codec's own, if it has one, then the model's; none on a CPU."""
        return [stream for stream in (self._decoding.own_stream, self._stream) if stream is not None]

    @property
    def ticks_late(self) -> int:
        """Launches between a tick and the collection of its lengths: 1 on a GPU, which hides the wait; 0 on a CPU."""
        return 0 if self._stream is None else 1

    @contextmanager
    def active(self) -> Iterator[None]:
        """A context with inference mode and this runner's streams; the model must be called in it."""
        with torch.inference_mode(), torch.cuda.stream(self._decoding.own_stream), torch.cuda.stream(self._stream):
            yield

    def watch(self) -> None:
        """Watch the model's `word_heads` from now on. The model had none before, and no slot may be in use.
        Recaptures the frame graphs: two sizes now, the others are `to_come`. Synchronises."""
        assert isinstance(self._model, WatchedModel)
        with self.active():
            state = self._model.watching(self._state.state)
            self.graphs.watch(state)
        self._state = dataclasses.replace(self._state, state=state)
        self.ring = self._make_ring()

    def run(self, plan: Plan) -> Launched:
        """Launch `plan` and the copies of its results. An exception fails only the requests of that launch.
        Call it while `active`. No sync."""
        launched = Launched(self.ring.acquire())
        with ExitStack() as stack:
            stack.callback(launched.entry.release)
            self._give_pages(plan.pages)
            tokens = self._prefill(plan.admit, launched, len(plan.frame))
            self._append(plan.text, launched)
            self._step(plan.frame, launched, tokens)
            for frames, batch in plan.codec.items():
                for start in range(0, len(batch), self._max_batch):
                    self._decode(batch[start : start + self._max_batch], frames, launched)
            if self._decoding.beside is not None:
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

    def _prefill(self, batch: Sequence[Request], launched: Launched, stepped: int = 0) -> int:
        """Prefill the slots of `batch`, or leave that to a step of `stepped` slots: returns the number of tokens left.
        If a launch of several raises, each is tried alone, so only the faulty fail."""
        if not batch:
            return 0

        def fail(error: Exception) -> None:
            if len(batch) == 1:
                launched.failed[batch[0]] = error
                return
            for request in batch:
                self._prefill([request], launched)

        items = launched.items(batch)
        slots, prompts = _slots(items), [request.progress.prompt for request, _ in items]
        progress = [request.progress for request, _ in items]
        voices = [one.prompt.voice or one.voice for one in progress if one.prompt is not None]
        primed = [
            (slot, voice)
            for slot, voice in zip(slots, voices, strict=True)
            if voice is not None and voice.reference_frames is not None
        ]
        with border(fail):
            pages = [Pages(allocation.pages, allocation.cached) for _, allocation in items]
            tokens = self._model.stage(self._state.state, prompts, slots, pages)
            self.graphs.admits.run(slots)
            prefills = self._prefills_of(prompts, pages)
            has_more = prefills is not self.graphs.text_prefills and self.graphs.text_prefills is not None
            is_left = stepped > 0 and not has_more and self.graphs.steps.take(stepped, tokens)
            if tokens and not is_left:
                prefills.run(range(tokens))
            with torch.cuda.stream(self._decoding.own_stream):
                if self._decoding.has_own_stream:
                    self._decoding.admits.run(slots)
                if primed:
                    self._decoding.prime(primed)
            return tokens if is_left else 0
        return 0

    def _prefills_of(self, prompts: Sequence[Any], pages: Sequence[Pages]) -> GraphSet:
        """The graph set for `prompts`, some of whose tokens may be cached on `pages` already."""
        graphs = self.graphs
        if graphs.text_prefills is None:
            return graphs.prefills
        assert isinstance(self._model, TextPromptModel)
        return graphs.text_prefills if self._model.is_text_alone(prompts, pages) else graphs.prefills

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

    def _step(self, batch: Sequence[Request], launched: Launched, tokens: int) -> None:
        """Launch the frame graph for `batch`, with the prefill of `tokens` staged tokens, and the copies of its
        results."""
        items = launched.items(batch)
        if not items:
            return
        with launched.border(items):
            length, done, attention, *newest = self.graphs.steps.of(tokens).run(_slots(items))
            if self._decoding.beside is not None:
                self._decoding.follow()
            if self._decoding.is_apart:
                self._decoding.send(length, *newest)
                with torch.cuda.stream(self._decoding.own_stream):
                    self._decoding.receives.run(_slots(items))
            launched.stepped = items
        if not launched.stepped:
            return
        launched.length = launched.entry.copy(length[: len(items)])
        launched.done = launched.entry.copy(done[: len(items)])
        columns = max((request.words.columns for request, _ in items if request.words is not None), default=0)
        if attention is not None and columns:
            launched.attention = launched.entry.copy(attention[: len(items), :, :columns])
        launched.entry.split()

    def _decode(self, batch: Sequence[Request], frames: int, launched: Launched) -> None:
        """Launch the codec graph for the next `frames` frames of each of `batch`, and the copies of its results."""
        items = launched.items(batch)
        if not items:
            return
        results: tuple[Tensor, ...] = ()
        with torch.cuda.stream(self._decoding.own_stream):
            with launched.border(items):
                results = self._decoding.decodes[frames].run(_slots(items))
            if not results:
                return
            pcm, decoded, broken = (result[: len(items)] for result in results)
            copy, keeps_frames = launched.entry.copy, any(request.keeps_frames for request, _ in items)
            launched.decoded.append(
                Decoded(items, frames, copy(pcm), copy(broken), copy(decoded) if keeps_frames else None)
            )

    def _make_ring(self) -> PinnedRing:
        devices, beside = {self.device, self._decoding.device}, self._decoding.beside
        return PinnedRing(_IN_FLIGHT, self._entry_bytes(), *devices, beside=[] if beside is None else [beside])

    def _entry_bytes(self) -> int:
        """Bytes of a ring entry for a tick in which every slot is stepped and decodes the longest chunk."""
        state, slots, chunk_frames = self._state.state, self.config.slots, self.config.chunk_frames
        counts_bytes = 2 * state.length.itemsize + state.done.itemsize
        chunk_bytes = chunk_frames[-1] * (2 * self._model.codec.hop + state.frames[0, 0].nbytes)
        watched = self._model.attention(state) if isinstance(self._model, WatchedModel) else None
        attention_bytes = 0 if watched is None else watched[0].nbytes
        launches = len(chunk_frames) + -(-slots // self._max_batch)
        return slots * (counts_bytes + chunk_bytes + attention_bytes) + 2 * (launches + 2) * _ALIGNMENT_BYTES


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
