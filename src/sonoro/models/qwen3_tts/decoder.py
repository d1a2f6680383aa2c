"""The codec's decoder: frames of codes to audio by causal layers that stream exactly.

Sequences are [B, T, C] inside. Parameter names are the released ones, with q, k, v and gate, up fused on their rows.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.causal import CausalConv1d, CausalConvTranspose1d, CausalLayer, lay_out, name_layers
from sonoro.nn.history import WHOLE, Context
from sonoro.nn.transformer import RMSNorm, Rotary, rotary_tables, rotate
from sonoro.ops.activation import snake_beta, snake_beta_rates

from .config import CodecDecoderConfig

__all__ = ["CodecDecoder", "ConvNext", "ResidualUnit", "Snake", "TransformerLayer", "UpsampleBlock"]

UNIT_DILATIONS = (1, 3, 9)


class _Codebook(nn.Module):
    """A table kept as sums and counts of what fell to each code; training by averages writes them, gradients do not."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.embedding_sum = nn.Parameter(torch.zeros(size, width), requires_grad=False)
        self.cluster_usage = nn.Parameter(torch.ones(size), requires_grad=False)

    def table(self) -> Tensor:
        return self.embedding_sum / self.cluster_usage.clamp(min=1e-5)[:, None]


class _CodebookLevel(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self._codebook = _Codebook(size, width)


class _CodebookLevels(nn.Module):
    def __init__(self, levels: int, size: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_CodebookLevel(size, width) for _ in range(levels))


class _CodebookGroup(nn.Module):
    """Codebooks that share one projection to the latent."""

    def __init__(self, levels: int, size: int, width: int) -> None:
        super().__init__()
        self.vq = _CodebookLevels(levels, size, width // 2)
        self.output_proj = nn.Conv1d(width // 2, width, 1, bias=False)

    def projected_tables(self) -> Tensor:
        """What each code adds to the latent: [levels, size, width]."""
        tables = [cast(_CodebookLevel, level)._codebook.table() for level in self.vq.layers]
        return F.linear(torch.stack(tables), self.output_proj.weight[:, :, 0])


class _Quantizer(nn.Module):
    """Codes to latents: one row of a projected table per codebook, summed."""

    folded: Tensor | None

    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        size, width, semantic = config.codebook_size, config.codebook_dim, config.num_semantic_quantizers
        self.rvq_first = _CodebookGroup(semantic, size, width)
        self.rvq_rest = _CodebookGroup(config.num_quantizers - semantic, size, width)
        self.register_buffer("folded", None, persistent=False)

    def forward(self, frames: Tensor) -> Tensor:
        """Frames [B, T, K] to latents [B, T, width]."""
        tables = self.projected_tables() if self.folded is None or torch.is_grad_enabled() else self.folded
        books, size, _ = tables.shape
        return F.embedding(frames + torch.arange(books, device=frames.device) * size, tables.flatten(0, 1)).sum(2)

    def projected_tables(self) -> Tensor:
        return torch.cat([self.rvq_first.projected_tables(), self.rvq_rest.projected_tables()])


class Snake(nn.Module):
    """SnakeBeta by channel of [B, T, C], with the exponentials kept by `finalize` when no gradient is wanted."""

    exp_alpha: Tensor | None
    inverse_beta: Tensor | None

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(channels))
        self.beta = nn.Parameter(torch.zeros(channels))
        self.register_buffer("exp_alpha", None, persistent=False)
        self.register_buffer("inverse_beta", None, persistent=False)

    def finalize(self) -> None:
        self.exp_alpha, self.inverse_beta = snake_beta_rates(self.alpha.detach(), self.beta.detach())

    def forward(self, x: Tensor) -> Tensor:
        if self.exp_alpha is None or self.inverse_beta is None or torch.is_grad_enabled():
            return snake_beta(x, *snake_beta_rates(self.alpha, self.beta), channel_dim=-1)
        return snake_beta(x, self.exp_alpha, self.inverse_beta, channel_dim=-1)


class _LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((width,), 0.01))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class _WindowAttention(CausalLayer):
    """Attention over a column and the window - 1 before it, whose rotated keys and values the history keeps."""

    def __init__(self, config: CodecDecoderConfig) -> None:
        assert config.sliding_window > 1
        super().__init__(config.sliding_window - 1, 2 * config.num_key_value_heads * config.head_dim)
        self.heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.head_dim = config.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, sum(self.heads) * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor, history: Context) -> Tensor:
        heads = self.qkv_proj(x).view(*x.shape[:2], -1, self.head_dim)
        queries, keys, values = heads.split(self.heads, dim=2)
        pairs = torch.cat([rotate(keys, rotary), values], dim=2).flatten(2)
        pairs = history.recall(self.key, pairs)
        keys, values = pairs.view(*pairs.shape[:2], -1, self.head_dim).transpose(1, 2).chunk(2, dim=1)
        out = F.scaled_dot_product_attention(
            rotate(queries, rotary).transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            enable_gqa=self.heads[0] != self.heads[1],
        )
        return self.o_proj(out.transpose(1, 2).flatten(2))


