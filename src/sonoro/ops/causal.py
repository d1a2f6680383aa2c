"""First, depthwise and last layers of a streaming convolutional decoder over [B, T, C]: Triton kernels beside torch
references.

Left context is handled as in `ops.conv`. Computed in float32 (float64 for float64), results rounded once."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.activation import Rates, snake_beta_reference
from sonoro.ops.conv import COPY_BLOCK, NO_CONTEXT, LeftContext, has_sine, join_context, saturate
from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import pdl_options
from sonoro.ops.optional import tl, triton

if triton is not None:
    from sonoro.ops.conv import copy_block, saturate_to, snake_beta
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait

Bound = Literal["clamp", "tanh"]
"""How samples are limited to [-1, 1]."""

FEW_COLUMNS = 32
"""Up to this many columns a depthwise convolution is a product with copied windows; beyond, the library is faster.
Float32, one core, windows and library: 1024 channels, 4 columns 16 and 69 us; 512 channels, 192 columns 311 and 87."""

DEPTHWISE_BLOCK = 2048
"""Output elements per program of a large depthwise convolution."""


def embed_sum_reference(frames: Tensor, tables: Tensor, context: LeftContext = NO_CONTEXT) -> Tensor:
    """Embed `frames` [B, T, K] int64: the sum over k of row `frames[b, t, k]` of `tables` [K, V, C], after
    `context.left` columns of left context: [B, left + T, C]. Codes above V - 1 are read as V - 1."""
    books, size, _ = tables.shape
    rows = F.embedding(
        frames.clamp(max=size - 1) + torch.arange(books, device=frames.device) * size, tables.flatten(0, 1)
    )
    wide = torch.promote_types(tables.dtype, torch.float32)
    return join_context(rows[:, :, 0], rows.to(wide).sum(2).to(tables.dtype), context)


def with_context_reference(x: Tensor, dtype: torch.dtype, context: LeftContext) -> Tensor:
    """`x` [B, T, C] in `dtype`, after `context.left` columns of left context: [B, left + T, C]."""
    return join_context(x, x.to(dtype), context)


def depthwise_norm_reference(
    x: Tensor, weight: Tensor, bias: Tensor, norm: tuple[Tensor, Tensor, float], context: LeftContext = NO_CONTEXT
) -> Tensor:
    """Depthwise convolution of `x` [B, taps - 1 + T, C], then LayerNorm: [B, T, C].
    `weight` [taps, C], `bias` [C]; `norm`: weight [C], bias [C] and epsilon. Advances `context.history`."""
    norm_weight, norm_bias, eps = norm
    wide = torch.promote_types(weight.dtype, torch.float32)
    columns = x.shape[1] - weight.shape[0] + 1
    y = sum((x[:, tap : tap + columns].to(wide) * row for tap, row in enumerate(weight.to(wide))), bias.to(wide))
    y = F.layer_norm(y, y.shape[-1:], norm_weight.to(wide), norm_bias.to(wide), eps)
    return join_context(x, y.to(weight.dtype), context)


def depthwise_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    dilation: int = 1,
    context: LeftContext = NO_CONTEXT,
    *,
    rates: Rates | None = None,
) -> Tensor:
    """Depthwise convolution of `x` [B, (taps - 1) * dilation + T, C], then Snake with `rates` if given: [B, T, C].
    `weight` [taps, C], `bias` [C]. A float16 result saturates. Advances `context.history`. Differentiable."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    (taps, channels), inputs, weights = weight.shape, x.to(wide), weight.to(wide)
    length = (taps - 1) * dilation
    if x.shape[0] * (x.shape[1] - length) <= FEW_COLUMNS:
        y = (inputs.unfold(1, length + 1, 1)[..., ::dilation] * weights.mT).sum(-1) + bias.to(wide)
    else:
        # Unlike conv1d, a 2D convolution of height 1 reads channels-last memory without a copy.
        pixels, kernels = inputs.mT.unsqueeze(2), weights.mT[:, None, None]
        y = F.conv2d(pixels, kernels, bias.to(wide), dilation=(1, dilation), groups=channels).squeeze(2).mT
    if rates is not None:
        y = snake_beta_reference(y, *rates, channel_dim=-1)
    return join_context(x, saturate(y, weight.dtype), context)


