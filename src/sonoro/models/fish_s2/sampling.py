"""How ids are drawn: the nucleus before the temperature, and another draw where the first repeats what was just said.

Follows fishaudio/fish-speech fish_speech/models/text2semantic/inference.py `logits_to_probs`, `decode_one_token_ar`, in
float32 throughout. Capturable, no sync.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sonoro.ops.sample import draw_nucleus
from sonoro.runtime.sampling import SamplingRow

__all__ = ["WINDOW", "draw_first", "draw_rest"]

WINDOW = 10
"""How many codes before it codebook 0 avoids to repeat."""

_AGAIN_TEMPERATURE, _AGAIN_TOP_P, _LEAST_TEMPERATURE = 1.0, 0.9, 1e-5


def draw_first(logits: Tensor, noise: Tensor, noise_again: Tensor, row: SamplingRow, recent: Tensor) -> Tensor:
    """Codebook 0, [B] int64, of `logits` [B, V], whose last column is end of speech, with Gumbel noise [B, V].

    One that is among `recent` [B, W] int64 is drawn again, once, with its own noise and from a wider choice.
    """
    is_end = torch.arange(logits.shape[1], device=logits.device) == logits.shape[1] - 1
    logits = logits.masked_fill(is_end & row.ignore_eos, -torch.inf)
    drawn = draw_rest(logits, noise, row)
    temperature, top_p = (torch.full_like(row.top_p, value) for value in (_AGAIN_TEMPERATURE, _AGAIN_TOP_P))
    again = draw_nucleus(logits, noise_again, temperature, row.top_k, top_p, row.is_greedy)
    return torch.where((recent == drawn[:, None]).any(dim=1), again, drawn)


def draw_rest(logits: Tensor, noise: Tensor, row: SamplingRow) -> Tensor:
    """One of the other codebooks, [B] int64, of `logits` [B, V] with Gumbel `noise` [B, V]."""
    temperature = row.temperature.clamp(min=_LEAST_TEMPERATURE)
    return draw_nucleus(logits, noise, temperature, row.top_k, row.top_p, row.is_greedy)
