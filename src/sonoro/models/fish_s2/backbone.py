"""The slow AR (backbone) and the fast AR (depth model), under the released names; the decode step is in `frame.py`."""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.models.shared.step import Feedback
from sonoro.nn.linear import Linear, lay_out_by_input
from sonoro.nn.transformer import Attention, DecoderStack, NormedAttention
from sonoro.ops.causal import embed_sum

from .config import ModelConfig, StackConfig, decoder_config


class DualAR(nn.Module):
    """All modules of the released safetensors files. Call `finalize` once the weights are final.
    The slow AR's head has `codes` + 1 outputs: the codes of codebook 0, then the end of speech."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        audio = config.audio_decoder_config
        self.codebooks, self.codes = audio.num_codebooks, audio.vocab_size
        self.text_model = nn.ModuleDict({"model": _SlowAR(config)})
        self.audio_decoder = _FastAR(config)
        self.head: Linear
        self.code_starts: Tensor
        self.register_buffer("code_starts", None, persistent=False)

    @property
    def slow(self) -> _SlowAR:
        return cast(_SlowAR, self.text_model["model"])

    @property
    def fast(self) -> _FastAR:
        return self.audio_decoder

    @property
    def device(self) -> torch.device:
        return self.slow.embeddings.weight.device

    @torch.no_grad()
    def finalize(self) -> None:
        """Derive what inference needs from the loaded weights. Call once."""
        self.requires_grad_(False).eval()
        # The files have interleaved rotary pairs.
        for stack in (self.slow, self.fast):
            stack.split_pairs()
        first, table = self.config.semantic_start_token_id, self.slow.embeddings.weight
        # Only these ids can be sampled: the head reads 21 MB instead of 798.
        rows = (table[first : first + self.codes], table[self.config.eos_token_id][None])
        self.head = Linear.derived(torch.cat(rows))
        self.code_starts = torch.arange(self.codebooks, device=self.device) * self.codes
        if self.device.type == "cpu":
            lay_out_by_input(self)

    def embed(self, columns: Tensor) -> Tensor:
        """Embed columns [..., 1 + K] int64 of a token id and K codes: [..., H].
        For a code of codebook 0: the sum of token and codes over sqrt(K + 1), rounded after each operation."""
        tokens, config = columns[..., 0], self.config
        is_code = (tokens >= config.semantic_start_token_id) & (tokens <= config.semantic_end_token_id)
        text = self.slow.embeddings(tokens)
        codes = F.embedding(columns[..., 1:] + self.code_starts, self.fast.codebook_embeddings.weight).sum(-2)
        return torch.where(is_code[..., None], (text + codes) / math.sqrt(self.codebooks + 1), text)

    @property
    def feedback(self) -> Feedback:
        """The feedback of a frame: equals `embed` of its column, but reads the rows of the head.
        The first frame cannot end speech: as in the official code, an end there is fed back as that token."""
        table, first, divisor = self.fast.codebook_embeddings.weight, self.head.weight, math.sqrt(self.codebooks + 1)

        def embed(codes: Tensor) -> Tensor:
            tables = table.unflatten(0, (self.codebooks, self.codes))
            return (first[codes[:, 0]] + embed_sum(codes[:, None], tables)[:, 0]) / divisor

        return Feedback(
            embed, table, self.code_starts, self.codes, end=self.codes, earliest_end=1, first=first, divisor=divisor
        )


class _SlowAR(DecoderStack):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__(decoder_config(config, config.text_config), _attention(config.text_config))
        self.embeddings = nn.Embedding(config.text_config.vocab_size, config.text_config.dim)


class _FastAR(DecoderStack):
    """`codebook_embeddings` embed the slow AR's input; the released files store them here."""

    def __init__(self, config: ModelConfig) -> None:
        audio = config.audio_decoder_config
        super().__init__(decoder_config(config, audio), _attention(audio))
        self.codebook_embeddings = nn.Embedding(audio.num_codebooks * audio.vocab_size, audio.dim)
        self.embeddings = nn.Embedding(audio.vocab_size, audio.dim)
        self.output = Linear(audio.dim, audio.vocab_size, bias=False)


def _attention(stack: StackConfig) -> type[Attention]:
    return NormedAttention if stack.attention_qk_norm else Attention
