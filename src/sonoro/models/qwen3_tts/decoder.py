"""The codec decoder: frames of codes to audio, with causal layers that stream exactly.

Sequences are [B, T, C] inside. Parameter names are the released ones, with Q, K, V and gate, up fused."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.models.shared.streaming import example_codes
from sonoro.nn.causal import CausalConv1d, name_layers
from sonoro.nn.history import WHOLE, Context
from sonoro.nn.linear import Linear, RMSNorm
from sonoro.nn.vocoder import LogSnake, Upsampler, Vocoder, finalize, reach_frames
from sonoro.nn.vocoder_fused import FusedVocoder, Past, fold_layers, scaled, taps
from sonoro.nn.window import WindowConfig, WindowLayers
from sonoro.ops.causal import embed_sum
from sonoro.ops.conv import Epilogue, conv

from .config import CodecDecoderConfig, stack_sizes


class _Codebook(nn.Module):
    """A codebook stored as EMA sums and counts of the vectors assigned to each code; not trained by gradients."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.embedding_sum = nn.Parameter(torch.zeros(size, width), requires_grad=False)
        self.cluster_usage = nn.Parameter(torch.ones(size), requires_grad=False)

    def table(self) -> Tensor:
        return self.embedding_sum / self.cluster_usage.clamp(min=1e-5)[:, None]


class _CodebookGroup(nn.Module):
    """Codebooks that share one output projection."""

    def __init__(self, levels: int, size: int, width: int) -> None:
        super().__init__()
        books = [nn.ModuleDict({"_codebook": _Codebook(size, width // 2)}) for _ in range(levels)]
        self.vq = nn.ModuleDict({"layers": nn.ModuleList(books)})
        self.output_proj = nn.Conv1d(width // 2, width, 1, bias=False)

    def projected_tables(self) -> Tensor:
        """The projected codebooks [levels, size, width]: what each code adds to the latent."""
        tables = [book.table() for book in self.vq.modules() if isinstance(book, _Codebook)]
        return F.linear(torch.stack(tables), self.output_proj.weight[:, :, 0])


class _Quantizer(nn.Module):
    """Codes to latents: the sum over codebooks of rows of projected tables."""

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


class _Transformer(nn.Module):
    """The only part with long left context: `num_hidden_layers` windows of `sliding_window` frames."""

    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        self.input_proj = Linear(config.latent_dim, config.hidden_size)
        self.layers = WindowLayers(WindowConfig(**stack_sizes(config), window=config.sliding_window))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.output_proj = Linear(config.hidden_size, config.latent_dim)

    def forward(self, x: Tensor, history: Context) -> Tensor:
        return self.output_proj(self.norm(self.layers(self.input_proj(x), history)))


class CodecDecoder(nn.Module):
    """Frames to audio. Follows QwenLM/Qwen3-TTS modeling_qwen3_tts_tokenizer_v2.py Qwen3TTSTokenizerV2Decoder.
    `hop` is samples per frame, `layout` that of its `History`, `reach_frames` the receptive field of the state of
    `render`. Differentiable; without gradients it uses the tables of `finalize`."""

    def __init__(self, config: CodecDecoderConfig) -> None:
        super().__init__()
        self.config = config
        latent, rates, ratios = config.latent_dim, config.upsample_rates, config.upsampling_ratios
        self.quantizer = _Quantizer(config)
        self.pre_conv = CausalConv1d(config.codebook_dim, latent, 3)
        self.pre_transformer = _Transformer(config)
        self.upsample = Upsampler(latent, ratios)
        self.decoder = Vocoder(latent, config.decoder_dim, rates, LogSnake, "clamp")
        self.hop = math.prod(rates) * math.prod(ratios)
        self.reach_frames = reach_frames(ratios, rates)
        self.layout = name_layers(self)
        self.codes = config.num_quantizers, config.codebook_size

    @staticmethod
    def is_wide(name: str) -> bool:
        """Whether the tensor `name` stays in float32 in any dtype: tables are derived from it."""
        return name.startswith("quantizer.") or name.endswith((".alpha", ".beta"))

    @property
    def weight(self) -> Tensor:
        return self.pre_conv.conv.weight

    def example(self, rows: int, columns: int) -> Tensor:
        return example_codes(rows, columns, self.codes, self.weight.device)

    def latents(self, frames: Tensor) -> Tensor:
        """The sum of the code vectors of `frames` [B, T, K] int64: [B, codebook_dim, T]."""
        return self.quantizer(frames).mT

    def forward(self, latents: Tensor, history: Context = WHOLE) -> Tensor:
        """Decode `latents` [B, codebook_dim, T] to audio [B, T * hop] in [-1, 1]; by default whole sequences."""
        return self.render(self.contextualize(latents, history), history)

    def contextualize(self, latents: Tensor, history: Context) -> Tensor:
        """Run the transformer: `latents` to [B, T, latent_dim]."""
        return self.pre_transformer(self.pre_conv(latents.mT, history), history)

    def render(self, x: Tensor, history: Context) -> Tensor:
        """Run the layers of short left context, `reach_frames`: [B, T, latent_dim] to audio [B, T * hop]."""
        return self.decoder(self.upsample(x, history), history)

    @torch.no_grad()
    def finalize(self) -> None:
        self.quantizer.folded = self.quantizer.projected_tables().to(self.weight.dtype)
        finalize(self)


class FusedDecoder:
    """A finalized `CodecDecoder` as fused kernels; residual streams are in `stream_dtype`.
    Shares its weights, except for small ones that are folded. Capturable."""

    def __init__(self, decoder: CodecDecoder, stream_dtype: torch.dtype) -> None:
        assert decoder.quantizer.folded is not None
        self.decoder = decoder
        self.tables = decoder.quantizer.folded
        transformer = decoder.pre_transformer
        self.layers = fold_layers(transformer.layers)
        self.output_weight = scaled(transformer.output_proj.weight, transformer.norm.weight)
        self.render = FusedVocoder(decoder.upsample, decoder.decoder, stream_dtype)

    def contextualize(self, frames: Tensor, past: Past) -> Tensor:
        """Embed `frames` [B, T, K] int64 and run the transformer: [B, T, latent_dim]."""
        pre_conv, transformer = self.decoder.pre_conv, self.decoder.pre_transformer
        x = embed_sum(frames.contiguous(), self.tables, past.left_context(None, pre_conv))
        _, x = conv(x, taps(pre_conv), pre_conv.conv.bias, 1, past.left_context(pre_conv))
        project = transformer.input_proj
        stream = Epilogue(plain=torch.promote_types(x.dtype, torch.float32))
        x, _ = conv(x, project.weight[None], project.bias, epilogue=stream)
        for layer in self.layers:
            x = layer(x, past)
        past.advance(frames.shape[1])
        eps = transformer.norm.eps
        return conv(x, self.output_weight, transformer.output_proj.bias, epilogue=Epilogue(norm_eps=eps))[1]
