"""config.json of Fish S2: released field names and official defaults; unused keys are ignored."""

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sonoro.nn.configs import read_released
from sonoro.nn.transformer import DecoderConfig, Rotary

from .codec import CodecConfig

RELEASED = {"fish-s2-pro": "fishaudio/s2-pro"}
"""Released configuration (packaged), and the hub repository of its weights."""


@dataclass(frozen=True, kw_only=True)
class StackConfig:
    """Sizes of the slow AR (the backbone) or the fast AR (the depth model)."""

    vocab_size: int
    n_layer: int
    dim: int
    n_head: int
    n_local_heads: int
    head_dim: int
    intermediate_size: int
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    max_seq_len: int = 2048
    attention_qk_norm: bool = False
    tie_word_embeddings: bool = True
    attention_qkv_bias: bool = False
    attention_o_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class AudioDecoderConfig(StackConfig):
    """The fast AR."""

    num_codebooks: int
    tie_word_embeddings: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """config.json. `codec_config` is our own key: released folders lack it and use the released codec."""

    eos_token_id: int
    semantic_start_token_id: int
    semantic_end_token_id: int
    text_config: StackConfig
    audio_decoder_config: AudioDecoderConfig
    codec_config: CodecConfig = field(default_factory=CodecConfig)


def model_config(source: Path | str) -> ModelConfig:
    """Read and check the configuration of a folder or of one of `RELEASED`. Raises `CheckpointError` naming the key."""
    return read_released(ModelConfig, source, __package__, _expected)


class _Config(DecoderConfig):
    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        # Trained with tables rounded to bfloat16; with exact ones the released weights sound bad.
        cos, sin = super().rotary(positions, torch.bfloat16)
        return cos.to(dtype), sin.to(dtype)


def decoder_config(config: ModelConfig, stack: StackConfig) -> DecoderConfig:
    """The `DecoderConfig` of `stack`. RoPE base and epsilon are the slow AR's for both, as in the official code."""
    return _Config(
        width=stack.dim,
        intermediate=stack.intermediate_size,
        layers=stack.n_layer,
        heads=stack.n_head,
        kv_heads=stack.n_local_heads,
        head_width=stack.head_dim,
        norm_eps=config.text_config.norm_eps,
        rope_theta=config.text_config.rope_base,
    )


def _expected(config: ModelConfig) -> list[tuple[str, object, object]]:
    """Keys of config.json with their values and the only supported ones."""
    text, audio = config.text_config, config.audio_decoder_config
    codes = config.semantic_end_token_id - config.semantic_start_token_id + 1
    highest = text.vocab_size - 1
    expected: list[tuple[str, object, object]] = [
        ("text_config.tie_word_embeddings", text.tie_word_embeddings, True),
        ("audio_decoder_config.tie_word_embeddings", audio.tie_word_embeddings, False),
        ("audio_decoder_config.dim", audio.dim, text.dim),
        ("audio_decoder_config.vocab_size", audio.vocab_size, codes),
        ("eos_token_id", config.eos_token_id, min(config.eos_token_id, highest)),
        ("semantic_end_token_id", config.semantic_end_token_id, min(config.semantic_end_token_id, highest)),
    ]
    for name, stack in (("text_config", text), ("audio_decoder_config", audio)):
        expected.append((f"{name}.attention_qkv_bias", stack.attention_qkv_bias, False))
        expected.append((f"{name}.attention_o_bias", stack.attention_o_bias, False))
        decoder_config(config, stack)
    return expected
