"""The talker's rows by slot, how a prompt is written into them, and the prefill of what was written.

The last row is scratch; a free slot is `done`, its pages are the scratch page. Prompts are staged in two copies: what
their slots need, a row each, and their own rows as ids, packed back to back. `place` and `prefill` take it from there,
and depend on nothing but the numbers of slots and of staged rows.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from sonoro.models.base import Capacity
from sonoro.nn.kvcache import PackedRows, PagedCache
from sonoro.nn.transformer import Rotary
from sonoro.runtime.ring import overwrite, upload
from sonoro.runtime.sampling import CLEARED, SamplingRows, pack

from .backbone import Talker
from .prompt import TalkerPrompt
from .rows import StepRows
from .sampling import row_controls

__all__ = ["FrameState", "StagedRows", "allocate", "append", "place", "prefill", "reset", "stage"]

_LOOP_PAGE = 16
_ID_COLUMNS = 6


@dataclass(frozen=True)
class StagedRows:
    """What is waiting for `place` and `prefill`.

    `slots` [N+1, W] int64, one for each staged prompt: position, both sampling rows, page table, text ids; the last is
    that of a slot which is free. `ids` [M+1, 6 + K] int64, one for each prompt row, the last scratch: slot, position,
    where the prompt begins in the pack, the slot whose pending input this row is (scratch for all but a prompt's last
    row), which of `x_vectors` [N+1, H] is added on the code side (the last is zero), text id, K code ids.
    """

    slots: Tensor
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
    codes, numbers = torch.arange(end + 1, device=device), torch.arange(rows, dtype=torch.int32, device=device)
    zeros = functools.partial(torch.zeros, device=device)
    table = torch.full((rows, capacity.pages_per_slot), capacity.pages, dtype=torch.int32, device=device)
    ids = torch.full((capacity.max_tokens + 1, _ID_COLUMNS + books), -1, dtype=torch.int64, device=device)
    ids[:, :_ID_COLUMNS] = torch.tensor((capacity.slots, 0, 0, capacity.slots, capacity.slots, -1), device=device)
    free = [0, *CLEARED, *CLEARED, *[capacity.pages] * table.shape[1], *[pad_id] * (capacity.max_text + 1)]
    staged = StagedRows(
        slots=torch.tensor(free, device=device).repeat(rows, 1),
        ids=ids,
        x_vectors=zeros(rows, config.hidden_size, dtype=dtype),
    )
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
        staged=staged,
        cache=PagedCache.allocate(talker.model.config, table, capacity.page_positions, capacity.pages, dtype),
        loop=PagedCache.allocate(inner.config, numbers[:, None], loop_page, rows - 1, dtype),
        suppressed=(codes >= talker.codes) & (codes != end),
        is_end=codes == end,
        rotary=talker.model.rotary(torch.arange(capacity.max_positions, device=device), dtype),
        loop_rotary=inner.rotary(torch.arange(books, device=device), dtype),
        # An even width: every line starts at 16 bytes, as the kernels that read it were compiled for.
        loop_positions=torch.arange(books, device=device)[:, None].repeat(1, rows + rows % 2),
        pad_id=pad_id,
    )


def reset(state: FrameState, slots: Sequence[int]) -> None:
    """Make rows `slots` free and empty. No sync; not capturable."""
    index = upload(slots, torch.int64, state.done.device)
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
    """Lay out what rows `slots` need to speak `prompts`, each on its `pages`, for `place`, and the prompts' rows for
    `prefill`; how many rows those are. No sync; not capturable.
    """
    staged, tokens = state.staged, sum(prompt.positions for prompt in prompts)
    assert state.scratch not in slots
    assert tokens < staged.ids.shape[0], f"{tokens} prompt rows"
    ids = np.empty((tokens, staged.ids.shape[1]), np.int64)
    rows = np.empty((len(slots), staged.slots.shape[1]), np.int64)
    start = 0
    for number, (prompt, slot, owned) in enumerate(zip(prompts, slots, pages, strict=True)):
        _check_room(state, prompt, owned)
        rows[number] = _slot_row(state, prompt, owned)
        own = ids[start : start + prompt.positions]
        own[:, 0], own[:, 1], own[:, 2] = slot, np.arange(prompt.positions), start
        own[:, 3], own[:, 4], own[-1, 3] = state.scratch, state.scratch, slot
        own[:, 5], own[:, _ID_COLUMNS:] = prompt.text_rows.numpy(), prompt.code_rows.numpy()
        if prompt.x_vector_row is not None:
            assert prompt.voice is not None
            own[prompt.x_vector_row, 4] = number
            staged.x_vectors[number] = prompt.voice.data.x_vector.to(staged.x_vectors.device)
        start += prompt.positions
    overwrite(staged.slots[: len(slots)], torch.from_numpy(rows))
    overwrite(staged.ids[:tokens], torch.from_numpy(ids))
    return tokens


def _slot_row(state: FrameState, prompt: TalkerPrompt, pages: Sequence[int]) -> npt.NDArray[np.int64]:
    """A row of `StagedRows.slots` [W]."""
    table, text = state.cache.table.shape[1], state.text_ids.shape[1]
    first, rest = row_controls(prompt.controls)
    scratch_page = state.cache.keys.shape[1] - 1
    row = np.full(1 + 2 * len(CLEARED) + table + text, state.pad_id)
    row[:-text] = (prompt.positions - 1, *pack(first), *pack(rest), *pages, *[scratch_page] * (table - len(pages)))
    row[-text:][: prompt.text_ids] = prompt.trail.numpy()
    return row


def place(state: FrameState, slots: Tensor) -> None:
    """Empty rows `slots` [B] int64 and give each what was staged for it, in that order. Capturable; no sync."""
    is_scratch = slots == state.scratch
    staged = torch.where(is_scratch[:, None], state.staged.slots[-1], state.staged.slots[: slots.shape[0]])
    table, controls = state.cache.table, len(CLEARED)
    widths = (1, controls, controls, table.shape[1], state.text_ids.shape[1])
    position, first, rest, pages, text = staged.split(widths, dim=1)
    state.seen.index_fill_(0, slots, False)
    for rows in (state.length, state.frames, state.pending):
        rows.index_fill_(0, slots, 0)
    state.position.index_copy_(0, slots, position[:, 0])
    state.first.put(slots, first)
    state.rest.put(slots, rest)
    table.index_copy_(0, slots, pages.to(table.dtype))
    state.text_ids.index_copy_(0, slots, text)
    state.done.index_copy_(0, slots, is_scratch)


def append(state: FrameState, slots: Sequence[int], starts: Sequence[int], ids: Sequence[Sequence[int]]) -> None:
    """Write `ids` as the text ids of rows `slots` from number `starts` on. No sync; not capturable."""
    most = state.text_ids.shape[1] - 1
    assert all(start + len(new) <= most for start, new in zip(starts, ids, strict=True)), (starts, most)
    written = [
        (slot, start + column, one)
        for slot, start, new in zip(slots, starts, ids, strict=True)
        for column, one in enumerate(new)
    ]
    rows, columns, values = upload(written, torch.int64, state.done.device).unbind(1)
    state.text_ids.index_put_((rows, columns), values)


def prefill(talker: Talker, state: FrameState, tokens: Tensor) -> None:
    """Run the staged rows `tokens` [T] int64 from the first on, and leave each prompt's last one pending. Capturable.

    The last row is run too, though the first step runs it again: what it leaves is overwritten by the same.
    """
    ids = state.staged.ids[tokens]
    slots, positions, starts, pending, x_vector, text = ids[:, :_ID_COLUMNS].unbind(1)
    # A padding row is a sequence of its own.
    own = torch.arange(tokens.shape[0], device=tokens.device)
    starts = torch.where(slots == state.scratch, own, starts)
    rows = talker.embed_rows(text, ids[:, _ID_COLUMNS:], state.staged.x_vectors[x_vector])
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
