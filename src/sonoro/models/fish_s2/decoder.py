"""The codec decoder: frames of codes to audio, with causal layers that stream exactly; and the codebooks, which the
encoder shares.

Sequences are [B, T, C]. Rotary pairs are (i, i + D / 2); released weights have interleaved pairs, reordered at load."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sonoro.models.shared.streaming import example_codes
from sonoro.nn import window
from sonoro.nn.causal import name_layers
from sonoro.nn.codebooks import Codebooks, VectorQuantizer, joint_table
from sonoro.nn.history import Context
from sonoro.nn.transformer import Rotary
from sonoro.nn.vocoder import LinearSnake, Upsampler, Vocoder, finalize, reach_frames
from sonoro.nn.vocoder_fused import FusedVocoder, Past, fold_layers
from sonoro.nn.window import WindowTransformer
from sonoro.ops.causal import embed_sum
from sonoro.ops.norm import rms_norm
from sonoro.ops.window import window_attention


@dataclass(frozen=True)
class WindowConfig(window.WindowConfig):
    """Sizes of a stack of this codec, which was trained with rotary tables rounded to bfloat16."""

    has_rounded_angles: bool = True

    def rotary(self, positions: Tensor, dtype: torch.dtype) -> Rotary:
        cos, sin = super().rotary(positions, torch.bfloat16 if self.has_rounded_angles else dtype)
        return cos.to(dtype), sin.to(dtype)

    def attend(self, qkv: Tensor, past: tuple[Tensor, Tensor, Tensor] | None) -> Tensor:
        heads, angles = (self.heads, self.kv_heads), self.has_rounded_angles
        return window_attention(qkv, heads, self.window, self.rope_theta, past, has_rounded_angles=angles)


_TRANSFORMER = WindowConfig(
    width=1024, intermediate=3072, layers=8, heads=16, kv_heads=16, head_width=64, window=128, norm_eps=1e-5,
    rope_theta=10000.0,
)  # fmt: skip
_ENCODER_TRANSFORMER = replace(_TRANSFORMER, layers=4, window=512)


@dataclass(frozen=True)
class CodecConfig:
    """Sizes of the codec; defaults are those of the released one, whose folder does not store them.
    `encoder_transformer` follows the encoder's last block; `transformer` is used before and after the codebooks."""

    sample_rate: int = 44100
    encoder_dim: int = 64
    encoder_rates: tuple[int, ...] = (2, 4, 8, 8)
    encoder_transformer: WindowConfig = _ENCODER_TRANSFORMER
    downsample: tuple[int, ...] = (2, 2)
    transformer: WindowConfig = _TRANSFORMER
    semantic_codes: int = 4096
    residual_codes: int = 1024
    residual_codebooks: int = 9
    codebook_width: int = 8
    decoder_dim: int = 1536
    decoder_rates: tuple[int, ...] = (8, 8, 4, 2)


class Quantizer(nn.Module):
    """Codes to columns: the sum over codebooks of rows of projected tables. The first codebook is the semantic one."""

    folded: Tensor | None

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        widths = (config.transformer.width, config.codebook_width)
        self.semantic_quantizer = Codebooks(1, config.semantic_codes, *widths)
        self.quantizer = Codebooks(config.residual_codebooks, config.residual_codes, *widths)
        self.register_buffer("folded", None, persistent=False)

    @property
    def levels(self) -> list[VectorQuantizer]:
        """All codebooks, in the order of a frame's codes."""
        return [*self.semantic_quantizer.levels, *self.quantizer.levels]

    def forward(self, frames: Tensor) -> Tensor:
        """Embed frames [B, T, K] int64: columns [B, T, width]. Codes beyond their codebook are clamped to its last."""
        assert self.folded is not None
        return embed_sum(frames.contiguous(), self.folded)


class CodecDecoder(nn.Module):
    """Frames to audio, `hop` samples each. Follows fishaudio/fish-speech fish_speech/models/dac/modded_dac.py DAC.
    `layout` is that of its `History`; `reach_frames` the receptive field of the state of `render`."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        width, ratios, rates = config.transformer.width, config.downsample[::-1], config.decoder_rates
        self.quantizer = Quantizer(config)
        self.post_module = WindowTransformer(config.transformer)
        self.upsample = Upsampler(width, ratios)
        self.model = Vocoder(width, config.decoder_dim, rates, LinearSnake, "tanh")
        self.hop = math.prod(ratios) * math.prod(rates)
        self.reach_frames = reach_frames(ratios, rates)
        self.layout = name_layers(self)
        self.codes = 1 + config.residual_codebooks, config.residual_codes

    @staticmethod
    def is_wide(name: str) -> bool:
        """Whether the tensor `name` stays in float32 in any dtype: tables are derived from it."""
        return name.startswith("quantizer.") or name.endswith(".alpha")

    @property
    def weight(self) -> Tensor:
        return self.post_module.norm.weight

    def example(self, rows: int, columns: int) -> Tensor:
        return example_codes(rows, columns, self.codes, self.weight.device)

    def latents(self, frames: Tensor) -> Tensor:
        """The sum of the code vectors of `frames` [B, T, K] int64: [B, T, width]."""
        return self.quantizer(frames)

    def contextualize(self, latents: Tensor, history: Context) -> Tensor:
        """Run the transformer: `latents` to [B, T, width]."""
        return self.post_module(latents, history)

    def render(self, x: Tensor, history: Context) -> Tensor:
        """Run the layers of short left context, `reach_frames`: [B, T, width] to audio [B, T * hop]."""
        return self.model(self.upsample(x, history), history)

    @torch.no_grad()
    def finalize(self) -> None:
        self.quantizer.folded = joint_table(self.quantizer.levels).to(self.weight.dtype)
        finalize(self)


class FusedDecoder:
    """A finalized `CodecDecoder` as fused kernels; residual streams are in `stream_dtype`. Capturable."""

    def __init__(self, decoder: CodecDecoder, stream_dtype: torch.dtype) -> None:
        norm = decoder.post_module.norm
        self.quantizer, self.eps = decoder.quantizer, norm.eps
        # In the dtype of the stream, which one kernel norms.
        self.weight = norm.weight.to(torch.promote_types(norm.weight.dtype, torch.float32))
        self.layers = fold_layers(decoder.post_module.layers)
        self.render = FusedVocoder(decoder.upsample, decoder.model, stream_dtype)

    def contextualize(self, frames: Tensor, past: Past) -> Tensor:
        """Embed `frames` [B, T, K] int64 and run the transformer: [B, T, width]."""
        x = self.quantizer(frames)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        for layer in self.layers:
            x = layer(x, past)
        past.advance(frames.shape[1])
        return rms_norm(x.flatten(0, 1), self.weight, self.eps).view_as(x)
