"""Products with `nn.Linear` weights for one position per row, fused with the norm before and the sum after them.

A frame is a chain of hundreds of such products, each waiting for the one before, so three things count: every weight is
read from memory once, at its full rate; launches are few; and the weights of a kernel are on their way while the kernel
ahead of it still runs (see `sonoro.ops.norm`). `sonoro.ops.plans` chooses between the ways to run one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import can_overlap, is_row_major, rms_norm_kernel, rms_norm_reference
from sonoro.ops.plans import Library, Plan, Tile, Vector, plan_for

try:
    import triton
    import triton.language as tl

    from sonoro.ops.norm import launch_dependents, scale_and_weigh, wait_for_inputs
except ImportError:
    triton = None

__all__ = [
    "linear_add",
    "linear_add_kernel",
    "linear_add_reference",
    "norm_gate_up",
    "norm_gate_up_kernel",
    "norm_gate_up_reference",
    "norm_linear",
    "norm_linear_kernel",
    "norm_linear_reference",
]

ROW_BLOCK = 1024
"""Elements per program of the small kernels after a product."""


def norm_linear_reference(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """The RMS norm of `x` [B, K] times `weight` [N, K]: [B, N]. Differentiable."""
    return F.linear(rms_norm_reference(x, norm_weight, eps), weight)


def norm_gate_up_reference(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> Tensor:
    """silu(gate) * up of the RMS norm of `x` [B, K], for `weight` [2 N, K] with the gate's rows first: [B, N].

    Differentiable.
    """
    gate, up = norm_linear_reference(x, norm_weight, eps, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def linear_add_reference(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """`residual` [B, N] plus `x` [B, K] times `weight` [N, K]. Differentiable."""
    return residual + F.linear(x, weight)


if triton is not None:
    # Triton's interpreter takes the bits of a bfloat16 operand for an integer; products in float32 are the same.
    OPERAND = {
        torch.float32: tl.float32,
        torch.bfloat16: tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16,
    }

    @triton.jit
    def _silu_times(gate, up, dtype: tl.constexpr):
        # Rounded where the reference's separate steps round.
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        return ((gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up).to(dtype)

    @triton.jit
    def _gate(both, out, width_out, block: tl.constexpr, overlap: tl.constexpr):
        launch_dependents(overlap)
        wait_for_inputs(overlap)
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        gate = tl.load(both + row * 2 * width_out + column, mask=column < width_out, other=0)
        up = tl.load(both + row * 2 * width_out + width_out + column, mask=column < width_out, other=0)
        tl.store(out + row * width_out + column, _silu_times(gate, up, out.dtype.element_ty), mask=column < width_out)

    @triton.jit
    def _multiply_rows(tiles, values, chunks: tl.constexpr, first: tl.constexpr, step: tl.constexpr):
        # Sums of tiles[first], tiles[first + step], ... times the chunks of x, over K.
        total = tiles[first].to(tl.float32) * values[0][None, :]
        for chunk in tl.static_range(1, chunks):
            total += tiles[first + step * chunk].to(tl.float32) * values[chunk][None, :]
        return tl.sum(total, 1)

    @triton.jit(do_not_specialize=["batch"])
    def _vector(  # noqa: PLR0917 (a kernel's arguments are positional)
        x,
        norm_weight,
        weight,
        residual,
        out,
        batch,
        x_stride,
        residual_stride,
        eps,
        width_out: tl.constexpr,
        width_in: tl.constexpr,
        rows: tl.constexpr,
        block_k: tl.constexpr,
        is_gated: tl.constexpr,
        overlap: tl.constexpr,
    ):
        launch_dependents(overlap)
        dtype: tl.constexpr = out.dtype.element_ty
        chunks: tl.constexpr = (width_in + block_k - 1) // block_k
        halves: tl.constexpr = 2 if is_gated else 1
        row = tl.program_id(0) * rows + tl.arange(0, rows)
        column = tl.arange(0, block_k)
        start = weight + row.to(tl.int64)[:, None] * width_in + column[None, :]
        tiles, gains = (), ()
        for chunk in tl.static_range(chunks):
            k = chunk * block_k
            for half in tl.static_range(halves):
                mask = (row < width_out)[:, None] & (k + column < width_in)[None, :]
                tiles += (tl.load(start + half * width_out * width_in + k, mask=mask, other=0),)  # type: ignore[assignment]
            if norm_weight is not None:
                gains += (tl.load(norm_weight + k + column, mask=k + column < width_in, other=0),)  # type: ignore[assignment]
        wait_for_inputs(overlap)
        for b in range(batch):
            if residual is not None:
                rest = tl.load(residual + b * residual_stride + row, mask=row < width_out, other=0).to(tl.float32)
            values = ()
            for chunk in tl.static_range(chunks):
                spot = chunk * block_k + column
                values += (tl.load(x + b * x_stride + spot, mask=spot < width_in, other=0).to(tl.float32),)  # type: ignore[assignment]
            if norm_weight is not None:
                squares = tl.zeros([block_k], tl.float32)
                for chunk in tl.static_range(chunks):
                    squares += values[chunk] * values[chunk]
                inverse = tl.rsqrt(tl.sum(squares) / width_in + eps)
                normed = ()
                for chunk in tl.static_range(chunks):
                    normed += (scale_and_weigh(values[chunk], inverse, gains[chunk], dtype).to(tl.float32),)  # type: ignore[assignment]
                values = normed
            result = _multiply_rows(tiles, values, chunks, 0, halves).to(dtype)
            if is_gated:
                result = _silu_times(result, _multiply_rows(tiles, values, chunks, 1, halves), dtype)
            if residual is not None:
                result = (result.to(tl.float32) + rest).to(dtype)
            tl.store(out + b * width_out + row, result, mask=row < width_out)

    @triton.jit
    def _prefetch_rows(weight, row, width_in: tl.constexpr, span: tl.constexpr, line: tl.constexpr):
        # One address in each `line` elements, which are a cache line of 128 bytes.
        spot = tl.arange(0, 16) * line
        for k in range(0, span, 16 * line):
            address = weight + row[:, None] * width_in + tl.minimum(k + spot, span - 1)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [address.to(tl.int64, bitcast=True)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )

    @triton.jit(do_not_specialize=["batch"])
    def _tile(  # noqa: PLR0915, PLR0917 (a kernel's arguments are positional)
        x,
        weight,
        residual,
        out,
        batch,
        x_stride,
        residual_stride,
        width_out: tl.constexpr,
        width_in: tl.constexpr,
        block_b: tl.constexpr,
        block_n: tl.constexpr,
        block_k: tl.constexpr,
        splits: tl.constexpr,
        parts: tl.constexpr,
        stages: tl.constexpr,
        is_gated: tl.constexpr,
        is_prefetched: tl.constexpr,
        overlap: tl.constexpr,
        operand: tl.constexpr,
    ):
        launch_dependents(overlap)
        dtype: tl.constexpr = weight.dtype.element_ty
        step: tl.constexpr = splits * block_k
        span: tl.constexpr = (width_in + parts - 1) // parts
        # Added to the pointers, so that the loop has constant ends: it is 6% faster (8 rows, as below).
        part = 0 if parts == 1 else tl.program_id(2)
        x += part * span
        weight += part * span
        place = tl.program_id(0) * block_b + tl.arange(0, block_b)
        b = place.to(tl.int64)
        row = tl.program_id(1) * block_n + tl.arange(0, block_n)
        # Rows past the end repeat the last one, unmasked; their sums are not stored. A mask on rows of x pays in the
        # smallest blocks only (passes of a depth model, H200: 1.53 ms, not 1.66, for 8 rows; 1.98, not 1.78, for 64);
        # in others rows repeat in turn, as many reads of the last one are slow (2.31 ms, not 1.81, for 17).
        source = tl.minimum(row, width_out - 1).to(tl.int64)
        here = b if block_b < 32 else (place % batch).to(tl.int64)
        # Axes (b, k) and (k, n); a split K puts the split before both.
        if splits == 1:
            column = tl.arange(0, block_k)
            wide, tall = column[None, :], column[:, None]
            inputs = x + here[:, None] * x_stride + wide
            has_row = (b < batch)[:, None] if block_b < 32 else True
            weights = weight + source[None, :] * width_in + tall
            total = tl.zeros([block_b, block_n], tl.float32)
        else:
            column = tl.arange(0, splits)[:, None] * block_k + tl.arange(0, block_k)[None, :]
            wide, tall = column[:, None, :], column[:, :, None]
            inputs = x + here[None, :, None] * x_stride + wide
            has_row = (b < batch)[None, :, None] if block_b < 32 else True
            weights = weight + source[None, None, :] * width_in + tall
            total = tl.zeros([splits, block_b, block_n], tl.float32)
        other = total
        if overlap and is_prefetched:
            line: tl.constexpr = 1024 // dtype.primitive_bitwidth
            _prefetch_rows(weight, source, width_in, span, line)
            if is_gated:
                _prefetch_rows(weight, source + width_out, width_in, span, line)
        wait_for_inputs(overlap)
        for k in tl.range(0, span, step, num_stages=stages):
            if width_in % step == 0:
                value = tl.load(inputs + k, mask=has_row, other=0).to(operand)
                tile = tl.load(weights + k).to(operand)
            else:
                value = tl.load(inputs + k, mask=has_row & (k + wide < width_in), other=0).to(operand)
                tile = tl.load(weights + k, mask=k + tall < width_in, other=0).to(operand)
            total = tl.dot(value, tile, total, input_precision="ieee")
            if is_gated:
                if width_in % step == 0:
                    tile = tl.load(weights + width_out * width_in + k).to(operand)
                else:
                    tile = tl.load(weights + width_out * width_in + k, mask=k + tall < width_in, other=0).to(operand)
                other = tl.dot(value, tile, other, input_precision="ieee")
        if splits > 1:
            total, other = tl.sum(total, 0), tl.sum(other, 0)
        mask = (b < batch)[:, None] & (row < width_out)[None, :]
        result = total if parts > 1 else total.to(dtype)
        if is_gated:
            result = _silu_times(result, other, dtype)
        if residual is not None:
            rest = tl.load(residual + b[:, None] * residual_stride + row[None, :], mask=mask, other=0)
            result = (result.to(tl.float32) + rest.to(tl.float32)).to(dtype)
        tl.store(out + (part * batch + b[:, None]) * width_out + row[None, :], result, mask=mask)

    @triton.jit(do_not_specialize=["batch"])
    def _add_parts(  # noqa: PLR0917 (a kernel's arguments are positional)
        sums,
        residual,
        out,
        batch,
        residual_stride,
        width_out: tl.constexpr,
        parts: tl.constexpr,
        block: tl.constexpr,
        overlap: tl.constexpr,
    ):
        launch_dependents(overlap)
        wait_for_inputs(overlap)
        dtype: tl.constexpr = out.dtype.element_ty
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * block + tl.arange(0, block)
        mask = column < width_out
        total = tl.zeros([block], tl.float32)
        for part in tl.static_range(parts):
            total += tl.load(sums + (part * batch + row) * width_out + column, mask=mask, other=0)
        result = total.to(dtype)
        if residual is not None:
            rest = tl.load(residual + row * residual_stride + column, mask=mask, other=0)
            result = (result.to(tl.float32) + rest.to(tl.float32)).to(dtype)
        tl.store(out + row * width_out + column, result, mask=mask)


def _product(  # noqa: PLR0917
    x: Tensor,
    weight: Tensor,
    plan: Plan,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    batch, width_in = x.shape
    width_out = weight.shape[0] // 2 if is_gated else weight.shape[0]
    overlap = plan.is_overlapped and can_overlap(x.device)
    residual_stride = 0 if residual is None else residual.stride(0)
    if isinstance(plan, Vector):
        out = torch.empty((batch, width_out), dtype=x.dtype, device=x.device)
        gain, eps = norm or (None, 0.0)
        inputs = (x, gain, weight, residual, out, batch, x.stride(0), residual_stride, eps)
        sizes = (width_out, width_in, plan.rows, plan.block_k, is_gated, overlap)
        _vector[(triton.cdiv(width_out, plan.rows),)](*inputs, *sizes, num_warps=plan.warps, launch_pdl=overlap)
        return out
    if norm is not None:
        x = rms_norm_kernel(x, *norm, is_overlapped=plan.is_overlapped)
    if isinstance(plan, Library):
        return _library_product(x, weight, residual, is_gated, overlap)
    return _tile_product(x, weight, plan, residual, is_gated)


def _tile_product(x: Tensor, weight: Tensor, plan: Tile, residual: Tensor | None, is_gated: bool) -> Tensor:
    batch, width_in = x.shape
    width_out = weight.shape[0] // 2 if is_gated else weight.shape[0]
    overlap = plan.is_overlapped and can_overlap(x.device)
    residual_stride = 0 if residual is None else residual.stride(0)
    out = torch.empty((batch, width_out), dtype=x.dtype, device=x.device)
    sums, rest = out, residual
    if plan.parts > 1:
        assert not is_gated
        assert width_in % (plan.parts * plan.splits * plan.block_k) == 0, (width_in, plan)
        sums = torch.empty((plan.parts, batch, width_out), dtype=torch.float32, device=x.device)
        rest = None
    blocks = (plan.block_b, plan.block_n, plan.block_k, plan.splits, plan.parts, plan.stages)
    _tile[(triton.cdiv(batch, plan.block_b), triton.cdiv(width_out, plan.block_n), plan.parts)](
        *(x, weight, rest, sums, batch, x.stride(0), residual_stride, width_out, width_in),
        *(*blocks, is_gated, plan.is_prefetched, overlap, OPERAND[x.dtype]),
        num_warps=plan.warps,
        launch_pdl=overlap,
    )
    if plan.parts > 1:
        grid = (batch, triton.cdiv(width_out, ROW_BLOCK))
        inputs = (sums, residual, out, batch, residual_stride, width_out)
        _add_parts[grid](*inputs, plan.parts, ROW_BLOCK, overlap, launch_pdl=overlap)
    return out


def _library_product(x: Tensor, weight: Tensor, residual: Tensor | None, is_gated: bool, overlap: bool) -> Tensor:
    product = F.linear(x, weight)
    if is_gated:
        batch, width_out = product.shape[0], product.shape[1] // 2
        out = torch.empty((batch, width_out), dtype=x.dtype, device=x.device)
        grid = (batch, triton.cdiv(width_out, ROW_BLOCK))
        _gate[grid](product, out, width_out, ROW_BLOCK, overlap, launch_pdl=overlap)
        return out
    return product if residual is None else product.add_(residual)


def norm_linear_kernel(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, plan: Plan | None = None) -> Tensor:
    """`norm_linear_reference` in one or two launches; no gradient."""
    return _product(x, weight, plan or plan_for(x.shape[0], weight, False), (norm_weight, eps))


def norm_gate_up_kernel(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, plan: Plan | None = None) -> Tensor:
    """`norm_gate_up_reference` in one to three launches; no gradient."""
    plan = plan or plan_for(x.shape[0], weight, True)
    return _product(x, weight, plan, (norm_weight, eps), is_gated=True)


def linear_add_kernel(x: Tensor, weight: Tensor, residual: Tensor, plan: Plan | None = None) -> Tensor:
    """`linear_add_reference` in one or two launches; no gradient."""
    return _product(x, weight, plan or plan_for(x.shape[0], weight, False), residual=residual)


def _takes_norm(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor) -> bool:
    return x.ndim == 2 and is_row_major(x, norm_weight, weight) and weight.is_contiguous()


def _takes_residual(x: Tensor, weight: Tensor, residual: Tensor) -> bool:
    return x.ndim == 2 and is_row_major(x, weight, residual) and weight.is_contiguous()


norm_linear = Operation("norm_linear", norm_linear_kernel, norm_linear_reference, _takes_norm)
norm_gate_up = Operation("norm_gate_up", norm_gate_up_kernel, norm_gate_up_reference, _takes_norm)
linear_add = Operation("linear_add", linear_add_kernel, linear_add_reference, _takes_residual)
