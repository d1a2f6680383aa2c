"""The codec encoder: whole recordings to frames of codes, for in-context cloning.

Follows the encoder of transformers 4.57.3 modeling_mimi.py MimiModel, as QwenLM/Qwen3-TTS uses it. Parameter names are
the released ones, with Q, K and V fused; unused codebooks are not built."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.linear import Linear
from sonoro.nn.transformer import Attention, DecoderConfig, Rotary, causal_attention
from sonoro.nn.window import LayerScale

from .config import CodecEncoderConfig

_DOWNSAMPLE_STRIDE = 2
"""From the transformer's 25 Hz to the codec's 12.5 frames per second."""

_PIECE_COLUMNS = 100
"""Columns convolved at a time, 4 s of audio: a minute at once takes gigabytes and occupies the GPU for long."""


class _Conv(nn.Module):
    """Strided causal convolution, [B, C, S] to [B, C_out, ceil(S / stride)]; pads left, and right to whole strides."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, *, stride: int = 1, dilation: int = 1, bias: bool = True
    ) -> None:
        super().__init__()
        self.conv = nn.Conv1d(in_channels, out_channels, kernel, stride, dilation=dilation, bias=bias)
        self.left = (kernel - 1) * dilation + 1 - stride

    def forward(self, x: Tensor, mode: str = "constant") -> Tensor:
        return self.conv(F.pad(x, (self.left, -x.shape[-1] % self.conv.stride[0]), mode))


