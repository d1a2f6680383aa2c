"""Weights in 8 bits: int8 or float8_e4m3fn, each of which 16 bits hold exactly, and a scale per output channel.

`scale` [N] float32 times row n is what that row stands for: kernels multiply their sums by it."""

import torch
from torch import Tensor

EIGHT_BITS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""The dtype of each quantisation's weights."""

_QUANTIZED_AT_ONCE = 2**22
"""Numbers, in float32: all of a large layer would take four times what is kept of it, and tear memory to pieces."""


def quantize(weight: Tensor, quantization: str) -> tuple[Tensor, Tensor]:
    """`weight` [N, K] in 8 bits, "int8" or "fp8" (E4M3), and the scale [N] float32 of its rows, the output channels.
    Symmetric, rounded to nearest: the largest of a row is the largest of the format. Takes 32 MB besides."""
    dtype = EIGHT_BITS[quantization]
    largest = (torch.iinfo if dtype == torch.int8 else torch.finfo)(dtype).max
    stored = torch.empty_like(weight, dtype=dtype)
    scale = torch.empty(len(weight), device=weight.device)
    if weight.is_meta:
        return stored, scale
    rows = max(1, _QUANTIZED_AT_ONCE // weight.shape[1])
    for part, into, by in zip(weight.split(rows), stored.split(rows), scale.split(rows), strict=True):
        wide = part.float()
        torch.div(wide.abs().amax(dim=1).clamp_min_(1e-30), largest, out=by)
        # Rounding may exceed the largest value by a step, so clamp.
        steps = (wide / by[:, None]).clamp_(-largest, largest)
        into.copy_(steps.round_() if quantization == "int8" else steps)
    return stored, scale


def dequantized(weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`weight` [N, K] times `scale` [N], rounded once to `dtype`; `weight` itself without a scale. Capturable."""
    if scale is None:
        return weight
    if dtype.itemsize > 2:
        return (weight.to(torch.promote_types(dtype, scale.dtype)) * scale[:, None]).to(dtype)
    # Multiply in place, in 16 bits: a copy in 32 bits would be the largest tensor of a prompt. torch cannot multiply
    # 8-bit floats, and 16 bits hold each of them.
    return weight.to(dtype).mul_(scale[:, None])
