"""Zero the rows of some slots in many tensors: a Triton kernel, one launch for all, beside the torch reference."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import pdl_options
from sonoro.ops.optional import tl, triton

if triton is not None:
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait

_BLOCK = 4096
"""Words per program: 16 KiB of most tensors. Four slots of a codec make some 700 programs, a third of what runs at once
on an H100."""


def clear_rows_reference(slots: Tensor, tensors: Sequence[Tensor]) -> None:
    """Zero the rows `slots` [B] int64, which may repeat, of each of `tensors` [N, ...], of any dtypes, in place.
    Capturable; no sync."""
    for tensor in tensors:
        tensor.index_fill_(0, slots, 0)


if triton is not None:

    @triton.jit
    def _clear_rows_kernel(slots, words, WIDTHS: tl.constexpr, BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr):
        pdl_launch_dependents(ENABLE_PDL)
        pdl_wait(ENABLE_PDL)
        slot = tl.load(slots + tl.program_id(1))
        # Counts from the first block of each tensor in turn: one of them has block `program_id(0)` of all.
        block = tl.program_id(0)
        for number in tl.static_range(len(WIDTHS)):
            blocks = tl.cdiv(WIDTHS[number], BLOCK)
            if (block >= 0) & (block < blocks):
                word = block * BLOCK + tl.arange(0, BLOCK)
                tl.store(words[number] + slot * WIDTHS[number] + word, 0, mask=word < WIDTHS[number])
            block -= blocks


def clear_rows_kernel(slots: Tensor, tensors: Sequence[Tensor]) -> None:
    """`clear_rows_reference` as one Triton kernel, for contiguous tensors."""
    words = tuple(map(_words, tensors))
    widths = tuple(flat.shape[0] // tensor.shape[0] for flat, tensor in zip(words, tensors, strict=True))
    blocks = sum(triton.cdiv(width, _BLOCK) for width in widths)
    _clear_rows_kernel[blocks, slots.shape[0]](slots, words, widths, _BLOCK, **pdl_options(slots.device))


def _words(tensor: Tensor) -> Tensor:
    """All of `tensor` [N, ...] as the largest integers, of up to 32 bits, of which a row is a whole number."""
    row_bytes = tensor.nbytes // tensor.shape[0]
    word = torch.int32 if row_bytes % 4 == 0 else torch.int16 if row_bytes % 2 == 0 else torch.int8
    return tensor.view(-1).view(word)


def _is_supported(slots: Tensor, tensors: Sequence[Tensor]) -> bool:
    return slots.numel() > 0 and all(tensor.numel() > 0 and tensor.is_contiguous() for tensor in tensors)


clear_rows = Operation(clear_rows_kernel, clear_rows_reference, _is_supported)
