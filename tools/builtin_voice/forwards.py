"""Whole sequences through the talker and its code predictor, as training has them: differentiable, nothing kept.

What the engine runs is `sonoro.models.qwen3_tts.frame`, which is tested against these.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sonoro.models.qwen3_tts.backbone import Talker
from sonoro.models.qwen3_tts.prompt import TalkerPrompt
from sonoro.nn.transformer import causal_attention

__all__ = ["TalkerOutput", "embed_prompt", "predictor_logits", "talker_forward"]


class TalkerOutput(NamedTuple):
    """Of every position: `hidden` [B, T, H] after the final norm, `logits` [B, T, V] of codebook 0."""

    hidden: Tensor
    logits: Tensor


def embed_prompt(talker: Talker, prompt: TalkerPrompt) -> Tensor:
    """Embed all tokens of `prompt`, with its x-vector: [P, H]."""
    x_vectors = None
    if prompt.x_vector_row is not None:
        assert prompt.voice is not None
        size = prompt.positions, talker.config.hidden_size
        x_vectors = torch.zeros(size, device=talker.device, dtype=talker.dtype)
        x_vectors[prompt.x_vector_row] = prompt.voice.data.x_vector.to(talker.device)
    return talker.embed_rows(prompt.text_rows.to(talker.device), prompt.code_rows.to(talker.device), x_vectors)


def talker_forward(talker: Talker, rows: Tensor) -> TalkerOutput:
    """Whole sequences `rows` [B, T, H], right padding allowed, from position 0."""
    rotary = talker.model.config.rotary(torch.arange(rows.shape[1], device=rows.device), rows.dtype)
    hidden = talker.model(rows, rotary, causal_attention)
    return TalkerOutput(hidden, talker.codec_head(hidden))


def predictor_logits(talker: Talker, hidden: Tensor, codes: Tensor) -> Tensor:
    """Logits [..., K-1, V] of codebooks 1 .. K-1, each given the true codes before it.

    `hidden` [..., H] is the row of `talker_forward` that decides codebook 0 of `codes` [..., K] int64.
    """
    predictor, given = talker.code_predictor, talker.embed_codes(codes)[..., :-1, :]
    rows = predictor.small_to_mtp_projection(torch.cat((hidden[..., None, :], given), dim=-2)).flatten(0, -3)
    rotary = predictor.model.config.rotary(torch.arange(rows.shape[1], device=rows.device), rows.dtype)
    states = predictor.model(rows, rotary, causal_attention)
    logits = torch.stack([head(states[:, book + 1]) for book, head in enumerate(predictor.lm_head)], dim=1)
    return logits.unflatten(0, hidden.shape[:-1])
