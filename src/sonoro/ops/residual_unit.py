"""A residual unit of a codec as one launch: a dilated convolution, Snake, a pointwise convolution, and its epilogue.

What lies between the two convolutions stays on the chip, which saves writing and reading it. That pays where there are
few channels and many columns, as memory then limits the unit: see `unit_tile`. The dilated convolution is full or
depthwise, each with a kernel. Left contexts and epilogues are those of `ops.conv`."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from sonoro.ops.activation import Rates
from sonoro.ops.causal import depthwise, depthwise_reference
from sonoro.ops.conv import COPY_BLOCK, Epilogue, LeftContext, conv, conv_reference, has_sine, index_type
from sonoro.ops.conv_tiles import ConvTile
from sonoro.ops.device import Card
from sonoro.ops.dispatch import Operation, shrunk
from sonoro.ops.norm import pdl_options
from sonoro.ops.optional import tl, triton

if triton is not None:
    from sonoro.ops.conv import apply_epilogue, copy_contexts, saturate_to, snake_beta
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait

MIN_ROWS = {96: 7680, 192: 65536}
"""By channels, the fewest columns of a batch for which one launch with a full convolution was measured to be faster
than two: 4 and 102 frames of a 12 Hz codec."""

MIN_ELEMENTS = 1 << 18
"""The fewest columns times channels for one launch with a depthwise convolution: slightly more than 160 ms of a 48 kHz
codec, for which one launch is slower than two with 128 channels."""

TILES = {96: ConvTile(128, 64, 32, 32, 4, 4), 192: ConvTile(128, 128, 64, 64, 8, 4)}
"""By channels. On an H100 in float16, 384 frames of a 12 Hz codec: 434 us in place of 553 (96 channels) and 406 in
place of 437 (192); with 384 channels one launch is slower than two."""

DEPTHWISE_TILES = {
    32: ConvTile(64, 32, 0, 32, 4, 4),
    64: ConvTile(64, 64, 0, 64, 4, 4),
    128: ConvTile(64, 128, 0, 64, 8, 2),
}
"""By channels, of units with a depthwise convolution, where `stages` is the number of taps whose columns are loaded
together. The four units of a block over 7.7 s of a 48 kHz codec take 156 us in place of 239 (32 channels), 172 in place
of 249 and 220 in place of 316 on an H100 in float16; with 256 channels one launch is slower than two."""


class UnitWeights(NamedTuple):
    """The weights of a residual unit of C channels: `dilated` [taps, C, C], or [taps, C] if it is depthwise, and
    `pointwise` [C, C], all contiguous by output, their biases [C], and Snake's `rates` between them."""

    dilated: Tensor
    dilated_bias: Tensor
    rates: Rates
    pointwise: Tensor
    pointwise_bias: Tensor

    @property
    def is_depthwise(self) -> bool:
        return self.dilated.ndim == 2

    @property
    def tiles(self) -> dict[int, ConvTile]:
        """The table of its kernel, by channels."""
        return DEPTHWISE_TILES if self.is_depthwise else TILES


def unit_tile(rows: int, weights: UnitWeights, on: Card) -> ConvTile | None:
    """The tile for a unit over `rows` columns, or None where two launches are faster or it does not fit `on`."""
    channels = len(weights.pointwise)
    tile, least = weights.tiles.get(channels), MIN_ROWS.get(channels, 0)
    least = MIN_ELEMENTS // channels if weights.is_depthwise else least
    if tile is None or rows < least or tile.stages_on(on) < tile.stages or not _is_half(weights):
        return None
    # Compiled for Turing, a depthwise unit spills registers.
    return None if weights.is_depthwise and (on.has_few_registers or not on.has_bfloat16) else tile


def _is_half(weights: UnitWeights) -> bool:
    return weights.dilated.dtype in (torch.bfloat16, torch.float16)


