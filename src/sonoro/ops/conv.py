"""Causal convolutions over [B, T, C] fused with what surrounds them: Triton kernels, each beside its torch reference.

Everything is a product over taps: a dilated convolution, a linear layer (one tap), and a transposed convolution of
kernel 2 * stride (two taps, stride * C_out outputs). An input holds its left context; `Ends` says where those are kept.
The interior is computed in float32 (in float64 for float64) and rounded once where an output is stored.

    input  [B, L + T, C]    columns before ->|<- columns of this call
    kept   [rows, L, C]     what row slots[b] will find before its next call: the input's last L columns
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .activation import Rates
from .dispatch import Operation
from .norm import can_overlap

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None
else:
    from .norm import launch_dependents, wait_for_inputs

__all__ = ["Ends", "Tile", "choose_tile", "conv", "conv_kernel", "conv_reference"]

HALF_LIMIT = 65504.0
"""The largest float16."""

COPY_BLOCK = 4096
"""Elements of left context that one program moves."""


@dataclass(frozen=True)
class Ends:
    """Where the left contexts of a call are: of the columns an operation reads, and of what will read its output.

    `kept` [rows, L, C] receives the last columns of the input. The first `left` columns of the output are those of
    `next_kept` [rows, left, C'], or zeros. Both are rows `slots` int64 [B]; only a scratch row may repeat.
    """

    slots: Tensor | None = None
    kept: Tensor | None = None
    next_kept: Tensor | None = None
    left: int = 0


NO_ENDS = Ends()


def conv_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dilation: int = 1,
    ends: Ends = NO_ENDS,
    *,
    norm_eps: float | None = None,
    function: Literal["none", "gelu", "gate"] = "none",
    residual: Tensor | None = None,
    plain: torch.dtype | None = None,
    affine: tuple[Tensor, Tensor] | None = None,
    rates: Rates | None = None,
) -> tuple[Tensor | None, Tensor]:
    """The product over taps of `x` [B, L + T, C] and `weight` [taps, N, C], and what follows it.

    Tap j of the input's column t is its column t + j * dilation; at a negative dilation, t + (j - taps + 1) * dilation.
    Then, in this order: division by the root mean square of the column (`norm_eps`, one tap); `bias` [C'], repeated
    over N; `function` (gate: outputs come in pairs, and each becomes silu(first) * second); plus `residual` [B, T, N].
    That is the first result, [B, T', C'] in the dtype `plain`, if one is given. The second is that times the first and
    plus the second of `affine` (by channel, float32 or wider), and SnakeBeta of it by `rates`, each if given, after
    `ends.left` columns of left context: [B, left + T', C'], where T' * C' = T * N. Advances `ends.kept`. A result in
    float16 saturates.
    """
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
    return first_result, meet(x, active, ends)


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in `dtype`; in float16, what is beyond its range becomes its largest number."""
    return x.clamp(-HALF_LIMIT, HALF_LIMIT).to(dtype) if dtype == torch.float16 else x.to(dtype)


def meet(x: Tensor, active: Tensor, ends: Ends) -> Tensor:
    """`active` [B, T, C'] after its left context; the end of `x` [B, L + T, C] is kept. What `Ends` promises."""
    if ends.kept is not None:
        assert ends.slots is not None
        ends.kept.index_copy_(0, ends.slots, x[:, x.shape[1] - ends.kept.shape[1] :].to(ends.kept.dtype))
    if not ends.left:
        return active
    if ends.next_kept is None:
        return F.pad(active, (0, 0, ends.left, 0))
    assert ends.slots is not None
    return torch.cat([ends.next_kept.index_select(0, ends.slots), active], dim=1)


if triton is not None:

    @triton.jit
    def copy_block(  # noqa: PLR0917 (a kernel's arguments are positional)
        source, source_step, target, target_step, slots, block, count, size, by_slot: tl.constexpr, step: tl.constexpr
    ):
        # `count` rows of `size` elements; one side is addressed by batch row, the other by that row's slot.
        index = block * step + tl.arange(0, step)
        row = (index // size).to(tl.int64)
        inside = row < count
        slot = tl.load(slots + row, mask=inside, other=0)
        place = index - row * size
        read = tl.where(by_slot, slot, row) * source_step + place
        write = tl.where(by_slot, row, slot) * target_step + place
        value = tl.load(source + read, mask=inside)
        tl.store(target + write, value.to(target.dtype.element_ty), mask=inside)

    @triton.jit
    def snake(value, rate, scale):
        # sin(z)^2 has the period pi: reduced to +-pi / 2 (pi in two parts, the first exact in 11 bits), then a series.
        z = value * rate
        turns = tl.floor(z * 0.3183098861837907 + 0.5)
        z = (z - turns * 3.140625) - turns * 9.67653589793e-4
        square = z * z
        series = 2.7557319e-06 + square * -2.5052108e-08
        series = -1.9841270e-04 + square * series
        series = 8.3333333e-03 + square * series
        series = -1.6666667e-01 + square * series
        wave = z + z * square * series
        return value + wave * wave * scale

    @triton.jit
    def saturated(value, dtype: tl.constexpr):
        if dtype == tl.float16:
            value = tl.minimum(tl.maximum(value, -65504.0), 65504.0)
        return value.to(dtype)

    @triton.jit
    def _finish(  # noqa: PLR0917
        y, rows, batch, column, first, squares, bias, residual, plain, active, gain, offset, rate, scale, count,
        active_step, active_start,
        channels: tl.constexpr, outputs: tl.constexpr, period: tl.constexpr, function: tl.constexpr,
        norm_eps: tl.constexpr, width: tl.constexpr,
    ):  # fmt: skip
        # One tile of the product, [rows, width] from output `first` on, through the epilogue to memory.
        output = first + tl.arange(0, width)
        if norm_eps is not None:
            y *= tl.rsqrt(squares / channels + norm_eps)[:, None]
        if bias is not None:
            y += tl.load(bias + output % period, mask=output < outputs, other=0.0).to(y.dtype)[None, :]
        if function == "gelu":
            y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
        stored: tl.constexpr = outputs // 2 if function == "gate" else outputs
        if function == "gate":
            gate, up = tl.split(tl.reshape(y, (y.shape[0], width // 2, 2)))
            y = gate * tl.sigmoid(gate) * up
            output = first // 2 + tl.arange(0, width // 2)
        inside = (rows < count)[:, None] & (output < stored)[None, :]
        flat = rows.to(tl.int64)[:, None] * stored + output[None, :]
        if residual is not None:
            y += tl.load(residual + flat, mask=inside, other=0.0).to(y.dtype)
        if plain is not None:
            tl.store(plain + flat, saturated(y, plain.dtype.element_ty), mask=inside)
        channel = output % period
        if gain is not None:
            y = y * tl.load(gain + channel)[None, :] + tl.load(offset + channel)[None, :]
        if rate is not None:
            y = snake(y, tl.load(rate + channel)[None, :], tl.load(scale + channel)[None, :])
        if active is not None:
            place = (
                (batch.to(tl.int64) * active_step + active_start)[:, None] + column[:, None] * stored + output[None, :]
            )
            tl.store(active + place, saturated(y, active.dtype.element_ty), mask=inside)

    # Arguments that can be 1 must stay numbers of the run time.
    @triton.jit(do_not_specialize=["count", "columns", "length", "dilation", "tiles", "tail_blocks"])
    def _conv(  # noqa: PLR0915, PLR0917
        x, weight, bias, residual, plain, active, gain, offset, rate, scale, slots, kept, next_kept,
        count, columns, length, dilation, active_step, active_start, tap_step, output_step, tiles, tail_blocks,
        channels: tl.constexpr, outputs: tl.constexpr, taps: tl.constexpr, period: tl.constexpr,
        function: tl.constexpr, norm_eps: tl.constexpr, block_m: tl.constexpr, block_n: tl.constexpr,
        extra_n: tl.constexpr, block_k: tl.constexpr, copy: tl.constexpr, overlap: tl.constexpr,
    ):  # fmt: skip
        wait_for_inputs(overlap)
        program = tl.program_id(0)
        span = length + columns
        if program >= tiles:
            block = program - tiles
            size = length * channels
            batch_size = count // columns
            # Arguments that are None are pruned only where nothing else is asked in the same condition.
            if kept is not None:  # noqa: SIM102
                if block < tail_blocks:
                    tail, step = x + columns.to(tl.int64) * channels, span.to(tl.int64) * channels
                    copy_block(tail, step, kept, size, slots, block, batch_size, size, False, copy)
            if next_kept is not None:  # noqa: SIM102
                if block >= tail_blocks:
                    block -= tail_blocks
                    copy_block(
                        next_kept, active_start, active, active_step, slots, block, batch_size, active_start, True, copy
                    )  # fmt: skip
        else:
            wide_n: tl.constexpr = block_n + extra_n
            across: tl.constexpr = (outputs + wide_n - 1) // wide_n
            rows = (program // across) * block_m + tl.arange(0, block_m)
            first = (program % across) * wide_n
            # Rows and outputs past the end read the last one's values; they are not stored.
            row = tl.minimum(rows, count - 1)
            batch = row // columns
            column = row - batch * columns
            start = tl.where(dilation > 0, 0, length)
            inner = tl.arange(0, block_k)
            inputs = x + (batch.to(tl.int64) * span + column + start)[:, None] * channels + inner[None, :]
            output = tl.minimum(first + tl.arange(0, block_n), outputs - 1)
            weights = weight + output.to(tl.int64)[:, None] * output_step + inner[None, :]
            acc = tl.zeros((block_m, block_n), dtype=tl.float32)
            squares = tl.zeros((block_m,), dtype=tl.float32)
            if extra_n > 0:
                extra = tl.minimum(first + block_n + tl.arange(0, extra_n), outputs - 1)
                extra_weights = weight + extra.to(tl.int64)[:, None] * output_step + inner[None, :]
                extra_acc = tl.zeros((block_m, extra_n), dtype=tl.float32)
            steps: tl.constexpr = channels // block_k
            for step in range(taps * steps):
                tap = step // steps
                channel = (step % steps) * block_k
                a = tl.load(inputs + (tap * dilation * channels + channel))
                if norm_eps is not None:
                    wide = a.to(tl.float32)
                    squares += tl.sum(wide * wide, axis=1)
                a = a.to(weight.dtype.element_ty)
                shift = tap * tap_step + channel
                acc = tl.dot(a, tl.trans(tl.load(weights + shift)), acc, input_precision="ieee")
                if extra_n > 0:
                    b = tl.trans(tl.load(extra_weights + shift))
                    extra_acc = tl.dot(a, b, extra_acc, input_precision="ieee")
            # Not sooner: programs that wait would take places next to those that work, two on one multiprocessor.
            launch_dependents(overlap)
            _finish(
                acc, rows, batch, column, first, squares, bias, residual, plain, active, gain, offset, rate, scale,
                count, active_step, active_start, channels, outputs, period, function, norm_eps, block_n,
            )  # fmt: skip
            if extra_n > 0:
                _finish(
                    extra_acc, rows, batch, column, first + block_n, squares, bias, residual, plain, active, gain,
                    offset, rate, scale, count, active_step, active_start, channels, outputs, period, function,
                    norm_eps, extra_n,
                )  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """How a product is cut: outputs per program are `n` + `extra`, so that 96 and 192 waste nothing."""

    m: int
    n: int
    extra: int
    k: int
    warps: int
    stages: int


DEEP = (
    (120, Tile(128, 128, 0, 64, 8, 3)),
    (90, Tile(128, 128, 0, 64, 4, 4)),
    (200, Tile(64, 64, 0, 64, 4, 4)),
    (90, Tile(64, 32, 0, 64, 4, 5)),
    (90, Tile(32, 32, 0, 128, 4, 4)),
    (90, Tile(16, 32, 0, 128, 2, 5)),
    (0, Tile(16, 16, 0, 256, 4, 4)),
)
SHALLOW = (
    (90, Tile(64, 128, 0, 64, 4, 3)),
    (120, Tile(64, 64, 0, 64, 4, 4)),
    (60, Tile(64, 32, 0, 64, 4, 5)),
    (90, Tile(32, 32, 0, 128, 4, 4)),
    (0, Tile(16, 32, 0, 128, 2, 5)),
)
"""Tiles in the order in which they are tried, each with the programs it must give: by half-precision times on an H200.

Deep are products of 1024 inputs and more, over all taps.
"""
NARROW = {
    (96, False): Tile(128, 64, 32, 32, 4, 4),
    (96, True): Tile(64, 64, 32, 32, 4, 4),
    (192, False): Tile(64, 128, 64, 64, 4, 3),
    (192, True): Tile(128, 64, 0, 64, 4, 3),
    (288, False): Tile(128, 64, 32, 64, 4, 4),
}
"""For 16384 rows and more, by outputs and whether there is one tap."""


def choose_tile(rows: int, outputs: int, channels: int, taps: int) -> Tile:
    """The tile for a product of `rows` columns by `outputs` from `taps` times `channels` inputs."""
    if (outputs, taps == 1) in NARROW and rows >= 16384:
        tile = NARROW[outputs, taps == 1]
    else:
        table = DEEP if taps * channels >= 1024 or (taps > 1 and outputs < 768) else SHALLOW
        fitting = [
            tile
            for least, tile in table
            if tile.m <= max(16, rows) and tile.n <= outputs and -(-rows // tile.m) * -(-outputs // tile.n) >= least
        ]
        tile = fitting[0] if fitting else table[-1][1]
        if tile.m == 16 and taps > 2:
            tile = replace(tile, warps=4, stages=4)
    return replace(tile, k=math.gcd(channels, tile.k))


def conv_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dilation: int = 1,
    ends: Ends = NO_ENDS,
    *,
    norm_eps: float | None = None,
    function: Literal["none", "gelu", "gate"] = "none",
    residual: Tensor | None = None,
    plain: torch.dtype | None = None,
    affine: tuple[Tensor, Tensor] | None = None,
    rates: Rates | None = None,
    tile: Tile | None = None,
) -> tuple[Tensor | None, Tensor]:
    """`conv_reference` as one Triton kernel. `tile` is chosen by size unless given."""
    taps, outputs, channels = weight.shape
    length = (taps - 1) * abs(dilation)
    batch, columns = x.shape[0], x.shape[1] - length
    assert x.is_contiguous()
    assert weight.stride(2) == 1
    assert residual is None or residual.is_contiguous()
    stored = outputs // 2 if function == "gate" else outputs
    period = rates[0].shape[0] if rates is not None else stored if bias is None else bias.shape[0]
    made = columns * stored // period
    active = x.new_empty(batch, ends.left + made, period, dtype=weight.dtype)
    if ends.left and ends.next_kept is None:
        active[:, : ends.left].zero_()
    first_result = None if plain is None else x.new_empty(batch, made, period, dtype=plain)
    tile = tile or choose_tile(batch * columns, outputs, channels, taps)
    tiles = triton.cdiv(batch * columns, tile.m) * triton.cdiv(outputs, tile.n + tile.extra)
    tails = triton.cdiv(batch * length * channels, COPY_BLOCK) if ends.kept is not None else 0
    heads = triton.cdiv(batch * ends.left * period, COPY_BLOCK) if ends.next_kept is not None else 0
    (gain, offset), (rate, scale) = affine or (None, None), rates or (None, None)
    # The stride of an axis of one is arbitrary, and one that is no multiple of 16 would forbid wide loads.
    tap_step = weight.stride(0) if taps > 1 else channels
    overlap = can_overlap(x.device)
    _conv[(tiles + tails + heads,)](
        x, weight, bias, residual, first_result, active, gain, offset, rate, scale, ends.slots, ends.kept,
        ends.next_kept, batch * columns, columns, length, dilation, (ends.left + made) * period, ends.left * period,
        tap_step, weight.stride(1), tiles, tails,
        channels, outputs, taps, period, function, norm_eps,
        tile.m, tile.n, tile.extra, tile.k, COPY_BLOCK, overlap,
        num_warps=tile.warps, num_stages=tile.stages, launch_pdl=overlap,
    )  # fmt: skip
    return first_result, active


def _is_supported(x: Tensor, weight: Tensor, *_: object, **__: object) -> bool:
    return weight.dtype in (torch.bfloat16, torch.float16) and weight.shape[2] % 16 == 0


conv = Operation("conv", conv_kernel if triton is not None else conv_reference, conv_reference, _is_supported)
