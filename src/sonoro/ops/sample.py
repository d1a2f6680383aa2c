"""Choosing one id per row: addressed Gumbel noise, logit processors and the pick. The torch reference, on any device.

Every parameter is per row and lives on the device, so a batch may mix greedy and random rows. Nothing here synchronises
or depends on a device value; everything may be captured. Knows no model.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["gumbel_noise", "keep_top_k", "keep_top_p", "penalize_seen", "philox_words", "pick"]

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox_words(counter: Sequence[Tensor], key: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four random words of each counter: Philox4x32-10.

    `counter` (four) and `key` (two) are int64 tensors whose low 32 bits count; they broadcast against one another, and
    parts that vary along one axis only are cheap to give unexpanded. Words are int64 in [0, 2**32).
    Follows Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).
    """
    a, b, c, d = (word & _WORD for word in counter)
    left, right = key
    for _ in range(_ROUNDS):
        # The 64-bit products wrap in int64, which leaves all their bits right. `b`, `d` and the keys keep garbage
        # above bit 31: they are only ever xored, and the mask comes after.
        first, second = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a = ((second >> 32) ^ (b ^ left)) & _WORD
        c = ((first >> 32) ^ (d ^ right)) & _WORD
        b, d = second, first
        left, right = left + _KEY_STEPS[0], right + _KEY_STEPS[1]
    return a, b & _WORD, c, d & _WORD


def gumbel_noise(seed: Tensor, segment: Tensor, frame: Tensor, codebooks: int, vocabulary: int) -> Tensor:
    """Gumbel noise [B, codebooks, vocabulary] float32 of one frame, addressed by int64 rows `seed`, `segment`, `frame`.

    Entry (codebook, v) of a row is a function of that row's three numbers, the codebook and v alone: key = seed (low
    word, high word), counter = (v // 4, codebook, frame, segment), word v % 4, u = ((word >> 9) + 0.5) / 2**23.
    """
    row_seed, row_segment, row_frame = (rows[:, None, None] for rows in (seed, segment, frame))
    book = torch.arange(codebooks, device=seed.device)[:, None]
    block = torch.arange(-(-vocabulary // 4), device=seed.device)
    words = philox_words((block, book, row_frame, row_segment), (row_seed, row_seed >> 32))
    word = torch.stack(words, dim=-1).flatten(-2)[..., :vocabulary]
    uniform = (word >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()


def penalize_seen(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """`logits` [B, V] with those of `seen` [B, V] bool made less likely by `penalty` [B, 1] (1 changes nothing)."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def keep_top_k(logits: Tensor, top_k: Tensor, limit: int) -> Tensor:
    """`logits` [B, V] with those below the row's `top_k`-th [B, 1] int64 at -inf; ties with it stay; 0 keeps all.

    `limit` must not be smaller than any `top_k` that is below V: the caller knows it without asking the device.
    """
    best = logits.topk(min(limit, logits.shape[-1]), dim=-1).values
    smallest = best.gather(-1, (top_k - 1).clamp(0, best.shape[-1] - 1))
    return logits.masked_fill((logits < smallest) & (top_k > 0), -torch.inf)


def keep_top_p(logits: Tensor, top_p: Tensor) -> Tensor:
    """`logits` [B, V] with the least likely at -inf, as long as those dropped sum to at most 1 - `top_p` [B, 1].

    At least one stays. A row with `top_p` 1 keeps every id that can be drawn. Costs a sort.
    """
    ascending, order = logits.sort(dim=-1)
    is_dropped = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    is_dropped[:, -1].fill_(False)
    return logits.masked_fill(is_dropped.scatter(-1, order, is_dropped), -torch.inf)


def pick(logits: Tensor, noise: Tensor, is_greedy: Tensor) -> Tensor:
    """One id per row, [B] int64: the largest of `logits` where `is_greedy` [B, 1], else drawn from their softmax.

    `noise` is Gumbel noise [B, V]. Of equal values the first wins.
    """
    return (logits + noise.masked_fill(is_greedy, 0.0)).argmax(dim=-1)
