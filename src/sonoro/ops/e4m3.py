"""Products of rows with a weight, both in E4M3: large batches of layers whose weights are in fp8.

Three bits of mantissa are too few for a row, so a row may be the sum of two terms: `values` [B, 2, K] float8_e4m3fn,
with one `x_scale` [B] float32 for both. The second term is the rest that the first leaves. Two terms hold about as many
digits as bfloat16. A product of 16-bit rows must widen the 8-bit weight in each tile; here the weight is used as it is
stored, and tensor cores multiply E4M3 at twice the speed of 16 bits. Needs compute capability 8.9;
`sonoro.ops.plans.e4m3_plan` says at which batch sizes layers use it."""

import torch
from torch import Tensor

from sonoro.ops.device import card, is_recorded
from sonoro.ops.dispatch import Operation
from sonoro.ops.eight_bits import quantize
from sonoro.ops.linear import gate_up_reference, linear_add_reference, linear_reference
from sonoro.ops.norm import is_row_major, pdl_options, rms_norm_reference, stride_of
from sonoro.ops.optional import tl, triton
from sonoro.ops.plans import LIMITS, TilePlan, e4m3_plan
from sonoro.ops.tiles import reduce_split_k

if triton is not None:
    from sonoro.ops.activation import silu_mul
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait, scale_and_weigh
    from sonoro.ops.tiles import prefetch_l2

Quantized = tuple[Tensor, Tensor]
"""Rows as `terms` in E4M3 [B, terms, K], and their scales [B]."""


def takes_e4m3(x: Tensor, weight: Tensor, terms: int) -> bool:
    """Whether measured plans say that the product of `x` [B, K] with `weight` [N, K] is faster with rows as `terms` in
    E4M3. False for float32, which has more digits than two terms, and once a check has disabled a kernel: the 16-bit
    kernels are faster than the reference, which widens the weight."""
    is_launched = x.is_cuda or (x.is_meta and is_recorded())
    is_broken = any(operation.is_broken for operation in (quantize_rows, e4m3_linear, e4m3_linear_add_norm))
    return (
        is_launched
        and not is_broken
        and x.dtype == torch.bfloat16
        and e4m3_plan(x.shape[0], weight, False, terms) is not None
    )


def e4m3_sizes(weight: Tensor, terms: int) -> tuple[int, ...]:
    """The largest of each bucket of batch sizes at which products of bfloat16 rows with `weight` [N, K] take them as
    `terms` in E4M3."""
    is_launched = weight.is_cuda or (weight.is_meta and is_recorded())
    return tuple(limit for limit in LIMITS if is_launched and e4m3_plan(limit, weight, False, terms) is not None)


def quantize_rows_reference(
    x: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0, terms: int = 1
) -> Quantized:
    """The rows of `x` [B, K], or of its RMS norm, as one or two `terms` in E4M3 [B, terms, K], and their scales [B].
    One term is within 2**-4 of a number; two are within 2**-8, or 2**-10 of the scale."""
    rows = x if norm_weight is None else rms_norm_reference(x, norm_weight, eps)
    high, scale = quantize(rows, "fp8")
    if terms == 1:
        return high[:, None], scale
    rest = rows.float() / scale[:, None] - high.float()
    return torch.stack((high, rest.to(high.dtype)), dim=1), scale


