"""A codec like the built-in voice's, with small widths, and sounds for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from builtin_voice import settings
from builtin_voice.voice_codec import VoiceCodec
from sonoro.models.qwen3_tts.config import CodecConfig
from sonoro.nn.configs import build


@pytest.fixture
def codec_values() -> dict[str, Any]:
    """The built-in voice's own, with every width cut down; books, rates and strides as they are."""
    values = settings.codec_config()
    values["decoder_config"] |= {
        "latent_dim": 16, "codebook_dim": 16, "decoder_dim": 32, "hidden_size": 16,
        "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
        "head_dim": 8,
    }  # fmt: skip
    return values


@pytest.fixture
def tiny_codec(codec_values: dict[str, Any], chords: Callable[[int, int], Tensor]) -> VoiceCodec:
    """Drawn, not trained; its books are as wide as its latents."""
    torch.manual_seed(0)
    codec = VoiceCodec(build(CodecConfig, codec_values, "codec"))
    with torch.no_grad():
        quantizer = codec.quantizer
        latents = codec.encoder(codec.spectra(chords(2, 20 * settings.HOP)))
        spread = quantizer.project_in(latents).std(unbiased=False)
        shrinking = 0.6 ** torch.arange(len(quantizer.books))[:, None, None]
        quantizer.books.copy_(torch.randn(quantizer.books.shape) * spread * shrinking)
    return codec.eval()


@pytest.fixture(scope="session")
def chords() -> Callable[[int, int], Tensor]:
    """Makes sounds [B, S] float32 in [-1, 1]: chords that fade in and out, different in every row."""

    def make(batch: int, samples: int) -> Tensor:
        time = torch.arange(samples) / settings.SAMPLE_RATE
        pitches = 110 * 2 ** (torch.arange(batch) / 5)
        tones = [torch.sin(2 * torch.pi * part * pitches[:, None] * time) / part for part in (1, 2, 3)]
        return 0.2 * torch.stack(tones).sum(0) * torch.sin(torch.pi * 3 * time).square()

    return make
