"""Products of more rows with a weight: Triton kernels whose programs compute output tiles with the tensor cores.

A weight in 8 bits is widened tile by tile to the dtype of the other operand. Where a plan says so and the card can, TMA
loads the tiles instead of pointers."""

import torch
from torch import Tensor

from sonoro.ops.device import card
from sonoro.ops.norm import pdl_options, stride_of
from sonoro.ops.optional import tl, triton
from sonoro.ops.plans import TilePlan

if triton is not None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from sonoro.ops.activation import silu_mul
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait

ROW_BLOCK = 1024
"""Elements per program of the kernel that adds up split-K's sums."""

if triton is not None:
    # Triton's interpreter reads bfloat16 operands of tl.dot as integers; float32 gives the same products.
    OPERAND = {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16,
    }

    @triton.jit
    def prefetch_l2(weight, n, K: tl.constexpr, SPAN: tl.constexpr, LINE: tl.constexpr):
        # One address in each `LINE` elements, which are a cache line of 128 bytes.
        offset = tl.arange(0, 16) * LINE
        for k in range(0, SPAN, 16 * LINE):
            address = weight + n[:, None] * K + tl.minimum(k + offset, SPAN - 1)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
                "=r,l",
                [address.to(tl.int64, bitcast=True)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )

    _WIDEN = (
        "{{.reg .b32 a, by, none; prmt.b32 a, {1}, 0, {2}; mul.lo.u32 a, a, 16; and.b32 a, a, 0x87F087F0;"
        "mov.b32 by, 0x7B807B80; mov.b32 none, 0x80008000; fma.rn.bf16x2 {0}, a, by, none;}}"
    )
    WIDEN_TWO = tl.constexpr(_WIDEN.format("$0", "$1", "0x9180"))
    WIDEN_FOUR = tl.constexpr(_WIDEN.format("$0", "$2", "0x9180") + _WIDEN.format("$1", "$2", "0xB3A2"))

    @triton.jit
    def _widened(weight, operand: tl.constexpr, ARE_PAIRS: tl.constexpr):
        # Widen a tile of the weight for the tensor cores. Triton converts an 8-bit float to bfloat16 by way of float16,
        # in 10 cycles; this assembly converts two in 4. It moves sign, exponent and mantissa of each byte to their
        # places in bfloat16, and multiplies by 2 ** 120 to correct the exponent. `ARE_PAIRS`: a thread holds two
        # neighbouring bytes, not four.
        if weight.dtype == tl.float8e4nv and operand == tl.bfloat16:
            return tl.inline_asm_elementwise(
                WIDEN_TWO if ARE_PAIRS else WIDEN_FOUR,
                "=r,r" if ARE_PAIRS else "=&r,=&r,r",
                [weight.to(tl.int8, bitcast=True)],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=2 if ARE_PAIRS else 4,
            )
        return weight.to(operand)

    @triton.jit
    def _load_weight(
        start, k, k_index, K: tl.constexpr, IS_WHOLE: tl.constexpr, operand: tl.constexpr, ARE_PAIRS: tl.constexpr
    ):
        # Load a tile of the weight from column `k` on. `IS_WHOLE`: no tile goes past the end of K.
        if IS_WHOLE:
            return _widened(tl.load(start + k), operand, ARE_PAIRS)
        return _widened(tl.load(start + k, mask=k + k_index < K, other=0.0), operand, ARE_PAIRS)

    @triton.jit
    def _dot(x, weight, acc, IS_SWAPPED: tl.constexpr):
        # wgmma reads only operand A from registers, where an 8-bit weight is widened, so that goes first.
        if IS_SWAPPED:
            acc = tl.dot(weight, x, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, weight, acc, input_precision="ieee")
        return acc

    @triton.jit
    def _store_tile(
        acc, acc_up, residual, out, m64, n, mask, start, residual_stride, N: tl.constexpr, IS_GATED: tl.constexpr
    ):  # fmt: skip
        # Store the sums of rows `m64` and outputs `n` in rows of `out` from `start` on.
        dtype: tl.constexpr = out.dtype.element_ty
        result = acc.to(dtype)
        if IS_GATED:
            result = silu_mul(result, acc_up, dtype)
        if residual is not None:
            rest = tl.load(residual + m64[:, None] * residual_stride + n[None, :], mask=mask, other=0)
            result = (result.to(tl.float32) + rest.to(tl.float32)).to(dtype)
        tl.store(out + (start + m64[:, None]) * N + n[None, :], result, mask=mask)

    @triton.jit(do_not_specialize=["batch"])
    def _tile_kernel(  # noqa: PLR0915 (a kernel's arguments are positional)
        x, weight, scale, residual, out, batch, x_stride, residual_stride,
        N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        SLICE_K: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, IS_SWAPPED: tl.constexpr,
        IS_GATED: tl.constexpr, PREFETCH_L2: tl.constexpr, ENABLE_PDL: tl.constexpr, OPERAND_DTYPE: tl.constexpr,
    ):  # fmt: skip
        pdl_launch_dependents(ENABLE_PDL)
        STEP: tl.constexpr = SLICE_K * BLOCK_K
        IS_WHOLE: tl.constexpr = K % STEP == 0
        # The layout of operand A of wgmma in registers.
        ARE_PAIRS: tl.constexpr = IS_SWAPPED and SLICE_K == 1 and BLOCK_N >= 64
        SPAN: tl.constexpr = (K + SPLIT_K - 1) // SPLIT_K
        # Add the split's start to the pointers: with constant bounds the loop is 6% faster (8 rows, as below).
        split = 0 if SPLIT_K == 1 else tl.program_id(2)
        x += split * SPAN
        weight += split * SPAN
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        m64 = m.to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows past the end repeat others; their sums are not stored. Only the smallest blocks mask rows of x instead.
        # Passes of a depth model on an H200: with a mask 1.53 ms for 8 rows and 1.98 for 64, without 1.66 and 1.78.
        # Outputs repeat the last one, rows all in turn: for 17 rows, repeating the last takes 2.31 ms, in turn 1.81.
        n_source = tl.minimum(n, N - 1).to(tl.int64)
        m_source = m64 if BLOCK_M < 32 else (m % batch).to(tl.int64)
        # The operands are (m, k) and (k, n), or (n, k) and (k, m) if swapped; an axis of K's slices precedes both.
        LAST: tl.constexpr = 0 if IS_SWAPPED else 1
        m_index, n_index = tl.expand_dims(m_source, LAST), tl.expand_dims(n_source, 1 - LAST)
        is_row = tl.expand_dims(m64 < batch, LAST) if BLOCK_M < 32 else True
        if SLICE_K == 1:
            k_offset = tl.arange(0, BLOCK_K)
            k_of_x, k_of_w = tl.expand_dims(k_offset, 1 - LAST), tl.expand_dims(k_offset, LAST)
        else:
            k_offset = tl.arange(0, SLICE_K)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
            k_of_x, k_of_w = tl.expand_dims(k_offset, 2 - LAST), tl.expand_dims(k_offset, 1 + LAST)
            m_index, n_index = tl.expand_dims(m_index, 0), tl.expand_dims(n_index, 0)
            is_row = tl.expand_dims(is_row, 0) if BLOCK_M < 32 else True
        x_ptrs, w_ptrs = x + m_index * x_stride + k_of_x, weight + n_index * K + k_of_w
        ROWS: tl.constexpr = BLOCK_N if IS_SWAPPED else BLOCK_M
        COLUMNS: tl.constexpr = BLOCK_M if IS_SWAPPED else BLOCK_N
        acc = tl.zeros([ROWS, COLUMNS] if SLICE_K == 1 else [SLICE_K, ROWS, COLUMNS], tl.float32)
        acc_up = acc
        if ENABLE_PDL and PREFETCH_L2:
            LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
            prefetch_l2(weight, n_source, K, SPAN, LINE)
            if IS_GATED:
                prefetch_l2(weight, n_source + N, K, SPAN, LINE)
        pdl_wait(ENABLE_PDL)
        for k in tl.range(0, SPAN, STEP, num_stages=NUM_STAGES):
            if IS_WHOLE:
                x_tile = tl.load(x_ptrs + k, mask=is_row, other=0).to(OPERAND_DTYPE)
            else:
                x_tile = tl.load(x_ptrs + k, mask=is_row & (k + k_of_x < K), other=0).to(OPERAND_DTYPE)
            w_tile = _load_weight(w_ptrs, k, k_of_w, K, IS_WHOLE, OPERAND_DTYPE, ARE_PAIRS)
            acc = _dot(x_tile, w_tile, acc, IS_SWAPPED)
            if IS_GATED:
                w_tile = _load_weight(w_ptrs + N * K, k, k_of_w, K, IS_WHOLE, OPERAND_DTYPE, ARE_PAIRS)
                acc_up = _dot(x_tile, w_tile, acc_up, IS_SWAPPED)
        if SLICE_K > 1:
            acc, acc_up = tl.sum(acc, 0), tl.sum(acc_up, 0)
        if IS_SWAPPED:
            acc, acc_up = tl.trans(acc), tl.trans(acc_up)
        mask = (m64 < batch)[:, None] & (n < N)[None, :]
        if scale is not None:
            acc *= tl.load(scale + n_source)[None, :]
            if IS_GATED:
                acc_up *= tl.load(scale + N + n_source)[None, :]
        _store_tile(acc, acc_up, residual, out, m64, n, mask, split * batch, residual_stride, N, IS_GATED)

    @triton.jit(do_not_specialize=["batch"])
    def _tma_tile_kernel(
        x_tiles, weight_tiles, weight, residual, out, batch, residual_stride,
        N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, IS_GATED: tl.constexpr, PREFETCH_L2: tl.constexpr,
        ENABLE_PDL: tl.constexpr, OPERAND_DTYPE: tl.constexpr,
    ):  # fmt: skip
        # As `_tile_kernel`, with the tiles of both operands loaded by TMA, which fills in zeros past the ends.
        pdl_launch_dependents(ENABLE_PDL)
        SPAN: tl.constexpr = K // SPLIT_K
        split = 0 if SPLIT_K == 1 else tl.program_id(2)
        first_m, first_n, first_k = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N, split * SPAN
        m64 = (first_m + tl.arange(0, BLOCK_M)).to(tl.int64)
        n = first_n + tl.arange(0, BLOCK_N)
        if ENABLE_PDL and PREFETCH_L2:
            LINE: tl.constexpr = 1024 // weight.dtype.element_ty.primitive_bitwidth
            n_source = tl.minimum(n, N - 1).to(tl.int64)
            prefetch_l2(weight + first_k, n_source, K, SPAN, LINE)
            if IS_GATED:
                prefetch_l2(weight + first_k, n_source + N, K, SPAN, LINE)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc_up = acc
        pdl_wait(ENABLE_PDL)
        for k in tl.range(0, SPAN, BLOCK_K, num_stages=NUM_STAGES):
            x_tile = x_tiles.load([first_m, first_k + k]).to(OPERAND_DTYPE)
            w_tile = weight_tiles.load([first_n, first_k + k]).to(OPERAND_DTYPE)
            acc = _dot(x_tile, tl.trans(w_tile), acc, False)
            if IS_GATED:
                w_tile = weight_tiles.load([N + first_n, first_k + k]).to(OPERAND_DTYPE)
                acc_up = _dot(x_tile, tl.trans(w_tile), acc_up, False)
        mask = (m64 < batch)[:, None] & (n < N)[None, :]
        _store_tile(acc, acc_up, residual, out, m64, n, mask, split * batch, residual_stride, N, IS_GATED)

    @triton.jit(do_not_specialize=["batch"])
    def _reduce_split_k(
        partial, residual, out, batch, residual_stride,
        N: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_launch_dependents(ENABLE_PDL)
        pdl_wait(ENABLE_PDL)
        dtype: tl.constexpr = out.dtype.element_ty
        row = tl.program_id(0).to(tl.int64)
        n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = n < N
        acc = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLIT_K):
            acc += tl.load(partial + (split * batch + row) * N + n, mask=mask, other=0)
        result = acc.to(dtype)
        if residual is not None:
            rest = tl.load(residual + row * residual_stride + n, mask=mask, other=0)
            result = (result.to(tl.float32) + rest.to(tl.float32)).to(dtype)
        tl.store(out + row * N + n, result, mask=mask)


