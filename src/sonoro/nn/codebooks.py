"""Codebooks that are searched in a few dimensions, each for what those before it left over. Knows no codec.

Sequences are [B, T, C].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Codebooks", "VectorQuantizer", "encode", "joint_table"]


class VectorQuantizer(nn.Module):
    """One codebook, searched and added through projections to a few dimensions and back."""

    def __init__(self, codes: int, width: int, inner: int) -> None:
        super().__init__()
        self.codebook = nn.Embedding(codes, inner)
        self.in_proj, self.out_proj = nn.Conv1d(width, inner, 1), nn.Conv1d(inner, width, 1)

    def table(self) -> Tensor:
        """What each code adds to a column: [codes, width]."""
        return F.linear(self.codebook.weight, self.out_proj.weight[:, :, 0], self.out_proj.bias)

    def nearest(self, x: Tensor) -> Tensor:
        """The codes of `x` [B, T, width] by cosine: [B, T] int64."""
        inner = F.linear(x, self.in_proj.weight[:, :, 0], self.in_proj.bias)
        return (F.normalize(inner, dim=-1) @ F.normalize(self.codebook.weight, dim=-1).t()).argmax(-1)


class Codebooks(nn.Module):
    """`books` codebooks of equal sizes."""

    def __init__(self, books: int, codes: int, width: int, inner: int) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(VectorQuantizer(codes, width, inner) for _ in range(books))

    @property
    def levels(self) -> list[VectorQuantizer]:
        return cast(list[VectorQuantizer], [*self.quantizers])


def joint_table(levels: Sequence[VectorQuantizer]) -> Tensor:
    """What each code of `levels` adds: [K, V, width]. A codebook shorter than the longest repeats its last row."""
    tables = [level.table() for level in levels]
    size = max(map(len, tables))
    return torch.stack([torch.cat([table, table[-1:].expand(size - len(table), -1)]) for table in tables])


def encode(levels: Sequence[VectorQuantizer], x: Tensor) -> Tensor:
    """The codes [B, T, K] int64 of `x` [B, T, width]: each codebook codes what those before it left over."""
    codes: list[Tensor] = []
    for level in levels:
        codes.append(level.nearest(x))
        x = x - F.embedding(codes[-1], level.table())
    return torch.stack(codes, dim=-1)
