"""A residual vector quantiser for training: codebooks follow their latents by exponential moving averages, and unused
codes are moved onto latents of the batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Quantized", "ResidualQuantizer"]

BOOK_DECAY = 0.99
DEAD_BELOW = 0.15
"""A code whose average use is below this share of its codebook's mean is dead: moved onto a latent of the batch."""


class Quantized(NamedTuple):
    """`quantized` latents [B, C_out, T] and the `first` codebook's entry [B, C, T], both with straight-through
    gradients; `codes` [B, T, K] int64; and the commitment loss, summed over codebooks."""

    quantized: Tensor
    first: Tensor
    codes: Tensor
    commitment: Tensor


class ResidualQuantizer(nn.Module):
    """A chain of K codebooks in a low-dimensional space between two projections. In training mode, `forward` updates
    the codebooks: the first call initialises them with its latents, later ones update the moving averages."""

    def __init__(self, width_in: int, width: int, width_out: int, books: int, size: int) -> None:
        super().__init__()
        self.project_in = nn.Conv1d(width_in, width, 1, bias=False)
        self.project_out = nn.Conv1d(width, width_out, 1, bias=False)
        self.register_buffer("books", torch.randn(books, size, width) * 0.1)
        self.register_buffer("usage", torch.ones(books, size))
        self.register_buffer("sums", self.books.clone())
        self.is_seeded = False

    def forward(self, latents: Tensor) -> Quantized:
        """Quantise `latents` [B, C_in, T]."""
        projected = self.project_in(latents).transpose(1, 2).float()
        residual, commitment, codes = projected, projected.new_zeros(()), []
        total = torch.zeros_like(projected)
        for book in range(self.books.shape[0]):
            if self.training and not self.is_seeded:
                self._move(book, residual.detach(), torch.ones(self.books.shape[1], dtype=torch.bool))
            code = self._nearest(book, residual.detach())
            chosen = F.embedding(code, self.books[book])
            commitment = commitment + F.mse_loss(residual, chosen.detach())
            if self.training:
                self._follow(book, residual.detach(), code)
            total = total + chosen
            residual = residual - chosen
            codes.append(code)
        self.is_seeded = True
        passed, first = (
            projected + (chosen - projected).detach() for chosen in (total, F.embedding(codes[0], self.books[0]))
        )
        return Quantized(
            self.project_out(passed.transpose(1, 2)), first.transpose(1, 2), torch.stack(codes, dim=-1), commitment
        )

    def looked_up(self, codes: Tensor) -> Tensor:
        """The sum of the entries of `codes` [B, T, K]: [B, T, C]."""
        books, size, _ = self.books.shape
        return F.embedding(codes + torch.arange(books, device=codes.device) * size, self.books.flatten(0, 1)).sum(-2)

    def _nearest(self, book: int, x: Tensor) -> Tensor:
        entries = self.books[book]
        scores = x @ entries.T - entries.square().sum(-1) / 2
        return scores.argmax(-1)

    @torch.no_grad()
    def _follow(self, book: int, x: Tensor, code: Tensor) -> None:
        one_hot = (code.flatten()[:, None] == torch.arange(self.books.shape[1], device=code.device)).to(x.dtype)
        self.usage[book].lerp_(one_hot.sum(0), 1 - BOOK_DECAY)
        self.sums[book].lerp_(one_hot.T @ x.flatten(0, 1), 1 - BOOK_DECAY)
        self.books[book] = self.sums[book] / self.usage[book].clamp(min=1e-5)[:, None]
        self._move(book, x, self.usage[book] < DEAD_BELOW * _mean_use(x, self.books))

    @torch.no_grad()
    def _move(self, book: int, x: Tensor, dead: Tensor) -> None:
        """Put the `dead` codes of a book onto latents of this batch, as codes of half the mean use."""
        dead, use = dead.to(x.device), _mean_use(x, self.books) / 2
        live = x.flatten(0, 1)
        picks = live[torch.randint(live.shape[0], (dead.shape[0],), device=x.device)]
        self.books[book] = torch.where(dead[:, None], picks, self.books[book])
        self.usage[book] = torch.where(dead, use, self.usage[book])
        self.sums[book] = torch.where(dead[:, None], picks * use, self.sums[book])

    def used(self, positions: int) -> Tensor:
        """The share of codes in regular use, for batches of `positions` latents."""
        return (self.usage > 2 * DEAD_BELOW * positions / self.books.shape[1]).float().mean()


def _mean_use(x: Tensor, books: Tensor) -> float:
    """Uses per code of `books` [K, V, C] for latents `x` [B, T, C], if all were used equally."""
    return x.shape[0] * x.shape[1] / books.shape[1]
