"""The talker's rows by slot, how a prompt is written into them, and the prefill of what was written.

The last row is scratch; a free slot is `done`, its pages are the scratch page. Prompts are staged as ids, packed back
to back: `prefill` gathers and runs them, so that it depends on nothing but the numbers of the staged rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sonoro.models.base import Capacity
from sonoro.nn.kvcache import PackedRows, PagedCache
from sonoro.nn.transformer import Rotary
from sonoro.runtime.sampling import SamplingRows

from .backbone import Talker
from .prompt import TalkerPrompt
from .rows import StepRows
from .sampling import row_controls

__all__ = ["FrameState", "StagedRows", "allocate", "prefill", "reset", "stage"]

_LOOP_PAGE = 16
_ID_COLUMNS = 5


@dataclass(frozen=True)
class StagedRows:
    """Prompt rows waiting for `prefill`, [M+1] each, the last scratch.

    `ids` [M+1, 5 + K] int64: slot, position, where the prompt begins in the pack, the slot whose pending input this row
    is (scratch for all but a prompt's last row), text id, K code ids. `x_vectors` [M+1, H] are added on the code side.
    """

    ids: Tensor
    x_vectors: Tensor


@dataclass(frozen=True)
class FrameState:
    """Rows by slot, [N+1, ...] each, and tables shared by all. Mutated in place by the functions of this folder.

    `pending` [H] is the talker's next input but for its text, at `position`; `text_ids` are the ids fed from the
    second frame on, padded by the pad id to one more than fits. `seen` [end id + 1] bool marks ids of codebook 0 made
    in this segment. Of `cache` only positions before `position` count. `loop` holds the code predictor's keys and
    values during one step, `loop_positions` [K, N+1 or more] its positions.
    """

    done: Tensor
    length: Tensor
    frames: Tensor
    pending: Tensor
    position: Tensor
    text_ids: Tensor
    seen: Tensor
    first: SamplingRows
    rest: SamplingRows
    staged: StagedRows
    cache: PagedCache
    loop: PagedCache
    suppressed: Tensor
    is_end: Tensor
    rotary: Rotary
    loop_rotary: Rotary
    loop_positions: Tensor
    pad_id: int

    @property
    def scratch(self) -> int:
        """The number of the scratch row."""
        return self.done.shape[0] - 1

    @property
    def step_rows(self) -> StepRows:
        """What the two ends of a step read and write."""
        return StepRows(self.done, self.length, self.position, self.pending, self.text_ids, self.frames, self.seen)


def allocate(talker: Talker, capacity: Capacity, pad_id: int) -> FrameState:
    """Free rows for `capacity.slots` requests. `pad_id` is the text id fed once a row's text has ended."""
    device, dtype, config = talker.device, talker.dtype, talker.config
    rows, books, end = capacity.slots + 1, talker.codebooks, config.codec_eos_token_id
    ids, numbers = torch.arange(end + 1, device=device), torch.arange(rows, dtype=torch.int32, device=device)
    zeros = functools.partial(torch.zeros, device=device)
    table = torch.full((rows, capacity.pages_per_slot), capacity.pages, dtype=torch.int32, device=device)
    staged = torch.full((capacity.max_tokens + 1, _ID_COLUMNS + books), -1, dtype=torch.int64, device=device)
    staged[:, :_ID_COLUMNS] = torch.tensor((capacity.slots, 0, 0, capacity.slots, -1), device=device)
    inner = talker.code_predictor.model
    loop_page = max(_LOOP_PAGE, 1 << (books - 1).bit_length())
    return FrameState(
        done=torch.ones(rows, dtype=torch.bool, device=device),
        length=zeros(rows, dtype=torch.int64),
        frames=zeros(rows, capacity.max_frames, books, dtype=torch.int64),
        pending=zeros(rows, config.hidden_size, dtype=dtype),
        position=zeros(rows, dtype=torch.int64),
        text_ids=torch.full((rows, capacity.max_text + 1), pad_id, dtype=torch.int64, device=device),
        seen=zeros(rows, end + 1, dtype=torch.bool),
        first=SamplingRows(capacity.slots, device),
        rest=SamplingRows(capacity.slots, device),
        staged=StagedRows(staged, zeros(capacity.max_tokens + 1, config.hidden_size, dtype=dtype)),
        cache=PagedCache.allocate(talker.model.config, table, capacity.page_positions, capacity.pages, dtype),
        loop=PagedCache.allocate(inner.config, numbers[:, None], loop_page, rows - 1, dtype),
        suppressed=(ids >= talker.codes) & (ids != end),
        is_end=ids == end,
        rotary=talker.model.rotary(torch.arange(capacity.max_positions, device=device), dtype),
        loop_rotary=inner.rotary(torch.arange(books, device=device), dtype),
        # An even width: every line starts at 16 bytes, as the kernels that read it were compiled for.
        loop_positions=torch.arange(books, device=device)[:, None].repeat(1, rows + rows % 2),
        pad_id=pad_id,
    )


def reset(state: FrameState, slots: Sequence[int]) -> None:
    """Make rows `slots` free and empty. No sync; not capturable."""
    index = _to(torch.tensor(slots, dtype=torch.int64), state.done.device)
    scratch_page = state.cache.keys.shape[1] - 1
    for rows, value in (
        (state.done, True),
        (state.seen, False),
        (state.text_ids, state.pad_id),
        (state.cache.table, scratch_page),
    ):
        rows.index_fill_(0, index, value)
    for rows in (state.length, state.frames, state.pending, state.position):
        rows.index_fill_(0, index, 0)
    state.first.clear(slots)
    state.rest.clear(slots)


def stage(
    state: FrameState, prompts: Sequence[TalkerPrompt], slots: Sequence[int], pages: Sequence[Sequence[int]]
) -> int:
    """Give rows `slots` to `prompts`, each on its `pages`, and lay the prompts' rows out for `prefill`; how many.

    No sync; not capturable.
    """
    device, staged = state.done.device, state.staged
    reset(state, slots)
    tokens = sum(prompt.positions for prompt in prompts)
    assert state.scratch not in slots
    assert tokens < staged.ids.shape[0], f"{tokens} prompt rows"
    ids = torch.full((tokens, staged.ids.shape[1]), state.scratch, dtype=torch.int64)
    text = torch.full((len(slots), state.text_ids.shape[1]), state.pad_id, dtype=torch.int64)
    table = torch.full((len(slots), state.cache.table.shape[1]), state.cache.keys.shape[1] - 1, dtype=torch.int32)
    start = 0
    staged.x_vectors[:tokens].zero_()
    for row, (prompt, slot, owned) in enumerate(zip(prompts, slots, pages, strict=True)):
        _check_room(state, prompt, owned)
        rows = ids[start : start + prompt.positions]
        rows[:, 0], rows[:, 2], rows[-1, 3] = slot, start, slot
        rows[:, 1] = torch.arange(prompt.positions)
        rows[:, 4], rows[:, _ID_COLUMNS:] = prompt.text_rows, prompt.code_rows
        text[row, : prompt.text_ids] = prompt.trail
        table[row, : len(owned)] = torch.tensor(owned, dtype=torch.int32)
        if prompt.x_vector_row is not None:
            assert prompt.voice is not None
            staged.x_vectors[start + prompt.x_vector_row] = prompt.voice.data.x_vector.to(device)
        start += prompt.positions
    staged.ids[:tokens] = _to(ids, device)
    index = _to(torch.tensor(slots, dtype=torch.int64), device)
    state.text_ids.index_copy_(0, index, _to(text, device))
    state.cache.table.index_copy_(0, index, _to(table, device))
    state.position.index_copy_(0, index, _to(torch.tensor([prompt.positions - 1 for prompt in prompts]), device))
    controls = [row_controls(prompt.controls) for prompt in prompts]
    state.first.set(slots, [first for first, _ in controls])
    state.rest.set(slots, [rest for _, rest in controls])
    state.done.index_fill_(0, index, False)
    return tokens


def prefill(talker: Talker, state: FrameState, tokens: Tensor) -> None:
    """Run the staged rows `tokens` [T] int64 from the first on, and leave each prompt's last one pending. Capturable.

    The last row is run too, though the first step runs it again: what it leaves is overwritten by the same.
    """
    ids = state.staged.ids[tokens]
    slots, positions, starts, pending, text = ids[:, :_ID_COLUMNS].unbind(1)
    # A padding row is a sequence of its own.
    place = torch.arange(tokens.shape[0], device=tokens.device)
    starts = torch.where(slots == state.scratch, place, starts)
    rows = talker.embed_rows(text, ids[:, _ID_COLUMNS:], state.staged.x_vectors[tokens])
    rotary = (state.rotary[0][positions], state.rotary[1][positions])
    talker.model(rows[None], rotary, state.cache.fill(PackedRows(slots, positions, starts)))
    state.pending[pending] = rows


def _check_room(state: FrameState, prompt: TalkerPrompt, pages: Sequence[int]) -> None:
    limit = prompt.controls.max_frames
    positions = prompt.positions - 1 + limit
    assert positions <= state.rotary[0].shape[0], (positions, state.rotary[0].shape[0])
    assert positions <= len(pages) * state.cache.page_positions, (positions, len(pages))
    assert limit <= state.frames.shape[1], (limit, state.frames.shape[1])
    assert prompt.text_ids < state.text_ids.shape[1], (prompt.text_ids, state.text_ids.shape[1])


def _to(values: Tensor, device: torch.device) -> Tensor:
    """`values` on `device`, copied behind the host's back where that is possible."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values
