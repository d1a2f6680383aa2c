"""Products with `nn.Linear` weights for one position per row, fused with the norm before and the sum after them.

A frame is a chain of hundreds of such products, each waiting for the one before, so three things count: every weight is
read from memory once, at its full rate; launches are few; and the weights of a kernel are on their way while the kernel
ahead of it still runs (see `sonoro.ops.norm`). `sonoro.ops.plans` chooses between the ways to run one: `gemv`, `tiles`,
or torch's product (cuBLAS), which is here.

A weight is stored in the dtype of what it multiplies, or in 8 bits with a `scale` (see `sonoro.ops.eight_bits`)."""

from typing import TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.activation import silu_and_mul
from sonoro.ops.device import is_recorded
from sonoro.ops.dispatch import Operation, shrunk
from sonoro.ops.eight_bits import EIGHT_BITS, dequantized
from sonoro.ops.gemv import gemv
from sonoro.ops.norm import add_rms_norm, is_row_major, rms_norm_kernel, rms_norm_reference
from sonoro.ops.plans import CublasPlan, GemvPlan, Plan, TilePlan, plan_for, smaller
from sonoro.ops.tiles import launch_tiles, tile_matmul

_WIDENED_AT_ONCE = 2**23
"""Elements of an 8-bit weight that are widened for cuBLAS at a time: 17 MB."""

_GATED_AT_ONCE = 1024
"""Rows of `x` in one call of cuBLAS for gate and up."""


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
    Differentiable."""
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


def _matmul(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    plan: Plan,
    norm: tuple[Tensor, float] | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
) -> Tensor:
    if isinstance(plan, GemvPlan):
        return gemv(x, weight, scale, plan, norm, residual, is_gated)
    if norm is not None:
        x = rms_norm_kernel(x, *norm, enable_pdl=plan.enable_pdl)
    if isinstance(plan, TilePlan):
        return tile_matmul(x, weight, scale, plan, residual, is_gated)
    if is_gated:
        return _cublas_gate_up(x, weight, scale, plan)
    product = _cublas_matmul(x, weight, scale)
    return product if residual is None else product.add_(residual)


def _cublas_matmul(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    if scale is None:
        return F.linear(x, weight)
    product = torch.empty((x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
    # Widen a part of the weight at a time, so that it takes no more memory than the rest of a prompt.
    step = max(1, _WIDENED_AT_ONCE // weight.shape[1] // 128) * 128
    for first in range(0, weight.shape[0], step):
        own = slice(first, first + step)
        torch.mm(x, dequantized(weight[own], scale[own], x.dtype).t(), out=product[:, own])
    return product


def _cublas_gate_up(x: Tensor, weight: Tensor, scale: Tensor | None, plan: CublasPlan) -> Tensor:
    out = torch.empty((x.shape[0], weight.shape[0] // 2), dtype=x.dtype, device=x.device)
    # Run a long prompt in parts: the product of gate and up takes twice the memory of the result.
    for rows, into in zip(x.split(_GATED_AT_ONCE), out.split(_GATED_AT_ONCE), strict=True):
        silu_and_mul(_cublas_matmul(rows, weight, scale), into, enable_pdl=plan.enable_pdl)
    return out


class Choice(TypedDict, total=False):
    """Keyword arguments of every kernel here: the `plan` (default: chosen by size), and `shrink` as in `Operation`."""

    plan: Plan | None
    shrink: int


def _chosen(x: Tensor, weight: Tensor, is_gated: bool, *, plan: Plan | None = None, shrink: int = 0) -> Plan:
    return shrunk(plan or plan_for(x.shape[0], weight, is_gated), smaller, shrink)


def linear_kernel(x: Tensor, weight: Tensor, scale: Tensor | None = None, **choice: Unpack[Choice]) -> Tensor:
    """`linear_reference` in one or two launches; no gradient."""
    rows = x.flatten(0, -2)
    return _matmul(rows, weight, scale, _chosen(rows, weight, False, **choice)).unflatten(0, x.shape[:-1])


def gate_up_kernel(x: Tensor, weight: Tensor, scale: Tensor | None = None, **choice: Unpack[Choice]) -> Tensor:
    """`gate_up_reference` in one or two launches; no gradient."""
    return _matmul(x, weight, scale, _chosen(x, weight, True, **choice), is_gated=True)


def norm_linear_kernel(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, scale: Tensor | None = None, **choice: Unpack[Choice]
) -> Tensor:
    """`norm_linear_reference` in one or two launches; no gradient."""
    return _matmul(x, weight, scale, _chosen(x, weight, False, **choice), (norm_weight, eps))


def norm_gate_up_kernel(
    x: Tensor, norm_weight: Tensor, eps: float, weight: Tensor, scale: Tensor | None = None, **choice: Unpack[Choice]
) -> Tensor:
    """`norm_gate_up_reference` in one to three launches; no gradient."""
    return _matmul(x, weight, scale, _chosen(x, weight, True, **choice), (norm_weight, eps), is_gated=True)


def linear_add_kernel(
    x: Tensor, weight: Tensor, residual: Tensor, scale: Tensor | None = None, **choice: Unpack[Choice]
) -> Tensor:
    """`linear_add_reference` in one or two launches; no gradient."""
    return _matmul(x, weight, scale, _chosen(x, weight, False, **choice), residual=residual)


def joins_norm(x: Tensor, weight: Tensor) -> bool:
    """Whether `linear_add_norm` of `x` [B, K] needs one launch fewer than `linear_add` and the norm apart: if the
    product's own kernel cannot add the residual, the norm's kernel adds it."""
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
    **choice: Unpack[Choice],
) -> tuple[Tensor, Tensor]:
    """`linear_add_norm_reference` in two launches; no gradient."""
    plan = _chosen(x, weight, False, **choice)
    if isinstance(plan, CublasPlan):
        partial = _cublas_matmul(x, weight, scale)[None]
    elif isinstance(plan, TilePlan) and plan.split_k > 1:
        partial = launch_tiles(x, weight, scale, plan, None, False)
    else:
        total = _matmul(x, weight, scale, plan, residual=residual)
        return total, rms_norm_kernel(total, norm_weight, eps, enable_pdl=plan.enable_pdl)
    return add_rms_norm(partial, residual, norm_weight, eps, enable_pdl=plan.enable_pdl)


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


linear = Operation(linear_kernel, linear_reference, _takes_rows, can_shrink=True)
gate_up = Operation(gate_up_kernel, gate_up_reference, _takes_rows, can_shrink=True)
norm_linear = Operation(norm_linear_kernel, norm_linear_reference, _takes_norm, can_shrink=True)
norm_gate_up = Operation(norm_gate_up_kernel, norm_gate_up_reference, _takes_norm, can_shrink=True)
linear_add = Operation(linear_add_kernel, linear_add_reference, _takes_residual, can_shrink=True)
linear_add_norm = Operation(linear_add_norm_kernel, linear_add_norm_reference, _takes_residual_norm, can_shrink=True)
