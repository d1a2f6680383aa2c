"""Plans carried out on the device: prefill, one frame, audio, and the copies that bring the results back.

Owns all rows by slot, and the graphs that advance them. Knows the protocols of `models.base` and no model. All work
goes to one stream, or one on each of two devices, in the order it is launched; nothing here waits for it but
`Launched.entry.wait`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sonoro.core.config import EngineConfig
from sonoro.engine.decoding import Decoding
from sonoro.engine.request import Place, RunningRequest
from sonoro.engine.rows import allocate_rows
from sonoro.engine.scheduler import Plan
from sonoro.models.base import Pages, SpeechModel
from sonoro.runtime.graphs import GraphPool, GraphSet
from sonoro.runtime.ring import Entry, PinnedRing

__all__ = ["Decoded", "Launched", "Runner", "Turn"]

logger = logging.getLogger(__name__)

_IN_FLIGHT = 2
"""Ticks whose results are under way at once: the one being launched and the one before."""

_ALIGNMENT_BYTES = 64


class Turn(NamedTuple):
    """A row's part in a launch: the results are its own while it still holds that very place."""

    row: RunningRequest
    place: Place

    @property
    def is_current(self) -> bool:
        return self.row.place is self.place


@dataclass(frozen=True)
class Decoded:
    """What one codec launch made of `frames` frames for each of `turns`.

    In pinned memory: `pcm` [B, frames * hop] int16 and, if anybody needs them, `made` [B, frames, ...] of what.
    """

    turns: list[Turn]
    frames: int
    pcm: npt.NDArray[np.int16]
    made: npt.NDArray[Any] | None

    def pcm_of(self, at: int, frames: int) -> bytes:
        """The first `frames` frames of row `at` as PCM16 little-endian."""
        samples = self.pcm.shape[1] // self.frames * frames
        return self.pcm[at, :samples].astype("<i2", copy=False).tobytes()

    def frames_of(self, at: int, frames: int) -> npt.NDArray[Any]:
        """A copy of the first `frames` frames of row `at`, [frames, ...]."""
        assert self.made is not None
        return self.made[at, :frames].copy()


@dataclass
class Launched:
    """The results of one tick, valid once `entry` has arrived; `failed` holds the rows whose launch raised, and what.

    Of the rows `stepped`: `length` [B] frames made by then, and whether they are `done` [B] and will make no more.
    """

    entry: Entry
    failed: dict[RunningRequest, Exception] = field(default_factory=dict)
    stepped: list[Turn] = field(default_factory=list)
    length: list[int] | npt.NDArray[np.int64] = field(default_factory=list)
    done: list[bool] | npt.NDArray[np.bool_] = field(default_factory=list)
    decoded: list[Decoded] = field(default_factory=list)

    def turns(self, rows: Sequence[RunningRequest]) -> list[Turn]:
        """The turns of those of `rows` that have not failed in this tick."""
        return [Turn(row, row.place) for row in rows if row.place is not None and row not in self.failed]


