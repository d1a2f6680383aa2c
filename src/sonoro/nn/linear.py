"""Linear layers: every weight product of a language model and of its flow-matching network.

Only this module knows how a weight is stored: in the dtype of the activations, or in 8 bits with a scale per output
channel. A codec's fused decoder uses `sonoro.ops.conv` instead."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.ops.device import seeded
from sonoro.ops.e4m3 import e4m3_linear, e4m3_linear_add_norm, e4m3_sizes, quantize_rows, takes_e4m3
from sonoro.ops.eight_bits import dequantized, quantize
from sonoro.ops.linear import gate_up, joins_norm, linear, linear_add, linear_add_norm, norm_gate_up, norm_linear
from sonoro.ops.norm import rms_norm, rms_norm_reference

_KERNEL_TOLERANCES = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Relative to the largest value: a few roundings. Other dtypes sum thousands of float32 terms in another order."""


class RMSNorm(nn.Module):
    """RMSNorm of the last axis, computed in float32 or wider and rounded before the weight is applied."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm_reference(x, self.weight, self.eps)

    def fused(self, x: Tensor) -> Tensor:
        """`forward` for `x` [B, C], in one kernel where there is one. Capturable; no autograd."""
        return rms_norm(x, self.weight, self.eps)


class E4M3Rows(NamedTuple):
    """Rows as terms in E4M3, `values` [B, terms, C], and the `scale` [B] of each (`sonoro.ops.e4m3`)."""

    values: Tensor
    scale: Tensor


class NormedRows(NamedTuple):
    """`rows` [B, C], and the next norm of them [B, C] if the kernel that computed `rows` fused it."""

    rows: Tensor
    normed: Tensor | E4M3Rows | None = None


class Linear(nn.Linear):
    """`x` [..., K] times `weight` [N, K], plus a bias if there is one: [..., N].

    If `quantization` is set before `nn.weights.fill`, the weight is kept in 8 bits, as rows divided by `scale` [N], and
    cannot be trained; with "stored", as the file has it. Otherwise `scale` is None. `widen` keeps a 16-bit copy too,
    for products of more than `narrow_rows` rows. With a weight in fp8 and `row_terms`, products take rows as so many
    terms in E4M3 at the batch sizes where that is faster.

    The other methods fuse the product with the operation before or after it, for `x` [B, K] of one token per row,
    without bias and autograd. They can be captured. Each has a check that compares its kernel with its reference."""

    scale: Tensor | None
    wide: Tensor | None
    quantization = "none"
    row_terms = 0
    narrow_rows = 16
    """Up to this many rows a small product in 8 bits is as fast as in 16: on an H200, the 1.7B's depth model takes 1.84
    and 1.85 ms for 16 rows, 2.24 and 2.09 for 32."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, device: str | None = None) -> None:
        super().__init__(in_features, out_features, bias, device)
        self.register_buffer("scale", None, persistent=False)
        self.register_buffer("wide", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The product of `x` [..., K]: [..., N]. Differentiable by `x`."""
        if self.scale is None:
            return F.linear(x, self.weight, self.bias)
        product: Tensor = linear(x, self.weight, self.scale)
        return product if self.bias is None else product + self.bias

    def stored(self, weight: Tensor) -> Tensor:
        """How this layer keeps `weight` [N, K]; in 8 bits, it takes the scale itself."""
        if self.quantization == "none":
            return weight
        self.weight.requires_grad_(False)
        if self.quantization == "stored":
            return weight
        stored, self.scale = quantize(weight, self.quantization)
        return stored

    @torch.no_grad()
    def reorder(self, order: Callable[[Tensor], Tensor]) -> None:
        """Put the rows of the weight, and their scales, in the order that `order` makes of rows [N, ...], in place."""
        # Not every operation knows 8-bit floats; their bits move alike.
        weight = self.weight.data if self.scale is None else self.weight.data.view(torch.int8)
        weight.copy_(order(weight))
        if self.scale is not None:
            self.scale.copy_(order(self.scale[:, None])[:, 0])

    @classmethod
    def derived(cls, weight: Tensor) -> Linear:
        """A layer whose `weight` [N, K] is derived from other tensors: it is no parameter, and no file holds it."""
        layer = cls(weight.shape[1], weight.shape[0], bias=False, device="meta")
        del layer.weight
        layer.register_buffer("weight", weight, persistent=False)
        return layer

    @torch.no_grad()
    def widen(self, dtype: torch.dtype) -> None:
        """From now on, keep a copy of the 8-bit weight in `dtype` as well."""
        if self.scale is not None and self.wide is None:
            self.wide = dequantized(self.weight, self.scale, dtype)

    def _for(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weight, and its scale if it has one, for a product of `rows` [B, ...]."""
        if self.wide is not None and rows.shape[0] > self.narrow_rows:
            return self.wide, None
        return self.weight, self.scale

    def takes_e4m3(self, x: Tensor) -> bool:
        """Whether products of `x` [B, K] take it in E4M3."""
        return self.row_terms > 0 and self._for(x)[1] is not None and takes_e4m3(x, self.weight, self.row_terms)

    @property
    def e4m3_sizes(self) -> tuple[int, ...]:
        """The largest of each bucket of batch sizes at which products take rows in E4M3."""
        return e4m3_sizes(self.weight, self.row_terms) if self.row_terms and self.wide is None else ()

    def after_norm(self, x: Tensor, norm: RMSNorm, normed: Tensor | E4M3Rows | None = None) -> Tensor:
        """The product of `norm(x)`, [B, K] to [B, N]; `normed` is that norm, if it is computed already."""
        normed = self._quantized(x, norm, normed)
        if isinstance(normed, E4M3Rows):
            return e4m3_linear(*normed, self.weight, self.scale, x.dtype)
        if normed is not None:
            return linear(normed, *self._for(x))
        return norm_linear(x, norm.weight, norm.eps, *self._for(x))

    def gate_up_after_norm(self, x: NormedRows, norm: RMSNorm) -> Tensor:
        """silu(gate) * up [B, N / 2] of the product of `norm(x)` [B, K]; the gate is the first half of `weight`."""
        rows, normed = x.rows, self._quantized(x.rows, norm, x.normed)
        if isinstance(normed, E4M3Rows):
            return e4m3_linear(*normed, self.weight, self.scale, rows.dtype, None, True)
        if normed is not None:
            return gate_up(normed, *self._for(rows))
        return norm_gate_up(rows, norm.weight, norm.eps, *self._for(rows))

    def _quantized(self, x: Tensor, norm: RMSNorm, normed: Tensor | E4M3Rows | None) -> Tensor | E4M3Rows | None:
        """`norm(x)` in E4M3 if products take `x` in E4M3; else `normed`."""
        if isinstance(normed, E4M3Rows) or not self.takes_e4m3(x):
            return normed
        given = (x, norm.weight, norm.eps) if normed is None else (normed,)
        return E4M3Rows(*quantize_rows(*given, terms=self.row_terms))

    def add_to(
        self, residual: Tensor, x: Tensor, norm: RMSNorm | None = None, following: Linear | None = None
    ) -> NormedRows:
        """`residual` [B, N] plus the product of `x` [B, K]; with the next `norm` of the sum where that is fused, for
        the product with the layer `following`."""
        if self.takes_e4m3(x):
            given = (*quantize_rows(x, terms=self.row_terms), self.weight, self.scale)
            if norm is None or following is None or not following.takes_e4m3(residual):
                return NormedRows(e4m3_linear(*given, x.dtype, residual))
            total, *normed = e4m3_linear_add_norm(*given, residual, norm.weight, norm.eps)
            return NormedRows(total, E4M3Rows(*normed))
        weight, scale = self._for(x)
        if norm is not None and self.joins_norm(x):
            return NormedRows(*linear_add_norm(x, weight, residual, norm.weight, norm.eps, scale))
        return NormedRows(linear_add(x, weight, residual, scale))

    def joins_norm(self, x: Tensor) -> bool:
        """Whether `add_to(residual, x, norm)` fuses the norm in 16 bits, for `x` [B, K]."""
        return not self.takes_e4m3(x) and joins_norm(x, self._for(x)[0])

    def check_alone(self, x: Tensor, tolerance: float, *, is_normed: bool = False) -> None:
        """That of `x` [B, K], where it is a kernel of ours: in 8 bits, or as rows that the kernel ahead has normed."""
        if is_normed or self.scale is not None:
            linear.check(lambda: (x, *self._for(x)), tolerance)

    def check_after_norm(
        self, x: Tensor, norm: RMSNorm, tolerance: float, *, is_gated: bool = False, is_normed: bool = False
    ) -> None:
        """That of `after_norm`, or of `gate_up_after_norm`; with `is_normed` also for rows normed by another kernel."""
        if self.takes_e4m3(x):
            rows = (x, norm.weight, norm.eps, self.row_terms)
            quantize_rows.check(lambda: rows, tolerance)
            given = (*quantize_rows(*rows), self.weight, self.scale, x.dtype, None, is_gated)
            e4m3_linear.check(lambda: given, tolerance)
            return
        fused, alone = (norm_gate_up, gate_up) if is_gated else (norm_linear, linear)
        fused.check(lambda: (x, norm.weight, norm.eps, *self._for(x)), tolerance)
        if is_normed:
            alone.check(lambda: (x, *self._for(x)), tolerance)

    def check_add_to(self, residual: Tensor, x: Tensor, norm: RMSNorm | None, tolerance: float) -> None:
        """Those of `add_to`, with that norm or without one."""
        if self.takes_e4m3(x):
            quantize_rows.check(lambda: (x, None, 0.0, self.row_terms), tolerance)
            given = (*quantize_rows(x, terms=self.row_terms), self.weight, self.scale)
            e4m3_linear.check(lambda: (*given, x.dtype, residual), tolerance)
            if norm is not None:
                after = norm.weight, norm.eps
                e4m3_linear_add_norm.check(lambda: (*given, residual, *after), tolerance)
            return
        weight, scale = self._for(x)
        linear_add.check(lambda: (x, weight, residual, scale), tolerance)
        if norm is not None and self.joins_norm(x):
            after = norm.weight, norm.eps
            linear_add_norm.check(lambda: (x, weight, residual, *after, scale), tolerance)


def random_like(weight: Tensor) -> tuple[Callable[..., Tensor], float]:
    """A seeded `randn` on the device and in the dtype of `weight`, and the tolerance of kernel checks on it."""
    generator = seeded(weight.device)
    random = functools.partial(torch.randn, device=weight.device, dtype=weight.dtype, generator=generator)
    return random, _KERNEL_TOLERANCES.get(weight.dtype, 1e-4)


def kept_as_stored(module: nn.Module) -> list[Linear]:
    """Every `Linear` in `module` whose weight is in 8 bits because the file has it so."""
    parts = (part for part in module.modules() if isinstance(part, Linear))
    return [part for part in parts if part.quantization == "stored" and part.scale is not None]


@torch.no_grad()
def widen_stored(parts: Iterable[Linear]) -> None:
    """From now on, keep the weights of `parts`, `kept_as_stored` on a CPU, as the same numbers in float32, by input:
    their products in torch are faster."""
    for part in parts:
        part.weight.data, part.scale = dequantized(part.weight, part.scale, torch.float32), None
        lay_out_by_input(part)


@torch.no_grad()
def lay_out_by_input(module: nn.Module) -> None:
    """Store the weight of every `Linear` in `module` column by column, in place; its shape and values stay. Those in 8
    bits stay as they are.
    For decoding on a CPU: a product with one row then streams the weight in order, at twice the speed where it comes
    from memory (23 GB/s instead of 11, float32 [1536, 256], one core of an AMD EPYC)."""
    for part in module.modules():
        if isinstance(part, Linear) and part.scale is None:
            part.weight.data = part.weight.t().contiguous().t()
