"""The two ends of a frame: what a step starts from, and what it leaves in its rows, for models that feed back the frame
and nothing else. Triton kernels beside references. Knows no model.

Rows that are done are redirected to the scratch row, which is itself always done at length 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sonoro.models.slots import BackboneState, append_frames
from sonoro.ops.causal import embed_sum
from sonoro.ops.device import seeded
from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import has_pdl

try:
    import triton
    import triton.language as tl

    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait
except ImportError:
    triton = None

__all__ = [
    "EndRows",
    "Feedback",
    "Start",
    "begin",
    "begin_kernel",
    "begin_reference",
    "check_kernels",
    "finish",
    "finish_kernel",
    "finish_reference",
]

_BLOCK = 512


class EndRows(NamedTuple):
    """The rows by slot that both ends read and write, under their names in `BackboneState`."""

    done: Tensor
    length: Tensor
    position: Tensor
    pending: Tensor
    frames: Tensor

    @classmethod
    def of(cls, state: BackboneState) -> EndRows:
        return cls(state.done, state.length, state.position, state.pending, state.frames)


class Start(NamedTuple):
    """`rows` [B] int64 of a step, their `length` and `position` [B], and the backbone's `inputs` [B, H]."""

    rows: Tensor
    length: Tensor
    position: Tensor
    inputs: Tensor


class Feedback(NamedTuple):
    """What a frame is embedded as: row c of `first` [C + 1, H] for codebook 0's c, plus row k of each of `tables`
    [K, C, H] at codebook k, divided by `divisor`; each step is rounded. The last row of `first` is the end of speech,
    and stands alone. That ends a row from its frame `earliest_end` on; before, it is kept as code 0.
    """

    first: Tensor
    tables: Tensor
    divisor: float
    earliest_end: int


def begin_reference(slots: Tensor, state: EndRows) -> Start:
    """Where the rows `slots` [B] int64 stand, and what is pending."""
    rows = slots.masked_fill(state.done[slots], state.done.shape[0] - 1)
    return Start(rows, state.length[rows], state.position[rows], state.pending[rows])


def finish_reference(codes: Tensor, start: Start, max_frames: Tensor, state: EndRows, feedback: Feedback) -> None:
    """Append the frames `codes` [B, K] int64, make what they are embedded as pending, and end rows at `max_frames` [B].

    Codebook 0 may be the end of speech.
    """
    decided = codes[:, 0]
    is_end = decided == feedback.first.shape[0] - 1
    codes = torch.cat((decided.masked_fill(is_end, 0)[:, None], codes[:, 1:]), dim=1)
    first = feedback.first[decided]
    whole = (first + embed_sum(codes[:, None], feedback.tables)[:, 0]) / feedback.divisor
    pending = torch.where(is_end[:, None], first, whole)
    stops = is_end & (start.length >= feedback.earliest_end)
    append_frames(state, *start[:3], codes, pending, is_end=stops, max_frames=max_frames)


