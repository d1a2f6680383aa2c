"""Everything the device holds by slot, allocated once: how many pages fit beside it is decided here.

Knows the protocols of `models.base` and no model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sonoro.core.config import EngineConfig
from sonoro.models.base import Capacity, SlotState, SpeechModel
from sonoro.runtime.memory import MemoryBudget, device_memory, plan_pages, report

__all__ = ["DeviceRows", "allocate_rows"]

_GRAPH_BYTES = 16 * 2**20
"""What a captured graph takes besides its share of the pool. A guess on the safe side."""


@dataclass(frozen=True)
class DeviceRows:
    """Rows by slot, the last one scratch; mutated in place by the runner alone.

    `decoded` [N+1] int64 counts the columns of `state.frames` that were given to the codec, whose left context is
    `history`. Of the `pages` at most `kept_pages` may be kept for prompts that begin alike. `report` says in lines what
    takes how much memory.
    """

    state: SlotState
    history: Any
    decoded: Tensor
    pages: int
    kept_pages: int
    report: tuple[str, ...]

    @property
    def device(self) -> torch.device:
        return self.decoded.device

    @property
    def scratch(self) -> int:
        """The number of the scratch row."""
        return self.decoded.shape[0] - 1


def allocate_rows(model: SpeechModel, config: EngineConfig) -> DeviceRows:
    """Allocate what resolved `config` asks of `model`, in inference mode.

    Raises `ConfigError` naming the field if not even the longest request fits into the memory.
    """
    page_bytes = model.position_bytes * config.page_positions
    history, budget = _measure(model, config, page_bytes)
    pages = plan_pages(budget, page_bytes, config.slots, config.pages_per_slot, config.pages)
    state = model.allocate(_capacity(config, pages))
    kept = min(pages, config.prefix_cache_bytes // page_bytes)
    return DeviceRows(
        state=state,
        history=history,
        decoded=torch.zeros_like(state.length),
        pages=pages,
        kept_pages=kept,
        report=(*report(budget, page_bytes, pages), f"pages kept for prompts that begin alike: at most {kept}"),
    )


def _measure(model: SpeechModel, config: EngineConfig, page_bytes: int) -> tuple[Any, MemoryBudget | None]:
    """The codec's history, and what the card would hold without pages; no budget on a CPU."""
    # With the fewest pages that can serve: what it takes besides them is what the rows take.
    least = model.allocate(_capacity(config, config.pages_per_slot))
    device = least.done.device
    memory = device_memory(device)
    if memory is None:
        return model.codec.allocate(config.slots), None
    total_bytes, with_rows_bytes = memory
    frames = least.frames[:1].clone()
    del least
    _, loaded_bytes = device_memory(device) or memory
    history = model.codec.allocate(config.slots)
    _, with_history_bytes = device_memory(device) or memory
    sizes = 2 * len(config.frame_batches) + len(config.prefill_buckets)
    sizes += len(config.codec_batches) * len(config.chunk_frames)
    return history, MemoryBudget(
        total_bytes=total_bytes,
        fraction=config.memory_fraction,
        in_use={"weights and all else": loaded_bytes, "codec histories": with_history_bytes - loaded_bytes},
        reserved={
            "rows": max(0, with_rows_bytes - loaded_bytes - (config.pages_per_slot + 1) * page_bytes),
            # Freed blocks of one size do not always serve the next, so the pool grows beyond the largest.
            "graphs": 3 * _peak_bytes(model, config, history, frames) // 2 + sizes * _GRAPH_BYTES,
        },
    )


def _peak_bytes(model: SpeechModel, config: EngineConfig, history: Any, frames: Tensor) -> int:
    """What the largest launch of the codec takes while it runs, measured on the scratch row with some `frames`."""
    rows, device = config.codec_batches[-1], frames.device
    chunk = frames[:, : config.chunk_frames[-1]].repeat_interleave(rows, dim=0)
    slots = torch.full((rows,), config.slots, dtype=torch.int64, device=device)
    torch.cuda.reset_peak_memory_stats(device)
    before_bytes = torch.cuda.memory_allocated(device)
    model.codec.decode(chunk, slots, history)
    return torch.cuda.max_memory_allocated(device) - before_bytes


def _capacity(config: EngineConfig, pages: int) -> Capacity:
    return Capacity(
        slots=config.slots,
        max_positions=config.max_positions,
        max_frames=config.max_frames,
        max_text=config.max_text,
        page_positions=config.page_positions,
        pages=pages,
        max_tokens=config.prefill_tokens,
    )
