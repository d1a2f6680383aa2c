"""The adversary of the codec's training: a critic that looks at spectra of several resolutions for what is not speech.

Least squares: real sounds are to score 1, made ones 0, and the codec wants its own to score 1. Matching the critic's
inner columns is the steadier half of what the codec learns from it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

__all__ = ["Critic", "Verdict", "critic_loss", "maker_losses"]

_SLOPE = 0.1


class Verdict(NamedTuple):
    """Of one resolution: `scores` [B, 1, T, F] and the columns of every layer before it."""

    scores: Tensor
    inner: list[Tensor]


class _Judge(nn.Module):
    """Convolutions over the complex spectrum of one window length, narrowing frequency three times."""

    def __init__(self, window: int, channels: int) -> None:
        super().__init__()
        self.window = window
        self.register_buffer("hann", torch.hann_window(window))

        def layer(width: int, kernel: tuple[int, int], stride: tuple[int, int], out: int = channels) -> nn.Module:
            padding = (kernel[0] // 2, kernel[1] // 2)
            return weight_norm(nn.Conv2d(width, out, kernel, stride, padding))

        self.layers = nn.ModuleList(
            [
                layer(2, (3, 9), (1, 1)),
                *(layer(channels, (3, 9), (1, 2)) for _ in range(3)),
                layer(channels, (3, 3), (1, 1)),
            ]
        )
        self.score = layer(channels, (3, 3), (1, 1), out=1)

    def forward(self, audio: Tensor) -> Verdict:
        bins = torch.stft(
            audio.float(), self.window, self.window // 4, window=self.hann, normalized=True, return_complex=True
        )
        x = torch.stack((bins.real, bins.imag), dim=1).mT.contiguous(memory_format=torch.channels_last)
        inner = []
        for layer in self.layers:
            x = F.leaky_relu(layer(x), _SLOPE)
            inner.append(x)
        return Verdict(self.score(x), inner)


class Critic(nn.Module):
    """A verdict on sounds [B, S] for each of `windows`."""

    def __init__(self, windows: tuple[int, ...] = (512, 1280), channels: int = 24) -> None:
        super().__init__()
        self.judges = nn.ModuleList(_Judge(window, channels) for window in windows)
        self.to(memory_format=torch.channels_last)

    def forward(self, audio: Tensor) -> list[Verdict]:
        return [judge(audio) for judge in self.judges]


def critic_loss(real: list[Verdict], made: list[Verdict]) -> Tensor:
    """How far the critic is from telling real from made, averaged over resolutions."""
    terms = [
        (true.scores.float() - 1).square().mean() + false.scores.float().square().mean()
        for true, false in zip(real, made, strict=True)
    ]
    return torch.stack(terms).mean()


def maker_losses(real: list[Verdict], made: list[Verdict]) -> tuple[Tensor, Tensor]:
    """How far the codec is from passing for real, and the relative distance of inner columns; both averaged."""
    passing = [(false.scores.float() - 1).square().mean() for false in made]
    matching = [
        (left.float() - right.float()).abs().mean() / right.float().abs().mean()
        for true, false in zip(real, made, strict=True)
        for left, right in zip(false.inner, true.inner, strict=True)
    ]
    return torch.stack(passing).mean(), torch.stack(matching).mean()
