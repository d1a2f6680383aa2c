"""First and last kernel of a decode step of a model with codebooks: gather the backbone's inputs by slot, and append
the frame and its feedback embedding. Triton kernels beside their references.

Slots that are done are replaced by the scratch slot, which is always done, at length 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sonoro.models.shared.slots import BackboneState
from sonoro.ops.device import seeded
from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import pdl_options
from sonoro.ops.optional import tl, triton

if triton is not None:
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait

_BLOCK = 512


# Dataclasses rather than tuples: a kernel check compares every tensor in its tuples, and these hold large tables.
@dataclass(frozen=True)
class PendingText:
    """Text added to the inputs: frame n takes entry n - 1 of a slot's `ids` [N+1, M] int64, and the last one after
    that.
    `embed` maps ids [B] to [B, H]; `table` [V, H] holds its results for all ids, or None if it is not in memory."""

    ids: Tensor
    table: Tensor | None
    embed: Callable[[Tensor], Tensor]


class StepState(NamedTuple):
    """Tensors of `BackboneState` that a step reads and writes, by slot.
    `seen` [N+1, end of speech + 1] bool marks the codes sampled for codebook 0, for models with a repetition penalty.
    """

    done: Tensor
    length: Tensor
    position: Tensor
    pending: Tensor
    frames: Tensor
    seen: Tensor | None = None
    text: PendingText | None = None

    @classmethod
    def of(cls, state: BackboneState, seen: Tensor | None = None, text: PendingText | None = None) -> StepState:
        return cls(state.done, state.length, state.position, state.pending, state.frames, seen, text)


class Start(NamedTuple):
    """The `slots` [B] int64 of a step (scratch for those done), their `length` and `position` [B] int64, and the
    backbone's `inputs` [B, H]."""

    slots: Tensor
    length: Tensor
    position: Tensor
    inputs: Tensor


@dataclass(frozen=True)
class Feedback:
    """How a frame becomes the next input, and which code ends speech.

    `embed` maps frames [B, K] to [B, H]: the sum over k, in float32, of rows `starts[k]` + code of `table`, rounded.
    With `first` [end + 1, H], its row for code 0 of the frame is added and the sum divided by `divisor`, rounding each.

    Code `end` in codebook 0 ends speech from frame `earliest_end` on. Before that, the frame is stored with code 0 in
    its place, and its feedback is the last row of `first` alone. Every codebook has at least `codes` codes."""

    embed: Callable[[Tensor], Tensor]
    table: Tensor | None
    starts: Tensor
    codes: int
    end: int
    earliest_end: int = 0
    first: Tensor | None = None
    divisor: float = 1.0


def begin_reference(slots: Tensor, state: StepState) -> Start:
    """Gather the state of `slots` [B] int64 and the backbone's inputs: `pending`, plus the frame's text if there is
    any."""
    slots = slots.masked_fill(state.done[slots], state.done.shape[0] - 1)
    length, inputs, text = state.length[slots], state.pending[slots], state.text
    if text is not None:
        embedded = text.embed(text.ids[slots, (length - 1).clamp(0, text.ids.shape[1] - 1)])
        inputs = inputs + embedded.masked_fill((length == 0)[:, None], 0.0)
    return Start(slots, length, state.position[slots], inputs)


def finish_reference(codes: Tensor, start: Start, max_frames: Tensor, state: StepState, feedback: Feedback) -> None:
    """Append the frames `codes` [B, K] int64, write their embeddings to `pending`, and end slots at `max_frames`
    [B]."""
    decided = codes[:, 0]
    is_end = decided == feedback.end
    codes = torch.cat((decided.masked_fill(is_end, 0)[:, None], codes[:, 1:]), dim=1)
    pending = feedback.embed(codes)
    if feedback.first is not None:
        pending = torch.where(is_end[:, None], feedback.first[decided], pending)
    stops = is_end & (start.length >= feedback.earliest_end)
    kept = append_frames(state, *start[:3], codes, pending, is_end=stops, max_frames=max_frames)
    if state.seen is not None:
        state.seen[kept, codes[:, 0]] = kept != state.done.shape[0] - 1


