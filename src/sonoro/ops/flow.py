"""A step of a flow's solver between two calls of its network: a Triton kernel beside its torch reference.

The network sees two sequences of tokens per row, with condition and without, the second half of a batch. They end with
the patch that is being made; the rest stays through all calls but for the one token that says what time it is.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import can_overlap, is_row_major

try:
    import triton
    import triton.language as tl

    from sonoro.ops.linear import OPERAND
    from sonoro.ops.norm import launch_dependents, wait_for_inputs
except ImportError:
    triton = None

__all__ = ["Ends", "advance", "advance_kernel", "advance_reference", "guide"]


class Ends(NamedTuple):
    """What leads into the network and out of it: weight [W, D] and bias [W] of the tokens of a patch, and the bias [D]
    of velocities.
    """

    weight: Tensor
    bias: Tensor
    out_bias: Tensor


def guide(conditional: Tensor, free: Tensor, cfg: Tensor) -> Tensor:
    """The velocity [B, P, D] to follow, `cfg` [B] float32 times as far from the `free` one as the `conditional` one is.

    The free one is first scaled to be as near to the other as it can. Follows Fan et al., "CFG-Zero*: Improved
    Classifier-Free Guidance for Flow Matching Models" (2025).
    """
    product, square = (conditional * free).sum((1, 2), keepdim=True), free.square().sum((1, 2), keepdim=True)
    scaled = free * (product / (square + 1e-8))
    apart = cfg[:, None, None] * (conditional - scaled)
    return scaled + apart.to(scaled.dtype)


def advance_reference(  # noqa: PLR0917 (all that a step knows)
    x: Tensor,
    velocities: Tensor | None,
    size: Tensor,
    cfg: Tensor,
    time: Tensor,
    ends: Ends,
    tokens: Tensor,
    clock: int,
) -> Tensor:
    """`x` [B, P, D] moved by `size` [B] against the guided velocity, a new tensor; where it is now is left in `tokens`.

    `velocities` [2 B P, D] lack their bias; without any, `x` stays where it is. `cfg` [B] float32 as in `guide`. Into
    `tokens` [2 B, T, W], of both halves, go the P tokens of the patch, the last ones, and `time` [B, W] at `clock`.
    Capturable; no sync; no gradient.
    """
    if velocities is None:
        x = x.clone()
    else:
        guided, free = (velocities + ends.out_bias).view(2, *x.shape)
        x = x - size[:, None, None] * guide(guided, free, cfg)
    both = tokens.unflatten(0, (2, -1))
    both[:, :, -x.shape[1] :] = F.linear(x, ends.weight, ends.bias)
    both[:, :, clock] = time
    return x


if triton is not None:

    @triton.jit
    def _advance(  # noqa: PLR0917 (a kernel's arguments are positional)
        x,
        velocities,
        size,
        cfg,
        time,
        weight,
        bias,
        out_bias,
        tokens,
        out,
        size_stride,
        cfg_stride,
        time_stride,
        moves: tl.constexpr,
        patch: tl.constexpr,
        latents: tl.constexpr,
        count: tl.constexpr,
        clock: tl.constexpr,
        width: tl.constexpr,
        block_p: tl.constexpr,
        block_d: tl.constexpr,
        block_w: tl.constexpr,
        operand: tl.constexpr,
        overlap: tl.constexpr,
    ):
        launch_dependents(overlap)
        dtype: tl.constexpr = out.dtype.element_ty
        row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
        place, latent = tl.arange(0, block_p)[:, None], tl.arange(0, block_d)
        column = tl.program_id(1) * block_w + tl.arange(0, block_w)
        is_column, is_there = column < width, (place < patch) & (latent < latents)[None, :]
        spot = place * latents + latent[None, :]
        into = tl.load(
            weight + column[None, :] * latents + latent[:, None],
            mask=is_column[None, :] & (latent < latents)[:, None],
            other=0.0,
        )
        raised = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
        shift = tl.load(out_bias + latent, mask=latent < latents, other=0.0).to(tl.float32)[None, :]
        wait_for_inputs(overlap)
        here = tl.load(x + row * patch * latents + spot, mask=is_there, other=0.0)
        if moves:
            # Rounded where the reference's separate steps round. Masked lanes hold a bias, which no sum may see.
            line = velocities + row * patch * latents + spot
            guided = (tl.load(line, mask=is_there, other=0.0).to(tl.float32) + shift).to(dtype).to(tl.float32)
            line += rows * patch * latents
            free = (tl.load(line, mask=is_there, other=0.0).to(tl.float32) + shift).to(dtype).to(tl.float32)
            guided, free = tl.where(is_there, guided, 0.0), tl.where(is_there, free, 0.0)
            product = tl.sum((guided * free).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            square = tl.sum((free * free).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            ratio = (product / (square + 1e-8).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            scaled = (free * ratio).to(dtype).to(tl.float32)
            apart = (guided - scaled).to(dtype).to(tl.float32) * tl.load(cfg + row * cfg_stride)
            velocity = (scaled + apart.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            step = (tl.load(size + row * size_stride).to(tl.float32) * velocity).to(dtype).to(tl.float32)
            here = (here.to(tl.float32) - step).to(dtype)
        if tl.program_id(1) == 0:
            tl.store(out + row * patch * latents + spot, here, mask=is_there)
        made = tl.dot(here.to(operand), into.to(operand), input_precision="ieee")
        made = (made + raised[None, :]).to(dtype)
        now = tl.load(time + row * time_stride + column, mask=is_column, other=0.0)
        for half in tl.static_range(2):
            target = tokens + (half * rows + row) * count * width + column
            tl.store(target[None, :] + (count - patch + place) * width, made, mask=(place < patch) & is_column[None, :])
            tl.store(target + clock * width, now, mask=is_column)


_BLOCK_W = 64


def advance_kernel(  # noqa: PLR0917
    x: Tensor,
    velocities: Tensor | None,
    size: Tensor,
    cfg: Tensor,
    time: Tensor,
    ends: Ends,
    tokens: Tensor,
    clock: int,
) -> Tensor:
    """`advance_reference` as one Triton kernel, a program per row and block of a token's width, each moving `x`."""
    (batch, patch, latents), (_, count, width) = x.shape, tokens.shape
    out, overlap = torch.empty_like(x), can_overlap(x.device)
    _advance[batch, triton.cdiv(width, _BLOCK_W)](
        x,
        x if velocities is None else velocities,
        size,
        cfg,
        time,
        *ends,
        tokens,
        out,
        size.stride(0),
        cfg.stride(0),
        time.stride(0),
        velocities is not None,
        patch,
        latents,
        count,
        clock,
        width,
        max(16, triton.next_power_of_2(patch)),
        max(16, triton.next_power_of_2(latents)),
        _BLOCK_W,
        OPERAND[x.dtype],
        overlap,
        num_warps=2,
        launch_pdl=overlap,
    )
    return out


def _can_advance(  # noqa: PLR0917
    x: Tensor,
    velocities: Tensor | None,
    size: Tensor,
    cfg: Tensor,
    time: Tensor,
    ends: Ends,
    tokens: Tensor,
    clock: int,
) -> bool:
    dense = (x, *ends, tokens) if velocities is None else (x, velocities, *ends, tokens)
    return (
        is_row_major(*dense, time)
        and all(tensor.is_contiguous() for tensor in dense)
        and size.dtype == x.dtype
        and cfg.dtype == torch.float32
        and x.shape[1] <= 32
        and x.shape[2] <= 128
    )


advance = Operation("advance", advance_kernel, advance_reference, _can_advance)