def residual_unit_in_two(
    x: Tensor,
    weights: UnitWeights,
    dilation: int,
    context: LeftContext,
    epilogue: Epilogue,
    conv: Callable[..., tuple[Tensor | None, Tensor]] = conv,
    depthwise: Callable[..., Tensor] = depthwise,
) -> tuple[Tensor | None, Tensor]:
    """The unit of `x` [B, L + T, C] as two operations; returns what the second returns.
    `context.history` is that of the dilated convolution, `context.next_history` and `left` are of the layer after."""
    first = LeftContext(context.slots, context.history)
    after = LeftContext(context.slots, None, context.next_history, context.left)
    if weights.is_depthwise:
        inner = depthwise(x, weights.dilated, weights.dilated_bias, dilation, first, rates=weights.rates)
    else:
        _, inner = conv(x, weights.dilated, weights.dilated_bias, dilation, first, Epilogue(rates=weights.rates))
    return conv(inner, weights.pointwise[None], weights.pointwise_bias, 1, after, epilogue)


def residual_unit_reference(
    x: Tensor, weights: UnitWeights, dilation: int, context: LeftContext, epilogue: Epilogue
) -> tuple[Tensor | None, Tensor]:
    """`residual_unit_in_two` by the references of both operations."""
    return residual_unit_in_two(x, weights, dilation, context, epilogue, conv_reference, depthwise_reference)


