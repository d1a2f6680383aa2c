"""An ODE step of a flow-matching solver, between two calls of its network: a Triton kernel beside its torch reference.

The network's batch holds two token sequences per request: conditional in the first half, unconditional in the second
(classifier-free guidance). A step changes their time token and their last tokens, the patch being generated."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import is_row_major, pdl_options
from sonoro.ops.optional import tl, triton

if triton is not None:
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait
    from sonoro.ops.tiles import OPERAND


class PatchProjections(NamedTuple):
    """Projections around the network: `weight` [W, D] and `bias` [W] from latents to tokens, and the bias [D] of the
    output velocities."""

    weight: Tensor
    bias: Tensor
    out_bias: Tensor


class SolverStep(NamedTuple):
    """One ODE step of a batch: step `size` [B], guidance scale `cfg` [B] float32, and the embedding [B, W] of the
    `time` after it."""

    size: Tensor
    cfg: Tensor
    time: Tensor


def guide(conditional: Tensor, free: Tensor, cfg: Tensor) -> Tensor:
    """Classifier-free guidance with scale `cfg` [B] float32 of velocities `conditional` and `free` [B, P, D]: [B, P,
    D].
    The unconditional velocity is first scaled by its least-squares projection. Follows Fan et al., "CFG-Zero*: Improved
    Classifier-Free Guidance for Flow Matching Models" (2025)."""
    product, square = (conditional * free).sum((1, 2), keepdim=True), free.square().sum((1, 2), keepdim=True)
    scaled = free * (product / (square + 1e-8))
    apart = cfg[:, None, None] * (conditional - scaled)
    return scaled + apart.to(scaled.dtype)


def advance_reference(
    x: Tensor, velocity: Tensor | None, step: SolverStep, projections: PatchProjections, tokens: Tensor, time_token: int
) -> Tensor:
    """Take one ODE step: returns `x` [B, P, D] minus step size times guided velocity, as a new tensor.
    `velocity` [2 B P, D] is the network's output without bias; None takes no step. Writes the new patch, projected, to
    the last P tokens of both halves of `tokens` [2 B, T, W], and the time embedding to token `time_token`. Capturable;
    no sync; no gradient."""
    if velocity is None:
        x = x.clone()
    else:
        guided, free = (velocity + projections.out_bias).view(2, *x.shape)
        x = x - step.size[:, None, None] * guide(guided, free, step.cfg)
    both = tokens.unflatten(0, (2, -1))
    both[:, :, -x.shape[1] :] = F.linear(x, projections.weight, projections.bias)
    both[:, :, time_token] = step.time
    return x


