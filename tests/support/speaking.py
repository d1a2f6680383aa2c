"""Rows of a state brought to their first frame without an engine: whose pages are whose is decided here."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from sonoro.models.base import Capacity, Pages

PAGE = 16


def capacity(slots: int, positions: int, frames: int, text: int) -> Capacity:
    """Room for `slots` rows at once, in pages of 16 positions."""
    pages = slots * -(-positions // PAGE)
    return Capacity(slots, positions, frames, text, page_positions=PAGE, pages=pages, max_tokens=slots * positions)


def pages_of(slot: int, slots: int, count: int) -> list[int]:
    """Pages that no other slot has, far apart and not in order."""
    return [slot + slots * index for index in reversed(range(count))]


class Starts(Protocol):
    """What of a `SpeechModel` brings rows to their first frame."""

    stage: Callable[..., int]
    admit: Callable[[Any, Tensor], None]
    prefill: Callable[[Any, Tensor], None]


def begin(model: Starts, state: Any, prompts: Sequence[Any], slots: Any) -> None:
    """Stage, place and prefill `prompts`; afterwards rows `slots` are ready for their first frame."""
    table = state.cache.page_table
    numbers = torch.as_tensor(slots).tolist()
    pages = [Pages(pages_of(slot, table.shape[0] - 1, table.shape[1])) for slot in numbers]
    tokens = model.stage(state, prompts, numbers, pages)
    model.admit(state, torch.tensor(numbers, device=table.device))
    model.prefill(state, torch.arange(tokens, device=table.device))
