"""Log-mel spectra: the input of the codec's encoder, and the basis of its losses.

Magnitudes are clamped to `FLOOR`. Without it, most of a log-spectral loss would be about inaudible parts: above 8 kHz
and between words the teachers have next to nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sonoro.models.qwen3_tts.voice import mel_filterbank

__all__ = ["Bands", "SpectralLoss", "SpeechSpectra"]

FLOOR = 3e-4
"""Floor of a mel band with windows of 1,024 samples: about white noise at -69 dBFS."""


class Bands(nn.Module):
    """STFT magnitudes with Hann windows of `length` samples and step `hop`, and their `bands` mel bands up to
    `top_hz`."""

    window: Tensor
    bank: Tensor

    def __init__(self, sample_rate: int, length: int, hop: int, bands: int, top_hz: float) -> None:
        super().__init__()
        self.length, self.hop, self.floor = length, hop, FLOOR * length / 1024
        bank = torch.as_tensor(mel_filterbank(sample_rate, length, bands, 0.0, top_hz))
        self.register_buffer("window", torch.hann_window(length), persistent=False)
        self.register_buffer("bank", bank.float(), persistent=False)

    def magnitudes(self, audio: Tensor) -> Tensor:
        """`audio` [B, S], padded with silence, to [B, length / 2 + 1, S / hop]; window t is centred on hop t."""
        reach = (self.length - self.hop) // 2
        bins = torch.stft(
            F.pad(audio, (reach, reach)), self.length, self.hop, window=self.window, center=False, return_complex=True
        )
        return (torch.view_as_real(bins).square().sum(-1) + 1e-9).sqrt()

    def log_mel(self, magnitudes: Tensor) -> Tensor:
        return (self.bank @ magnitudes).clamp(min=self.floor).log()

    def distance(self, made: Tensor, wanted: Tensor) -> Tensor:
        """L1 between log-mel spectra of magnitudes. Missing energy has a gradient below the floor too, or it could
        never be recovered."""
        aim = self.bank @ wanted
        floor = torch.where(aim > self.floor, self.floor / 30, self.floor)
        return F.l1_loss(torch.maximum(self.bank @ made, floor).log(), aim.clamp(min=self.floor).log())


class SpeechSpectra(nn.Module):
    """`audio` [B, S] to columns [B, S / column, width]: two short windows for time resolution and a long one for pitch.
    Values are about -1 to 3."""

    column = 480
    _SHORT_BANDS, _LONG_BANDS, _TOP_HZ = 80, 160, 12_000.0
    width = 2 * _SHORT_BANDS + _LONG_BANDS

    def __init__(self, sample_rate: int) -> None:
        super().__init__()
        self.short = Bands(sample_rate, 512, self.column // 2, self._SHORT_BANDS, self._TOP_HZ)
        self.long = Bands(sample_rate, 2048, self.column, self._LONG_BANDS, self._TOP_HZ)

    def forward(self, audio: Tensor) -> Tensor:
        spectra = [self._columns(bands, audio) for bands in (self.short, self.long)]
        return torch.cat(spectra, dim=-1) / 2 + 3

    def _columns(self, bands: Bands, audio: Tensor) -> Tensor:
        mel = bands.log_mel(bands.magnitudes(audio)).mT
        return mel.unflatten(1, (-1, self.column // bands.hop)).flatten(2)


class SpectralLoss(nn.Module):
    """Multi-resolution spectral loss of two waveforms [B, S]: L1 of log-mel spectra plus relative error of magnitudes
    (spectral convergence), averaged over window lengths."""

    def __init__(self, sample_rate: int) -> None:
        super().__init__()
        sizes = {256: 32, 512: 64, 1024: 80, 2048: 128}
        self.all_bands = nn.ModuleList(
            Bands(sample_rate, length, length // 4, bands, sample_rate / 2) for length, bands in sizes.items()
        )

    def forward(self, made: Tensor, wanted: Tensor) -> Tensor:
        total = made.new_zeros(())
        for bands in self.all_bands:
            left, right = bands.magnitudes(made), bands.magnitudes(wanted)
            relative = (left - right).norm(dim=(1, 2)) / (right.norm(dim=(1, 2)) + 1e-3)
            total = total + bands.distance(left, right) + relative.mean()
        return total / len(self.all_bands)
