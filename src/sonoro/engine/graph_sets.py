"""The graph sets of a model and its codec: makes them, captures their sizes, and counts what they take.

Depends on the protocols of `models.base` and on no model; knows no request. All launches are the runner's."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from sonoro.core.config import EngineConfig
from sonoro.engine.decoding import Decoding
from sonoro.engine.device_state import PACKED_SIZES, DeviceState, packed_batches
from sonoro.models.base import (
    CompiledModel,
    CompiledSteps,
    PackingModel,
    SlotState,
    SpeechModel,
    TextPromptModel,
    WatchedModel,
)
from sonoro.runtime.graphs import Compiled, GraphPool, GraphSet, Steps, no_garbage_collection
from sonoro.runtime.phases import Phases

_MOST_PACKED = 1024
"""Most tokens of prompts in a decode step."""


class GraphSets:
    """The graph sets of `model` over `state`, with the sizes of `config`; those of the codec are in `decoding`.
    `admits` and `frames` map slots, `prefills` and `text_prefills` (None unless the model has it) map prompt tokens.
    All run on one stream, so they share `pool`. Call what launches or captures with the runner `active`."""

    def __init__(
        self, model: SpeechModel, state: DeviceState, decoding: Decoding, config: EngineConfig, pool: GraphPool
    ) -> None:
        self._model, self._state, self._decoding, self._config, self._pool = model, state, decoding, config, pool
        slots, max_tokens = state.state, config.prefill_tokens

        def admit(admitted: Tensor) -> None:
            model.admit(slots, admitted)
            if not decoding.has_own_stream:
                decoding.clear(admitted)

        def prefill(tokens: Tensor) -> None:
            model.prefill(slots, tokens)

        self.admits = self._new_set("admit", admit, config.frame_batches, state.scratch)
        steps = self._steps_of(slots)
        compiled = None if steps is None else Compiled(steps.prefill, max_tokens)
        self.prefills = self._new_set("prefill", prefill, config.prefill_buckets, max_tokens, compiled)
        self.text_prefills: GraphSet | None = None
        if isinstance(model, TextPromptModel):
            of_text = functools.partial(model.prefill_text, slots)
            self.text_prefills = self._new_set("prefill text", of_text, config.prefill_buckets, max_tokens)
        self.frames = self._frames_of(slots, steps)
        self.steps = self._steps_on(slots, self.frames)
        self.to_come = 0
        """How many sizes are not captured yet; batches are padded to a larger one until they are."""

    @property
    def launches(self) -> dict[str, dict[str, int]]:
        """Launches so far by kind: of a graph of kernels alone, of one that holds a torch reference, in compiled code
        (on a CPU), or eager."""
        return {
            kind: {
                "graph": sum(graphs.graph_launches - graphs.reference_launches for graphs in sets),
                "reference_graph": sum(graphs.reference_launches for graphs in sets),
                "compiled": sum(graphs.compiled_launches for graphs in sets),
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
    def memory_mib(self) -> float:
        """Device memory of all captured graphs."""
        return sum(size.memory_bytes for graphs in self._all for size in graphs.captured) / 2**20

    @property
    def _kinds(self) -> dict[str, list[GraphSet]]:
        prefills = [self.prefills, *([self.text_prefills] if self.text_prefills else [])]
        frames = [self.frames, *self.steps.packed_sets]
        return {"admit": [self.admits], "prefill": prefills, "frame": frames, **self._decoding.sets}

    @property
    def _all(self) -> list[GraphSet]:
        """All graph sets in the order of capture: those that take the most memory first."""
        decoding = [graphs for sets in self._decoding.sets.values() for graphs in reversed(sets)]
        return [*decoding, self.admits, *self._kinds["prefill"], *self._kinds["frame"]]

    def run_all(self) -> None:
        """Run every size of every kind once on the scratch slot, so that all kernels are compiled and loaded."""
        for graphs in self._all:
            with self._stream_of(graphs):
                for size in graphs.sizes:
                    graphs.run([graphs.scratch] * size)

    def capture_first(self, phases: Phases) -> None:
        """Check the model's kernels and capture the first sizes of every kind. Synchronises."""
        self._check_kernels(self._state.state, self._first_sizes(self.frames))
        phases.end("checks")
        is_captured = any(graphs.can_capture for graphs in self._all)
        with no_garbage_collection() if is_captured else nullcontext():
            for graphs in self._all:
                if first := self._first_sizes(graphs):
                    self._capture(graphs, first)
        if self.frames.can_capture:
            self._load_long_prefills()
        phases.end("graphs")

    def capture_next(self) -> None:
        """Capture one of the sizes `to_come`: prefills first, then the smallest. Synchronises.
        Takes some hundred milliseconds: call it only while no request runs."""
        waiting, prefills = [graphs for graphs in self._all if graphs.to_come], self._kinds["prefill"]
        graphs = min(waiting, key=lambda graphs: (graphs not in prefills, graphs.to_come[0]))
        if graphs is self.frames:
            self._check_kernels(self._state.state, graphs.to_come[:1])
        # The largest size first: any batch can be padded to it.
        self._capture(graphs, graphs.to_come[:1] if graphs.captured else graphs.to_come[-1:])

    def watch(self, state: SlotState) -> None:
        """Recapture the decode step on `state`, which watches other heads: two sizes now, the others are `to_come`."""
        frames = self._frames_of(state, self._steps_of(state))
        first = sorted({*frames.sizes[:1], *frames.sizes[-1:]})
        self._check_kernels(state, first)
        frames.capture(first)
        frames.count_on(self.frames)
        self.frames, self._state = frames, dataclasses.replace(self._state, state=state)
        steps = self._steps_on(state, frames)
        for graphs, before in zip(steps.packed_sets, self.steps.packed_sets, strict=True):
            graphs.count_on(before)
        self.steps = steps
        self._count_to_come()

    def _new_set(
        self,
        name: str,
        function: Callable[[Tensor], Any],
        sizes: Sequence[int],
        scratch: int,
        compiled: Compiled | None = None,
    ) -> GraphSet:
        how: dict[str, Any] = {"pool": self._pool, "is_eager": self._config.is_eager, "compiled": compiled}
        return GraphSet(name, function, sizes, scratch, self._state.device, **how)

    def _steps_of(self, state: SlotState) -> CompiledSteps | None:
        """The compiled code of the model on `state`, if it is used."""
        model = self._model
        return model.compiled_steps(state) if isinstance(model, CompiledModel) and not self._config.is_eager else None

    def _frames_of(self, state: SlotState, steps: CompiledSteps | None) -> GraphSet:
        """The graph set of a decode step on `state`."""
        model, decoding = self._model, self._decoding
        eager = _frame_by(model, decoding, state, lambda slots: model.frame(state, slots))
        compiled = None if steps is None else Compiled(_frame_by(model, decoding, state, steps.frame), steps.most)
        return self._new_set("frame", eager, self._config.frame_batches, self._state.scratch, compiled)

    def _steps_on(self, state: SlotState, frames: GraphSet) -> Steps:
        """The decode steps on `state`: `frames`, and those of large batches with prompts in them."""
        model, config, packed = self._model, self._config, {}
        if isinstance(model, PackingModel) and config.tuning.is_prefill_fused and config.frame_batches:
            for size in [size for size in config.prefill_buckets if size <= _MOST_PACKED][-PACKED_SIZES:]:
                tokens = torch.full((size,), config.prefill_tokens, device=state.done.device)
                step = functools.partial(model.prefill_and_frame, state, tokens)
                function = _frame_by(model, self._decoding, state, step)
                graphs = self._new_set(f"frame with {size}", function, packed_batches(config), self._state.scratch)
                packed[size] = tokens, graphs
        return Steps(frames, packed, config.prefill_tokens, is_eager=config.is_eager)

    def _first_sizes(self, graphs: GraphSet) -> Sequence[int]:
        """The sizes of `graphs` to capture at start: all of them, or, if `config.is_ready_early`, the largest, to which
        any batch can be padded, and the smallest (not of longer codec chunks), and none with prompts in a step."""
        if not (graphs.can_capture and self._config.is_ready_early):
            return graphs.sizes
        if graphs in self._kinds["prefill"]:
            return self._config.first_sizes.prefill_buckets
        if graphs in self._kinds["frame"][1:]:
            return ()
        is_longer = graphs in self._decoding.sets["codec"][1:]
        return graphs.sizes[-1:] if is_longer else sorted({graphs.sizes[0], graphs.sizes[-1]})

    def _load_long_prefills(self) -> None:
        """Load the kernels of longer prompts, which run eagerly: running streams would wait 400 ms for it later."""
        state = self._state.state
        prefills = [functools.partial(self._model.prefill, state)]
        if isinstance(self._model, TextPromptModel):
            prefills.append(functools.partial(self._model.prefill_text, state))
        for length in self._config.long_prefills:
            for run in prefills:
                run(torch.full((length,), self._config.prefill_tokens, device=self._state.device))
        # These were the largest activations; do not keep their memory.
        torch.cuda.empty_cache()

    def _check_kernels(self, state: SlotState, sizes: Sequence[int]) -> None:
        for size in sizes:
            self._model.check_kernels(state, size)

    def _capture(self, graphs: GraphSet, sizes: Sequence[int]) -> None:
        with self._stream_of(graphs):
            graphs.capture(sizes)
        self._count_to_come()

    def _count_to_come(self) -> None:
        self.to_come = sum(len(graphs.to_come) for graphs in self._all)

    def _stream_of(self, graphs: GraphSet) -> AbstractContextManager[Any]:
        """A context with the stream of `graphs` as the current one."""
        is_of_codec = any(graphs in sets for sets in self._decoding.sets.values())
        return self._decoding.active() if is_of_codec else nullcontext()


def _frame_by(
    model: SpeechModel, decoding: Decoding, state: SlotState, step: Callable[[Tensor], None]
) -> Callable[[Tensor], Any]:
    """The function of slots that runs `step` and gathers what the host reads of it."""
    watched = model.attention(state) if isinstance(model, WatchedModel) else None

    def frame(slots: Tensor) -> tuple[Tensor | None, ...]:
        step(slots)
        length, done = state.length[slots], state.done[slots]
        attention = None if watched is None else watched[slots]
        return length, done, attention, *decoding.newest(state.frames, slots, length)

    return frame
