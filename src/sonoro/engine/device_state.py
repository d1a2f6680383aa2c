"""Allocates the device state of all slots once, and computes how many KV cache pages fit beside it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError
from sonoro.models.base import Capacity, Codec, CodecChoice, PackingModel, SlotState, SpeechModel, TextPromptModel
from sonoro.runtime.kernels import is_recorded
from sonoro.runtime.memory import MemoryBudget, device_memory, peak_bytes, plan_pages, report

_GRAPH_BYTES = 16 * 2**20
"""Upper estimate of a captured graph's memory besides its share of the pool."""

PACKED_SIZES = 9
"""At most so many sizes of prompts in a decode step are captured, the largest."""

_LEAST_PACKED = 256
"""The smallest batch whose decode step takes prompts, unless the largest batch is smaller."""

CHECKED_BATCH, _CHECKED_FRAMES = 4, 16
"""Maximum batch and chunk frames of the comparison of the codec's dtype with float32."""


@dataclass(frozen=True)
class CodecState:
    """The codec's per-slot state on its device, N slots and a scratch slot. Only `Decoding` mutates it, in place.
    `decoded` [N+1] int64 counts the columns of `frames` [N+1, T, ...] decoded so far; `history` is the codec's left
    context. `frames` are the model's own tensor unless the codec `is_apart`, on its own device: then they are a copy,
    and `arrived` receives lengths [N] and newest frames [N, ...] of a launch, by batch index."""

    history: Any
    decoded: Tensor
    frames: Tensor
    arrived: tuple[Tensor, Tensor] | None

    @property
    def is_apart(self) -> bool:
        return self.arrived is not None

    @property
    def device(self) -> torch.device:
        return self.decoded.device


@dataclass(frozen=True)
class DeviceState:
    """The per-slot state of model and codec, the last slot scratch. Only the runner mutates it, in place.
    At most `cached_pages` of the `pages` may hold cached prefixes. `report` lists the memory by part, in lines."""

    state: SlotState
    codec: CodecState
    pages: int
    cached_pages: int
    report: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        return self.state.done.device

    @property
    def scratch(self) -> int:
        """The index of the scratch slot."""
        return self.state.done.shape[0] - 1


