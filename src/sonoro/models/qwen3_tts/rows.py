"""The two ends of a frame: what a step starts from and what it leaves in its rows. Triton kernels beside references.

Rows that are done are redirected to the scratch row, which is itself always done at length 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sonoro.models.slots import append_frames
from sonoro.ops.device import seeded
from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import has_pdl

from .backbone import Talker

try:
    import triton
    import triton.language as tl

    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait
except ImportError:
    triton = None

__all__ = [
    "Start",
    "StepRows",
    "begin",
    "begin_kernel",
    "begin_reference",
    "check_kernels",
    "finish",
    "finish_kernel",
    "finish_reference",
]

_BLOCK = 512


class StepRows(NamedTuple):
    """The rows by slot that a step reads and writes, under their names in `FrameState`."""

    done: Tensor
    length: Tensor
    position: Tensor
    pending: Tensor
    text_ids: Tensor
    frames: Tensor
    seen: Tensor


class Start(NamedTuple):
    """`rows` [B] int64 of a step, their `length` and `position` [B], and the backbone's `inputs` [B, H]."""

    rows: Tensor
    length: Tensor
    position: Tensor
    inputs: Tensor


def begin_reference(slots: Tensor, state: StepRows, talker: Talker) -> Start:
    """Where the rows `slots` [B] int64 stand; text is added to what is pending from the second frame on."""
    rows = slots.masked_fill(state.done[slots], state.done.shape[0] - 1)
    length = state.length[rows]
    text = talker.embed_text(state.text_ids[rows, (length - 1).clamp(0, state.text_ids.shape[1] - 1)])
    inputs = state.pending[rows] + text.masked_fill((length == 0)[:, None], 0.0)
    return Start(rows, length, state.position[rows], inputs)


def finish_reference(codes: Tensor, start: Start, max_frames: Tensor, state: StepRows, talker: Talker) -> None:
    """Append the frames `codes` [B, K] int64, make their embeddings pending, and end rows at `max_frames` [B].

    A row also ends where codebook 0 is the end of speech, the last id of `seen`.
    """
    scratch, end = state.done.shape[0] - 1, state.seen.shape[1] - 1
    is_end = codes[:, 0] == end
    codes = torch.cat((codes[:, :1].masked_fill(is_end[:, None], 0), codes[:, 1:]), dim=1)
    pending = talker.embed_frames(codes)
    kept = append_frames(state, *start[:3], codes, pending, is_end=is_end, max_frames=max_frames)
    state.seen[kept, codes[:, 0]] = kept != scratch


if triton is not None:

    @triton.jit
    def _begin(  # noqa: PLR0917 (a kernel's arguments are positional)
        slots,
        done,
        length,
        position,
        pending,
        text_ids,
        text_table,
        out_rows,
        out_length,
        out_position,
        out_inputs,
        text_stride,
        scratch,
        width,
        block: tl.constexpr,
        overlap: tl.constexpr,
    ):
        pdl_launch_dependents(overlap)
        pdl_wait(overlap)
        line = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        is_there = column < width
        slot = tl.load(slots + line)
        row = tl.where(tl.load(done + slot) != 0, scratch, slot)
        made = tl.load(length + row)
        value = tl.load(pending + row * width + column, mask=is_there, other=0.0)
        if made > 0:
            text = tl.load(text_ids + row * text_stride + tl.minimum(made, text_stride) - 1)
            added = tl.load(text_table + text * width + column, mask=is_there, other=0.0)
            value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(out_inputs + line * width + column, value, mask=is_there)
        if tl.program_id(1) == 0:
            tl.store(out_rows + line, row)
            tl.store(out_length + line, made)
            tl.store(out_position + line, tl.load(position + row))

    @triton.jit
    def _finish(  # noqa: PLR0917
        codes,
        rows,
        rows_length,
        rows_position,
        max_frames,
        done,
        length,
        position,
        pending,
        frames,
        seen,
        table,
        starts,
        max_frames_stride,
        frames_stride,
        scratch,
        end,
        width,
        books: tl.constexpr,
        book_block: tl.constexpr,
        block: tl.constexpr,
        overlap: tl.constexpr,
    ):
        pdl_launch_dependents(overlap)
        pdl_wait(overlap)
        line = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        is_there = column < width
        row, before = tl.load(rows + line), tl.load(rows_length + line)
        first = tl.load(codes + line * books)
        stopped = (row == scratch) | (first == end)
        first = tl.where(first == end, 0, first)
        kept = tl.where(stopped, scratch, row)
        total = tl.load(table + (tl.load(starts) + first) * width + column, mask=is_there, other=0.0).to(tl.float32)
        for book in tl.static_range(1, books):
            entry = tl.load(starts + book) + tl.load(codes + line * books + book)
            total += tl.load(table + entry * width + column, mask=is_there, other=0.0).to(tl.float32)
        tl.store(pending + kept * width + column, total.to(pending.dtype.element_ty), mask=is_there)
        # The other programs of this row read nothing that is written below.
        if tl.program_id(1) == 0:
            place = tl.arange(0, book_block)
            code = tl.load(codes + line * books + place, mask=place < books, other=0)
            code = tl.where(place == 0, first, code)
            tl.store(frames + kept * frames_stride + before * books + place, code, mask=place < books)
            made = tl.where(stopped, 0, before + 1)
            tl.store(seen + kept * (end + 1) + first, stopped == 0)
            tl.store(position + kept, tl.where(stopped, 0, tl.load(rows_position + line) + 1))
            tl.store(length + kept, made)
            tl.store(done + row, stopped | (made >= tl.load(max_frames + line * max_frames_stride)))