if triton is not None:

    @triton.jit
    def _activated(acc, bias, rate, scale, channel, HAS_SINE: tl.constexpr, dtype: tl.constexpr):
        # The activation between the two convolutions, rounded as it would be if it were stored.
        y = acc + tl.load(bias + channel)[None, :]
        y = snake_beta(y, tl.load(rate + channel)[None, :], tl.load(scale + channel)[None, :], HAS_SINE)
        return saturate_to(y, dtype)

    @triton.jit
    def _columns_of(program, count, columns, BLOCK_M: tl.constexpr):
        # The rows of a program, and the batch index and column of each.
        rows = program * BLOCK_M + tl.arange(0, BLOCK_M)
        # Rows past the end read the last one's; they are not stored.
        row = tl.minimum(rows, count - 1)
        batch = row // columns
        return rows, batch, row - batch * columns

    # Triton would specialise integer arguments that equal 1.
    @triton.jit(do_not_specialize=["count", "columns", "length", "dilation", "tiles", "tail_blocks"])
    def _residual_unit(
        x, weight, bias, rate, scale, pointwise, pointwise_bias, residual, plain, active, gain, offset, next_rate,
        next_scale, slots, history, next_history,
        count, columns, length, dilation, active_step, active_start, tiles, tail_blocks,
        TAPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EXTRA_N: tl.constexpr, BLOCK_K: tl.constexpr,
        COPY_BLOCK_SIZE: tl.constexpr, HAS_SINE: tl.constexpr, INDEX: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        # The C channels are BLOCK_N + EXTRA_N, as a block has a power of two.
        C: tl.constexpr = BLOCK_N + EXTRA_N
        pdl_wait(ENABLE_PDL)
        program = tl.program_id(0)
        if program >= tiles:
            copy_contexts(
                x, active, slots, history, next_history, program - tiles, count, columns, length, active_step,
                active_start, tail_blocks, C, COPY_BLOCK_SIZE,
            )  # fmt: skip
        else:
            rows, batch, column = _columns_of(program, count, columns, BLOCK_M)
            k_offset = tl.arange(0, BLOCK_K)
            main = tl.arange(0, BLOCK_N)
            extra = BLOCK_N + tl.arange(0, EXTRA_N)
            x_ptrs = x + (batch.to(tl.int64) * (length + columns) + column)[:, None] * C + k_offset[None, :]
            w_ptrs = weight + main[:, None] * (TAPS * C) + k_offset[None, :]
            extra_w_ptrs = weight + extra[:, None] * (TAPS * C) + k_offset[None, :]
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            extra_acc = tl.zeros((BLOCK_M, EXTRA_N), dtype=tl.float32)
            STEPS_K: tl.constexpr = C // BLOCK_K
            for step in range(TAPS * STEPS_K):
                tap = step // STEPS_K
                channel = (step % STEPS_K) * BLOCK_K
                a = tl.load(x_ptrs + (tap * dilation * C + channel))
                shift = tap * C + channel
                acc = tl.dot(a, tl.trans(tl.load(w_ptrs + shift)), acc, input_precision="ieee")
                extra_acc = tl.dot(a, tl.trans(tl.load(extra_w_ptrs + shift)), extra_acc, input_precision="ieee")
            pdl_launch_dependents(ENABLE_PDL)
            y = _activated(acc, bias, rate, scale, main, HAS_SINE, weight.dtype.element_ty)
            extra_y = _activated(extra_acc, bias, rate, scale, extra, HAS_SINE, weight.dtype.element_ty)
            squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
            main_w_ptrs, extra_w_ptrs = pointwise + main[:, None] * C, pointwise + extra[:, None] * C
            out = tl.dot(y, tl.trans(tl.load(main_w_ptrs + main[None, :])), input_precision="ieee")
            out = tl.dot(extra_y, tl.trans(tl.load(main_w_ptrs + extra[None, :])), out, input_precision="ieee")
            apply_epilogue(
                out, rows, batch, column, 0, squares, pointwise_bias, residual, plain, active, gain, offset, next_rate,
                next_scale, count, active_step, active_start, C, C, C, "none", None, BLOCK_N, HAS_SINE,
                INDEX,
            )  # fmt: skip
            out = tl.dot(y, tl.trans(tl.load(extra_w_ptrs + main[None, :])), input_precision="ieee")
            out = tl.dot(extra_y, tl.trans(tl.load(extra_w_ptrs + extra[None, :])), out, input_precision="ieee")
            apply_epilogue(
                out, rows, batch, column, BLOCK_N, squares, pointwise_bias, residual, plain, active, gain, offset,
                next_rate, next_scale, count, active_step, active_start, C, C, C, "none", None, EXTRA_N, HAS_SINE,
                INDEX,
            )  # fmt: skip

    @triton.jit(do_not_specialize=["count", "columns", "length", "dilation", "tiles", "tail_blocks"])
    def _depthwise_unit(
        x, weight, bias, rate, scale, pointwise, pointwise_bias, residual, plain, active, gain, offset, next_rate,
        next_scale, slots, history, next_history,
        count, columns, length, dilation, active_step, active_start, tiles, tail_blocks,
        TAPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
        COPY_BLOCK_SIZE: tl.constexpr, HAS_SINE: tl.constexpr, INDEX: tl.constexpr, ENABLE_PDL: tl.constexpr,
        UNROLL: tl.constexpr,
    ):  # fmt: skip
        C: tl.constexpr = BLOCK_N  # a program has all channels
        pdl_wait(ENABLE_PDL)
        program = tl.program_id(0)
        if program >= tiles:
            copy_contexts(
                x, active, slots, history, next_history, program - tiles, count, columns, length, active_step,
                active_start, tail_blocks, C, COPY_BLOCK_SIZE,
            )  # fmt: skip
        else:
            rows, batch, column = _columns_of(program, count, columns, BLOCK_M)
            x_ptrs = x + (batch.to(tl.int64) * (length + columns) + column)[:, None] * C
            w_ptrs = pointwise + tl.arange(0, BLOCK_N)[:, None] * C
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            # Not pipelined, or shared memory would get the columns of each tap.
            for first in tl.range(0, C, BLOCK_K, num_stages=1):
                channel = first + tl.arange(0, BLOCK_K)
                y = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
                y += tl.load(bias + channel).to(tl.float32)[None, :]
                for tap in tl.range(0, TAPS, loop_unroll_factor=UNROLL):
                    value = tl.load(x_ptrs + (tap * dilation * C + channel)[None, :]).to(tl.float32)
                    y += value * tl.load(weight + tap * C + channel).to(tl.float32)[None, :]
                y = snake_beta(y, tl.load(rate + channel)[None, :], tl.load(scale + channel)[None, :], HAS_SINE)
                # Rounded as if it were stored.
                a = saturate_to(y, weight.dtype.element_ty)
                if HAS_SINE:  # a GPU of NVIDIA
                    # Else Triton moves the layout that the product takes, and its barriers, to the columns of each tap.
                    a = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [a], a.dtype, is_pure=False, pack=2)
                acc = tl.dot(a, tl.trans(tl.load(w_ptrs + channel[None, :])), acc, input_precision="ieee")
            pdl_launch_dependents(ENABLE_PDL)
            apply_epilogue(
                acc, rows, batch, column, 0, None, pointwise_bias, residual, plain, active, gain, offset, next_rate,
                next_scale, count, active_step, active_start, C, C, C, "none", None, BLOCK_N, HAS_SINE, INDEX,
            )  # fmt: skip


