"""Before and after a codec: the next frames of each slot, and audio as PCM16. Triton kernels beside torch references.

Counts by slot [N+1] int64 are advanced in place. Only the scratch slot, the last, may repeat in a batch."""

import torch
from torch import Tensor

from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import pdl_options
from sonoro.ops.optional import tl, triton

if triton is not None:
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait

_FRAMES = 16
"""Frames that a program copies at once."""

_SAMPLES = 2048
"""Samples that a program converts."""

_SLOTS = 128
"""Slots whose counts a program advances."""


def begin_chunk_reference(frames: Tensor, decoded: Tensor, slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The next `count` of `frames` [N+1, T, ...] of each of `slots` [B] int64, [B, count, ...], and zeros [B] int64 for
    `end_chunk`. Advances `decoded`, the columns taken before; columns past the end repeat the last one. What the
    scratch slot gets, and its count, are unspecified. Capturable; no sync."""
    first = decoded[slots]
    columns = (first[:, None] + torch.arange(count, device=slots.device)).clamp(max=frames.shape[1] - 1)
    chunk = frames[slots[:, None], columns]
    # The scratch slot may repeat; each copy writes the same value.
    decoded.index_copy_(0, slots, first + count)
    return chunk, torch.zeros_like(slots)


def end_chunk_reference(pcm: Tensor, broken: Tensor) -> Tensor:
    """Float `pcm` [B, S] in [-1, 1] as by `to_pcm16`; samples that are not finite become 0, and their number is added
    to `broken` [B] int64. Capturable; no sync."""
    wide = pcm.to(torch.promote_types(pcm.dtype, torch.float32))
    is_finite = wide.isfinite()
    broken += pcm.shape[1] - is_finite.sum(1)
    return to_pcm16(wide.where(is_finite, 0.0))


def to_pcm16(pcm: Tensor) -> Tensor:
    """Convert float `pcm` in [-1, 1] to int16, rounded and clipped exactly as by `sonoro.audio.pcm.to_pcm16`."""
    return (pcm * 32768.0).round().clamp(-32768, 32767).to(torch.int16)


def advance_counts_reference(counts: Tensor, slots: Tensor, by: int) -> None:
    """Add `by` to `counts` of `slots` [B] int64, once for each slot; for scratch it may be left out. Capturable."""
    counts.index_copy_(0, slots, counts.index_select(0, slots) + by)


if triton is not None:

    @triton.jit(do_not_specialize=["count", "columns", "scratch"])
    def _begin_chunk(
        frames, decoded, slots, chunk, broken, count, columns, scratch,
        WIDTH: tl.constexpr, BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_launch_dependents(ENABLE_PDL)
        pdl_wait(ENABLE_PDL)
        row = tl.program_id(0).to(tl.int64)
        slot = tl.load(slots + row)
        first = tl.load(decoded + slot)
        size = count * WIDTH
        for start in range(0, size, BLOCK):
            index = start + tl.arange(0, BLOCK)
            column = tl.minimum(first + index // WIDTH, columns - 1)
            value = tl.load(frames + (slot * columns + column) * WIDTH + index % WIDTH, mask=index < size)
            tl.store(chunk + row * size + index, value, mask=index < size)
        tl.store(broken + row, 0)
        # All threads have read the count that is written now. No other program has this slot, unless it is scratch,
        # whose count stays: it cannot overflow, and programs do not race for it.
        tl.debug_barrier()
        tl.store(decoded + slot, first + count, mask=slot != scratch)

    @triton.jit
    def _end_chunk(pcm, out, broken, samples, BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr):
        pdl_launch_dependents(ENABLE_PDL)
        pdl_wait(ENABLE_PDL)
        row = tl.program_id(1).to(tl.int64)
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(pcm + row * samples + index, mask=index < samples, other=0.0).to(tl.float32)
        is_finite = tl.abs(value) < float("inf")
        limited = tl.minimum(tl.maximum(tl.where(is_finite, value, 0.0), -1.0), 1.0)
        # Near 1.5 * 2^23 floats are integers, so the sum is rounded to the nearest, half to even.
        rounded = (tl.minimum(limited * 32768.0, 32767.0) + 12582912.0) - 12582912.0
        tl.store(out + row * samples + index, rounded.to(tl.int16), mask=index < samples)
        found = tl.sum(tl.where(is_finite, 0, 1))
        if found > 0:
            tl.atomic_add(broken + row, found.to(tl.int64))

    @triton.jit(do_not_specialize=["batch", "by", "scratch"])
    def _advance_counts(counts, slots, batch, by, scratch, BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr):
        pdl_launch_dependents(ENABLE_PDL)
        pdl_wait(ENABLE_PDL)
        row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        # The scratch slot may repeat, and is left out: so each count has one thread.
        slot = tl.load(slots + row, mask=row < batch, other=scratch)
        count = tl.load(counts + slot)
        tl.store(counts + slot, count + by, mask=slot != scratch)


def begin_chunk_kernel(frames: Tensor, decoded: Tensor, slots: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`begin_chunk_reference` as one Triton kernel, a program per slot. The count of the scratch slot stays."""
    chunk, broken = frames.new_empty(slots.shape[0], count, *frames.shape[2:]), torch.empty_like(slots)
    width = frames[0, 0].numel()
    _begin_chunk[(slots.shape[0],)](
        frames=frames, decoded=decoded, slots=slots, chunk=chunk, broken=broken, count=count, columns=frames.shape[1],
        scratch=decoded.shape[0] - 1, WIDTH=width, BLOCK=triton.next_power_of_2(_FRAMES * width),
        **pdl_options(frames.device),
    )  # fmt: skip
    return chunk, broken


def end_chunk_kernel(pcm: Tensor, broken: Tensor) -> Tensor:
    """`end_chunk_reference` as one Triton kernel."""
    (batch, samples), out = pcm.shape, torch.empty_like(pcm, dtype=torch.int16)
    _end_chunk[triton.cdiv(samples, _SAMPLES), batch](
        pcm=pcm, out=out, broken=broken, samples=samples, BLOCK=_SAMPLES, **pdl_options(pcm.device)
    )
    return out


def advance_counts_kernel(counts: Tensor, slots: Tensor, by: int) -> None:
    """`advance_counts_reference` as one Triton kernel. The count of the scratch slot stays."""
    batch = slots.shape[0]
    _advance_counts[(triton.cdiv(batch, _SLOTS),)](
        counts=counts, slots=slots, batch=batch, by=by, scratch=counts.shape[0] - 1, BLOCK=_SLOTS,
        **pdl_options(counts.device),
    )  # fmt: skip


begin_chunk = Operation(
    begin_chunk_kernel,
    begin_chunk_reference,
    lambda frames, *_: frames.is_contiguous() and frames[0, 0].numel() <= 4096,
    is_repeatable=False,
)
end_chunk = Operation(
    end_chunk_kernel,
    end_chunk_reference,
    lambda pcm, _: pcm.dtype != torch.float64 and pcm.is_contiguous() and pcm.numel() > 0,
    is_repeatable=False,
)
advance_counts = Operation(advance_counts_kernel, advance_counts_reference, is_repeatable=False)