def allocate_device_state(model: SpeechModel, config: EngineConfig) -> DeviceState:
    """Allocate the state of `model` for resolved `config`, and move its codec to `codec_device`. In inference mode.
    Raises `ConfigError` naming the field if the longest request alone does not fit into memory, or if there is no such
    device."""
    page_bytes = model.position_bytes * config.page_positions
    history, budget, elsewhere = _measure(model, config, page_bytes)
    pages = plan_pages(budget, page_bytes, config.slots, config.pages_per_slot, config.pages)
    state = model.allocate(capacity_of(config, pages))
    cached_pages = min(pages, config.prefix_cache_bytes // page_bytes)
    return DeviceState(
        state=state,
        codec=_codec_state(state, history, config.codec_device),
        pages=pages,
        cached_pages=cached_pages,
        report=(
            *report(budget, page_bytes, pages),
            f"pages kept for prompts that begin alike: at most {cached_pages}",
            *elsewhere,
        ),
    )


def _codec_state(state: SlotState, history: Any, apart: str) -> CodecState:
    decoded = torch.zeros_like(state.length, device=apart or None)
    if not apart:
        return CodecState(history, decoded, state.frames, None)
    arrived = torch.zeros_like(state.length[1:], device=apart), torch.zeros_like(state.frames[1:, 0], device=apart)
    return CodecState(history, decoded, torch.zeros_like(state.frames, device=apart), arrived)


def _move_codec(codec: Codec, wanted: str, device: torch.device) -> torch.device:
    """Move `codec` to device `wanted`, if named, and return its device. Raises `ConfigError` if it cannot be there."""
    if not wanted:
        return device
    apart = torch.device(wanted)
    if apart.type != device.type:
        raise ConfigError("codec_device", wanted, f"it must be of the same type as the model's device, {device}")
    if apart.type == "cuda" and apart.index >= torch.cuda.device_count():
        raise ConfigError("codec_device", wanted, f"this process sees {torch.cuda.device_count()} GPUs")
    if apart.type == "cuda" and apart == device:
        raise ConfigError("codec_device", wanted, "the model is on it; name another device, or none")
    codec.move(apart)
    return apart


def _settle(codec: Codec, config: EngineConfig) -> CodecChoice:
    """Choose the dtype of `codec` by comparison with float32, at sizes that will be served."""
    batch = max((size for size in config.codec_batches if size <= CHECKED_BATCH), default=config.codec_batches[0])
    chunks = [config.chunk_frames[0], *(length for length in config.chunk_frames[1:] if length <= _CHECKED_FRAMES)]
    return codec.settle(config.codec_dtype, batch, chunks)


def _measure(model: SpeechModel, config: EngineConfig, page_bytes: int) -> tuple[Any, MemoryBudget | None, list[str]]:
    """The codec's history, the memory budget of the model's GPU without pages (None on a CPU), and report lines."""
    # Allocate the fewest usable pages; the rest of that memory is the slots' state.
    least = model.allocate(capacity_of(config, config.pages_per_slot))
    device = least.done.device
    home = _move_codec(model.codec, config.codec_device, device)
    chosen = str(_settle(model.codec, config))
    memory = device_memory(device)
    if memory is None:
        history = model.codec.allocate(config.slots)
        if is_recorded():
            # On a GPU this launch comes next.
            _decode_largest(model, config, history, least.frames[:1])
        return history, None, [chosen]
    total_bytes, with_state_bytes = memory
    frames, frames_bytes = least.frames[:1].to(home, copy=True), least.frames.nbytes
    del least
    _, loaded_bytes = device_memory(device) or memory
    history, codec = _measure_codec(model, config, frames)
    state_bytes = max(0, with_state_bytes - loaded_bytes - (config.pages_per_slot + 1) * page_bytes)
    graphs_bytes = graph_bytes(model, config)
    in_use, elsewhere = {"weights and all else": loaded_bytes}, [chosen]
    if home == device:
        in_use["codec histories"] = codec.in_use["codec histories"]
        graphs_bytes += codec.reserved["graphs"]
    else:
        more_bytes = frames_bytes + 2 * len(config.frame_batches) * _GRAPH_BYTES
        elsewhere += [f"codec on {home}: {codec.check_room(more_bytes, str(home))}"]
    budget = MemoryBudget(
        total_bytes=total_bytes,
        fraction=config.memory_fraction,
        in_use=in_use,
        reserved={"slots": state_bytes, "graphs": graphs_bytes},
    )
    return history, budget, elsewhere


def _measure_codec(model: SpeechModel, config: EngineConfig, frames: Tensor) -> tuple[Any, MemoryBudget]:
    """The codec's history, and the memory budget of its GPU."""
    total_bytes, loaded_bytes = device_memory(frames.device) or (0, 0)
    history = model.codec.allocate(config.slots)
    _, with_history_bytes = device_memory(frames.device) or (0, 0)
    launched_bytes = peak_bytes(lambda: _decode_largest(model, config, history, frames), frames.device)
    return history, MemoryBudget(
        total_bytes=total_bytes,
        fraction=config.memory_fraction,
        in_use={"weights and all else": loaded_bytes, "codec histories": with_history_bytes - loaded_bytes},
        reserved={"graphs": codec_graph_bytes(config, launched_bytes)},
    )


def _decode_largest(model: SpeechModel, config: EngineConfig, history: Any, frames: Tensor) -> None:
    batch = config.codec_batches[-1]
    chunk = frames[:, : config.chunk_frames[-1]].repeat_interleave(batch, dim=0)
    slots = torch.full((batch,), config.slots, dtype=torch.int64, device=frames.device)
    with torch.cuda.device_of(slots):
        model.codec.decode(chunk, slots, history)


def graph_bytes(model: SpeechModel, config: EngineConfig) -> int:
    """Upper estimate of the memory of all graphs of `model` for resolved `config` except the codec's."""
    # By batch: admission and decode step, and the codec's own admission if it runs on a second stream.
    by_batch = 2 + (config.tuning.codec_overlap > 0 and not config.codec_device)
    prefills = 1 + isinstance(model, TextPromptModel)
    graphs = by_batch * len(config.frame_batches) + prefills * len(config.prefill_buckets)
    packed = PACKED_SIZES * len(packed_batches(config)) * isinstance(model, PackingModel)
    return (graphs + packed) * _GRAPH_BYTES


def packed_batches(config: EngineConfig) -> list[int]:
    """The batch sizes of decode steps that take prompts: those that fill a GPU, and the largest."""
    return [size for size in config.frame_batches if size >= min(_LEAST_PACKED, config.frame_batches[-1])]


def codec_graph_bytes(config: EngineConfig, peak_bytes: int) -> int:
    """Upper estimate of the memory of the codec's graphs, whose largest launch peaks at `peak_bytes`."""
    # Blocks freed by one size do not always fit the next, so the pool grows beyond the largest launch.
    return 3 * peak_bytes // 2 + len(config.codec_batches) * len(config.chunk_frames) * _GRAPH_BYTES


def capacity_of(config: EngineConfig, pages: int) -> Capacity:
    """The `Capacity` that resolved `config` asks for, with `pages` pages."""
    return Capacity(
        slots=config.slots,
        max_positions=config.max_positions,
        max_frames=config.max_frames,
        max_text=config.max_text,
        page_positions=config.page_positions,
        pages=pages,
        max_tokens=config.prefill_tokens,
        is_prefill_fused=config.tuning.is_prefill_fused,
    )