if triton is not None:

    @triton.jit
    def _begin(  # noqa: PLR0917 (a kernel's arguments are positional)
        slots,
        done,
        length,
        position,
        pending,
        out_rows,
        out_length,
        out_position,
        out_inputs,
        scratch,
        width,
        block: tl.constexpr,
        ENABLE_PDL: tl.constexpr,
    ):
        pdl_launch_dependents(ENABLE_PDL)
        pdl_wait(ENABLE_PDL)
        line = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        slot = tl.load(slots + line)
        row = tl.where(tl.load(done + slot) != 0, scratch, slot)
        value = tl.load(pending + row * width + column, mask=column < width)
        tl.store(out_inputs + line * width + column, value, mask=column < width)
        if tl.program_id(1) == 0:
            tl.store(out_rows + line, row)
            tl.store(out_length + line, tl.load(length + row))
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
        first,
        tables,
        divisor,
        max_frames_stride,
        frames_stride,
        scratch,
        end,
        entries,
        width,
        earliest_end: tl.constexpr,
        books: tl.constexpr,
        book_block: tl.constexpr,
        block: tl.constexpr,
        ENABLE_PDL: tl.constexpr,
    ):
        pdl_launch_dependents(ENABLE_PDL)
        pdl_wait(ENABLE_PDL)
        dtype: tl.constexpr = pending.dtype.element_ty
        line = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        is_there = column < width
        row, before = tl.load(rows + line), tl.load(rows_length + line)
        decided = tl.load(codes + line * books)
        is_end = decided == end
        stopped = (row == scratch) | (is_end & (before >= earliest_end))
        kept = tl.where(stopped, scratch, row)
        code = tl.where(is_end, 0, decided)
        total = tl.load(tables + code * width + column, mask=is_there, other=0.0).to(tl.float32)
        for book in tl.static_range(1, books):
            entry = book * entries + tl.load(codes + line * books + book)
            total += tl.load(tables + entry * width + column, mask=is_there, other=0.0).to(tl.float32)
        alone = tl.load(first + decided * width + column, mask=is_there, other=0.0)
        whole = (alone.to(tl.float32) + total.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        whole = tl.div_rn(whole, tl.zeros([block], tl.float32) + divisor).to(dtype)
        tl.store(pending + kept * width + column, tl.where(is_end, alone, whole), mask=is_there)
        # The other programs of this row read nothing that is written below.
        if tl.program_id(1) == 0:
            place = tl.arange(0, book_block)
            made = tl.load(codes + line * books + place, mask=place < books, other=0)
            made = tl.where(place == 0, code, made)
            tl.store(frames + kept * frames_stride + before * books + place, made, mask=place < books)
            count = tl.where(stopped, 0, before + 1)
            tl.store(position + kept, tl.where(stopped, 0, tl.load(rows_position + line) + 1))
            tl.store(length + kept, count)
            tl.store(done + row, stopped | (count >= tl.load(max_frames + line * max_frames_stride)))


def begin_kernel(slots: Tensor, state: EndRows) -> Start:
    """`begin_reference` as one Triton kernel: the same bits."""
    count, width = slots.shape[0], state.pending.shape[1]
    rows, length, position = (torch.empty_like(slots) for _ in range(3))
    inputs = torch.empty((count, width), dtype=state.pending.dtype, device=slots.device)
    start, enable_pdl = Start(rows, length, position, inputs), has_pdl(slots.device)
    sizes = (state.done.shape[0] - 1, width, _BLOCK, enable_pdl)
    _begin[count, triton.cdiv(width, _BLOCK)](slots, *state[:4], *start, *sizes, num_warps=4, launch_pdl=enable_pdl)
    return start


def finish_kernel(codes: Tensor, start: Start, max_frames: Tensor, state: EndRows, feedback: Feedback) -> None:
    """`finish_reference` as one Triton kernel; embeddings are summed from codebook 0 on, in float32."""
    (count, books), width, enable_pdl = codes.shape, state.pending.shape[1], has_pdl(codes.device)
    _finish[count, triton.cdiv(width, _BLOCK)](
        codes,
        *start[:3],
        max_frames,
        *state,
        *feedback[:3],
        max_frames.stride(0),
        state.frames.stride(0),
        state.done.shape[0] - 1,
        feedback.first.shape[0] - 1,
        feedback.tables.shape[1],
        width,
        feedback.earliest_end,
        books,
        triton.next_power_of_2(books),
        _BLOCK,
        enable_pdl,
        num_warps=4,
        launch_pdl=enable_pdl,
    )


def _is_dense(state: EndRows) -> bool:
    known = (torch.float32, torch.bfloat16, torch.float16)
    return state.pending.dtype in known and all(rows.is_contiguous() for rows in state)


@torch.inference_mode()
def check_kernels(count: int, state: EndRows, feedback: Feedback) -> None:
    """Compare both kernels with their references at `count` rows, shorter than those of `state`. Synchronises."""
    device, width, dtype = state.done.device, state.pending.shape[1], state.pending.dtype
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
    entries = feedback.tables.shape[1]
    made = EndRows(done, length, 3 * length, pending, random(entries, count + 1, frames, books))
    codes = random(entries, count, books)
    # One row has just ended: two would both write to the scratch row, in any order.
    codes[count // 2, 0] = entries
    start = begin_reference(index, made)
    begin.check(lambda: (index, made), tolerance=0.0)
    finish.check(
        lambda: (codes, start, start.length + index % 3, EndRows(*(rows.clone() for rows in made)), feedback),
        # Some roundings of the dtype, or sums of float32 in another order.
        tolerance={torch.bfloat16: 2**-6, torch.float16: 2**-9}.get(dtype, 1e-6),
    )


begin = Operation(
    "begin",
    begin_kernel,
    begin_reference,
    lambda slots, state: slots.numel() > 0 and slots.is_contiguous() and _is_dense(state),
)
finish = Operation(
    "finish",
    finish_kernel,
    finish_reference,
    lambda codes, start, max_frames, state, feedback: (
        codes.numel() > 0
        and codes.is_contiguous()
        and _is_dense(state)
        and all(table.is_contiguous() and table.dtype == state.pending.dtype for table in feedback[:2])
    ),
)