def append_frames(  # noqa: PLR0917 (where the rows stand, and what they are given)
    state: StepState,
    rows: Tensor,
    length: Tensor,
    position: Tensor,
    made: Tensor,
    pending: Tensor,
    *,
    is_end: Tensor,
    max_frames: Tensor,
) -> Tensor:
    """Append the frames `made` [B, ...] to the slots `rows` [B], at `length` and `position` [B] int64.

    `pending` [B, H] are the next inputs. A slot with `is_end` [B] ends without this frame; others end at `max_frames`
    [B]. Capturable; no sync.

    Returns `rows` with the scratch slot for those with `is_end`: where to write any other state of this frame."""
    scratch = state.done.shape[0] - 1
    stopped = is_end | (rows == scratch)
    # A slot that ends writes to the scratch slot: its last decision changes `done` alone.
    kept = rows.masked_fill(stopped, scratch)
    count = (length + 1).masked_fill(stopped, 0)
    state.position[kept] = (position + 1).masked_fill(stopped, 0)
    state.frames[kept, length] = made
    state.pending[kept] = pending
    state.length[kept] = count
    state.done[rows] = stopped | (count >= max_frames)
    return kept


if triton is not None:

    @triton.jit
    def _begin(  # noqa: PLR0917 (a kernel's arguments are positional)
        slots, done, length, position, pending, text_ids, text_table, out_slots, out_length, out_position, out_inputs,
        text_stride, scratch, width, BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_launch_dependents(ENABLE_PDL)
        pdl_wait(ENABLE_PDL)
        index = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        asked = tl.load(slots + index)
        slot = tl.where(tl.load(done + asked) != 0, scratch, asked)
        made = tl.load(length + slot)
        value = tl.load(pending + slot * width + column, mask=mask, other=0.0)
        if text_ids is not None:  # noqa: SIM102 (decided when the kernel is compiled)
            if made > 0:
                text = tl.load(text_ids + slot * text_stride + tl.minimum(made, text_stride) - 1)
                added = tl.load(text_table + text * width + column, mask=mask, other=0.0)
                value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(out_inputs + index * width + column, value, mask=mask)
        if tl.program_id(1) == 0:
            tl.store(out_slots + index, slot)
            tl.store(out_length + index, made)
            tl.store(out_position + index, tl.load(position + slot))

    @triton.jit
    def _finish(  # noqa: PLR0917
        codes, slots, slots_length, slots_position, max_frames, done, length, position, pending, frames, seen,
        table, starts, first, divisor, max_frames_stride, frames_stride, scratch, end, width,
        EARLIEST_END: tl.constexpr, BOOKS: tl.constexpr, BOOK_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
        ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_launch_dependents(ENABLE_PDL)
        pdl_wait(ENABLE_PDL)
        dtype: tl.constexpr = pending.dtype.element_ty
        index = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = column < width
        slot, before = tl.load(slots + index), tl.load(slots_length + index)
        decided = tl.load(codes + index * BOOKS)
        is_end = decided == end
        stopped = (slot == scratch) | (is_end & (before >= EARLIEST_END))
        kept = tl.where(stopped, scratch, slot)
        code = tl.where(is_end, 0, decided)
        total = tl.load(table + (tl.load(starts) + code) * width + column, mask=mask, other=0.0).to(tl.float32)
        for book in tl.static_range(1, BOOKS):
            entry = tl.load(starts + book) + tl.load(codes + index * BOOKS + book)
            total += tl.load(table + entry * width + column, mask=mask, other=0.0).to(tl.float32)
        value = total.to(dtype)
        if first is not None:
            alone = tl.load(first + decided * width + column, mask=mask, other=0.0)
            whole = (alone.to(tl.float32) + value.to(tl.float32)).to(dtype).to(tl.float32)
            whole = tl.div_rn(whole, tl.zeros([BLOCK], tl.float32) + divisor).to(dtype)
            value = tl.where(is_end, alone, whole)
        tl.store(pending + kept * width + column, value, mask=mask)
        # One program per slot; the others read nothing that it writes.
        if tl.program_id(1) == 0:
            books = tl.arange(0, BOOK_BLOCK)
            frame = tl.load(codes + index * BOOKS + books, mask=books < BOOKS, other=0)
            frame = tl.where(books == 0, code, frame)
            tl.store(frames + kept * frames_stride + before * BOOKS + books, frame, mask=books < BOOKS)
            if seen is not None:
                tl.store(seen + kept * (end + 1) + code, stopped == 0)
            count = tl.where(stopped, 0, before + 1)
            tl.store(position + kept, tl.where(stopped, 0, tl.load(slots_position + index) + 1))
            tl.store(length + kept, count)
            tl.store(done + slot, stopped | (count >= tl.load(max_frames + index * max_frames_stride)))


def begin_kernel(slots: Tensor, state: StepState) -> Start:
    """`begin_reference` as one Triton kernel, with bit-equal results."""
    count, width = slots.shape[0], state.pending.shape[1]
    stepped, length, position = (torch.empty_like(slots) for _ in range(3))
    inputs = torch.empty((count, width), dtype=state.pending.dtype, device=slots.device)
    text_ids, text_table = (None, None) if state.text is None else (state.text.ids, state.text.table)
    _begin[count, triton.cdiv(width, _BLOCK)](
        slots=slots, done=state.done, length=state.length, position=state.position, pending=state.pending,
        text_ids=text_ids, text_table=text_table, out_slots=stepped, out_length=length, out_position=position,
        out_inputs=inputs, text_stride=1 if text_ids is None else text_ids.shape[1], scratch=state.done.shape[0] - 1,
        width=width, BLOCK=_BLOCK, num_warps=4, **pdl_options(slots.device),
    )  # fmt: skip
    return Start(stepped, length, position, inputs)


def finish_kernel(codes: Tensor, start: Start, max_frames: Tensor, state: StepState, feedback: Feedback) -> None:
    """`finish_reference` as one Triton kernel; embeddings are summed from codebook 0 on, in float32."""
    (count, books), width = codes.shape, state.pending.shape[1]
    _finish[count, triton.cdiv(width, _BLOCK)](
        codes=codes, slots=start.slots, slots_length=start.length, slots_position=start.position,
        max_frames=max_frames, done=state.done, length=state.length, position=state.position, pending=state.pending,
        frames=state.frames, seen=state.seen, table=feedback.table, starts=feedback.starts, first=feedback.first,
        divisor=feedback.divisor, max_frames_stride=max_frames.stride(0), frames_stride=state.frames.stride(0),
        scratch=state.done.shape[0] - 1, end=feedback.end, width=width, EARLIEST_END=feedback.earliest_end,
        BOOKS=books, BOOK_BLOCK=triton.next_power_of_2(books), BLOCK=_BLOCK, num_warps=4, **pdl_options(codes.device),
    )  # fmt: skip


def _can_begin(slots: Tensor, state: StepState) -> bool:
    text = () if state.text is None else (state.text.ids, state.text.table)
    return slots.numel() > 0 and slots.is_contiguous() and _is_dense(state, *text)


def _can_finish(codes: Tensor, start: Start, max_frames: Tensor, state: StepState, feedback: Feedback) -> bool:
    first = () if feedback.first is None else (feedback.first,)
    return codes.numel() > 0 and codes.is_contiguous() and _is_dense(state, feedback.table, *first)


def _is_dense(state: StepState, *tables: Tensor | None) -> bool:
    """Whether the kernels support dtype and layout of `state` and of `tables` (embeddings, or ids)."""
    dtype = state.pending.dtype
    return (
        dtype in (torch.float32, torch.bfloat16, torch.float16)
        and all(rows is None or rows.is_contiguous() for rows in state[:6])
        and all(table is not None and table.is_contiguous() and table.dtype in (dtype, torch.int64) for table in tables)
    )


@torch.inference_mode()
def check_kernels(count: int, state: StepState, feedback: Feedback) -> None:
    """Compare both kernels with their references at `count` slots of at most 8 frames. Synchronises."""
    device, width, dtype, text = state.done.device, state.pending.shape[1], state.pending.dtype, state.text
    generator = seeded(device)
    index = torch.arange(count, device=device)
    frames, books = min(state.frames.shape[1], 8), state.frames.shape[2]

    def random(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, device=device, generator=generator)

    length = random(frames, count + 1)
    length[0] = length[count] = 0
    done = index.new_zeros(count + 1, dtype=torch.bool)
    done[count] = True
    pending = torch.randn(count + 1, width, device=device, generator=generator).to(dtype)
    if text is not None:
        text = replace(text, ids=random(1 if text.table is None else len(text.table), count + 1, 6))
    seen = None if state.seen is None else random(2, count + 1, state.seen.shape[1]).bool()
    made = StepState(done, length, 3 * length, pending, random(feedback.codes, count + 1, frames, books), seen, text)
    codes = random(feedback.codes, count, books)
    # Only one slot ends: two would write to the scratch slot in any order.
    codes[count // 2, 0] = feedback.end
    start = begin_reference(index, made)
    begin_step.check(lambda: (index, made), tolerance=0.0)
    finish_step.check(
        lambda: (codes, start, start.length + index % 3, _copied(made), feedback),
        # Allow a few roundings of the dtype, or float32 sums in another order.
        tolerance={torch.bfloat16: 2**-6, torch.float16: 2**-9}.get(dtype, 1e-6),
    )


def _copied(state: StepState) -> StepState:
    tensors: dict[str, Any] = {
        name: rows.clone() for name, rows in zip(StepState._fields, state, strict=True) if isinstance(rows, Tensor)
    }
    return state._replace(**tensors)


begin_step = Operation(begin_kernel, begin_reference, _can_begin, name="begin_step")
finish_step = Operation(finish_kernel, finish_reference, _can_finish, name="finish_step")
