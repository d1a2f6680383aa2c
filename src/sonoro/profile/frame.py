"""Time of one frame at each batch size, and its bandwidth floor: `sonoro bench frame`.

The requests of a batch have real prompts, and have generated frames up to the context they are timed at."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sonoro.core.errors import ConfigError, EngineError, border
from sonoro.models import registry
from sonoro.models.base import (
    Capacity,
    CloningModel,
    LoadedModel,
    Pages,
    ProfiledModel,
    Prompt,
    SpeechModel,
    Voice,
    WatchedModel,
)
from sonoro.models.shared.codec_choice import dtype_name
from sonoro.profile.report import Report
from sonoro.profile.requests import Subject, speech_request
from sonoro.profile.timing import copy_bandwidth, median_ms, on_stream
from sonoro.runtime.graphs import GraphPool, GraphSet
from sonoro.runtime.kernels import fallbacks
from sonoro.runtime.ring import upload

logger = logging.getLogger(__name__)

GRAPH_REPEATS, EAGER_REPEATS, WARM_UPS = 24, 5, 2
CHUNK_FRAMES = (1, 4, 12)
XRT_CHUNK = 4
CODEC_BATCH = 64
"""Most requests per codec launch; more take several launches."""

_STEPPED = GRAPH_REPEATS + EAGER_REPEATS + 2 * WARM_UPS
_PAGE_POSITIONS = 32
_CHECKED_BATCH = 4
_WORD = "speech"
_STAGED_TOKENS = 2048


@dataclass(frozen=True)
class FrameBench(Subject):
    """The options of `sonoro bench frame`; `context` is that of the middle frame. Raises `ConfigError`."""

    batch: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    context: int = 512
    is_eager: bool = False

    def __post_init__(self) -> None:
        is_allowed = bool(self.batch) and all(1 <= size <= 4096 for size in self.batch)
        ConfigError.unless(is_allowed, "batch", self.batch, "each must be at least 1 and at most 4096")
        limit = "it must be at least 1 and at most 1000000"
        ConfigError.unless(1 <= self.context <= 1_000_000, "context", self.context, limit)


def run(bench: FrameBench, loaded: LoadedModel | None = None) -> dict[str, Any]:
    """Time the model of `bench`, or `loaded`; print the table, and return the contents of the results file.
    A measurement that fails leaves its error in its row; `EngineError` is raised at the end."""
    if loaded is None:
        how = {"load_format": bench.load_format, "quantization": bench.quantization or "none"}
        loaded = registry.load(bench.model, device=bench.device, dtype=bench.dtype, **how)
    is_gpu, is_eager = loaded.device.type == "cuda", bench.is_eager or loaded.device.type != "cuda"
    with on_stream(loaded.device):
        loaded.model.codec.settle("auto", _CHECKED_BATCH, CHUNK_FRAMES)
        script = Script.of(loaded.model, bench.context)
        bandwidth = copy_bandwidth(loaded.device)
        settings = {
            **bench.settings,
            "is_eager": is_eager,
            "contexts_timed": [bench.context - _STEPPED // 2, bench.context - _STEPPED // 2 + _STEPPED],
            "prompt_positions": script.positions,
            "graph_repeats": GRAPH_REPEATS,
            "eager_repeats": EAGER_REPEATS,
            "codec_rows_at_once": CODEC_BATCH,
            "xrt_chunk_frames": XRT_CHUNK,
            "copy_gb_per_s": round(bandwidth / 1e9, 1),
        }
        top = {
            "bench": "frame",
            "model": loaded.model.spec.name,
            "arm": "eager" if is_eager else "graph",
            "dtype": dtype_name(loaded.dtype),
            "quantization": loaded.quantization,
        }
        report = Report(top, is_gpu=is_gpu, settings=settings, commit=bench.commit, out=bench.out)
        for batch in bench.batch:
            report.add(_time_batch(loaded, script, batch, bandwidth, is_eager=is_eager))
            gc.collect()
            if is_gpu:
                torch.cuda.empty_cache()
    report.note("fallbacks", fallbacks())
    values = report.finish(f"one frame of {top['model']} at context {bench.context}, ms")
    failed = [f"batch {row['batch']}: {error}" for row in report.rows for error in row.get("errors", {}).values()]
    if failed:
        raise EngineError("; ".join(failed))
    return values


@dataclass(frozen=True)
class Script:
    """What every request speaks: `words` words, whose prompt has `positions` tokens, for `frames` frames: `lead` frames
    up to the timed context, then `stepped` timed ones."""

    model: SpeechModel
    voice: Voice | None
    words: int
    positions: int
    text_ids: int
    lead: int
    stepped: int = _STEPPED

    @classmethod
    def of(cls, model: SpeechModel, context: int, stepped: int = _STEPPED) -> Script:
        """The script with the longest prompt that leaves room for the timed frames around `context`.
        Raises `ConfigError` naming `context` if the shortest prompt is too long."""
        first = context - stepped // 2
        references = speech_request(model.spec, 0, _WORD, 1).references
        voice = model.encode_voice(references) if references and isinstance(model, CloningModel) else None
        chosen = cls(model, voice, 0, 0, 0, 0, stepped)
        for words in range(1, max(first, 1) + 1):
            prompt = replace(chosen, words=words).prompt(0, 1)
            if prompt.positions > first:
                break
            sizes: dict[str, Any] = {
                "positions": prompt.positions,
                "text_ids": prompt.text_ids,
                "lead": first - prompt.positions,
            }
            chosen = replace(chosen, words=words, **sizes)
        limit = f"at least {prompt.positions + stepped // 2}: the shortest prompt, and half of the timed frames"
        ConfigError.unless(chosen.words > 0, "context", context, limit)
        return chosen

    @property
    def frames(self) -> int:
        return self.lead + self.stepped

    @property
    def text(self) -> str:
        """The text of every request."""
        return " ".join([_WORD] * self.words)

    def prompt(self, number: int, frames: int) -> Prompt:
        """The prompt of request `number`, which is its seed."""
        request = speech_request(self.model.spec, number, self.text, frames)
        return self.model.prepare(request, self.text, 0, [], self.voice)

    def capacity(self, slots: int) -> Capacity:
        """The `Capacity` for `slots` such requests."""
        positions = self.positions + self.frames
        return Capacity(
            slots=slots,
            max_positions=positions,
            max_frames=max(self.frames, *CHUNK_FRAMES),
            max_text=max(self.text_ids, 1),
            page_positions=_PAGE_POSITIONS,
            pages=slots * -(-positions // _PAGE_POSITIONS),
            max_tokens=max(_STAGED_TOKENS, self.positions),
        )


def _time_batch(loaded: LoadedModel, script: Script, batch: int, bandwidth: float, *, is_eager: bool) -> dict[str, Any]:
    """The row of one batch size; a failed measurement is None, with its error in `errors`."""
    model, context = script.model, script.positions + script.lead + _STEPPED // 2
    assert isinstance(model, ProfiledModel)
    floor_ms = 1000 * model.frame_bytes(batch, context) / bandwidth
    row: dict[str, Any] = {"batch": batch, "context": context, "eager_ms": None, "graph_ms": None, "floor_ms": floor_ms}
    row |= {"backbone_ms": None, "depth_ms": None, "sample_ms": None}
    row |= {"codec_ms": {str(frames): None for frames in CHUNK_FRAMES}, "xrt": None}
    with _keeping(row, "rows"):
        timed = TimedBatch(loaded, script, batch, is_eager=is_eager)
        with _keeping(row, "graph"):
            if not is_eager:
                row["graph_ms"] = timed.graph_ms()
        with _keeping(row, "eager"):
            row["eager_ms"] = timed.eager_ms()
        for frames in CHUNK_FRAMES:
            with _keeping(row, f"codec_{frames}"):
                row["codec_ms"][str(frames)] = timed.codec_ms(frames)
        for name, part in model.parts(timed.state).items():
            with _keeping(row, name):
                row[f"{name}_ms"] = timed.part_ms(name, part)
    frame_ms, chunk_ms = row["eager_ms" if is_eager else "graph_ms"], row["codec_ms"][str(XRT_CHUNK)]
    if frame_ms is not None and chunk_ms is not None:
        row["xrt"] = batch * model.spec.frame_s * 1000 / (frame_ms + chunk_ms / XRT_CHUNK)
    return row


def _keeping(row: dict[str, Any], piece: str) -> AbstractContextManager[None]:
    """A context for one measurement: an exception is noted in `row["errors"]`, not raised."""

    def note(error: Exception) -> None:
        logger.warning("batch=%d piece=%s error=%r", row["batch"], piece, error)
        row.setdefault("errors", {})[piece] = " ".join(f"{piece}: {type(error).__name__}: {error}".split())

    return border(note)


class TimedBatch:
    """A batch of `batch` slots that have generated the lead of `script`, and timings of its work."""

    def __init__(self, loaded: LoadedModel, script: Script, batch: int, *, is_eager: bool) -> None:
        self._model, self._device, self._batch, self._is_eager = loaded.model, loaded.device, batch, is_eager
        self._slots, self._pool = list(range(batch)), GraphPool()
        self.state = self._model.allocate(script.capacity(batch))
        self._history = self._model.codec.allocate(batch)
        self._model.check_kernels(self.state, batch)
        self._fill(script)
        self._graph = self._captured("frame", self._frame, batch)
        for _ in range(script.lead):
            self._graph.run(self._slots)

    def step(self) -> None:
        """One frame without a graph."""
        self._frame(upload(self._slots, torch.int64, self._device))

    def _frame(self, slots: Tensor) -> Tensor | None:
        """One frame, and the gather of watched attention that an engine does after it."""
        self._model.frame(self.state, slots)
        watched = self._model.attention(self.state) if isinstance(self._model, WatchedModel) else None
        return None if watched is None else watched[slots]

    def graph_ms(self) -> float:
        """Time of one frame from its graph. Advances the requests by `GRAPH_REPEATS` + `WARM_UPS` frames."""
        return self._time(self._graph, GRAPH_REPEATS)

    def eager_ms(self) -> float:
        """Time of one eager frame. Advances the requests by `EAGER_REPEATS` + `WARM_UPS` frames."""
        return self._time(GraphSet("frame", self._frame, (self._batch,), self._batch, self._device), EAGER_REPEATS)

    def part_ms(self, name: str, part: Callable[[Tensor], Any]) -> float:
        """Time of one part of a frame."""
        return self._time(self._captured(name, part, self._batch), GRAPH_REPEATS)

    def codec_ms(self, frames: int) -> float:
        """Time to decode `frames` frames of every request to audio."""

        def decode(slots: Tensor) -> Tensor:
            return self._model.codec.decode(self.state.frames[slots, :frames], slots, self._history)

        graphs = self._captured(f"codec_{frames}", decode, min(self._batch, CODEC_BATCH))
        return self._time(graphs, GRAPH_REPEATS)

    def _captured(self, name: str, function: Callable[[Tensor], Any], size: int) -> GraphSet:
        graphs = GraphSet(name, function, (size,), self._batch, self._device, pool=self._pool, is_eager=self._is_eager)
        graphs.capture()
        return graphs

    def _time(self, graphs: GraphSet, repeats: int) -> float:
        """Median time to run all requests through `graphs`. Raises `EngineError` if the capture failed."""
        for captured in graphs.captured:
            if captured.error:
                raise EngineError(f"no graph: {captured.error}")
        most = graphs.sizes[0]
        groups = [self._slots[start : start + most] for start in range(0, self._batch, most)]
        repeats = EAGER_REPEATS if self._is_eager else repeats
        return median_ms(lambda: [graphs.run(group) for group in groups], repeats, WARM_UPS, self._device)

    def _fill(self, script: Script) -> None:
        """Prefill all prompts, as many at once as can be staged."""
        capacity = script.capacity(self._batch)
        pages, together = capacity.pages_per_slot, capacity.max_tokens // script.positions
        for start in range(0, self._batch, together):
            slots = self._slots[start : start + together]
            prompts = [script.prompt(slot, script.frames) for slot in slots]
            owned = [Pages(range(slot * pages, (slot + 1) * pages)) for slot in slots]
            tokens = self._model.stage(self.state, prompts, slots, owned)
            self._model.admit(self.state, upload(slots, torch.int64, self._device))
            self._model.prefill(self.state, torch.arange(tokens, device=self._device))
