"""The codec: frames of codes to audio by causal layers that stream exactly, and audio to frames for cloning.

Sequences are [B, T, C] inside. Parameter names are the released ones, with q, k, v and gate, up fused on their rows.
"""

from __future__ import annotations

import math
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.core.errors import CheckpointError
from sonoro.models.base import Voice
from sonoro.nn.causal import CausalConv1d, CausalConvTranspose1d, CausalLayer, lay_out, name_layers
from sonoro.nn.history import WHOLE, Context, History
from sonoro.nn.transformer import RMSNorm, Rotary, rotary_tables, rotate
from sonoro.ops.activation import snake_beta, snake_beta_rates

from .config import CodecConfig, CodecDecoderConfig
from .encoder import CodecEncoder

__all__ = ["CodecDecoder", "Qwen3Codec"]

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


class _Snake(nn.Module):
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


class _TransformerLayer(nn.Module):
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
        self.layers = nn.ModuleList(_TransformerLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output_proj = nn.Linear(config.hidden_size, config.latent_dim)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        x = self.input_proj(x)
        frames = x.shape[1]
        positions = history.positions(frames, x.device)
        rotary = rotary_tables(positions, self.head_dim, self.rope_theta, x.dtype)
        key = cast(_TransformerLayer, self.layers[0]).self_attn.key
        known = history.recalled(key, frames, x.device)[:, None]
        distance = positions[:, :, None] - known
        mask = ((distance >= 0) & (distance < self.window) & (known >= 0))[:, None]
        for layer in self.layers:
            x = layer(x, rotary, mask, history)
        history.advance(frames)
        return self.output_proj(self.norm(x))


class _ConvNext(nn.Module):
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


class _ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int) -> None:
        super().__init__()
        self.act1, self.act2 = _Snake(channels), _Snake(channels)
        self.conv1 = CausalConv1d(channels, channels, 7, dilation)
        self.conv2 = CausalConv1d(channels, channels, 1)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        return x + self.conv2(self.act2(self.conv1(self.act1(x), history)), history)


class _UpsampleBlock(nn.Module):
    """`rate` times as many columns of half the channels."""

    def __init__(self, channels: int, rate: int) -> None:
        super().__init__()
        half = channels // 2
        units = [_ResidualUnit(half, dilation) for dilation in UNIT_DILATIONS]
        self.block = nn.ModuleList([_Snake(channels), CausalConvTranspose1d(channels, half, 2 * rate, rate), *units])

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
            nn.ModuleList([CausalConvTranspose1d(latent, latent, ratio, ratio), _ConvNext(latent)])
            for ratio in config.upsampling_ratios
        )
        widths = [channels >> index for index in range(len(rates) + 1)]
        blocks = [_UpsampleBlock(width, rate) for width, rate in zip(widths, rates, strict=False)]
        first, last = CausalConv1d(latent, channels, 7), CausalConv1d(widths[-1], 1, 7)
        self.decoder = nn.ModuleList([first, *blocks, _Snake(widths[-1]), last])
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
        self.quantizer.folded = self.quantizer.projected_tables()
        for module in self.modules():
            if isinstance(module, _Snake):
                module.finalize()
        lay_out(self)


class Qwen3Codec(nn.Module):
    """Frames to audio and back; implements `sonoro.models.base.Codec`. Its state_dict is speech_tokenizer's file.

    Call `finalize` once after loading. Raises `CheckpointError` for a configuration that contradicts itself.
    """

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        self.sample_rate = config.output_sample_rate
        self.decoder = CodecDecoder(config.decoder_config)
        self.hop = self.decoder.hop
        _check_equal("decode_upsample_rate", config.decode_upsample_rate, "product of its rates", self.hop)
        self.encoder = None
        if config.encoder_config is not None:
            self.encoder = CodecEncoder(config.encoder_config, config.encoder_valid_num_quantizers)
            _check_equal("encode_downsample_rate", config.encode_downsample_rate, "encoder's stride", self.encoder.hop)

    def finalize(self) -> None:
        """Make what is derived from the loaded weights. Not capturable."""
        self.decoder.finalize()

    def allocate(self, slots: int) -> History:
        """A zeroed history for `slots` rows and the scratch row, in the dtype and on the device of the weights."""
        weight = self.decoder.pre_conv.conv.weight
        return History(self.decoder.layout, slots, device=weight.device, dtype=weight.dtype)

    def reset(self, history: History, slots: Tensor) -> None:
        """Forget what rows `slots` saw. Capturable."""
        history.reset(slots)

    @torch.no_grad()
    def prime(self, history: History, slots: Tensor, voice: Voice) -> None:
        """Leave rows `slots` (freshly reset) as if they had decoded the voice's reference frames.

        Only the last `reach_frames` are rendered: what the layers of `render` keep depends on no more.
        """
        assert voice.reference_frames is not None
        rows = history.at(slots)
        latents = self.decoder.latents(voice.reference_frames.to(slots.device)[None])
        x = self.decoder.contextualize(latents.expand(slots.shape[0], -1, -1), rows)
        self.decoder.render(x[:, -self.decoder.reach_frames :], rows)

    @torch.no_grad()
    def decode(self, frames: Tensor, slots: Tensor | None = None, history: History | None = None) -> Tensor:
        """Decode `frames` [B, T, K] int64 to PCM [B, T * hop] in [-1, 1], advancing rows `slots` of `history`.

        Float32, or float64 if the weights are. Capturable; no sync. Without a history it is the whole-sequence decode.
        Exact: equals the whole-sequence decode up to rounding, for any split into chunks.
        """
        assert (history is None) == (slots is None)
        rows: Context = WHOLE if history is None or slots is None else history.at(slots)
        pcm = self.decoder(self.decoder.latents(frames), rows)
        return pcm.to(torch.promote_types(pcm.dtype, torch.float32))

    @torch.no_grad()
    def encode(self, audio: Tensor) -> Tensor:
        """Encode mono `audio` [S] at `sample_rate` to frames [T, K] int64, T = ceil(S / hop). Synchronises nothing.

        Raises `CheckpointError` if the checkpoint has no encoder.
        """
        if self.encoder is None:
            raise CheckpointError("speech_tokenizer/config.json has no encoder_config: this codec cannot encode audio")
        return self.encoder.encode(audio)


def _check_equal(field: str, value: int, what: str, derived: int) -> None:
    if value != derived:
        raise CheckpointError(f"speech_tokenizer/config.json: {field} is {value}, but the {what} is {derived}")
