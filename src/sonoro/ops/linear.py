"""Products with `nn.Linear` weights for one position per row, fused with the norm before and the sum after them.

A frame is a chain of hundreds of such products, each waiting for the one before, so three things count: every weight is
read from memory once, at its full rate; launches are few; and the weights of a kernel are on their way while the kernel
ahead of it still runs (see `sonoro.ops.norm`). `sonoro.ops.plans` chooses between the ways to run one.

A weight is stored in the dtype of what it multiplies, or in 8 bits: int8 or float8_e4m3fn, each of which 16 bits hold
exactly. Then `scale` [N] float32 times row n is what that row stands for, and the kernels multiply their sums by it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.device import is_recorded
from sonoro.ops.dispatch import Operation, shrunk
from sonoro.ops.norm import has_pdl, is_row_major, pdl_options, rms_norm_kernel, rms_norm_reference
from sonoro.ops.plans import CublasPlan, GemvPlan, Plan, TilePlan, plan_for, smaller

try:
    import triton
    import triton.language as tl

    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait, scale_and_weigh
except ImportError:
    triton = None

__all__ = [
    "EIGHT_BITS",
    "dequantized",
    "gate_up",
    "gate_up_kernel",
    "gate_up_reference",
    "joins_norm",
    "linear",
    "linear_add",
    "linear_add_kernel",
    "linear_add_norm",
    "linear_add_norm_kernel",
    "linear_add_norm_reference",
    "linear_add_reference",
    "linear_kernel",
    "linear_reference",
    "norm_gate_up",
    "norm_gate_up_kernel",
    "norm_gate_up_reference",
    "norm_linear",
    "norm_linear_kernel",
    "norm_linear_reference",
    "quantize",
]

ROW_BLOCK = 1024
"""Elements per program of the small kernels after a product."""


EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""What weights are stored in, by what that is called."""

_LARGEST = {"int8": 127.0, "fp8": 448.0}
"""What the largest of a channel is stored as."""

_WIDENED_AT_ONCE = 2**23
"""Weights in 8 bits that are widened for the library, 17 MB."""

_GATED_AT_ONCE = 1024
"""Rows of a gated product that the library makes."""

_QUANTIZED_AT_ONCE = 2**22
"""Numbers, in float32: all of a large layer would take four times what is kept of it, and tear memory to pieces."""