class _ResidualBlock(nn.Module):
    def __init__(self, config: CodecEncoderConfig, channels: int, dilation: int) -> None:
        super().__init__()
        inner = channels // config.compress
        self.block = nn.Sequential(
            nn.ELU(),
            _Conv(channels, inner, config.residual_kernel_size, dilation=dilation),
            nn.ELU(),
            _Conv(inner, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


class _Convolutions(nn.Module):
    """Audio [B, 1, S] to columns of `hop` samples, 25 a second; the receptive field is `reach` samples further left."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        channels = config.num_filters
        layers: list[nn.Module] = [_Conv(1, channels, config.kernel_size)]
        for ratio in reversed(config.upsampling_ratios):
            for index in range(config.num_residual_layers):
                layers.append(_ResidualBlock(config, channels, config.dilation_growth_rate**index))
            layers += [nn.ELU(), _Conv(channels, 2 * channels, 2 * ratio, stride=ratio)]
            channels *= 2
        layers += [nn.ELU(), _Conv(channels, config.hidden_size, config.last_kernel_size)]
        self.layers = nn.Sequential(*layers)
        self.hop, self.reach = 1, 0
        for layer in self.modules():
            if isinstance(layer, _Conv):
                self.reach += self.hop * layer.left
                self.hop *= layer.conv.stride[0]

    def forward(self, x: Tensor, piece_columns: int | None = None) -> Tensor:
        """Convolve all of `x` at once, or `piece_columns` columns at a time: the same up to rounding."""
        if piece_columns is None:
            return self.layers(x)
        piece, context = piece_columns * self.hop, -(-self.reach // self.hop) * self.hop
        columns = []
        for start in range(0, x.shape[-1], piece):
            begin = max(0, start - context)
            columns.append(self.layers(x[..., begin : start + piece])[..., (start - begin) // self.hop :])
        return torch.cat(columns, dim=-1)


class _FeedForward(nn.Module):
    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.fc1 = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.fc2 = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def _decoder_config(config: CodecEncoderConfig) -> DecoderConfig:
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    sizes = config.hidden_size, config.intermediate_size, config.num_hidden_layers, *heads
    return DecoderConfig(*sizes, norm_eps=config.norm_eps, rope_theta=config.rope_theta)


class _TransformerLayer(nn.Module):
    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.input_layernorm = nn.LayerNorm(width, eps=config.norm_eps)
        self.self_attn = Attention(_decoder_config(config))
        self.self_attn_layer_scale = LayerScale(width)
        self.post_attention_layernorm = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = _FeedForward(config)
        self.mlp_layer_scale = LayerScale(width)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.self_attn_layer_scale(self.self_attn(self.input_layernorm(x), 0, rotary, causal_attention))
        return x + self.mlp_layer_scale(self.mlp(self.post_attention_layernorm(x)))


class _Transformer(nn.Module):
    """Causal transformer without a window: transformers applies the configured one with flash-attention alone."""

    def __init__(self, config: CodecEncoderConfig) -> None:
        super().__init__()
        self.config = _decoder_config(config)
        self.layers = nn.ModuleList(_TransformerLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x: Tensor) -> Tensor:
        rotary = self.config.rotary(torch.arange(x.shape[1], device=x.device), x.dtype)
        for layer in self.layers:
            x = layer(x, rotary)
        return x


class _Codebook(nn.Module):
    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.embed_sum = nn.Parameter(torch.zeros(size, width), requires_grad=False)
        self.cluster_usage = nn.Parameter(torch.ones(size), requires_grad=False)

    def table(self) -> Tensor:
        return self.embed_sum / self.cluster_usage.clamp(min=1e-5)[:, None]


class _ResidualQuantizer(nn.Module):
    """Residual vector quantisation: each level codes the residual of the levels before it."""

    def __init__(self, config: CodecEncoderConfig, levels: int) -> None:
        super().__init__()
        self.input_proj = nn.Conv1d(config.hidden_size, config.codebook_dim, 1, bias=False)
        books = [_Codebook(config.codebook_size, config.codebook_dim) for _ in range(levels)]
        self.layers = nn.ModuleList(nn.ModuleDict({"codebook": book}) for book in books)

    def forward(self, latents: Tensor) -> list[Tensor]:
        rest = self.input_proj(latents).mT.float()
        codes = []
        for book in (part for part in self.layers.modules() if isinstance(part, _Codebook)):
            table = book.table().float()
            codes.append(torch.cdist(rest, table.expand(rest.shape[0], -1, -1)).argmin(-1))
            rest = rest - F.embedding(codes[-1], table)
        return codes


class _Quantizer(nn.Module):
    def __init__(self, config: CodecEncoderConfig, levels: int) -> None:
        super().__init__()
        semantic = config.num_semantic_quantizers
        self.semantic_residual_vector_quantizer = _ResidualQuantizer(config, semantic)
        self.acoustic_residual_vector_quantizer = _ResidualQuantizer(config, levels - semantic)

    def forward(self, latents: Tensor) -> Tensor:
        # Both quantise the same latents: the acoustic part does not code the semantic part's residual.
        semantic = self.semantic_residual_vector_quantizer(latents)
        return torch.stack(semantic + self.acoustic_residual_vector_quantizer(latents), dim=-1)


class CodecEncoder(nn.Module):
    """Audio to frames of `levels` codes, `hop` samples each. Use float32: codes near a tie depend on rounding."""

    def __init__(self, config: CodecEncoderConfig, levels: int) -> None:
        super().__init__()
        self.encoder = _Convolutions(config)
        self.encoder_transformer = _Transformer(config)
        width, stride = config.hidden_size, _DOWNSAMPLE_STRIDE
        self.downsample = _Conv(width, width, 2 * stride, stride=stride, bias=False)
        self.quantizer = _Quantizer(config, levels)
        self.hop = self.encoder.hop * _DOWNSAMPLE_STRIDE

    def latents(self, audio: Tensor, piece_columns: int | None = None) -> Tensor:
        """The latents of `audio` [B, 1, S] before quantisation: [B, hidden_size, ceil(S / hop)]. Differentiable.
        Convolves all at once, or `piece_columns` columns (of hop / 2 samples) at a time: the same up to rounding."""
        x = self.encoder_transformer(self.encoder(audio, piece_columns).mT).mT
        return self.downsample(x, mode="replicate")

    @torch.no_grad()
    def quantize(self, latents: Tensor) -> Tensor:
        """The nearest codes of `latents` [B, hidden_size, T]: [B, T, K] int64, distances in float32."""
        return self.quantizer(latents)

    @torch.no_grad()
    def encode(self, audio: Tensor) -> Tensor:
        """Frames [T, K] int64 of mono `audio` [S], T = ceil(S / hop); S at least 1."""
        weight = self.downsample.conv.weight
        return self.quantize(self.latents(audio.to(weight.device, weight.dtype)[None, None], _PIECE_COLUMNS))[0]
