"""The codec encoder: whole recordings to frames of codes, for in-context cloning.

Follows the encoder of transformers 4.57.3 modeling_mimi.py MimiModel, as QwenLM/Qwen3-TTS uses it. Its layers are
those of other SEANet encoders, under the released names but for their parts; unused codebooks are not built."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.nn.causal import name_layers
from sonoro.nn.elu import EluEncoder
from sonoro.nn.gelu import GeluWindowLayer
from sonoro.nn.history import WHOLE, in_pieces
from sonoro.nn.window import WindowConfig, WindowLayers

from .config import CodecEncoderConfig

_DOWNSAMPLE_STRIDE = 2
"""From the transformer's 25 Hz to the codec's 12.5 frames per second."""

_ALL_COLUMNS = 1 << 30
_PIECE_COLUMNS = 100  # Convolved at a time, 4 s of audio.


def _convolutions(config: CodecEncoderConfig) -> EluEncoder:
    """Audio to columns of `hop` samples, 25 a second."""
    kernels = config.kernel_size, config.residual_kernel_size, config.last_kernel_size
    dilations = [config.dilation_growth_rate**index for index in range(config.num_residual_layers)]
    ratios = config.upsampling_ratios[::-1]
    return EluEncoder(config.hidden_size, config.num_filters, ratios, kernels, config.compress, dilations=dilations)


def _transformer(config: CodecEncoderConfig) -> WindowLayers:
    """Causal, of all columns before: transformers applies the configured window with flash-attention alone."""
    heads = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    sizes = config.hidden_size, config.intermediate_size, config.num_hidden_layers, *heads
    window = WindowConfig(*sizes, norm_eps=config.norm_eps, rope_theta=config.rope_theta, window=_ALL_COLUMNS)
    return WindowLayers(window, partial(GeluWindowLayer, approximate="none"))


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
        convolutions, width = _convolutions(config), config.hidden_size
        self.encoder = nn.ModuleDict({"layers": convolutions})
        self.encoder_transformer = nn.ModuleDict({"layers": _transformer(config)})
        self.downsample = nn.ModuleDict(
            {"conv": nn.Conv1d(width, width, 2 * _DOWNSAMPLE_STRIDE, _DOWNSAMPLE_STRIDE, bias=False)}
        )
        self.quantizer = _Quantizer(config, levels)
        self.layout, self.column = name_layers(convolutions), convolutions.hop
        self.hop = self.column * _DOWNSAMPLE_STRIDE

    def latents(self, audio: Tensor, piece_columns: int | None = None) -> Tensor:
        """The latents of `audio` [B, S] before quantisation: [B, hidden_size, ceil(S / hop)]. Differentiable.
        Convolves all at once, or `piece_columns` columns (of hop / 2 samples) at a time, of one recording: the same up
        to rounding."""
        convolve, attend = self.encoder["layers"], self.encoder_transformer["layers"]
        if piece_columns is None:
            x = convolve(audio, WHOLE)
        else:
            x = in_pieces(convolve, audio, piece_columns * self.column, self.layout)
        x = attend(x, WHOLE).mT
        # The first column stands for those before it, and the last for those behind it.
        padding = (_DOWNSAMPLE_STRIDE, -x.shape[-1] % _DOWNSAMPLE_STRIDE)
        return self.downsample["conv"](F.pad(x, padding, "replicate"))

    @torch.no_grad()
    def quantize(self, latents: Tensor) -> Tensor:
        """The nearest codes of `latents` [B, hidden_size, T]: [B, T, K] int64, distances in float32."""
        return self.quantizer(latents)

    @torch.no_grad()
    def encode(self, audio: Tensor) -> Tensor:
        """Frames [T, K] int64 of mono `audio` [S], T = ceil(S / hop); S at least 1."""
        return self.quantize(self.latents(audio.to(next(self.parameters()))[None], _PIECE_COLUMNS))[0]