def quantize(weight: Tensor, quantization: str) -> tuple[Tensor, Tensor]:
    """`weight` [N, K] in 8 bits, "int8" or "fp8" (E4M3), and the scale [N] float32 of its rows, the output channels.

    Symmetric, rounded to nearest: the largest of a row is the largest of the format. Takes 32 MB besides.
    """
    largest, stored = _LARGEST[quantization], torch.empty_like(weight, dtype=EIGHT_BITS[quantization])
    scale = torch.empty(len(weight), device=weight.device)
    if weight.is_meta:
        return stored, scale
    rows = max(1, _QUANTIZED_AT_ONCE // weight.shape[1])
    for part, into, by in zip(weight.split(rows), stored.split(rows), scale.split(rows), strict=True):
        wide = part.float()
        torch.div(wide.abs().amax(dim=1).clamp_min_(1e-30), largest, out=by)
        # Divided, not multiplied by the inverse; either may be a rounding beyond the largest.
        steps = (wide / by[:, None]).clamp_(-largest, largest)
        into.copy_(steps.round_() if quantization == "int8" else steps)
    return stored, scale


def dequantized(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """What `weight` [N, K] stands for, rounded once to `dtype`; itself without `scale` [N]. Capturable."""
    if scale is None:
        return weight
    if dtype.itemsize > 2:
        return (weight.to(torch.promote_types(dtype, scale.dtype)) * scale[:, None]).to(dtype)
    # No copy of the weight is ever in 32 bits, and no second one in 16: nothing of a prompt takes as much. Of 8-bit
    # floats torch knows no product, and 16 bits hold each.
    return weight.to(dtype).mul_(scale[:, None])


def norm_linear_reference(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, scale: Tensor | None = None
) -> Tensor:
    """The RMS norm of `x` [B, K] times `weight` [N, K]: [B, N]. Differentiable."""
    return linear_reference(rms_norm_reference(x, norm_weight, eps), weight, scale)


def linear_reference(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """`x` [..., K] times `weight` [N, K]: [..., N]. Differentiable."""
    return F.linear(x, dequantized(weight, scale, x.dtype))


def norm_gate_up_reference(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, scale: Tensor | None = None
) -> Tensor:
    """silu(gate) * up of the RMS norm of `x` [B, K], for `weight` [2 N, K] with the gate's rows first: [B, N].

    Differentiable.
    """
    return gate_up_reference(rms_norm_reference(x, norm_weight, eps), weight, scale)


def gate_up_reference(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> Tensor:
    """silu(gate) * up of `x` [B, K], for `weight` [2 N, K] with the gate's rows first: [B, N]. Differentiable."""
    gate, up = linear_reference(x, weight, scale).chunk(2, dim=-1)
    return F.silu(gate) * up


def linear_add_reference(x: Tensor, weight: Tensor, residual: Tensor, scale: Tensor | None = None) -> Tensor:
    """`residual` [B, N] plus `x` [B, K] times `weight` [N, K]. Differentiable."""
    return residual + linear_reference(x, weight, scale)


def linear_add_norm_reference(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`linear_add_reference`, and the RMS norm of that: both [B, N]. Differentiable."""
    total = linear_add_reference(x, weight, residual, scale)
    return total, rms_norm_reference(total, norm_weight, eps)


if triton is not None:
    INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
    # Triton's interpreter takes the bits of a bfloat16 operand for an integer; products in float32 are the same.
    OPERAND = {
        torch.float32: tl.float32,
        torch.float16: tl.float16,
        torch.bfloat16: tl.float32 if triton.knobs.runtime.interpret else tl.bfloat16,
    }

    @triton.jit
    def _silu_mul(gate, up, dtype: tl.constexpr):
        # Rounded where the reference's separate steps round.
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        return ((gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up).to(dtype)

    @triton.jit
    def _silu_mul_kernel(both, out, N, BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr):
        pdl_launch_dependents(ENABLE_PDL)
        pdl_wait(ENABLE_PDL)
        row = tl.program_id(0).to(tl.int64)
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        gate = tl.load(both + row * 2 * N + column, mask=column < N, other=0)
        up = tl.load(both + row * 2 * N + N + column, mask=column < N, other=0)
        tl.store(out + row * N + column, _silu_mul(gate, up, out.dtype.element_ty), mask=column < N)

    @triton.jit
    def _dot_rows(tiles, values, CHUNKS: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr):
        # Sums of tiles[first], tiles[first + step], ... times the chunks of x, over K.
        total = tiles[FIRST].to(tl.float32) * values[0][None, :]
        for chunk in tl.static_range(1, CHUNKS):
            total += tiles[FIRST + STEP * chunk].to(tl.float32) * values[chunk][None, :]
        return tl.sum(total, 1)

    @triton.jit
    def _unpacked(words, IS_FP8: tl.constexpr):
        # The four bytes of each int32, int8 or E4M3, the lowest first.
        if IS_FP8 and not INTERPRETED:
            return tl.inline_asm_elementwise(
                "{.reg .b16 h<6>; .reg .b32 a, b; mov.b32 {h4, h5}, $4;"
                "cvt.rn.f16x2.e4m3x2 a, h4; cvt.rn.f16x2.e4m3x2 b, h5;"
                "mov.b32 {h0, h1}, a; mov.b32 {h2, h3}, b;"
                "cvt.f32.f16 $0, h0; cvt.f32.f16 $1, h1; cvt.f32.f16 $2, h2; cvt.f32.f16 $3, h3;}",
                "=f,=f,=f,=f,r",
                [words],
                dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
                is_pure=False,
                pack=1,
            )
        return _byte(words, 0, IS_FP8), _byte(words, 1, IS_FP8), _byte(words, 2, IS_FP8), _byte(words, 3, IS_FP8)

    @triton.jit
    def _byte(words, number: tl.constexpr, IS_FP8: tl.constexpr):
        byte = (words >> 8 * number).to(tl.int8)
        return (byte.to(tl.float8e4nv, bitcast=True) if IS_FP8 else byte).to(tl.float32)

    @triton.jit
    def _dot_unpacked(
        tiles, values, zero, IS_FP8: tl.constexpr, CHUNKS: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr
    ):
        # The same of tiles with four weights in each int32, and chunks of x in four parts. `zero` is one that compilers
        # do not know: they would unpack all weights before the loop over rows, and run out of registers. Assembly that
        # is not pure stays in the loop by itself.
        total = tl.zeros_like(tiles[FIRST]).to(tl.float32)
        for chunk in tl.static_range(CHUNKS):
            words = tiles[FIRST + STEP * chunk]
            unpacked = _unpacked(words if IS_FP8 else words ^ zero, IS_FP8)
            for number in tl.static_range(4):
                total += unpacked[number] * values[4 * chunk + number][None, :]
        return tl.sum(total, 1)

    @triton.jit
    def _in_four(values, BLOCK_K: tl.constexpr):
        # Of `values` [BLOCK_K] every fourth, from the first, the second, the third and the fourth on.
        even, odd = tl.split(tl.reshape(values, [BLOCK_K // 4, 2, 2]))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
        return first, second, third, fourth

    @triton.jit(do_not_specialize=["batch"])
    def _gemv_kernel(
        x, norm_weight, weight, scale, residual, out, batch, x_stride, residual_stride, eps,
        N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, IS_GATED: tl.constexpr,
        IS_FP8: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        # A weight in 8 bits is given as int32, four in each: compilers keep one of 8 bits in a register of its own, and
        # the fewer bytes are on their way, the slower is memory.
        pdl_launch_dependents(ENABLE_PDL)
        dtype: tl.constexpr = out.dtype.element_ty
        CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        HALVES: tl.constexpr = 2 if IS_GATED else 1
        PACK: tl.constexpr = 1 if scale is None else 4
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k_offset = tl.arange(0, BLOCK_K)
        word_offset = tl.arange(0, BLOCK_K // PACK)
        if scale is not None:
            # Two words a thread, as it has eight numbers of x: otherwise each part of x goes through shared memory.
            word_offset = tl.max_contiguous(word_offset, 2)
        start = weight + n.to(tl.int64)[:, None] * (K // PACK) + word_offset[None, :]
        tiles, norm_tiles = (), ()
        for chunk in tl.static_range(CHUNKS):
            k = chunk * BLOCK_K
            for half in tl.static_range(HALVES):
                word = k // PACK
                mask = (n < N)[:, None] & (word + word_offset < K // PACK)[None, :]
                tiles += (tl.load(start + half * N * (K // PACK) + word, mask=mask, other=0),)  # type: ignore[assignment]
            if norm_weight is not None:
                norm_tiles += (tl.load(norm_weight + k + k_offset, mask=k + k_offset < K, other=0),)  # type: ignore[assignment]
        if scale is not None:
            n_scale = tl.load(scale + n, mask=n < N, other=0)
            if IS_GATED:
                up_scale = tl.load(scale + N + n, mask=n < N, other=0)
        pdl_wait(ENABLE_PDL)
        for b in range(batch):
            if residual is not None:
                rest = tl.load(residual + b * residual_stride + n, mask=n < N, other=0).to(tl.float32)
            values = ()
            for chunk in tl.static_range(CHUNKS):
                k_index = chunk * BLOCK_K + k_offset
                values += (tl.load(x + b * x_stride + k_index, mask=k_index < K, other=0).to(tl.float32),)  # type: ignore[assignment]
            if norm_weight is not None:
                squares = tl.zeros([BLOCK_K], tl.float32)
                for chunk in tl.static_range(CHUNKS):
                    squares += values[chunk] * values[chunk]
                inverse = tl.rsqrt(tl.sum(squares) / K + eps)
                normed = ()
                for chunk in tl.static_range(CHUNKS):
                    normed += (scale_and_weigh(values[chunk], inverse, norm_tiles[chunk], dtype).to(tl.float32),)  # type: ignore[assignment]
                values = normed
            if scale is None:
                result = _dot_rows(tiles, values, CHUNKS, 0, HALVES).to(dtype)
            else:
                parts, zero = (), (tl.program_id(0) >> 30) * b
                for chunk in tl.static_range(CHUNKS):
                    parts += _in_four(values[chunk], BLOCK_K)
                result = (_dot_unpacked(tiles, parts, zero, IS_FP8, CHUNKS, 0, HALVES) * n_scale).to(dtype)
            if IS_GATED:
                if scale is None:
                    up = _dot_rows(tiles, values, CHUNKS, 1, HALVES)
                else:
                    up = _dot_unpacked(tiles, parts, zero, IS_FP8, CHUNKS, 1, HALVES) * up_scale
                result = _silu_mul(result, up, dtype)
            if residual is not None:
                result = (result.to(tl.float32) + rest).to(dtype)
            tl.store(out + b * N + n, result, mask=n < N)

    @triton.jit
    def _prefetch_l2(weight, n, K: tl.constexpr, SPAN: tl.constexpr, LINE: tl.constexpr):
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
        # A tile of the weight as the tensor cores take it. Of 8-bit floats Triton makes bfloat16 by way of float16, in
        # 10 cycles each; here two take 4: each byte with its sign before it, moved to where sign, exponent and mantissa
        # stand, times 2 ** 120. `ARE_PAIRS`: a thread has two that are neighbours, not four.
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
    def _dot(x, weight, acc, IS_SWAPPED: tl.constexpr):
        # Of wgmma the first operand alone may come from registers, where one of 8 bits is widened.
        if IS_SWAPPED:
            acc = tl.dot(weight, x, acc, input_precision="ieee")
        else:
            acc = tl.dot(x, weight, acc, input_precision="ieee")
        return acc

    @triton.jit(do_not_specialize=["batch"])
    def _tile_kernel(  # noqa: PLR0915 (a kernel's arguments are positional)
        x, weight, scale, residual, out, batch, x_stride, residual_stride,
        N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        SLICE_K: tl.constexpr, SPLIT_K: tl.constexpr, NUM_STAGES: tl.constexpr, IS_SWAPPED: tl.constexpr,
        IS_GATED: tl.constexpr, PREFETCH_L2: tl.constexpr, ENABLE_PDL: tl.constexpr, OPERAND_DTYPE: tl.constexpr,
    ):  # fmt: skip
        pdl_launch_dependents(ENABLE_PDL)
        dtype: tl.constexpr = x.dtype.element_ty
        STEP: tl.constexpr = SLICE_K * BLOCK_K
        # So wgmma takes its first operand from registers.
        ARE_PAIRS: tl.constexpr = IS_SWAPPED and SLICE_K == 1 and BLOCK_N >= 64
        SPAN: tl.constexpr = (K + SPLIT_K - 1) // SPLIT_K
        # Added to the pointers, so that the loop has constant ends: it is 6% faster (8 rows, as below).
        split = 0 if SPLIT_K == 1 else tl.program_id(2)
        x += split * SPAN
        weight += split * SPAN
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        m64 = m.to(tl.int64)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        # Rows past the end repeat the last one, unmasked; their sums are not stored. A mask on rows of x pays in the
        # smallest blocks only (passes of a depth model, H200: 1.53 ms, not 1.66, for 8 rows; 1.98, not 1.78, for 64);
        # in others rows repeat in turn, as many reads of the last one are slow (2.31 ms, not 1.81, for 17).
        n_source = tl.minimum(n, N - 1).to(tl.int64)
        m_source = m64 if BLOCK_M < 32 else (m % batch).to(tl.int64)
        # Axes (m, k) and (k, n), or (n, k) and (k, m) where the weight comes first; slices of K come before both.
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
            _prefetch_l2(weight, n_source, K, SPAN, LINE)
            if IS_GATED:
                _prefetch_l2(weight, n_source + N, K, SPAN, LINE)
        pdl_wait(ENABLE_PDL)
        for k in tl.range(0, SPAN, STEP, num_stages=NUM_STAGES):
            if K % STEP == 0:
                x_tile = tl.load(x_ptrs + k, mask=is_row, other=0).to(OPERAND_DTYPE)
                w_tile = _widened(tl.load(w_ptrs + k), OPERAND_DTYPE, ARE_PAIRS)
            else:
                x_tile = tl.load(x_ptrs + k, mask=is_row & (k + k_of_x < K), other=0).to(OPERAND_DTYPE)
                w_tile = _widened(tl.load(w_ptrs + k, mask=k + k_of_w < K, other=0.0), OPERAND_DTYPE, ARE_PAIRS)
            acc = _dot(x_tile, w_tile, acc, IS_SWAPPED)
            if IS_GATED:
                if K % STEP == 0:
                    w_tile = _widened(tl.load(w_ptrs + N * K + k), OPERAND_DTYPE, ARE_PAIRS)
                else:
                    w_tile = _widened(
                        tl.load(w_ptrs + N * K + k, mask=k + k_of_w < K, other=0.0), OPERAND_DTYPE, ARE_PAIRS
                    )
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
        result = acc if SPLIT_K > 1 else acc.to(dtype)
        if IS_GATED:
            result = _silu_mul(result, acc_up, dtype)
        if residual is not None:
            rest = tl.load(residual + m64[:, None] * residual_stride + n[None, :], mask=mask, other=0)
            result = (result.to(tl.float32) + rest.to(tl.float32)).to(dtype)
        tl.store(out + (split * batch + m64[:, None]) * N + n[None, :], result, mask=mask)

    @triton.jit
    def _load_columns(start, k, k_column, K: tl.constexpr, IS_WHOLE: tl.constexpr, operand: tl.constexpr):
        # Columns of a tile of the weight from number `k` of K on.
        if IS_WHOLE:
            return _widened(tl.load(start + k), operand, False)
        return _widened(tl.load(start + k, mask=k + k_column < K, other=0.0), operand, False)

    @triton.jit(do_not_specialize=["batch"])
    def _two_tile_kernel(
        x, weight, scale, out, batch, x_stride,
        N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXTRA_N: tl.constexpr,
        BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr, ENABLE_PDL: tl.constexpr, OPERAND_DTYPE: tl.constexpr,
    ):  # fmt: skip
        # A gated product: each program makes a block of columns and a narrower one beside it, of one tile of x.
        pdl_launch_dependents(ENABLE_PDL)
        dtype: tl.constexpr = x.dtype.element_ty
        IS_WHOLE: tl.constexpr = K % BLOCK_K == 0
        m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
        m64, m_source = m.to(tl.int64), (m % batch).to(tl.int64)
        n = tl.program_id(1) * (BLOCK_N + EXTRA_N) + tl.arange(0, BLOCK_N)
        more = tl.program_id(1) * (BLOCK_N + EXTRA_N) + BLOCK_N + tl.arange(0, EXTRA_N)
        # Rows past the end repeat others, as in `_tile_kernel`; their sums are not stored.
        n_source, more_source = tl.minimum(n, N - 1).to(tl.int64), tl.minimum(more, N - 1).to(tl.int64)
        k_offset = tl.arange(0, BLOCK_K)
        x_ptrs = x + m_source[:, None] * x_stride + k_offset[None, :]
        k_column = k_offset[:, None]
        w_ptrs, more_ptrs = weight + n_source[None, :] * K + k_column, weight + more_source[None, :] * K + k_column
        gate, up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32), tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        gate_more, up_more = tl.zeros([BLOCK_M, EXTRA_N], tl.float32), tl.zeros([BLOCK_M, EXTRA_N], tl.float32)
        pdl_wait(ENABLE_PDL)
        for k in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
            if IS_WHOLE:
                x_tile = tl.load(x_ptrs + k).to(OPERAND_DTYPE)
            else:
                x_tile = tl.load(x_ptrs + k, mask=k + k_offset[None, :] < K, other=0).to(OPERAND_DTYPE)
            tile = _load_columns(w_ptrs, k, k_column, K, IS_WHOLE, OPERAND_DTYPE)
            gate = tl.dot(x_tile, tile, gate, input_precision="ieee")
            tile = _load_columns(more_ptrs, k, k_column, K, IS_WHOLE, OPERAND_DTYPE)
            gate_more = tl.dot(x_tile, tile, gate_more, input_precision="ieee")
            tile = _load_columns(w_ptrs + N * K, k, k_column, K, IS_WHOLE, OPERAND_DTYPE)
            up = tl.dot(x_tile, tile, up, input_precision="ieee")
            tile = _load_columns(more_ptrs + N * K, k, k_column, K, IS_WHOLE, OPERAND_DTYPE)
            up_more = tl.dot(x_tile, tile, up_more, input_precision="ieee")
        if scale is not None:
            gate *= tl.load(scale + n_source)[None, :]
            up *= tl.load(scale + N + n_source)[None, :]
            gate_more *= tl.load(scale + more_source)[None, :]
            up_more *= tl.load(scale + N + more_source)[None, :]
        is_row, target = (m64 < batch)[:, None], out + m64[:, None] * N
        tl.store(target + n[None, :], _silu_mul(gate, up, dtype), mask=is_row & (n < N)[None, :])
        tl.store(target + more[None, :], _silu_mul(gate_more, up_more, dtype), mask=is_row & (more < N)[None, :])

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

    @triton.jit(do_not_specialize=["batch"])
    def _add_norm_kernel(
        partial, residual, norm_weight, out, normed, batch, residual_stride, eps,
        N: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        # Rounded where a product, the sum with the residual and the norm of that are when each is a kernel.
        pdl_launch_dependents(ENABLE_PDL)
        dtype: tl.constexpr = out.dtype.element_ty
        row = tl.program_id(0).to(tl.int64)
        n = tl.arange(0, BLOCK)
        mask = n < N
        weights = tl.load(norm_weight + n, mask=mask, other=0)
        pdl_wait(ENABLE_PDL)
        acc = tl.zeros([BLOCK], tl.float32)
        for split in tl.static_range(SPLIT_K):
            acc += tl.load(partial + (split * batch + row) * N + n, mask=mask, other=0).to(tl.float32)
        rest = tl.load(residual + row * residual_stride + n, mask=mask, other=0)
        total = (acc.to(dtype).to(tl.float32) + rest.to(tl.float32)).to(dtype)
        tl.store(out + row * N + n, total, mask=mask)
        value = total.to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value) / N + eps)
        tl.store(normed + row * N + n, scale_and_weigh(value, inverse, weights, dtype), mask=mask)


def _matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    plan: Plan,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    batch, width_in = x.shape
    width_out = weight.shape[0] // 2 if is_gated else weight.shape[0]
    enable_pdl = plan.enable_pdl and has_pdl(x.device)
    residual_stride = 0 if residual is None else residual.stride(0)
    if isinstance(plan, GemvPlan):
        out = torch.empty((batch, width_out), dtype=x.dtype, device=x.device)
        gain, eps = norm or (None, 0.0)
        is_fp8 = weight.dtype == torch.float8_e4m3fn
        words = weight if scale is None else weight.view(torch.int32)
        inputs = (x, gain, words, scale, residual, out, batch, x.stride(0), residual_stride, eps)
        sizes = (width_out, width_in, plan.rows, plan.block_k, is_gated, is_fp8, enable_pdl)
        _gemv_kernel[(triton.cdiv(width_out, plan.rows),)](
            *inputs, *sizes, num_warps=plan.warps, **pdl_options(enable_pdl)
        )
        return out
    if norm is not None:
        x = rms_norm_kernel(x, *norm, enable_pdl=plan.enable_pdl)
    if isinstance(plan, CublasPlan) and is_gated:
        return _cublas_gate_up(x, weight, scale, enable_pdl)
    if isinstance(plan, CublasPlan):
        product = _cublas_matmul(x, weight, scale)
        return product if residual is None else product.add_(residual)
    return _tile_matmul(x, weight, scale, plan, residual, is_gated)


def _tile_matmul(
    x: Tensor, weight: Tensor, scale: Tensor | None, plan: TilePlan, residual: Tensor | None, is_gated: bool
) -> Tensor:
    batch, width_in = x.shape
    width_out = weight.shape[0] // 2 if is_gated else weight.shape[0]
    enable_pdl = plan.enable_pdl and has_pdl(x.device)
    residual_stride = 0 if residual is None else residual.stride(0)
    out = torch.empty((batch, width_out), dtype=x.dtype, device=x.device)
    if plan.extra_n:
        assert is_gated
        assert residual is None
        grid = (triton.cdiv(batch, plan.block_m), triton.cdiv(width_out, plan.block_n + plan.extra_n))
        _two_tile_kernel[grid](
            *(x, weight, scale, out, batch, x.stride(0), width_out, width_in),
            *(plan.block_m, plan.block_n, plan.extra_n, plan.block_k, plan.stages, enable_pdl, OPERAND[x.dtype]),
            num_warps=plan.warps,
            **pdl_options(enable_pdl),
        )
        return out
    if plan.split_k == 1:
        _launch_tiles(x, weight, scale, plan, residual, out, is_gated)
        return out
    assert not is_gated
    sums = _split_sums(x, weight, scale, plan)
    grid = (batch, triton.cdiv(width_out, ROW_BLOCK))
    inputs = (sums, residual, out, batch, residual_stride, width_out)
    _reduce_split_k[grid](*inputs, plan.split_k, ROW_BLOCK, enable_pdl, **pdl_options(enable_pdl))
    return out


def _split_sums(x: Tensor, weight: Tensor, scale: Tensor | None, plan: TilePlan) -> Tensor:
    """The sums [SPLIT_K, B, N] float32 over parts of K, one after the other, of `x` times `weight`."""
    assert x.shape[1] % (plan.split_k * plan.slice_k * plan.block_k) == 0, (x.shape, plan)
    sums = torch.empty((plan.split_k, x.shape[0], weight.shape[0]), dtype=torch.float32, device=x.device)
    _launch_tiles(x, weight, scale, plan, None, sums, False)
    return sums


def _launch_tiles(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    plan: TilePlan,
    residual: Tensor | None,
    out: Tensor,
    is_gated: bool,
) -> None:
    (batch, width_in), width_out = x.shape, out.shape[-1]
    enable_pdl = plan.enable_pdl and has_pdl(x.device)
    blocks = (plan.block_m, plan.block_n, plan.block_k, plan.slice_k, plan.split_k, plan.stages)
    _tile_kernel[(triton.cdiv(batch, plan.block_m), triton.cdiv(width_out, plan.block_n), plan.split_k)](
        *(x, weight, scale, residual, out, batch, x.stride(0)),
        *(0 if residual is None else residual.stride(0), width_out, width_in),
        *(*blocks, plan.is_swapped, is_gated, plan.is_prefetched, enable_pdl, OPERAND[x.dtype]),
        num_warps=plan.warps,
        **pdl_options(enable_pdl),
    )


def _cublas_matmul(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return F.linear(x, weight)
    product = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    # What is widened at once takes no more memory than the rest of a prompt does.
    step = max(1, _WIDENED_AT_ONCE // weight.shape[1] // 128) * 128
    for first in range(0, weight.shape[0], step):
        own = slice(first, first + step)
        torch.mm(x, dequantized(weight[own], scale[own], x.dtype).t(), out=product[:, own])
    return product


def _cublas_gate_up(x: Tensor, weight: Tensor, scale: Tensor | None, enable_pdl: bool) -> Tensor:
    width_out = weight.shape[0] // 2
    out = torch.empty((x.shape[0], width_out), dtype=x.dtype, device=x.device)
    # Of a long prompt some rows at a time, as both halves take four times what is kept.
    for rows, into in zip(x.split(_GATED_AT_ONCE), out.split(_GATED_AT_ONCE), strict=True):
        grid = (rows.shape[0], triton.cdiv(width_out, ROW_BLOCK))
        product = _cublas_matmul(rows, weight, scale)
        _silu_mul_kernel[grid](product, into, width_out, ROW_BLOCK, enable_pdl, **pdl_options(enable_pdl))
    return out


def _chosen(x: Tensor, weight: Tensor, is_gated: bool, plan: Plan | None, shrink: int) -> Plan:
    return shrunk(plan or plan_for(x.shape[0], weight, is_gated), smaller, shrink)


def linear_kernel(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, plan: Plan | None = None, *, shrink: int = 0
) -> Tensor:
    """`linear_reference` in one or two launches; no gradient."""
    rows = x.flatten(0, -2)
    return _matmul(rows, weight, scale, _chosen(rows, weight, False, plan, shrink)).unflatten(0, x.shape[:-1])


def gate_up_kernel(
    x: Tensor, weight: Tensor, scale: Tensor | None = None, plan: Plan | None = None, *, shrink: int = 0
) -> Tensor:
    """`gate_up_reference` in one or two launches; no gradient."""
    return _matmul(x, weight, scale, _chosen(x, weight, True, plan, shrink), is_gated=True)


def norm_linear_kernel(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    scale: Tensor | None = None,
    plan: Plan | None = None,
    *,
    shrink: int = 0,
) -> Tensor:
    """`norm_linear_reference` in one or two launches; no gradient."""
    return _matmul(x, weight, scale, _chosen(x, weight, False, plan, shrink), (norm_weight, eps))


def norm_gate_up_kernel(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    scale: Tensor | None = None,
    plan: Plan | None = None,
    *,
    shrink: int = 0,
) -> Tensor:
    """`norm_gate_up_reference` in one to three launches; no gradient."""
    return _matmul(x, weight, scale, _chosen(x, weight, True, plan, shrink), (norm_weight, eps), is_gated=True)


def linear_add_kernel(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    scale: Tensor | None = None,
    plan: Plan | None = None,
    *,
    shrink: int = 0,
) -> Tensor:
    """`linear_add_reference` in one or two launches; no gradient."""
    return _matmul(x, weight, scale, _chosen(x, weight, False, plan, shrink), residual=residual)


def joins_norm(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear_add_norm` of `x` [B, K] takes a launch less than the sum and the norm apart: where a kernel adds
    the residual that the one of the product does not."""
    if not (x.is_cuda or (x.is_meta and is_recorded())):
        return False
    plan = plan_for(x.shape[0], weight, False)
    return isinstance(plan, CublasPlan) or (isinstance(plan, TilePlan) and plan.split_k > 1)


def linear_add_norm_kernel(
    x: Tensor,
    weight: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    scale: Tensor | None = None,
    plan: Plan | None = None,
    *,
    shrink: int = 0,
) -> tuple[Tensor, Tensor]:
    """`linear_add_norm_reference` in two launches; no gradient."""
    plan = _chosen(x, weight, False, plan, shrink)
    if isinstance(plan, CublasPlan):
        partial = _cublas_matmul(x, weight, scale)[None]
    elif isinstance(plan, TilePlan) and plan.split_k > 1:
        partial = _split_sums(x, weight, scale, plan)
    else:
        total = _matmul(x, weight, scale, plan, residual=residual)
        return total, rms_norm_kernel(total, norm_weight, eps, enable_pdl=plan.enable_pdl)
    splits, batch, width = partial.shape
    total, normed = (torch.empty((batch, width), dtype=x.dtype, device=x.device) for _ in range(2))
    enable_pdl, block = plan.enable_pdl and has_pdl(x.device), triton.next_power_of_2(width)
    inputs = (partial, residual, norm_weight, total, normed, batch, residual.stride(0), eps)
    _add_norm_kernel[(batch,)](
        *(*inputs, width, splits, block, enable_pdl),
        num_warps=max(1, min(8, block // 512)),
        **pdl_options(enable_pdl),
    )
    return total, normed


def _takes_rows(x: Tensor, weight: Tensor, scale: Tensor | None = None) -> bool:
    return x.ndim > 1 and x.is_contiguous() and is_row_major(x) and _takes_weight(x, weight, scale)


def _takes_norm(x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, scale: Tensor | None = None) -> bool:
    return x.ndim == 2 and is_row_major(x, norm_weight) and _takes_weight(x, weight, scale)


def _takes_residual(x: Tensor, weight: Tensor, residual: Tensor, scale: Tensor | None = None) -> bool:
    return x.ndim == 2 and is_row_major(x, residual) and _takes_weight(x, weight, scale)


def _takes_residual_norm(
    x: Tensor, weight: Tensor, residual: Tensor, norm_weight: Tensor, eps: float, scale: Tensor | None = None
) -> bool:
    return _takes_residual(x, weight, residual, scale) and is_row_major(x, norm_weight) and weight.shape[0] <= 16384


def _takes_weight(x: Tensor, weight: Tensor, scale: Tensor | None) -> bool:
    is_known = weight.dtype == x.dtype if scale is None else weight.dtype in EIGHT_BITS.values()
    return is_known and weight.numel() > 0 and weight.is_contiguous()


linear = Operation("linear", linear_kernel, linear_reference, _takes_rows, can_shrink=True)
gate_up = Operation("gate_up", gate_up_kernel, gate_up_reference, _takes_rows, can_shrink=True)
norm_linear = Operation("norm_linear", norm_linear_kernel, norm_linear_reference, _takes_norm, can_shrink=True)
norm_gate_up = Operation("norm_gate_up", norm_gate_up_kernel, norm_gate_up_reference, _takes_norm, can_shrink=True)
linear_add = Operation("linear_add", linear_add_kernel, linear_add_reference, _takes_residual, can_shrink=True)
linear_add_norm = Operation(
    "linear_add_norm", linear_add_norm_kernel, linear_add_norm_reference, _takes_residual_norm, can_shrink=True
)
