"""The codec decoder: patches of latents to audio at 48 kHz, with causal layers over [B, T, C] that stream exactly."""

import bisect
import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from sonoro.models.shared.latents import LatentDecoder
from sonoro.nn.causal import CausalConv1d, name_layers
from sonoro.nn.history import Context
from sonoro.nn.vocoder import DepthwiseUnit, LinearSnake, UpsampleBlock, reach_frames
from sonoro.nn.vocoder_fused import FusedBlocks, Past
from sonoro.ops.causal import depthwise, with_context


@dataclass(frozen=True, kw_only=True)
class CodecConfig:
    """`audio_vae_config` of config.json, with the released defaults, plus `patch_size`.
    The decoder is conditioned on the bin of `out_sample_rate` among the edges `sr_bin_boundaries`. Other conditions and
    blocks of the official class have other tensors, so loading rejects them."""

    encoder_dim: int = 128
    encoder_rates: tuple[int, ...] = (2, 5, 8, 8)
    latent_dim: int = 64
    decoder_dim: int = 2048
    decoder_rates: tuple[int, ...] = (8, 6, 5, 2, 2, 2)
    sr_bin_boundaries: tuple[int, ...] = (20000, 30000, 40000)
    sample_rate: int = 16000
    out_sample_rate: int = 48000
    patch_size: int = 4


class _ConditionedBlock(UpsampleBlock):
    def __init__(self, config: CodecConfig, channels: int, rate: int) -> None:
        super().__init__(channels, rate, LinearSnake, DepthwiseUnit)
        # A rate equal to an edge belongs to the bin below.
        self.bin = bisect.bisect_left(config.sr_bin_boundaries, config.out_sample_rate)
        bins = len(config.sr_bin_boundaries) + 1
        self.scale_embed, self.bias_embed = nn.Embedding(bins, channels), nn.Embedding(bins, channels)

    @property
    def affine(self) -> tuple[Tensor, Tensor]:
        return self.scale_embed.weight[self.bin], self.bias_embed.weight[self.bin]


class CodecDecoder(LatentDecoder):
    """Patches to audio, `hop` samples each. Follows OpenBMB/VoxCPM voxcpm/modules/audiovae/audio_vae_v2.py AudioVAE.
    `layout` is that of its `History`; `reach_frames` the receptive field of its state, in patches."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        rates, patch = config.decoder_rates, (config.patch_size, config.latent_dim)
        widths = [config.decoder_dim >> index for index in range(len(rates) + 1)]
        blocks = [_ConditionedBlock(config, width, rate) for width, rate in zip(widths, rates, strict=False)]
        lead = CausalConv1d(patch[1], patch[1], 7, groups=patch[1]), CausalConv1d(patch[1], widths[0], 1)
        self.model = nn.ModuleList([*lead, *blocks, LinearSnake(widths[-1]), CausalConv1d(widths[-1], 1, 7)])
        self.patch, self.hop = patch, patch[0] * math.prod(rates)
        self.reach_frames = -(-reach_frames((), rates) // patch[0])
        self.layout = name_layers(self)

    @staticmethod
    def is_wide(name: str) -> bool:
        """Whether the tensor `name` stays in float32 in any dtype: conditions, and parameters of Snake rates."""
        return name.endswith((".alpha", "_embed.weight"))

    def contextualize(self, latents: Tensor, history: Context) -> Tensor:
        """Return `latents` unchanged (there is no long left context), and advance `history`."""
        history.advance(latents.shape[1])
        return latents

    def render(self, x: Tensor, history: Context) -> Tensor:
        """Patches [B, T, P, D] to audio [B, T * hop]."""
        *layers, activation, last = self.model
        x = x.flatten(1, 2)
        for layer in layers:
            x = layer(x, history)
        return last(activation(x), history).squeeze(2).tanh()


class FusedDecoder:
    """A finalized `CodecDecoder` as fused kernels; residual streams are in `stream_dtype`. Capturable."""

    def __init__(self, decoder: CodecDecoder, stream_dtype: torch.dtype) -> None:
        first, *layers = decoder.model
        self.first, self.dtype = cast(CausalConv1d, first), decoder.weight.dtype
        self.blocks = FusedBlocks(layers, "tanh", stream_dtype)

    def contextualize(self, frames: Tensor, past: Past) -> Tensor:
        """Return `frames` [B, T, P, D] unchanged; advances the history."""
        past.advance(frames.shape[1])
        return frames

    def render(self, x: Tensor, past: Past) -> Tensor:
        """Patches [B, T, P, D] to audio [B, T * hop]."""
        first = self.first.conv
        x = with_context(x.flatten(1, 2), self.dtype, past.left_context(None, self.first))
        x = depthwise(x, first.weight[:, 0].mT.contiguous(), first.bias, 1, past.left_context(self.first))
        return self.blocks(x, past)
