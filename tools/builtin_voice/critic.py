"""The discriminator of the codec's adversarial training: on STFTs of several resolutions, and on waves folded at
several periods.

Least-squares GAN: real sounds should score 1, generated ones 0; the codec wants its own to score 1, and to match the
discriminator's features. After the multi-period discriminator of HiFi-GAN
(Kong et al., 2020) and the multi-scale STFT discriminator of EnCodec (Defossez et al., 2022), both made narrower.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

__all__ = ["Critic", "Verdict", "critic_loss", "maker_losses"]

_SLOPE = 0.1


class Verdict(NamedTuple):
    """The output for one resolution or period: `scores` [B, 1, ...] and the features of every layer before."""

    scores: Tensor
    inner: list[Tensor]


def _layer(inputs: int, outputs: int, kernel: tuple[int, int], stride: tuple[int, int]) -> nn.Module:
    return weight_norm(nn.Conv2d(inputs, outputs, kernel, stride, (kernel[0] // 2, kernel[1] // 2)))


class _Judge(nn.Module):
    """Convolutions over an image [B, C, H, W] that a subclass derives from the sound."""

    def __init__(self, layers: Iterable[nn.Module], score: nn.Module) -> None:
        super().__init__()
        self.layers, self.score = nn.ModuleList(layers), score

    def image(self, audio: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, audio: Tensor) -> Verdict:
        x = self.image(audio).contiguous(memory_format=torch.channels_last)
        inner = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), _SLOPE)
            inner.append(x)
        return Verdict(self.score(x), inner)


class _SpectrumJudge(_Judge):
    """Discriminates the complex spectrum of one window length, [B, 2, T, F], with four strides over frequency."""

    def __init__(self, window: int, channels: int) -> None:
        narrowing = (_layer(2 if first else channels, channels, (3, 9), (1, 2)) for first in (True, *[False] * 3))
        last = _layer(channels, channels, (3, 3), (1, 1))
        super().__init__([*narrowing, last], _layer(channels, 1, (3, 3), (1, 1)))
        self.window = window
        self.register_buffer("hann", torch.hann_window(window))

    def image(self, audio: Tensor) -> Tensor:
        bins = torch.stft(
            audio.float(), self.window, self.window // 4, window=self.hann, normalized=True, return_complex=True
        )
        return torch.stack((bins.real, bins.imag), dim=1).mT


class _PeriodJudge(_Judge):
    """Discriminates the wave folded at `period` samples: [B, 1, S / period, period]."""

    def __init__(self, period: int, channels: int) -> None:
        widths = [1, channels, 3 * channels, 8 * channels, 16 * channels]
        narrowing = [_layer(*pair, (5, 1), (3, 1)) for pair in itertools.pairwise(widths)]
        last = _layer(widths[-1], widths[-1], (5, 1), (1, 1))
        super().__init__([*narrowing, last], _layer(widths[-1], 1, (3, 1), (1, 1)))
        self.period = period

    def image(self, audio: Tensor) -> Tensor:
        whole = audio.shape[-1] // self.period * self.period
        return audio[:, :whole].unflatten(1, (-1, self.period))[:, None]


class Critic(nn.Module):
    """All discriminators: a verdict on sounds [B, S] for each of `windows` and each of `periods`."""

    def __init__(
        self,
        windows: tuple[int, ...] = (512, 1024, 2048),
        periods: tuple[int, ...] = (2, 3, 5, 7, 11),
        channels: int = 32,
    ) -> None:
        super().__init__()
        spectral = (_SpectrumJudge(window, channels) for window in windows)
        self.judges = nn.ModuleList([*spectral, *(_PeriodJudge(period, channels) for period in periods)])
        self.to(memory_format=torch.channels_last)

    def forward(self, audio: Tensor) -> list[Verdict]:
        return [judge(audio) for judge in self.judges]


def critic_loss(real: list[Verdict], made: list[Verdict]) -> Tensor:
    """The discriminator's loss, averaged over its parts."""
    terms = [
        (true.scores.float() - 1).square().mean() + false.scores.float().square().mean()
        for true, false in zip(real, made, strict=True)
    ]
    return torch.stack(terms).mean()


def maker_losses(real: list[Verdict], made: list[Verdict]) -> tuple[Tensor, Tensor]:
    """The generator's adversarial loss and feature-matching loss (relative distance), averaged over the parts."""
    passing = [(false.scores.float() - 1).square().mean() for false in made]
    matching = [
        (left.float() - right.float()).abs().mean() / right.float().abs().mean()
        for true, false in zip(real, made, strict=True)
        for left, right in zip(false.inner, true.inner, strict=True)
    ]
    return torch.stack(passing).mean(), torch.stack(matching).mean()
