"""The codec decoder as a chain of fused kernels, with the weights, history and results of `CodecDecoder`.

For inference on a GPU; training and CPUs run the modules."""

from __future__ import annotations

import torch
from torch import Tensor

from sonoro.nn.vocoder_fused import FusedVocoder, Past, fold_layers, scaled, taps
from sonoro.ops.causal import embed_sum
from sonoro.ops.conv import Epilogue, conv

from .decoder import CodecDecoder


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
