"""RMSNorm, alone and after a sum: Triton kernels beside the torch reference; programmatic dependent launch (PDL).

With PDL a kernel starts before the one ahead of it is done. It must call `pdl_wait` before it writes anything or reads
what another kernel wrote; weights may be read before."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sonoro.ops.device import card
from sonoro.ops.dispatch import Operation
from sonoro.ops.optional import tl, triton

if triton is not None:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of `x` [..., K] over its last axis, times `weight` [K]. Differentiable.
    Computed in float32 or wider, rounded to the dtype of `x` before the weight is applied."""
    # Two steps, so that in bfloat16 the product with the weight is rounded a second time, as in official models.
    return unit_rms(x, eps) * weight


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """RMSNorm of `x` [..., K] without a weight, as a new tensor."""
    if x.is_cpu and x.dtype == torch.float32:
        # Fewer calls: 9 us for one row; F.rms_norm takes 16, and a frame has about a hundred norms.
        scale, floor = _scale_and_floor(x.shape[-1], eps)
        return x * (scale / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), floor))
    return F.rms_norm(x, x.shape[-1:], None, eps)


@functools.cache
def _scale_and_floor(width: int, eps: float) -> tuple[Tensor, Tensor]:
    # Tensors, since dividing a Python number rounds twice; not inference tensors, which autograd rejects.
    with torch.inference_mode(False):
        return torch.tensor(math.sqrt(width), device="cpu"), torch.tensor(math.sqrt(width * eps), device="cpu")


if triton is not None:

    @triton.jit
    def pdl_launch_dependents(ENABLE_PDL: tl.constexpr):
        """Allow the next kernel to start once every program of this one has called this."""
        if ENABLE_PDL:
            gdc_launch_dependents()

    @triton.jit
    def pdl_wait(ENABLE_PDL: tl.constexpr):
        """Wait until the preceding kernels are complete. Every kernel must call it, or only the last one is waited
        for."""
        if ENABLE_PDL:
            gdc_wait()

    @triton.jit
    def scale_and_weigh(value, inverse, weight, dtype: tl.constexpr):
        """value * inverse rounded to `dtype`, then times weight and rounded again. `value` and `inverse` float32."""
        scaled = (value * inverse).to(dtype).to(tl.float32)
        return (scaled * weight.to(tl.float32)).to(dtype)

    @triton.jit
    def _rms_norm_kernel(x, weight, out, x_stride, eps, K: tl.constexpr, BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr):
        pdl_launch_dependents(ENABLE_PDL)
        dtype: tl.constexpr = out.dtype.element_ty
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, BLOCK)
        weights = tl.load(weight + column, mask=column < K, other=0)
        pdl_wait(ENABLE_PDL)
        value = tl.load(x + row * x_stride + column, mask=column < K, other=0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(value * value) / K + eps)
        tl.store(out + row * K + column, scale_and_weigh(value, inverse, weights, dtype), mask=column < K)

    @triton.jit(do_not_specialize=["batch"])
    def _add_norm_kernel(
        partial, residual, norm_weight, out, normed, batch, residual_stride, eps,
        N: tl.constexpr, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr, ENABLE_PDL: tl.constexpr,
    ):  # fmt: skip
        # Round where three kernels would: after the product, the sum with the residual, and the norm.
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


def rms_norm_kernel(x: Tensor, weight: Tensor, eps: float, *, enable_pdl: bool = True) -> Tensor:
    """`rms_norm_reference` for `x` [B, K] as one Triton kernel, one program per row; no gradient."""
    batch, width_in = x.shape
    out = torch.empty((batch, width_in), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width_in)
    warps = max(1, min(8, block // 512))
    options = pdl_options(x.device, enable_pdl=enable_pdl)
    _rms_norm_kernel[(batch,)](x, weight, out, x.stride(0), eps, width_in, block, num_warps=warps, **options)
    return out


def add_rms_norm(
    partial: Tensor, residual: Tensor, weight: Tensor, eps: float, *, enable_pdl: bool = True
) -> tuple[Tensor, Tensor]:
    """`residual` [B, N] plus the sum of `partial` [splits, B, N], and the RMS norm of that, both [B, N]. One launch."""
    splits, batch, width = partial.shape
    total, normed = (torch.empty((batch, width), dtype=residual.dtype, device=residual.device) for _ in range(2))
    block = triton.next_power_of_2(width)
    _add_norm_kernel[(batch,)](
        partial=partial, residual=residual, norm_weight=weight, out=total, normed=normed, batch=batch,
        residual_stride=residual.stride(0), eps=eps, N=width, SPLIT_K=splits, BLOCK=block,
        num_warps=max(1, min(8, block // 512)), **pdl_options(residual.device, enable_pdl=enable_pdl),
    )  # fmt: skip
    return total, normed


def pdl_options(device: torch.device, *, enable_pdl: bool = True) -> dict[str, bool]:
    """The arguments of a launch on `device` that turn PDL on: for NVIDIA cards, from Hopper on."""
    has_pdl = card(device).capability >= (9, 0) and not triton.knobs.runtime.interpret
    # Other backends of Triton reject the option.
    return {"ENABLE_PDL": True, "launch_pdl": True} if enable_pdl and has_pdl else {"ENABLE_PDL": False}


def stride_of(rows: Tensor | None) -> int:
    """Elements from one of `rows` to the next; 0 if there are none."""
    return 0 if rows is None else rows.stride(0)


def is_row_major(*tensors: Tensor) -> bool:
    """Whether all `tensors` have one supported dtype (float32, bfloat16, float16) and dense rows, and none is empty."""
    dtypes = {tensor.dtype for tensor in tensors}
    return (
        dtypes in ({torch.float32}, {torch.bfloat16}, {torch.float16})
        and all(tensor.stride(-1) == 1 for tensor in tensors)
        and all(tensor.numel() > 0 for tensor in tensors)
    )


rms_norm = Operation(
    rms_norm_kernel,
    rms_norm_reference,
    lambda x, weight, eps: x.ndim == 2 and x.shape[1] <= 16384 and is_row_major(x, weight),
)
