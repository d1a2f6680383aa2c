"""The built-in voice's codec for training: an encoder of spectra, one residual quantiser and the engine's decoder.

The released layout has two output projections (first codebook, remaining ones). Both get the same weights, so that it
stores a plain residual chain. The encoder is not part of a checkpoint.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from builtin_voice import phones
from builtin_voice.quantizer import ResidualQuantizer
from builtin_voice.spectra import SpeechSpectra
from sonoro.models.qwen3_tts.codec import CodecDecoder
from sonoro.models.qwen3_tts.config import CodecConfig
from sonoro.nn.history import WHOLE

__all__ = ["CONTEXT_FRAMES", "VoiceCodec"]

CONTEXT_FRAMES = 4
"""Receptive field of a code: frames to either side of its own."""
_WIDTH = 512


class _Unit(nn.Module):
    """A residual convolution of kernel 3, [B, C, T] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.widen = nn.Conv1d(width, 2 * width, 3, padding=1)
        self.narrow = nn.Conv1d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.widen(self.norm(x.mT).mT)))


class _Encoder(nn.Module):
    """Columns of spectra [B, T * ratio, width_in] to one latent per frame, [B, C, T]. Not causal; for training only."""

    def __init__(self, width_in: int, ratio: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(width_in, _WIDTH, 1),
            *(_Unit(_WIDTH) for _ in range(4)),
            nn.Conv1d(_WIDTH, _WIDTH, ratio, ratio),
            _Unit(_WIDTH),
            _Unit(_WIDTH),
        )
        self.norm = nn.LayerNorm(_WIDTH)

    def forward(self, columns: Tensor) -> Tensor:
        return self.norm(self.layers(columns.mT).mT).mT


class Told(NamedTuple):
    """Target spectra `wanted` and those predicted from the codes, `sketch`, [B, N, width]; logits of `phones` [B, N, P]
    from all codes and from the `first` code of each frame; and the commitment loss."""

    wanted: Tensor
    sketch: Tensor
    phones: Tensor
    first: Tensor
    commitment: Tensor


class VoiceCodec(nn.Module):
    """`encoder` and `quantizer` code the `spectra` of speech. The first half of the decoder predicts spectra and phones
    from the codes, through two layers for training only, and a third layer predicts phones from the first code; the
    second half of the decoder makes the sound."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        decoder = config.decoder_config
        self.decoder = CodecDecoder(decoder)
        self.spectra = SpeechSpectra(config.output_sample_rate)
        self._ratio = self.decoder.hop // self.spectra.column
        self.encoder = _Encoder(self.spectra.width, self._ratio)
        self.quantizer = ResidualQuantizer(
            _WIDTH, decoder.codebook_dim // 2, decoder.codebook_dim, decoder.num_quantizers, decoder.codebook_size
        )
        self.sketch = nn.Linear(decoder.latent_dim, self.spectra.width)
        self.phones = nn.Linear(decoder.latent_dim, phones.COUNT)
        self.first_phones = nn.Linear(decoder.codebook_dim // 2, self._ratio * phones.COUNT)
        self._margin = CONTEXT_FRAMES * self.decoder.hop
        _open_branches(self)

    def codes(self, audio: Tensor) -> Tensor:
        """Encode `audio` [B, S], padded with silence, to codes [B, T, K] int64, T = S / hop."""
        return self.inner_codes(F.pad(audio, (self._margin, self._margin)))

    @torch.no_grad()
    def inner_codes(self, audio: Tensor) -> Tensor:
        """The codes of `audio` [B, S] without the first and last `CONTEXT_FRAMES`, which are only context."""
        return self.quantizer(self._inner_latents(self.spectra(audio))).codes

    def _inner_latents(self, columns: Tensor) -> Tensor:
        return self.encoder(columns)[..., CONTEXT_FRAMES:-CONTEXT_FRAMES]

    def told(self, audio: Tensor) -> Told:
        """Predictions from the codes of `audio` [B, S], without the first and last `CONTEXT_FRAMES`."""
        columns, margin = self.spectra(audio), CONTEXT_FRAMES * self._ratio
        coded = self.quantizer(self._inner_latents(columns))
        inner = self.decoder.upsample(self.decoder.contextualize(coded.quantized, WHOLE), WHOLE)
        first = self.first_phones(coded.first.mT).unflatten(-1, (self._ratio, -1)).flatten(1, 2)
        return Told(columns[:, margin:-margin], self.sketch(inner), self.phones(inner), first, coded.commitment)

    def spoken(self, codes: Tensor) -> Tensor:
        """Decode codes [B, T, K] to sound [B, T * hop]."""
        return self.decoder(self.quantizer.project_out(self.quantizer.looked_up(codes).mT))

    @torch.no_grad()
    def released_decoder(self) -> CodecDecoder:
        """The decoder with the trained codebooks and projection, in the layout of a checkpoint."""
        quantizer = self.decoder.quantizer
        for group, books in (
            (quantizer.rvq_first, self.quantizer.books[:1]),
            (quantizer.rvq_rest, self.quantizer.books[1:]),
        ):
            group.output_proj.weight.copy_(self.quantizer.project_out.weight)
            for level, book in zip(group.vq.layers, books, strict=True):
                level._codebook.embedding_sum.copy_(book)
                level._codebook.cluster_usage.fill_(1.0)
        return self.decoder


@torch.no_grad()
def _open_branches(codec: VoiceCodec) -> None:
    """Set the layer scales of residual branches to 0.1: the default is too small for a short training."""
    for name, parameter in codec.named_parameters():
        if name.endswith(("gamma", "layer_scale.scale")):
            nn.init.constant_(parameter, 0.1)