def smaller_unit(tile: ConvTile) -> ConvTile | None:
    """The next tile to try if `tile` cannot be launched: fewer stages, then fewer columns; None after the smallest."""
    if tile.stages > 2:
        return replace(tile, stages=tile.stages - 1)
    return replace(tile, m=tile.m // 2) if tile.m > 16 else None


def residual_unit_kernel(
    x: Tensor,
    weights: UnitWeights,
    dilation: int,
    context: LeftContext,
    epilogue: Epilogue,
    *,
    tile: ConvTile | None = None,
    shrink: int = 0,
) -> tuple[Tensor | None, Tensor]:
    """`residual_unit_reference` as one Triton kernel, of the channels in `TILES` or `DEPTHWISE_TILES`. No gradient."""
    taps, channels = weights.dilated.shape[:2]
    length = (taps - 1) * dilation
    batch, columns = x.shape[0], x.shape[1] - length
    assert x.is_contiguous()
    assert weights.dilated.movedim(0, -2).is_contiguous()
    assert weights.pointwise.is_contiguous()
    assert epilogue.norm_eps is None
    assert epilogue.function == "none"
    tile = shrunk(tile or weights.tiles[channels], smaller_unit, shrink)
    full, depthwise = (_residual_unit, {"EXTRA_N": tile.extra}), (_depthwise_unit, {"UNROLL": tile.stages})
    kernel, options = depthwise if weights.is_depthwise else full
    active = x.new_empty(batch, context.left + columns, channels)
    if context.left and context.next_history is None:
        active[:, : context.left].zero_()
    plain = None if epilogue.plain is None else x.new_empty(batch, columns, channels, dtype=epilogue.plain)
    tiles = triton.cdiv(batch * columns, tile.m)
    tails = triton.cdiv(batch * length * channels, COPY_BLOCK) if context.history is not None else 0
    heads = triton.cdiv(batch * context.left * channels, COPY_BLOCK) if context.next_history is not None else 0
    (gain, offset), (next_rate, next_scale) = epilogue.affine or (None, None), epilogue.rates or (None, None)
    kernel[(tiles + tails + heads,)](
        x=x, weight=weights.dilated, bias=weights.dilated_bias, rate=weights.rates[0], scale=weights.rates[1],
        pointwise=weights.pointwise, pointwise_bias=weights.pointwise_bias, residual=epilogue.residual, plain=plain,
        active=active, gain=gain, offset=offset, next_rate=next_rate, next_scale=next_scale, slots=context.slots,
        history=context.history, next_history=context.next_history, count=batch * columns, columns=columns,
        length=length, dilation=dilation, active_step=(context.left + columns) * channels,
        active_start=context.left * channels, tiles=tiles, tail_blocks=tails, TAPS=taps, BLOCK_M=tile.m,
        BLOCK_N=tile.n, BLOCK_K=tile.k, COPY_BLOCK_SIZE=COPY_BLOCK, HAS_SINE=has_sine(x.device),
        INDEX=index_type(active), num_warps=tile.warps, num_stages=tile.stages, **options, **pdl_options(x.device),
    )  # fmt: skip
    return plain, active


residual_unit = Operation(
    residual_unit_kernel,
    residual_unit_reference,
    lambda x, weights, *_, **__: _is_half(weights),
    can_shrink=True,
)