def tile_matmul(
    x: Tensor, weight: Tensor, scale: Tensor | None, plan: TilePlan, residual: Tensor | None, is_gated: bool
) -> Tensor:
    """The product [B, N] of `x` [B, K], in one launch, or two with split-K; plus `residual` [B, N] if there is one;
    `is_gated`: silu(gate) * up for `weight` [2 N, K]."""
    if plan.split_k == 1:
        return launch_tiles(x, weight, scale, plan, residual, is_gated)
    sums = launch_tiles(x, weight, scale, plan, None, is_gated)
    return reduce_split_k(sums, residual, x.dtype, enable_pdl=plan.enable_pdl)


def reduce_split_k(sums: Tensor, residual: Tensor | None, dtype: torch.dtype, *, enable_pdl: bool) -> Tensor:
    """The sum [B, N] in `dtype` of `sums` [SPLIT_K, B, N] float32, plus `residual` [B, N] if there is one."""
    splits, batch, width_out = sums.shape
    out = torch.empty((batch, width_out), dtype=dtype, device=sums.device)
    _reduce_split_k[(batch, triton.cdiv(width_out, ROW_BLOCK))](
        partial=sums, residual=residual, out=out, batch=batch, residual_stride=stride_of(residual),
        N=width_out, SPLIT_K=splits, BLOCK=ROW_BLOCK, **pdl_options(sums.device, enable_pdl=enable_pdl),
    )  # fmt: skip
    return out


