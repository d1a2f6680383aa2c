"""Activations: Snake and SnakeBeta of codec decoders, a Triton kernel beside its torch reference; and silu(gate) * up.

The periodic two take precomputed rates and scales by channel (`snake_rates`, `snake_beta_rates`). Triton is optional.
"""

import torch
from torch import Tensor

from sonoro.ops.dispatch import Operation
from sonoro.ops.norm import pdl_options
from sonoro.ops.optional import tl, triton

if triton is not None:
    from sonoro.ops.norm import pdl_launch_dependents, pdl_wait

Rates = tuple[Tensor, Tensor]
"""Rate and scale by channel, [C] each: factors of the sine's argument and of its square."""

BLOCK = 1024
"""Elements per program: the fastest of 512 to 4096 on an H200 (28 us for [16, 96, 7680] float32; memory floor 22)."""


def snake_beta_rates(alpha: Tensor, beta: Tensor) -> Rates:
    """SnakeBeta's rate and scale: exp(alpha) and 1 / (exp(beta) + 1e-9), [C] each, float32 or wider. Differentiable."""
    wide = torch.promote_types(alpha.dtype, torch.float32)
    return alpha.to(wide).exp(), 1 / (beta.to(wide).exp() + 1e-9)


def snake_rates(alpha: Tensor) -> Rates:
    """Snake's rate and scale: `alpha` and 1 / (alpha + 1e-9), [C] each, float32 or wider. Differentiable."""
    wide = alpha.to(torch.promote_types(alpha.dtype, torch.float32))
    return wide, 1 / (wide + 1e-9)


def snake_beta_reference(x: Tensor, exp_alpha: Tensor, inverse_beta: Tensor, channel_dim: int = 1) -> Tensor:
    """x + inverse_beta * sin(x * exp_alpha)^2 by channel, computed in float32 or wider, returned in the dtype of `x`.
    `x` has C channels on axis `channel_dim`, by default [B, C, S]. Differentiable."""
    shape = [1] * x.ndim
    shape[channel_dim] = -1
    rate, scale = exp_alpha.view(shape), inverse_beta.view(shape)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.addcmul(wide, torch.sin(wide * rate).square(), scale).to(x.dtype)


if triton is not None:

    @triton.jit
    def _snake_beta(
        x, exp_alpha, inverse_beta, out, count, stride, channels: tl.constexpr, block: tl.constexpr, wide: tl.constexpr
    ):
        # The channel of element n of a dense tensor is (n // stride) % channels, whatever the order of the other axes.
        # Only the block's start needs 64 bits; divisions by element stay in 32.
        start = tl.program_id(0).to(tl.int64) * block
        local = tl.arange(0, block)
        first = ((start // stride) % channels).to(tl.int32)
        channel = (first + ((start % stride).to(tl.int32) + local) // stride) % channels
        mask = start + local < count
        value = tl.load(x + start + local, mask=mask).to(wide)
        wave = tl.sin(value * tl.load(exp_alpha + channel).to(wide))
        result = value + wave * wave * tl.load(inverse_beta + channel).to(wide)
        tl.store(out + start + local, result.to(out.dtype.element_ty), mask=mask)

    @triton.jit
    def silu_mul(gate, up, dtype: tl.constexpr):
        """silu(gate) * up, rounded to `dtype` where the reference's separate steps round."""
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
        tl.store(out + row * N + column, silu_mul(gate, up, out.dtype.element_ty), mask=column < N)


def snake_beta_kernel(x: Tensor, exp_alpha: Tensor, inverse_beta: Tensor, channel_dim: int = 1) -> Tensor:
    """`snake_beta_reference` as one Triton kernel; no gradient.
    `x` contiguous, or contiguous once its channels are moved last; the output has its strides."""
    if x.is_meta:
        x = x.new_empty(x.shape)
    assert _is_dense(x, channel_dim), x.stride()
    channels = x.shape[channel_dim]
    # An axis of one column reports an arbitrary stride.
    stride = x.stride(channel_dim) if channels > 1 else 1
    out = torch.empty_like(x)
    wide = tl.float64 if x.dtype == torch.float64 else tl.float32
    grid = (triton.cdiv(x.numel(), BLOCK),)
    _snake_beta[grid](x, exp_alpha, inverse_beta, out, x.numel(), stride, channels, BLOCK, wide)
    return out


def silu_and_mul(both: Tensor, out: Tensor, *, enable_pdl: bool) -> None:
    """Write silu(gate) * up into `out` [B, N], of `both` [B, 2 N] with the gate first; one launch."""
    batch, width = out.shape
    options = pdl_options(out.device, enable_pdl=enable_pdl)
    _silu_mul_kernel[(batch, triton.cdiv(width, BLOCK))](both, out, width, BLOCK, **options)


def _is_dense(x: Tensor, channel_dim: int) -> bool:
    # Meta tensors may have other strides than a library's result on a GPU, which is dense.
    return x.is_meta or x.is_contiguous() or x.movedim(channel_dim, -1).is_contiguous()


snake_beta = Operation(
    snake_beta_kernel,
    snake_beta_reference,
    lambda x, exp_alpha, inverse_beta, channel_dim=1: x.numel() > 0 and _is_dense(x, channel_dim),
)