def dequantized_rows(values: Tensor, x_scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows [B, K] that `values` [B, terms, K] and `x_scale` [B] encode, rounded once to `dtype`."""
    return (values.float().sum(dim=1) * x_scale[:, None]).to(dtype)


def e4m3_linear_reference(
    values: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    """The sum of `values` [B, terms, K] times `x_scale` times `weight` [N, K]: [B, N] in `dtype`; plus `residual`
    [B, N] if there is one; `is_gated`: silu(gate) * up [B, N / 2]."""
    x = dequantized_rows(values, x_scale, dtype)
    if is_gated:
        return gate_up_reference(x, weight, scale)
    return linear_reference(x, weight, scale) if residual is None else linear_add_reference(x, weight, residual, scale)


def e4m3_linear_add_norm_reference(
    values: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`e4m3_linear_reference` with `residual` [B, N], and the RMS norm of that quantised to as many terms."""
    total = e4m3_linear_reference(values, x_scale, weight, scale, residual.dtype, residual)
    return total, *quantize_rows_reference(total, norm_weight, eps, values.shape[1])


if triton is not None:

    @triton.jit(do_not_specialize=["batch"])
    def _quantize_kernel(
        partial, residual, norm_weight, total, values, scale, batch, row_stride, residual_stride, eps,
        K: tl.constexpr, TERMS: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        # Add the partial sums and the residual, if any; norm the result, if there is a weight; quantise it.
        pdl_launch_dependents(ENABLE_PDL)
        row = tl.program_id(0).to(tl.int64)
        k = tl.arange(0, BLOCK)
        mask = k < K
        if norm_weight is not None:
            weights = tl.load(norm_weight + k, mask=mask, other=0)
        pdl_wait(ENABLE_PDL)
        value = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLIT_K):
            value += tl.load(partial + (split * batch + row) * row_stride + k, mask=mask, other=0).to(tl.float32)
        if residual is not None:
            dtype: tl.constexpr = residual.dtype.element_ty
            rest = tl.load(residual + row * residual_stride + k, mask=mask, other=0).to(tl.float32)
            summed = (value.to(dtype).to(tl.float32) + rest).to(dtype)
            tl.store(total + row * K + k, summed, mask=mask)
            value = summed.to(tl.float32)
        if norm_weight is not None:
            inverse = tl.rsqrt(tl.sum(value * value) / K + eps)
            value = scale_and_weigh(value, inverse, weights, norm_weight.dtype.element_ty).to(tl.float32)
        step = tl.maximum(tl.max(tl.abs(value)), 1e-30) / 448
        tl.store(scale + row, step)
        value = value / step
        high = value
        if TERMS == 2:
            # Round to three bits of mantissa by integer arithmetic. Casting to E4M3 and back does not work: ptxas 12.8
            # widens a register that it never wrote. E4M3 rounds subnormal numbers further, by 2**-10 at most.
            high = ((value.to(tl.int32, bitcast=True) + 0x80000) & -0x100000).to(tl.float32, bitcast=True)
            tl.store(values + (2 * row + 1) * K + k, (value - high).to(values.dtype.element_ty), mask=mask)
        tl.store(values + TERMS * row * K + k, high.to(values.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["batch"])
    def _e4m3_tile_kernel(
        x, x_scale, weight, scale, residual, out, batch, residual_stride,
        N: tl.constexpr, K: tl.constexpr, TERMS: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, IS_SWAPPED: tl.constexpr, IS_GATED: tl.constexpr,
        PREFETCH_L2: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        # BLOCK_N divides N and SPLIT_K * BLOCK_K divides K, so only rows can be past the end: they repeat others.
        pdl_launch_dependents(ENABLE_PDL)
        SPAN: tl.constexpr = K // SPLIT_K
        split = 0 if SPLIT_K == 1 else tl.program_id(2)
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        m64, n64 = m.to(tl.int64), n.to(tl.int64)
        m_source = (m % batch).to(tl.int64)
        k = split * SPAN + tl.arange(0, BLOCK_K)
        LAST: tl.constexpr = 0 if IS_SWAPPED else 1
        x_ptrs = x + tl.expand_dims(m_source, LAST) * (TERMS * K) + tl.expand_dims(k, 1 - LAST)
        w_ptrs = weight + tl.expand_dims(n64, 1 - LAST) * K + tl.expand_dims(k, LAST)
        acc = tl.zeros([BLOCK_N, BLOCK_M] if IS_SWAPPED else [BLOCK_M, BLOCK_N], tl.float32)
        acc_up = acc
        # The second terms have sums of their own: with one sum each product would wait for the one before.
        low_acc, low_acc_up = acc, acc
        if ENABLE_PDL and PREFETCH_L2:
            prefetch_l2(weight + split * SPAN, n64, K, SPAN, 128)
            if IS_GATED:
                prefetch_l2(weight + split * SPAN, n64 + N, K, SPAN, 128)
        pdl_wait(ENABLE_PDL)
        for step in tl.range(0, SPAN, BLOCK_K, num_stages=NUM_STAGES):
            high, w_tile = tl.load(x_ptrs + step), tl.load(w_ptrs + step)
            acc = tl.dot(w_tile, high, acc) if IS_SWAPPED else tl.dot(high, w_tile, acc)
            if TERMS == 2:
                low = tl.load(x_ptrs + K + step)
                low_acc = tl.dot(w_tile, low, low_acc) if IS_SWAPPED else tl.dot(low, w_tile, low_acc)
            if IS_GATED:
                w_tile = tl.load(w_ptrs + N * K + step)
                acc_up = tl.dot(w_tile, high, acc_up) if IS_SWAPPED else tl.dot(high, w_tile, acc_up)
                if TERMS == 2:
                    low_acc_up = tl.dot(w_tile, low, low_acc_up) if IS_SWAPPED else tl.dot(low, w_tile, low_acc_up)
        if TERMS == 2:
            acc, acc_up = acc + low_acc, acc_up + low_acc_up
        if IS_SWAPPED:
            acc, acc_up = tl.trans(acc), tl.trans(acc_up)
        dtype: tl.constexpr = out.dtype.element_ty
        row_scale = tl.load(x_scale + m_source)[:, None]
        result = (acc * (row_scale * tl.load(scale + n)[None, :])).to(dtype)
        if IS_GATED:
            result = silu_mul(result, acc_up * (row_scale * tl.load(scale + N + n)[None, :]), dtype)
        mask = m64[:, None] + 0 * n[None, :] < batch
        if residual is not None:
            rest = tl.load(residual + m64[:, None] * residual_stride + n[None, :], mask=mask, other=0)
            result = (result.to(tl.float32) + rest.to(tl.float32)).to(dtype)
        tl.store(out + (split * batch + m64[:, None]) * N + n[None, :], result, mask=mask)


def quantize_rows_kernel(x: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0, terms: int = 1) -> Quantized:
    """`quantize_rows_reference` in one launch; no gradient."""
    _, values, scale = _quantize(x[None], None, norm_weight, eps, terms)
    return values, scale


def _quantize(
    partial: Tensor, residual: Tensor | None, norm_weight: Tensor | None, eps: float, terms: int
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The sum of `partial` [splits, B, K] and `residual` [B, K], and the norm of that quantised. One launch."""
    splits, batch, width = partial.shape
    device = partial.device
    total = None if residual is None else torch.empty((batch, width), dtype=residual.dtype, device=device)
    values = torch.empty((batch, terms, width), dtype=torch.float8_e4m3fn, device=device)
    scale, block = torch.empty(batch, device=device), triton.next_power_of_2(width)
    _quantize_kernel[(batch,)](
        partial=partial, residual=residual, norm_weight=norm_weight, total=total, values=values, scale=scale,
        batch=batch, row_stride=partial.stride(1), residual_stride=stride_of(residual), eps=eps,
        K=width, TERMS=terms, SPLIT_K=splits, BLOCK=block,
        num_warps=max(1, min(8, block // 512)), **pdl_options(device),
    )  # fmt: skip
    return total, values, scale


def e4m3_linear_kernel(
    values: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    is_gated: bool = False,
    plan: TilePlan | None = None,
) -> Tensor:
    """`e4m3_linear_reference` in one launch, or two with split-K; no gradient."""
    plan = plan or _plan(values, weight, is_gated)
    if plan.split_k == 1:
        return _tiles((values, x_scale), (weight, scale), plan, dtype, residual, is_gated)
    partial = _tiles((values, x_scale), (weight, scale), plan, dtype)
    return reduce_split_k(partial, residual, dtype, enable_pdl=plan.enable_pdl)


def e4m3_linear_add_norm_kernel(
    values: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    plan: TilePlan | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`e4m3_linear_add_norm_reference` in two launches; no gradient."""
    plan = plan or _plan(values, weight, False)
    partial = _tiles((values, x_scale), (weight, scale), plan, residual.dtype)
    parts = partial if plan.split_k > 1 else partial[None]
    total, next_values, next_scale = _quantize(parts, residual, norm_weight, eps, values.shape[1])
    assert total is not None
    return total, next_values, next_scale


def _plan(values: Tensor, weight: Tensor, is_gated: bool) -> TilePlan:
    # The rows are in E4M3 already; without a measured plan for this weight, take one that fits everywhere.
    return e4m3_plan(values.shape[0], weight, is_gated, values.shape[1]) or TilePlan(64, 16, 32, 1, 1, 2, 4, False)


def _tiles(
    x: Quantized,
    weight: Quantized,
    plan: TilePlan,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    """The product [B, N] in `dtype`; with split-K the sums [SPLIT_K, B, N] float32 over consecutive parts of K."""
    (batch, terms, width_in), width_out = x[0].shape, weight[0].shape[0] // (1 + is_gated)
    is_split = plan.split_k > 1
    assert plan.slice_k == 1, plan
    assert width_out % plan.block_n == 0 == width_in % (plan.split_k * plan.block_k), (plan, weight[0].shape)
    assert not (is_split and (is_gated or residual is not None)), plan
    shape = (plan.split_k, batch, width_out) if is_split else (batch, width_out)
    out = torch.empty(shape, dtype=torch.float32 if is_split else dtype, device=x[0].device)
    _e4m3_tile_kernel[(triton.cdiv(batch, plan.block_m), width_out // plan.block_n, plan.split_k)](
        x=x[0], x_scale=x[1], weight=weight[0], scale=weight[1], residual=residual, out=out, batch=batch,
        residual_stride=stride_of(residual), N=width_out, K=width_in, TERMS=terms,
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, SPLIT_K=plan.split_k, NUM_STAGES=plan.stages,
        IS_SWAPPED=plan.is_swapped, IS_GATED=is_gated, PREFETCH_L2=plan.is_prefetched,
        num_warps=plan.warps, **pdl_options(x[0].device, enable_pdl=plan.enable_pdl),
    )  # fmt: skip
    return out


def _is_known(x: Tensor) -> bool:
    return card(x.device).has_e4m3 and x.numel() > 0


def _takes_norm(x: Tensor, norm_weight: Tensor | None = None, eps: float = 0.0, terms: int = 1) -> bool:
    return (
        _is_known(x)
        and x.ndim == 2
        and x.shape[1] <= 16384
        and is_row_major(x, *([] if norm_weight is None else [norm_weight]))
    )


def _takes_weight(
    values: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> bool:
    (outputs, inputs), is_dense = weight.shape, values.is_contiguous() and weight.is_contiguous()
    is_dense = is_dense and (residual is None or is_row_major(residual))
    is_whole = outputs // (1 + is_gated) % 16 == 0 == inputs % 32
    return _is_known(values) and weight.dtype == torch.float8_e4m3fn and is_dense and is_whole


def _takes_residual_norm(
    values: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, residual: Tensor, norm_weight: Tensor, eps: float
) -> bool:
    is_known = _takes_weight(values, x_scale, weight, scale, residual.dtype)
    return is_known and weight.shape[0] <= 16384 and is_row_major(residual, norm_weight)


quantize_rows = Operation(quantize_rows_kernel, quantize_rows_reference, _takes_norm)
e4m3_linear = Operation(e4m3_linear_kernel, e4m3_linear_reference, _takes_weight)
e4m3_linear_add_norm = Operation(e4m3_linear_add_norm_kernel, e4m3_linear_add_norm_reference, _takes_residual_norm)