def last_conv_reference(
    x: Tensor, weight: Tensor, bias: Tensor, context: LeftContext = NO_CONTEXT, *, bound: Bound = "clamp"
) -> Tensor:
    """Convolution of `x` [B, taps - 1 + T, C] to one channel, limited by `bound`: [B, T] in [-1, 1].
    `weight` [taps, C]. Float32, or float64 if `weight` is. Advances `context.history`."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    columns = x.shape[1] - weight.shape[0] + 1
    y = sum((x[:, tap : tap + columns].to(wide) @ row for tap, row in enumerate(weight.to(wide))), bias.to(wide))
    return join_context(x, y.tanh() if bound == "tanh" else y.clamp(-1, 1), context)


if triton is not None:

    @triton.jit(do_not_specialize=["columns", "tiles"])
    def _embed_sum(
        frames, tables, out, slots, next_history, rows, columns, size, left, tiles,
        NUM_CODEBOOKS: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr, COPY_BLOCK_SIZE: tl.constexpr,
        ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_wait(ENABLE_PDL)
        program = tl.program_id(0)
        step = (left + columns).to(tl.int64) * CHANNELS
        if program >= tiles:
            if next_history is not None:
                size_left, batch = left * CHANNELS, rows // columns
                copy_block(
                    next_history, size_left, out, step, slots, program - tiles, batch, size_left, True, COPY_BLOCK_SIZE
                )  # fmt: skip
        else:
            channel = tl.arange(0, BLOCK)
            inside = channel < CHANNELS
            total = tl.zeros((BLOCK,), dtype=tl.float32)
            for codebook in range(NUM_CODEBOOKS):
                code = tl.minimum(tl.load(frames + program * NUM_CODEBOOKS + codebook), size - 1) + codebook * size
                total += tl.load(tables + code * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
            pdl_launch_dependents(ENABLE_PDL)
            batch = program // columns
            target = out + batch * step + (left + program - batch * columns) * CHANNELS + channel
            tl.store(target, total.to(out.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["columns", "count"])
    def _with_context(
        x, out, slots, next_history, count, columns, left, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
        ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_launch_dependents(ENABLE_PDL)
        pdl_wait(ENABLE_PDL)
        index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        head, size = left * CHANNELS, columns * CHANNELS
        batch = (index // (head + size)).to(tl.int64)
        offset = index - batch * (head + size)
        is_new = offset >= head
        value = tl.load(x + batch * size + offset - head, mask=(index < count) & is_new, other=0.0)
        value = value.to(out.dtype.element_ty)
        if next_history is not None:
            slot = tl.load(slots + batch, mask=index < count, other=0)
            old = tl.load(next_history + slot * head + offset, mask=(index < count) & (offset < head), other=0.0)
            value = tl.where(is_new, value, old)
        tl.store(out + index, value, mask=index < count)

    @triton.jit
    def _keep_tail(x, history, slots, block, rows, columns, size, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
        """Copy a block of the last `size` elements of each batch index of `x` to its history, if there is one."""
        if history is not None:
            tail, step = x + columns.to(tl.int64) * CHANNELS, size + columns.to(tl.int64) * CHANNELS
            copy_block(tail, step, history, size, slots, block, rows // columns, size, False, BLOCK)

    @triton.jit(do_not_specialize=["columns", "tiles"])
    def _depthwise_norm(
        x, weight, bias, norm_weight, norm_bias, out, slots, history, rows, columns, tiles,
        TAPS: tl.constexpr, CHANNELS: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr,
        COPY_BLOCK_SIZE: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_wait(ENABLE_PDL)
        program = tl.program_id(0)
        size: tl.constexpr = (TAPS - 1) * CHANNELS
        step = (TAPS - 1 + columns).to(tl.int64) * CHANNELS
        if program >= tiles:
            _keep_tail(x, history, slots, program - tiles, rows, columns, size, CHANNELS, COPY_BLOCK_SIZE)
        else:
            channel = tl.arange(0, BLOCK)
            inside = channel < CHANNELS
            batch = program // columns
            start = x + batch * step + (program - batch * columns) * CHANNELS + channel
            y = tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
            for tap in tl.static_range(TAPS):
                value = tl.load(start + tap * CHANNELS, mask=inside, other=0.0).to(tl.float32)
                y += value * tl.load(weight + tap * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
            y = tl.where(inside, y - tl.sum(y, axis=0) / CHANNELS, 0.0)
            y *= tl.rsqrt(tl.sum(y * y, axis=0) / CHANNELS + EPS)
            y *= tl.load(norm_weight + channel, mask=inside, other=0.0).to(tl.float32)
            y += tl.load(norm_bias + channel, mask=inside, other=0.0).to(tl.float32)
            pdl_launch_dependents(ENABLE_PDL)
            tl.store(out + program.to(tl.int64) * CHANNELS + channel, y.to(out.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["columns", "dilation", "tiles"])
    def _depthwise(
        x, weight, bias, rate, scale, out, slots, history, rows, columns, dilation, tiles,
        TAPS: tl.constexpr, CHANNELS: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
        COPY_BLOCK_SIZE: tl.constexpr, HAS_SINE: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_wait(ENABLE_PDL)
        program = tl.program_id(0)
        size = (TAPS - 1) * dilation * CHANNELS
        step = size + columns.to(tl.int64) * CHANNELS
        if program >= tiles:
            _keep_tail(x, history, slots, program - tiles, rows, columns, size, CHANNELS, COPY_BLOCK_SIZE)
        else:
            BLOCKS_C: tl.constexpr = (CHANNELS + BLOCK - 1) // BLOCK
            row = (program // BLOCKS_C) * SAMPLES + tl.arange(0, SAMPLES)
            channel = (program % BLOCKS_C) * BLOCK + tl.arange(0, BLOCK)
            is_channel = channel < CHANNELS
            mask = (row < rows)[:, None] & is_channel[None, :]
            batch = row // columns
            start = x + (batch * step + (row - batch * columns) * CHANNELS)[:, None] + channel[None, :]
            y = tl.zeros((SAMPLES, BLOCK), dtype=tl.float32)
            y += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)[None, :]
            for tap in tl.static_range(TAPS):
                value = tl.load(start + tap * dilation * CHANNELS, mask=mask, other=0.0).to(tl.float32)
                part = tl.load(weight + tap * CHANNELS + channel, mask=is_channel, other=0.0).to(tl.float32)
                y += value * part[None, :]
            pdl_launch_dependents(ENABLE_PDL)
            if rate is not None:
                rates = tl.load(rate + channel, mask=is_channel, other=0.0)[None, :]
                y = snake_beta(y, rates, tl.load(scale + channel, mask=is_channel, other=0.0)[None, :], HAS_SINE)
            target = out + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
            tl.store(target, saturate_to(y, out.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["columns", "tiles"])
    def _last_conv(
        x, weight, bias, out, slots, history, rows, columns, tiles,
        TAPS: tl.constexpr, CHANNELS: tl.constexpr, BOUND: tl.constexpr, BLOCK: tl.constexpr, SAMPLES: tl.constexpr,
        COPY_BLOCK_SIZE: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_wait(ENABLE_PDL)
        program = tl.program_id(0)
        size: tl.constexpr = (TAPS - 1) * CHANNELS
        step = (TAPS - 1 + columns).to(tl.int64) * CHANNELS
        if program >= tiles:
            _keep_tail(x, history, slots, program - tiles, rows, columns, size, CHANNELS, COPY_BLOCK_SIZE)
        else:
            row = program * SAMPLES + tl.arange(0, SAMPLES)
            inside = row < rows
            channel = tl.arange(0, BLOCK)
            mask = inside[:, None] & (channel < CHANNELS)[None, :]
            batch = row // columns
            start = x + (batch * step + (row - batch * columns) * CHANNELS)[:, None] + channel[None, :]
            y = tl.zeros((SAMPLES, BLOCK), dtype=tl.float32)
            for tap in tl.static_range(TAPS):
                value = tl.load(start + tap * CHANNELS, mask=mask, other=0.0).to(tl.float32)
                part = tl.load(weight + tap * CHANNELS + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32)
                y += value * part[None, :]
            total = tl.sum(y, axis=1) + tl.load(bias).to(tl.float32)
            pdl_launch_dependents(ENABLE_PDL)
            if BOUND == "tanh":
                # tanh of the absolute value, so that the exponential cannot overflow.
                fading = tl.exp(-2.0 * tl.abs(total))
                total = tl.where(total < 0, -1.0, 1.0) * (1.0 - fading) / (1.0 + fading)
            # Propagate NaN, as in the reference.
            total = tl.maximum(total, -1.0, propagate_nan=tl.PropagateNan.ALL)
            tl.store(out + row, tl.minimum(total, 1.0, propagate_nan=tl.PropagateNan.ALL), mask=inside)


def embed_sum_kernel(frames: Tensor, tables: Tensor, context: LeftContext = NO_CONTEXT) -> Tensor:
    """`embed_sum_reference` as one Triton kernel."""
    (batch, columns, books), (_, size, channels) = frames.shape, tables.shape
    assert all(tensor.is_contiguous() for tensor in (frames, tables))
    out = tables.new_empty(batch, context.left + columns, channels)
    if context.left and context.next_history is None:
        out[:, : context.left].zero_()
    rows = batch * columns
    heads = triton.cdiv(batch * context.left * channels, COPY_BLOCK) if context.next_history is not None else 0
    _embed_sum[(rows + heads,)](
        frames=frames, tables=tables, out=out, slots=context.slots, next_history=context.next_history, rows=rows,
        columns=columns, size=size, left=context.left, tiles=rows, NUM_CODEBOOKS=books, CHANNELS=channels,
        BLOCK=triton.next_power_of_2(channels), COPY_BLOCK_SIZE=COPY_BLOCK, **pdl_options(frames.device),
    )  # fmt: skip
    return out


def with_context_kernel(x: Tensor, dtype: torch.dtype, context: LeftContext) -> Tensor:
    """`with_context_reference` as one Triton kernel."""
    batch, columns, channels = x.shape
    assert x.is_contiguous()
    out = x.new_empty(batch, context.left + columns, channels, dtype=dtype)
    _with_context[(triton.cdiv(out.numel(), 1024),)](
        x=x, out=out, slots=context.slots, next_history=context.next_history, count=out.numel(), columns=columns,
        left=context.left, CHANNELS=channels, BLOCK=1024, **pdl_options(x.device),
    )  # fmt: skip
    return out


def depthwise_norm_kernel(
    x: Tensor, weight: Tensor, bias: Tensor, norm: tuple[Tensor, Tensor, float], context: LeftContext = NO_CONTEXT
) -> Tensor:
    """`depthwise_norm_reference` as one Triton kernel."""
    (taps, channels), (norm_weight, norm_bias, eps) = weight.shape, norm
    batch, columns = x.shape[0], x.shape[1] - taps + 1
    assert all(tensor.is_contiguous() for tensor in (x, weight))
    out = weight.new_empty(batch, columns, channels)
    rows = batch * columns
    tails = triton.cdiv(batch * (taps - 1) * channels, COPY_BLOCK) if context.history is not None else 0
    _depthwise_norm[(rows + tails,)](
        x=x, weight=weight, bias=bias, norm_weight=norm_weight, norm_bias=norm_bias, out=out, slots=context.slots,
        history=context.history, rows=rows, columns=columns, tiles=rows, TAPS=taps, CHANNELS=channels, EPS=eps,
        BLOCK=triton.next_power_of_2(channels), COPY_BLOCK_SIZE=COPY_BLOCK, **pdl_options(x.device),
    )  # fmt: skip
    return out


def depthwise_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    dilation: int = 1,
    context: LeftContext = NO_CONTEXT,
    *,
    rates: Rates | None = None,
) -> Tensor:
    """`depthwise_reference` as one Triton kernel; no gradient."""
    taps, channels = weight.shape
    length = (taps - 1) * dilation
    batch, columns = x.shape[0], x.shape[1] - length
    assert all(tensor.is_contiguous() for tensor in (x, weight))
    out = weight.new_empty(batch, columns, channels)
    rows, block = batch * columns, min(triton.next_power_of_2(channels), 128)
    # Smaller programs if large ones would leave most of the GPU idle.
    size = DEPTHWISE_BLOCK if rows * channels >= 256 * DEPTHWISE_BLOCK else 256
    samples = max(1, size // block)
    tiles = triton.cdiv(rows, samples) * triton.cdiv(channels, block)
    tails = triton.cdiv(batch * length * channels, COPY_BLOCK) if context.history is not None else 0
    rate, scale = rates if rates is not None else (None, None)
    _depthwise[(tiles + tails,)](
        x=x, weight=weight, bias=bias, rate=rate, scale=scale, out=out, slots=context.slots, history=context.history,
        rows=rows, columns=columns, dilation=dilation, tiles=tiles, TAPS=taps, CHANNELS=channels, SAMPLES=samples,
        BLOCK=block, COPY_BLOCK_SIZE=COPY_BLOCK, HAS_SINE=has_sine(x.device), **pdl_options(x.device),
    )  # fmt: skip
    return out


def last_conv_kernel(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    context: LeftContext = NO_CONTEXT,
    *,
    bound: Bound = "clamp",
    samples: int = 16,
    warps: int = 1,
) -> Tensor:
    """`last_conv_reference` as one Triton kernel; `samples` per program."""
    taps, channels = weight.shape
    batch, columns = x.shape[0], x.shape[1] - taps + 1
    assert all(tensor.is_contiguous() for tensor in (x, weight))
    out = x.new_empty(batch, columns, dtype=torch.float32)
    rows = batch * columns
    tiles = triton.cdiv(rows, samples)
    tails = triton.cdiv(batch * (taps - 1) * channels, COPY_BLOCK) if context.history is not None else 0
    _last_conv[(tiles + tails,)](
        x=x, weight=weight, bias=bias, out=out, slots=context.slots, history=context.history, rows=rows,
        columns=columns, tiles=tiles, TAPS=taps, CHANNELS=channels, BOUND=bound,
        BLOCK=triton.next_power_of_2(channels), SAMPLES=samples, COPY_BLOCK_SIZE=COPY_BLOCK,
        num_warps=warps, **pdl_options(x.device),
    )  # fmt: skip
    return out


def _is_supported(x: Tensor, weight: Tensor, *_: object, **__: object) -> bool:
    return weight.dtype != torch.float64


embed_sum = Operation(embed_sum_kernel, embed_sum_reference, _is_supported)
with_context = Operation(
    with_context_kernel, with_context_reference, lambda x, dtype, _: x.is_contiguous() and dtype != torch.float64
)
depthwise_norm = Operation(depthwise_norm_kernel, depthwise_norm_reference, _is_supported)
depthwise = Operation(depthwise_kernel, depthwise_reference, _is_supported)
last_conv = Operation(last_conv_kernel, last_conv_reference, _is_supported)