def launch_tiles(
    x: Tensor, weight: Tensor, scale: Tensor | None, plan: TilePlan, residual: Tensor | None, is_gated: bool
) -> Tensor:
    """`tile_matmul` without split-K; with it, the sums [SPLIT_K, B, N] float32 over consecutive parts of K."""
    (batch, width_in), width_out = x.shape, weight.shape[0] // (1 + is_gated)
    assert plan.split_k == 1 or (width_in % (plan.split_k * plan.slice_k * plan.block_k) == 0 and not is_gated), plan
    is_split = plan.split_k > 1
    shape = (plan.split_k, batch, width_out) if is_split else (batch, width_out)
    out = torch.empty(shape, dtype=torch.float32 if is_split else x.dtype, device=x.device)
    grid = (triton.cdiv(batch, plan.block_m), triton.cdiv(width_out, plan.block_n), plan.split_k)
    options = {
        "weight": weight, "residual": residual, "out": out, "batch": batch, "residual_stride": stride_of(residual),
        "N": width_out, "K": width_in, "BLOCK_M": plan.block_m, "BLOCK_N": plan.block_n, "BLOCK_K": plan.block_k,
        "SPLIT_K": plan.split_k, "NUM_STAGES": plan.stages, "IS_GATED": is_gated, "PREFETCH_L2": plan.is_prefetched,
        "OPERAND_DTYPE": OPERAND[x.dtype], "num_warps": plan.warps, **pdl_options(x.device, enable_pdl=plan.enable_pdl),
    }  # fmt: skip
    if plan.has_tma and _takes_tma(x, weight, plan):
        x_tiles = TensorDescriptor.from_tensor(x, [plan.block_m, plan.block_k])
        weight_tiles = TensorDescriptor.from_tensor(weight, [plan.block_n, plan.block_k])
        _tma_tile_kernel[grid](x_tiles=x_tiles, weight_tiles=weight_tiles, **options)
    else:
        how = {"SLICE_K": plan.slice_k, "IS_SWAPPED": plan.is_swapped}
        _tile_kernel[grid](x=x, scale=scale, x_stride=x.stride(0), **how, **options)
    return out


def _takes_tma(x: Tensor, weight: Tensor, plan: TilePlan) -> bool:
    """Whether TMA can load the tiles of `plan`: on cards that have it, operands of one dtype, with every row at a
    multiple of 16 bytes."""
    has_units = card(x.device).has_tma or triton.knobs.runtime.interpret
    is_plain = weight.dtype == x.dtype and plan.slice_k == 1 and not plan.is_swapped
    starts = (start for one in (x, weight) for start in (one.data_ptr(), one.stride(0) * one.itemsize))
    return has_units and is_plain and not any(start % 16 for start in starts)