class Runner:
    """A model's rows on the device and the graphs that advance them. Ready once constructed: sizes are captured here.

    `config` is resolved here, its sizes being those that rows are padded to. Raises `ConfigError` naming the field if
    the model does not fit the device as the configuration asks.
    """

    def __init__(self, model: SpeechModel, config: EngineConfig) -> None:
        self._model = model
        with torch.inference_mode():
            self._rows = allocate_rows(model, config.resolve())
        self._device = self._rows.device
        self.pages, self.kept_pages = self._rows.pages, self._rows.kept_pages
        self.config = _with_sizes(config, self._device)
        # Graphs cannot be captured on the default stream; what was loaded on it must be there before this one reads.
        # Whatever else the process does on the device has a lower priority.
        self._stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        pool = GraphPool()
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            self._decoding = Decoding(model.codec, self._rows.codec, self.config, pool, self._stream)
        with self.active():
            for size in self.config.frame_batches:
                model.check_kernels(self._rows.state, size)
            self._capture(self.config, pool)
        self._most_rows = max(self.config.codec_batches, default=config.slots)
        for line in self.report.splitlines():
            logger.info("event=allocated what=%r", line)
        self.ring = PinnedRing(_IN_FLIGHT, self._entry_bytes(self.config), *{self._device, self._decoding.device})

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def codec_device(self) -> torch.device:
        """Where the codec is."""
        return self._decoding.device

    @property
    def streams(self) -> dict[torch.device, torch.cuda.Stream]:
        """Where everything is launched, on each device; none on a CPU."""
        streams = {self._decoding.device: self._decoding.stream, self._device: self._stream}
        return {device: stream for device, stream in streams.items() if stream is not None}

    @property
    def ticks_late(self) -> int:
        """After how many further launches results are best read: on a GPU the next hides the wait for the last."""
        return 0 if self._stream is None else _IN_FLIGHT - 1

    @property
    def launches(self) -> dict[str, dict[str, int]]:
        """Launches so far, by kind and by whether a graph was replayed."""
        return {
            kind: {
                "graph": sum(graphs.graph_launches for graphs in sets),
                "eager": sum(graphs.eager_launches for graphs in sets),
            }
            for kind, sets in self._kinds.items()
        }

    @property
    def report(self) -> str:
        """In lines: what takes how much memory, and what each captured size took in seconds and MiB."""
        lines = [line for sets in self._kinds.values() for graphs in sets for line in graphs.report()]
        return "\n".join([*self._rows.report, *lines])

    @property
    def graph_memory_mib(self) -> float:
        """What all captured graphs take on the device."""
        captured = [size for sets in self._kinds.values() for graphs in sets for size in graphs.captured]
        return sum(size.memory_bytes for size in captured) / 2**20

    @property
    def _kinds(self) -> dict[str, list[GraphSet]]:
        kinds = {"place": [self._places], "prefill": [self._prefills], "frame": [self._frames]}
        return {**kinds, **self._decoding.sets}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inference mode, on the streams of this runner: where the model must be called."""
        with torch.inference_mode(), self._decoding.active(), torch.cuda.stream(self._stream):
            yield

    def warm_up(self) -> None:
        """Run every size of every kind once on scratch rows, so that all it needs is compiled and loaded."""
        with self.active():
            for graphs in (self._places, self._prefills, self._frames):
                _run_every_size(graphs)
            with self._decoding.active():
                for graphs in (graphs for sets in self._decoding.sets.values() for graphs in sets):
                    _run_every_size(graphs)

    def run(self, plan: Plan) -> Launched:
        """Launch all of `plan` in order, and the copies of what comes of it. What raises fails its rows alone.

        To be called while `active`.
        """
        launched = Launched(self.ring.take())
        try:
            self._prefill(plan.admit, launched)
            self._append(plan.frame, launched)
            self._step(plan.frame, launched)
            for frames, rows in plan.codec.items():
                for start in range(0, len(rows), self._most_rows):
                    self._decode(rows[start : start + self._most_rows], frames, launched)
        except BaseException:
            launched.entry.give()
            raise
        launched.entry.close()
        return launched

    def reset(self, slots: Sequence[int]) -> None:
        """Empty `slots` after all that was launched for them."""
        with self.active():
            self._model.reset(self._rows.state, slots)

    def join(self, chunks: Sequence[npt.NDArray[Any]]) -> Tensor:
        """The frames [T, ...] of a segment from those of its chunks, on the CPU."""
        frames = self._rows.state.frames
        empty = torch.empty((0, *frames.shape[2:]), dtype=frames.dtype)
        return torch.cat([empty, *map(torch.from_numpy, chunks)])

    def _prefill(self, rows: Sequence[RunningRequest], launched: Launched) -> None:
        """Fill the slots of `rows`. When that fails for several together, the one at fault fails alone."""
        if not rows:
            return
        try:
            self._fill(launched.turns(rows))
        except Exception as error:
            if len(rows) == 1:
                launched.failed[rows[0]] = error
                return
            for row in rows:
                self._prefill([row], launched)

    def _fill(self, turns: list[Turn]) -> None:
        slots = _slots(turns)
        prompts, pages = [row.prompt for row, _ in turns], [Pages(place.pages, place.cached) for _, place in turns]
        tokens = self._model.stage(self._rows.state, prompts, slots, pages)
        self._places.run(slots)
        if tokens:
            self._prefills.run(range(tokens))
        voices = [row.prompt.voice or row.voice for row, _ in turns if row.prompt is not None]
        self._decoding.place(slots, voices)

    def _append(self, rows: Sequence[RunningRequest], launched: Launched) -> None:
        """Hand on the text that has come late for those of `rows` that are live."""
        turns = launched.turns([row for row in rows if row.late_ids])
        if not turns:
            return
        ids, starts = [row.late_ids for row, _ in turns], [row.pending_ids for row, _ in turns]
        try:
            self._model.append(self._rows.state, _slots(turns), starts, ids)
        except Exception as error:
            launched.failed.update({row: error for row, _ in turns})
            return
        for (row, _), handed in zip(turns, ids, strict=True):
            row.taken_ids += len(handed)
            row.pending_ids += len(handed)

    def _step(self, rows: Sequence[RunningRequest], launched: Launched) -> None:
        """One frame for each of `rows`."""
        turns = launched.turns(rows)
        if not turns:
            return
        try:
            length, done, *newest = self._frames.run(_slots(turns))
            self._decoding.receive(_slots(turns), length, newest)
        except Exception as error:
            launched.failed.update({row: error for row, _ in turns})
            return
        launched.stepped = turns
        launched.length = launched.entry.copy(length[: len(turns)])
        launched.done = launched.entry.copy(done[: len(turns)])

    def _decode(self, rows: Sequence[RunningRequest], frames: int, launched: Launched) -> None:
        """The next `frames` frames of each of `rows` as audio."""
        turns = launched.turns(rows)
        if not turns:
            return
        try:
            pcm, made = self._decoding.decode(_slots(turns), frames)
        except Exception as error:
            launched.failed.update({row: error for row, _ in turns})
            return
        is_kept = any(row.has_more_segments for row, _ in turns)
        copy = launched.entry.copy
        launched.decoded.append(
            Decoded(turns, frames, copy(pcm[: len(turns)]), copy(made[: len(turns)]) if is_kept else None)
        )

    def _capture(self, config: EngineConfig, pool: GraphPool) -> None:
        """Make the graph sets, with the sizes of `config`; all run on one stream, so they share `pool`."""
        model, state, scratch, decoding = self._model, self._rows.state, self._rows.scratch, self._decoding
        device, is_eager = self._device, config.is_eager

        def place(slots: Tensor) -> None:
            model.place(state, slots)
            if not decoding.is_apart:
                decoding.clear(slots)

        def prefill(tokens: Tensor) -> None:
            model.prefill(state, tokens)

        def frame(slots: Tensor) -> tuple[Tensor, ...]:
            model.frame(state, slots)
            length, done = state.length[slots], state.done[slots]
            return length, done, *decoding.newest(state.frames, slots, length)

        def graphs(name: str, function: Callable[[Tensor], Any], sizes: Sequence[int], scratch: int) -> GraphSet:
            return GraphSet(name, function, sizes, scratch, device, pool=pool, is_eager=is_eager)

        self._places = graphs("place", place, config.frame_batches, scratch)
        self._prefills = graphs("prefill", prefill, config.prefill_buckets, config.prefill_tokens)
        self._frames = graphs("frame", frame, config.frame_batches, scratch)
        decoding.capture()
        for captured in (self._places, self._prefills, self._frames):
            captured.capture()
        if device.type == "cuda" and not is_eager:
            # Longer prompts run without a graph. What they need is loaded now: a live stream would wait 400 ms for it.
            for length in config.long_prefills:
                prefill(torch.full((length,), config.prefill_tokens, device=device))

    def _entry_bytes(self, config: EngineConfig) -> int:
        """Room for a tick in which every slot is stepped and decodes the longest chunk."""
        state, slots, frames = self._rows.state, config.slots, config.chunk_frames[-1]
        made_bytes = state.frames[0, 0].nbytes * frames
        row_bytes = state.length.itemsize + state.done.itemsize + frames * self._model.codec.hop * 2 + made_bytes
        launches = len(config.chunk_frames) + -(-slots // self._most_rows)
        return slots * row_bytes + 2 * (launches + 1) * _ALIGNMENT_BYTES


def _with_sizes(config: EngineConfig, device: torch.device) -> EngineConfig:
    """`config` resolved; without a GPU, where nothing is captured, only the sizes it names itself are padded to."""
    resolved = config.resolve()
    if device.type == "cuda":
        return resolved
    return dataclasses.replace(
        resolved,
        frame_batches=config.frame_batches,
        prefill_buckets=config.prefill_buckets,
        codec_batches=config.codec_batches,
    )


def _run_every_size(graphs: GraphSet) -> None:
    for size in graphs.sizes:
        graphs.run([graphs.scratch] * size)


def _slots(turns: Sequence[Turn]) -> list[int]:
    return [place.slot for _, place in turns]
