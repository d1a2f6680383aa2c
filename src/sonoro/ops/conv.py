"""Causal convolutions over [B, T, C] with fused epilogues: a Triton kernel beside its torch reference.

Everything is a product over taps: a dilated convolution, a linear layer (one tap), and a transposed convolution of
kernel 2 * stride (two taps, stride * C_out outputs). An input begins with its left context, which `LeftContext` stores.
Computed in float32 (float64 for float64), each output rounded once.

    input    [B, L + T, C]    columns before ->|<- columns of this call
    history  [slots, L, C]    left context of the next call of slots[b]: the input's last L columns"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.activation import Rates
from sonoro.ops.conv_tiles import ConvTile, choose_tile, smaller_tile
from sonoro.ops.device import card
from sonoro.ops.dispatch import Operation, shrunk
from sonoro.ops.norm import pdl_options
from sonoro.ops.optional import tl, triton

if triton is not None:
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait

HALF_LIMIT = 65504.0
"""The largest float16."""

COPY_BLOCK = 4096
"""Elements of left context that one program copies."""

MOST_INT32 = 2**31 - 1
"""The largest offset in a tensor that 32 bits hold."""


@dataclass(frozen=True)
class LeftContext:
    """Left context of a kernel's input, and of the layer that reads its output.
    `history` [slots, L, C] receives the last L columns of the input. The first `left` columns of the output come from
    `next_history` [slots, left, C'], or are zero. Both are indexed by `slots` [B] int64; only the scratch slot may
    repeat."""

    slots: Tensor | None = None
    history: Tensor | None = None
    next_history: Tensor | None = None
    left: int = 0


NO_CONTEXT = LeftContext()


class Epilogue(NamedTuple):
    """What follows the product, in this order, each optional.
    RMSNorm of the input without weight (`norm_eps`, one tap only); the bias; `function` (gate: outputs are interleaved
    pairs, silu(first) * second); adding `residual` [B, T, N]; storing the result so far in the dtype `plain`; scale and
    shift `affine` (by channel, float32 or wider); SnakeBeta with `rates`."""

    norm_eps: float | None = None
    function: Literal["none", "gelu", "gate"] = "none"
    residual: Tensor | None = None
    plain: torch.dtype | None = None
    affine: tuple[Tensor, Tensor] | None = None
    rates: Rates | None = None


NO_EPILOGUE = Epilogue()


def conv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dilation: int = 1,
    context: LeftContext = NO_CONTEXT,
    epilogue: Epilogue = NO_EPILOGUE,
) -> tuple[Tensor | None, Tensor]:
    """The product over taps of `x` [B, L + T, C] and `weight` [taps, N, C], followed by `epilogue`.

    Tap j of output column t reads input column t + j * dilation; for a negative dilation t + (j - taps + 1) * dilation.
    `bias` [C'] is repeated over N. Returns the result stored as `epilogue.plain`, [B, T', C'], or None; and the final
    one after `context.left` columns of left context, [B, left + T', C'], where T' * C' = T * N. Advances
    `context.history`. Float16 results saturate."""
    norm_eps, function, residual, plain, affine, rates = epilogue
    taps, outputs, _ = weight.shape
    length = (taps - 1) * abs(dilation)
    columns = x.shape[1] - length
    wide = torch.promote_types(weight.dtype, torch.float32)
    first = 0 if dilation > 0 else length
    inputs = [x[:, first + tap * dilation :][:, :columns].to(wide) for tap in range(taps)]
    y = sum(F.linear(part, weight[tap].to(wide)) for tap, part in enumerate(inputs))
    assert isinstance(y, Tensor)
    if norm_eps is not None:
        y = y * (inputs[0].square().mean(-1, keepdim=True) + norm_eps).rsqrt()
    if bias is not None:
        y = y + bias.to(wide).repeat(outputs // bias.shape[0])
    if function == "gelu":
        y = F.gelu(y)
    if function == "gate":
        y = F.silu(y[..., 0::2]) * y[..., 1::2]
    if residual is not None:
        y = y + residual.to(wide)
    if rates is not None or bias is not None:
        y = y.reshape(x.shape[0], -1, (rates[0] if rates is not None else bias).shape[0])  # type: ignore[union-attr]
    first_result = None if plain is None else saturate(y, plain)
    if affine is not None:
        y = y * affine[0] + affine[1]
    if rates is not None:
        y = y + (y * rates[0]).sin().square() * rates[1]
    active = saturate(y, weight.dtype)
    return first_result, join_context(x, active, context)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; in float16, what is beyond its range becomes its largest number."""
    return x.clamp(-HALF_LIMIT, HALF_LIMIT).to(dtype) if dtype == torch.float16 else x.to(dtype)


def join_context(x: Tensor, active: Tensor, context: LeftContext) -> Tensor:
    """`active` [B, T, C'] after its left context; the last columns of `x` [B, L + T, C] become the history."""
    if context.history is not None:
        assert context.slots is not None
        context.history.index_copy_(
            0, context.slots, x[:, x.shape[1] - context.history.shape[1] :].to(context.history.dtype)
        )
    if not context.left:
        return active
    if context.next_history is None:
        return F.pad(active, (0, 0, context.left, 0))
    assert context.slots is not None
    return torch.cat([context.next_history.index_select(0, context.slots), active], dim=1)


if triton is not None:

    @triton.jit
    def copy_block(
        source, source_step, target, target_step, slots, block, count, size,
        FROM_SLOT: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        # Copy `count` rows of `size` elements; one side is indexed by batch index, the other by its slot.
        index = block * BLOCK + tl.arange(0, BLOCK)
        row = (index // size).to(tl.int64)
        inside = row < count
        slot = tl.load(slots + row, mask=inside, other=0)
        offset = index - row * size
        read = tl.where(FROM_SLOT, slot, row) * source_step + offset
        write = tl.where(FROM_SLOT, row, slot) * target_step + offset
        value = tl.load(source + read, mask=inside)
        tl.store(target + write, value.to(target.dtype.element_ty), mask=inside)

    @triton.jit
    def copy_contexts(
        x, active, slots, history, next_history, block, count, columns, length, active_step, active_start, tail_blocks,
        C_IN: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        # Program `block` copies a part of the input's tail to `history`, or of `next_history` to the output's head.
        size = length * C_IN
        batch_size = count // columns
        # A branch on None is pruned only if the condition tests nothing else.
        if history is not None:  # noqa: SIM102
            if block < tail_blocks:
                tail, step = x + columns.to(tl.int64) * C_IN, (length + columns).to(tl.int64) * C_IN
                copy_block(tail, step, history, size, slots, block, batch_size, size, False, BLOCK)
        if next_history is not None:  # noqa: SIM102
            if block >= tail_blocks:
                block -= tail_blocks
                copy_block(
                    next_history, active_start, active, active_step, slots, block, batch_size, active_start, True, BLOCK
                )

    @triton.jit
    def snake_beta(value, rate, scale, HAS_SINE: tl.constexpr):
        z = value * rate
        if HAS_SINE:
            # The GPU's unit: 5 instructions in place of 14, within 2^-20 near zero, as float32's rounding of z beyond.
            wave = tl.inline_asm_elementwise(
                "sin.approx.ftz.f32 $0, $1;", "=f,f", [z], dtype=tl.float32, is_pure=True, pack=1
            )
            return value + wave * wave * scale
        # sin(z)^2 has period pi: reduce z to +-pi / 2 (pi in two parts, the first exact in 11 bits), then a series.
        periods = tl.floor(z * 0.3183098861837907 + 0.5)
        z = (z - periods * 3.140625) - periods * 9.67653589793e-4
        square = z * z
        series = 2.7557319e-06 + square * -2.5052108e-08
        series = -1.9841270e-04 + square * series
        series = 8.3333333e-03 + square * series
        series = -1.6666667e-01 + square * series
        wave = z + z * square * series
        return value + wave * wave * scale

    @triton.jit
    def saturate_to(value, dtype: tl.constexpr):
        if dtype == tl.float16:
            # Propagate NaN, as in the reference.
            value = tl.maximum(value, -65504.0, propagate_nan=tl.PropagateNan.ALL)
            value = tl.minimum(value, 65504.0, propagate_nan=tl.PropagateNan.ALL)
        return value.to(dtype)

    @triton.jit
    def apply_epilogue(
        y, rows, batch, column, first, squares, bias, residual, plain, active, gain, offset, rate, scale, count,
        active_step, active_start,
        C_IN: tl.constexpr, C_OUT: tl.constexpr, PERIOD: tl.constexpr, FUNCTION: tl.constexpr,
        NORM_EPS: tl.constexpr, WIDTH: tl.constexpr, HAS_SINE: tl.constexpr, INDEX: tl.constexpr,
    ):  # fmt: skip
        # Apply the epilogue to one tile of the product, [rows, WIDTH] from output `first` on, and store it.
        output = first + tl.arange(0, WIDTH)
        if NORM_EPS is not None:
            y *= tl.rsqrt(squares / C_IN + NORM_EPS)[:, None]
        if bias is not None:
            y += tl.load(bias + output % PERIOD, mask=output < C_OUT, other=0.0).to(y.dtype)[None, :]
        if FUNCTION == "gelu":
            y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
        STORED: tl.constexpr = C_OUT // 2 if FUNCTION == "gate" else C_OUT
        if FUNCTION == "gate":
            gate, up = tl.split(tl.reshape(y, (y.shape[0], WIDTH // 2, 2)))
            y = gate * tl.sigmoid(gate) * up
            output = first // 2 + tl.arange(0, WIDTH // 2)
        inside = (rows < count)[:, None] & (output < STORED)[None, :]
        flat = rows.to(INDEX)[:, None] * STORED + output[None, :]
        if residual is not None:
            y += tl.load(residual + flat, mask=inside, other=0.0).to(y.dtype)
        if plain is not None:
            tl.store(plain + flat, saturate_to(y, plain.dtype.element_ty), mask=inside)
        channel = output % PERIOD
        if gain is not None:
            y = y * tl.load(gain + channel)[None, :] + tl.load(offset + channel)[None, :]
        if rate is not None:
            y = snake_beta(y, tl.load(rate + channel)[None, :], tl.load(scale + channel)[None, :], HAS_SINE)
        if active is not None:
            start = batch.to(INDEX) * active_step + active_start + column * STORED
            offset = start[:, None] + output[None, :]
            tl.store(active + offset, saturate_to(y, active.dtype.element_ty), mask=inside)

    # Triton would specialise integer arguments that equal 1.
    @triton.jit(do_not_specialize=["count", "columns", "length", "dilation", "tiles", "tail_blocks"])
    def _conv(
        x, weight, bias, residual, plain, active, gain, offset, rate, scale, slots, history, next_history,
        count, columns, length, dilation, active_step, active_start, tap_step, output_step, tiles, tail_blocks,
        C_IN: tl.constexpr, C_OUT: tl.constexpr, TAPS: tl.constexpr, PERIOD: tl.constexpr,
        FUNCTION: tl.constexpr, NORM_EPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        EXTRA_N: tl.constexpr, BLOCK_K: tl.constexpr, COPY_BLOCK_SIZE: tl.constexpr, HAS_SINE: tl.constexpr,
        INDEX: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_wait(ENABLE_PDL)
        program = tl.program_id(0)
        span = length + columns
        if program >= tiles:
            copy_contexts(
                x, active, slots, history, next_history, program - tiles, count, columns, length, active_step,
                active_start, tail_blocks, C_IN, COPY_BLOCK_SIZE,
            )  # fmt: skip
        else:
            TILE_N: tl.constexpr = BLOCK_N + EXTRA_N
            TILES_N: tl.constexpr = (C_OUT + TILE_N - 1) // TILE_N
            rows = (program // TILES_N) * BLOCK_M + tl.arange(0, BLOCK_M)
            first = (program % TILES_N) * TILE_N
            # Rows and outputs past the end read the last one's; they are not stored.
            row = tl.minimum(rows, count - 1)
            batch = row // columns
            column = row - batch * columns
            start = tl.where(dilation > 0, 0, length)
            k_offset = tl.arange(0, BLOCK_K)
            x_ptrs = x + (batch.to(tl.int64) * span + column + start)[:, None] * C_IN + k_offset[None, :]
            output = tl.minimum(first + tl.arange(0, BLOCK_N), C_OUT - 1)
            w_ptrs = weight + output.to(tl.int64)[:, None] * output_step + k_offset[None, :]
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
            if EXTRA_N > 0:
                extra = tl.minimum(first + BLOCK_N + tl.arange(0, EXTRA_N), C_OUT - 1)
                extra_w_ptrs = weight + extra.to(tl.int64)[:, None] * output_step + k_offset[None, :]
                extra_acc = tl.zeros((BLOCK_M, EXTRA_N), dtype=tl.float32)
            STEPS_K: tl.constexpr = C_IN // BLOCK_K
            for step in range(TAPS * STEPS_K):
                tap = step // STEPS_K
                channel = (step % STEPS_K) * BLOCK_K
                a = tl.load(x_ptrs + (tap * dilation * C_IN + channel))
                if NORM_EPS is not None:
                    wide = a.to(tl.float32)
                    squares += tl.sum(wide * wide, axis=1)
                a = a.to(weight.dtype.element_ty)
                shift = tap * tap_step + channel
                acc = tl.dot(a, tl.trans(tl.load(w_ptrs + shift)), acc, input_precision="ieee")
                if EXTRA_N > 0:
                    b = tl.trans(tl.load(extra_w_ptrs + shift))
                    extra_acc = tl.dot(a, b, extra_acc, input_precision="ieee")
            # Let the next kernel launch only now: while it waits, its programs take room on the multiprocessors.
            pdl_launch_dependents(ENABLE_PDL)
            apply_epilogue(
                acc, rows, batch, column, first, squares, bias, residual, plain, active, gain, offset, rate, scale,
                count, active_step, active_start, C_IN, C_OUT, PERIOD, FUNCTION, NORM_EPS, BLOCK_N, HAS_SINE, INDEX,
            )  # fmt: skip
            if EXTRA_N > 0:
                apply_epilogue(
                    extra_acc, rows, batch, column, first + BLOCK_N, squares, bias, residual, plain, active, gain,
                    offset, rate, scale, count, active_step, active_start, C_IN, C_OUT, PERIOD, FUNCTION,
                    NORM_EPS, EXTRA_N, HAS_SINE, INDEX,
                )  # fmt: skip


def conv_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dilation: int = 1,
    context: LeftContext = NO_CONTEXT,
    epilogue: Epilogue = NO_EPILOGUE,
    *,
    tile: ConvTile | None = None,
    shrink: int = 0,
) -> tuple[Tensor | None, Tensor]:
    """`conv_reference` as one Triton kernel; `choose_tile` chooses `tile` unless given. No gradient."""
    norm_eps, function, residual, plain, affine, rates = epilogue
    taps, outputs, channels = weight.shape
    length = (taps - 1) * abs(dilation)
    batch, columns = x.shape[0], x.shape[1] - length
    assert x.is_contiguous()
    assert weight.stride(2) == 1
    assert residual is None or residual.is_contiguous()
    stored = outputs // 2 if function == "gate" else outputs
    period = rates[0].shape[0] if rates is not None else stored if bias is None else bias.shape[0]
    made = columns * stored // period
    active = x.new_empty(batch, context.left + made, period, dtype=weight.dtype)
    if context.left and context.next_history is None:
        active[:, : context.left].zero_()
    first_result = None if plain is None else x.new_empty(batch, made, period, dtype=plain)
    tile = tile or choose_tile(batch * columns, outputs, channels, taps, card(x.device), x.element_size())
    tile = shrunk(tile, smaller_tile, shrink)
    tiles = triton.cdiv(batch * columns, tile.m) * triton.cdiv(outputs, tile.n + tile.extra)
    tails = triton.cdiv(batch * length * channels, COPY_BLOCK) if context.history is not None else 0
    heads = triton.cdiv(batch * context.left * period, COPY_BLOCK) if context.next_history is not None else 0
    (gain, offset), (rate, scale) = affine or (None, None), rates or (None, None)
    # The stride of an axis of size 1 is arbitrary; one that is no multiple of 16 would prevent wide loads.
    tap_step = weight.stride(0) if taps > 1 else channels
    _conv[(tiles + tails + heads,)](
        x=x, weight=weight, bias=bias, residual=residual, plain=first_result, active=active, gain=gain, offset=offset,
        rate=rate, scale=scale, slots=context.slots, history=context.history, next_history=context.next_history,
        count=batch * columns, columns=columns, length=length, dilation=dilation,
        active_step=(context.left + made) * period, active_start=context.left * period, tap_step=tap_step,
        output_step=weight.stride(1), tiles=tiles, tail_blocks=tails, C_IN=channels, C_OUT=outputs, TAPS=taps,
        PERIOD=period, FUNCTION=function, NORM_EPS=norm_eps, BLOCK_M=tile.m, BLOCK_N=tile.n, EXTRA_N=tile.extra,
        BLOCK_K=tile.k, COPY_BLOCK_SIZE=COPY_BLOCK, HAS_SINE=has_sine(x.device), INDEX=index_type(active),
        num_warps=tile.warps, num_stages=tile.stages, **pdl_options(x.device),
    )  # fmt: skip
    return first_result, active


def has_sine(device: torch.device) -> bool:
    """Whether kernels on `device` take sines from the GPU's own unit: NVIDIA's do, but not in Triton's interpreter."""
    return card(device).capability > (0, 0) and not triton.knobs.runtime.interpret


def index_type(result: Tensor) -> Any:
    """Triton's type for offsets in `result` and what has fewer elements. With 64 bits a launch takes 2% longer."""
    return tl.int32 if result.numel() <= MOST_INT32 else tl.int64


def _is_supported(x: Tensor, weight: Tensor, *_: object, **__: object) -> bool:
    return weight.dtype in (torch.bfloat16, torch.float16) and weight.shape[2] % 16 == 0


conv = Operation(conv_kernel, conv_reference, _is_supported, can_shrink=True)
