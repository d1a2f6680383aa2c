"""Products of one or two rows with a weight: a Triton kernel whose programs hold rows of the weight in registers.

A weight in 8 bits is held packed, and unpacked for each row of x."""

import torch
from torch import Tensor

from sonoro.ops.norm import pdl_options, stride_of
from sonoro.ops.optional import tl, triton
from sonoro.ops.plans import GemvPlan

if triton is not None:
    from sonoro.ops.activation import silu_mul
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait, scale_and_weigh

if triton is not None:
    INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

    @triton.jit
    def _dot_rows(tiles, values, CHUNKS: tl.constexpr, FIRST: tl.constexpr, STEP: tl.constexpr):
        # Multiply tiles[FIRST], tiles[FIRST + STEP], ... with the chunks of x, and add up over K.
        total = tiles[FIRST].to(tl.float32) * values[0][None, :]
        for chunk in tl.static_range(1, CHUNKS):
            total += tiles[FIRST + STEP * chunk].to(tl.float32) * values[chunk][None, :]
        return tl.sum(total, 1)

    @triton.jit
    def _unpacked(words, IS_FP8: tl.constexpr):
        # Unpack the four bytes of each int32, the lowest first: int8 or E4M3.
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
        # As `_dot_rows`, for tiles with four weights in each int32 and chunks of x in four parts. The compiler cannot
        # know that `zero` is 0. Otherwise it would unpack all weights before the loop over rows and run out of
        # registers. The assembly for E4M3 needs no `zero`: it is not pure, so it stays in the loop.
        total = tl.zeros_like(tiles[FIRST]).to(tl.float32)
        for chunk in tl.static_range(CHUNKS):
            words = tiles[FIRST + STEP * chunk]
            unpacked = _unpacked(words if IS_FP8 else words ^ zero, IS_FP8)
            for number in tl.static_range(4):
                total += unpacked[number] * values[4 * chunk + number][None, :]
        return tl.sum(total, 1)

    @triton.jit
    def _in_four(values, BLOCK_K: tl.constexpr):
        # Split `values` [BLOCK_K] into four parts: every fourth value, from the first, second, third and fourth on.
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
        # An 8-bit weight is passed as int32, four values in each. The compiler keeps every loaded value in a register
        # of its own: with single bytes, too few bytes would be in flight to reach the memory's bandwidth.
        pdl_launch_dependents(ENABLE_PDL)
        dtype: tl.constexpr = out.dtype.element_ty
        CHUNKS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
        HALVES: tl.constexpr = 2 if IS_GATED else 1
        PACK: tl.constexpr = 1 if scale is None else 4
        n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k_offset = tl.arange(0, BLOCK_K)
        word_offset = tl.arange(0, BLOCK_K // PACK)
        if scale is not None:
            # A thread holds eight numbers of x, so it loads two words: otherwise x would go through shared memory.
            word_offset = tl.max_contiguous(word_offset, 2)
        start = weight + n.to(tl.int64)[:, None] * (K // PACK) + word_offset[None, :]
        tiles, norm_tiles = (), ()
        for chunk in tl.static_range(CHUNKS):
            k = chunk * BLOCK_K
            # Unrolled loops extend these tuples; mypy takes `()` for a tuple of fixed length.
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
                result = silu_mul(result, up, dtype)
            if residual is not None:
                result = (result.to(tl.float32) + rest).to(dtype)
            tl.store(out + b * N + n, result, mask=n < N)


def gemv(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    plan: GemvPlan,
    norm: tuple[Tensor, float] | None,
    residual: Tensor | None,
    is_gated: bool,
) -> Tensor:
    """The product [B, N] of `x` [B, K], in one launch: of its RMS norm (weight [K], eps) if there is a `norm`, plus
    `residual` [B, N] if there is one; `is_gated`: silu(gate) * up for `weight` [2 N, K]."""
    (batch, width_in), width_out = x.shape, weight.shape[0] // (1 + is_gated)
    out = torch.empty((batch, width_out), dtype=x.dtype, device=x.device)
    norm_weight, eps = norm or (None, 0.0)
    words = weight if scale is None else weight.view(torch.int32)
    _gemv_kernel[(triton.cdiv(width_out, plan.rows),)](
        x=x, norm_weight=norm_weight, weight=words, scale=scale, residual=residual, out=out, batch=batch,
        x_stride=x.stride(0), residual_stride=stride_of(residual), eps=eps, N=width_out, K=width_in,
        BLOCK_N=plan.rows, BLOCK_K=plan.block_k, IS_GATED=is_gated, IS_FP8=weight.dtype == torch.float8_e4m3fn,
        num_warps=plan.warps, **pdl_options(x.device, enable_pdl=plan.enable_pdl),
    )  # fmt: skip
    return out