class _FeedForward(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class TransformerLayer(nn.Module):
    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = _WindowAttention(config)
        self.self_attn_layer_scale = _LayerScale(width)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = _FeedForward(width, config.intermediate_size)
        self.mlp_layer_scale = _LayerScale(width)

    def forward(self, x: Tensor, rotary: Rotary, mask: Tensor, history: Context) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), rotary, mask, history))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class _Transformer(nn.Module):
    """The only part with a long memory: `num_hidden_layers` windows of `sliding_window` frames."""

    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        self.window, self.head_dim, self.rope_theta = config.sliding_window, config.head_dim, config.rope_theta
        self.input_proj = nn.Linear(config.latent_dim, config.hidden_size)
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        x = self.input_proj(x)
        frames = x.shape[1]
        positions = history.positions(frames, x.device)
        rotary = rotary_tables(positions, self.head_dim, self.rope_theta, x.dtype)
        key = cast(TransformerLayer, self.layers[0]).self_attn.key
        known = history.recalled(key, frames, x.device)[:, None]
        distance = positions[:, :, None] - known
        mask = ((distance >= 0) & (distance < self.window) & (known >= 0))[:, None]
        for layer in self.layers:
            x = layer(x, rotary, mask, history)
        history.advance(frames)
        return self.output_proj(self.norm(x))


class ConvNext(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dwconv = CausalConv1d(width, width, 7, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.pwconv1 = nn.Linear(width, 4 * width)
        self.pwconv2 = nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor, history: Context) -> Tensor:
        y = self.norm(self.dwconv(x, history))
        return x + self.gamma * self.pwconv2(F.gelu(self.pwconv1(y)))


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1, self.act2 = Snake(channels), Snake(channels)
        self.conv1 = CausalConv1d(channels, channels, 7, dilation)
        self.conv2 = CausalConv1d(channels, channels, 1)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x), history)), history)


class UpsampleBlock(nn.Module):
    """`rate` times as many columns of half the channels."""

    def __init__(self, channels: int, rate: int) -> None:
        super().__init__()
        half = channels // 2
        units = [ResidualUnit(half, dilation) for dilation in UNIT_DILATIONS]
        self.block = nn.ModuleList([Snake(channels), CausalConvTranspose1d(channels, half, 2 * rate, rate), *units])

    def forward(self, x: Tensor, history: Context) -> Tensor:
        activation, *layers = self.block
        x = activation(x)
        for layer in layers:
            x = layer(x, history)
        return x


class CodecDecoder(nn.Module):
    """Frames to audio. Follows QwenLM/Qwen3-TTS modeling_qwen3_tts_tokenizer_v2.py Qwen3TTSTokenizerV2Decoder.

    `hop` samples per frame. `layout` says what a `History` must keep for it. Differentiable; once finalized, and while
    gradients are off, it uses derived tables.
    """

    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        self.config = config
        latent, channels, rates = config.latent_dim, config.decoder_dim, config.upsample_rates
        self.quantizer = _Quantizer(config)
        self.pre_conv = CausalConv1d(config.codebook_dim, latent, 3)
        self.pre_transformer = _Transformer(config)
        self.upsample = nn.ModuleList(
            nn.ModuleList([CausalConvTranspose1d(latent, latent, ratio, ratio), ConvNext(latent)])
            for ratio in config.upsampling_ratios
        )
        widths = [channels >> index for index in range(len(rates) + 1)]
        blocks = [UpsampleBlock(width, rate) for width, rate in zip(widths, rates, strict=False)]
        first, last = CausalConv1d(latent, channels, 7), CausalConv1d(widths[-1], 1, 7)
        self.decoder = nn.ModuleList([first, *blocks, Snake(widths[-1]), last])
        self.hop = math.prod(rates) * math.prod(config.upsampling_ratios)
        self.layout = name_layers(self)

    def latents(self, frames: Tensor) -> Tensor:
        """The sum of the code vectors of `frames` [B, T, K] int64: [B, codebook_dim, T]."""
        return self.quantizer(frames).mT

    def forward(self, latents: Tensor, history: Context = WHOLE) -> Tensor:
        """Audio [B, T * hop] in [-1, 1] of `latents` [B, codebook_dim, T]; the whole sequence unless `history` says."""
        return self.render(self.contextualize(latents, history), history)

    def contextualize(self, latents: Tensor, history: Context) -> Tensor:
        """The long memory: `latents` through the transformer, [B, T, latent_dim]."""
        return self.pre_transformer(self.pre_conv(latents.mT, history), history)

    def render(self, x: Tensor, history: Context) -> Tensor:
        """The short memory, `reach_frames`: [B, T, latent_dim] to audio [B, T * hop]."""
        for pair in self.upsample:
            for layer in cast(nn.ModuleList, pair):
                x = layer(x, history)
        first, *blocks, activation, last = self.decoder
        x = first(x, history)
        for block in blocks:
            x = block(x, history)
        return last(activation(x), history).squeeze(2).clamp(-1, 1)

    @property
    def reach_frames(self) -> int:
        """How many frames back anything kept within `render` depends on."""
        reach, rate = 0.0, 1
        for ratio in self.config.upsampling_ratios:
            rate *= ratio
            reach += 6 / rate
        reach += 6 / rate
        for ratio in self.config.upsample_rates:
            reach += 1 / rate
            rate *= ratio
            reach += 6 * sum(UNIT_DILATIONS) / rate
        return math.ceil(reach + 6 / rate)

    @torch.no_grad()
    def finalize(self) -> None:
        """Make the tables derived from parameters and order the weights in memory: once, after loading and casting."""
        self.quantizer.folded = self.quantizer.projected_tables().to(self.pre_conv.conv.weight.dtype)
        for module in self.modules():
            if isinstance(module, Snake):
                module.finalize()
        lay_out(self)