def begin_kernel(slots: Tensor, state: StepRows, talker: Talker) -> Start:
    """`begin_reference` as one Triton kernel: the same bits."""
    count, width = slots.shape[0], state.pending.shape[1]
    rows, length, position = (torch.empty_like(slots) for _ in range(3))
    inputs = torch.empty((count, width), dtype=state.pending.dtype, device=slots.device)
    overlap = has_pdl(slots.device)
    _begin[count, triton.cdiv(width, _BLOCK)](
        slots,
        *state[:5],
        talker.text_table,
        rows,
        length,
        position,
        inputs,
        state.text_ids.shape[1],
        state.done.shape[0] - 1,
        width,
        _BLOCK,
        overlap,
        num_warps=4,
        launch_pdl=overlap,
    )
    return Start(rows, length, position, inputs)


def finish_kernel(codes: Tensor, start: Start, max_frames: Tensor, state: StepRows, talker: Talker) -> None:
    """`finish_reference` as one Triton kernel; embeddings are summed from codebook 0 on, in float32, rounded once."""
    count, books = codes.shape
    width, overlap = state.pending.shape[1], has_pdl(codes.device)
    _finish[count, triton.cdiv(width, _BLOCK)](
        codes,
        *start[:3],
        max_frames,
        *state[:4],
        state.frames,
        state.seen,
        talker.code_table,
        talker.code_starts,
        max_frames.stride(0),
        state.frames.stride(0),
        state.done.shape[0] - 1,
        state.seen.shape[1] - 1,
        width,
        books,
        triton.next_power_of_2(books),
        _BLOCK,
        overlap,
        num_warps=4,
        launch_pdl=overlap,
    )


def _is_supported(state: StepRows, table: Tensor | None) -> bool:
    known = (torch.float32, torch.bfloat16, torch.float16)
    is_dense = all(rows.is_contiguous() for rows in state)
    return table is not None and is_dense and table.is_contiguous() and state.pending.dtype == table.dtype in known


@torch.inference_mode()
def check_kernels(count: int, state: StepRows, talker: Talker) -> None:
    """Compare both kernels with their references at `count` rows, shorter than those of `state`. Synchronises."""
    device = state.done.device
    generator = seeded(device)
    index = torch.arange(count, device=device)
    frames, books = min(state.frames.shape[1], 8), state.frames.shape[2]

    def random(limit: int, *shape: int) -> Tensor:
        return torch.randint(limit, shape, device=device, generator=generator)

    length = random(frames, count + 1)
    length[0] = length[count] = 0
    done = index.new_zeros(count + 1, dtype=torch.bool)
    done[count] = True
    width = state.pending.shape[1]
    pending = torch.randn(count + 1, width, device=device, generator=generator).to(state.pending.dtype)
    text_ids = random(talker.config.text_vocab_size, count + 1, 6)
    seen = random(2, count + 1, state.seen.shape[1]).bool()
    made = StepRows(done, length, 3 * length, pending, text_ids, random(talker.codes, count + 1, frames, books), seen)
    codes = random(talker.codes, count, books)
    # One row has just ended: two would both write to the scratch row, in any order.
    codes[count // 2, 0] = seen.shape[1] - 1
    start = begin_reference(index, made, talker)
    begin.check(lambda: (index, made, talker), tolerance=0.0)
    finish.check(
        lambda: (codes, start, start.length + index % 3, StepRows(*(rows.clone() for rows in made)), talker),
        # One rounding of the dtype, or sums of float32 in another order.
        tolerance={torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(pending.dtype, 1e-6),
    )


begin = Operation(
    "begin_frame",
    begin_kernel,
    begin_reference,
    lambda slots, state, talker: (
        slots.numel() > 0 and slots.is_contiguous() and _is_supported(state, talker.text_table)
    ),
)
finish = Operation(
    "finish_frame",
    finish_kernel,
    finish_reference,
    lambda codes, start, max_frames, state, talker: (
        codes.numel() > 0 and codes.is_contiguous() and _is_supported(state, talker.code_table)
    ),
)