if triton is not None:

    @triton.jit
    def _advance_kernel(
        x, velocities, size, cfg, time, weight, bias, out_bias, tokens, out, size_stride, cfg_stride, time_stride,
        MOVES: tl.constexpr, PATCH: tl.constexpr, LATENTS: tl.constexpr, NUM_TOKENS: tl.constexpr,
        TIME_TOKEN: tl.constexpr, WIDTH: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
        BLOCK_W: tl.constexpr, OPERAND_DTYPE: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        pdl_launch_dependents(ENABLE_PDL)
        dtype: tl.constexpr = out.dtype.element_ty
        row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
        patch_row, latent = tl.arange(0, BLOCK_P)[:, None], tl.arange(0, BLOCK_D)
        column = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
        is_column, is_there = column < WIDTH, (patch_row < PATCH) & (latent < LATENTS)[None, :]
        offset = patch_row * LATENTS + latent[None, :]
        into = tl.load(
            weight + column[None, :] * LATENTS + latent[:, None],
            mask=is_column[None, :] & (latent < LATENTS)[:, None],
            other=0.0,
        )
        raised = tl.load(bias + column, mask=is_column, other=0.0).to(tl.float32)
        shift = tl.load(out_bias + latent, mask=latent < LATENTS, other=0.0).to(tl.float32)[None, :]
        pdl_wait(ENABLE_PDL)
        x_now = tl.load(x + row * PATCH * LATENTS + offset, mask=is_there, other=0.0)
        if MOVES:
            # Rounds where the reference's steps round. Masked lanes hold the bias and must not enter the sums.
            line = velocities + row * PATCH * LATENTS + offset
            guided = (tl.load(line, mask=is_there, other=0.0).to(tl.float32) + shift).to(dtype).to(tl.float32)
            line += rows * PATCH * LATENTS
            free = (tl.load(line, mask=is_there, other=0.0).to(tl.float32) + shift).to(dtype).to(tl.float32)
            guided, free = tl.where(is_there, guided, 0.0), tl.where(is_there, free, 0.0)
            product = tl.sum((guided * free).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            square = tl.sum((free * free).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            ratio = (product / (square + 1e-8).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            scaled = (free * ratio).to(dtype).to(tl.float32)
            apart = (guided - scaled).to(dtype).to(tl.float32) * tl.load(cfg + row * cfg_stride)
            velocity = (scaled + apart.to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
            step = (tl.load(size + row * size_stride).to(tl.float32) * velocity).to(dtype).to(tl.float32)
            x_now = (x_now.to(tl.float32) - step).to(dtype)
        if tl.program_id(1) == 0:
            tl.store(out + row * PATCH * LATENTS + offset, x_now, mask=is_there)
        made = tl.dot(x_now.to(OPERAND_DTYPE), into.to(OPERAND_DTYPE), input_precision="ieee")
        made = (made + raised[None, :]).to(dtype)
        now = tl.load(time + row * time_stride + column, mask=is_column, other=0.0)
        for half in tl.static_range(2):
            target = tokens + (half * rows + row) * NUM_TOKENS * WIDTH + column
            tl.store(
                target[None, :] + (NUM_TOKENS - PATCH + patch_row) * WIDTH,
                made,
                mask=(patch_row < PATCH) & is_column[None, :],
            )
            tl.store(target + TIME_TOKEN * WIDTH, now, mask=is_column)


_BLOCK_W = 64


def advance_kernel(
    x: Tensor, velocity: Tensor | None, step: SolverStep, projections: PatchProjections, tokens: Tensor, time_token: int
) -> Tensor:
    """`advance_reference` as one Triton kernel, a program per request and block of token width; each steps all of
    `x`."""
    (batch, patch, latents), (_, count, width) = x.shape, tokens.shape
    out = torch.empty_like(x)
    _advance_kernel[batch, triton.cdiv(width, _BLOCK_W)](
        x=x, velocities=x if velocity is None else velocity, size=step.size, cfg=step.cfg, time=step.time,
        weight=projections.weight, bias=projections.bias, out_bias=projections.out_bias, tokens=tokens, out=out,
        size_stride=step.size.stride(0), cfg_stride=step.cfg.stride(0), time_stride=step.time.stride(0),
        MOVES=velocity is not None, PATCH=patch, LATENTS=latents, NUM_TOKENS=count, TIME_TOKEN=time_token, WIDTH=width,
        # Products of `tl.dot` have at least 16 rows and columns.
        BLOCK_P=max(16, triton.next_power_of_2(patch)), BLOCK_D=max(16, triton.next_power_of_2(latents)),
        BLOCK_W=_BLOCK_W, OPERAND_DTYPE=OPERAND[x.dtype], num_warps=2, **pdl_options(x.device),
    )  # fmt: skip
    return out


def _can_advance(
    x: Tensor, velocity: Tensor | None, step: SolverStep, projections: PatchProjections, tokens: Tensor, time_token: int
) -> bool:
    dense = (x, *projections, tokens) if velocity is None else (x, velocity, *projections, tokens)
    return (
        is_row_major(*dense, step.time)
        and all(tensor.is_contiguous() for tensor in dense)
        and step.size.dtype == x.dtype
        and step.cfg.dtype == torch.float32
        and x.shape[1] <= 32
        and x.shape[2] <= 128
    )


advance = Operation(advance_kernel, advance_reference, _can_advance)
