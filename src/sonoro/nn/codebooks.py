"""Residual vector quantisation of [B, T, C] with codebooks that are searched in a low-dimensional projection."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VectorQuantizer(nn.Module):
    """One codebook of `codes` entries of `inner` dimensions, with projections from and to sequences of `width`."""

    def __init__(self, codes: int, width: int, inner: int) -> None:
        super().__init__()
        self.codebook = nn.Embedding(codes, inner)
        self.in_proj, self.out_proj = nn.Conv1d(width, inner, 1), nn.Conv1d(inner, width, 1)

    def table(self) -> Tensor:
        """The projected codebook [codes, width]: what each code adds to a column."""
        return F.linear(self.codebook.weight, self.out_proj.weight[:, :, 0], self.out_proj.bias)

    def nearest(self, x: Tensor) -> Tensor:
        """The codes [B, T] int64 of highest cosine similarity to `x` [B, T, width]."""
        inner = F.linear(x, self.in_proj.weight[:, :, 0], self.in_proj.bias)
        return (F.normalize(inner, dim=-1) @ F.normalize(self.codebook.weight, dim=-1).t()).argmax(-1)


class Codebooks(nn.Module):
    """`books` codebooks of the same size."""

    def __init__(self, books: int, codes: int, width: int, inner: int) -> None:
        super().__init__()
        self.quantizers = nn.ModuleList(VectorQuantizer(codes, width, inner) for _ in range(books))

    @property
    def levels(self) -> list[VectorQuantizer]:
        return cast(list[VectorQuantizer], [*self.quantizers])


def joint_table(levels: Sequence[VectorQuantizer]) -> Tensor:
    """The projected codebooks of `levels`: [K, V, width]; those shorter than the longest repeat their last row."""
    tables = [level.table() for level in levels]
    size = max(map(len, tables))
    return torch.stack([torch.cat([table, table[-1:].expand(size - len(table), -1)]) for table in tables])


def encode(levels: Sequence[VectorQuantizer], x: Tensor) -> Tensor:
    """Encode `x` [B, T, width] to codes [B, T, K] int64; each level codes the residual of the levels before it."""
    codes: list[Tensor] = []
    for level in levels:
        codes.append(level.nearest(x))
        x = x - F.embedding(codes[-1], level.table())
    return torch.stack(codes, dim=-1)
