"""The layers of a StyleTTS 2 speaker (Li et al. 2023, arXiv 2306.07691) with an ISTFTNet vocoder (Kaneko et al. 2022),
for batches of utterances of different lengths.

Sequences are [B, C, T]; a mask is [B, 1, T] float32, 1 within an utterance. Norms use masked statistics, and
convolutions see zeros beyond the mask, so that a batch gives the same results as its utterances alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence


def mask_of(lengths: Tensor, longest: int) -> Tensor:
    """[B, 1, longest] float32 for `lengths` [B] int64."""
    return (torch.arange(longest, device=lengths.device) < lengths[:, None]).float()[:, None]


class PackedLSTM(nn.LSTM):
    """One layer in both directions, `width // 2` each: [B, C, T] to [B, width, T], zero beyond `lengths` [B], which are
    on the CPU."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, width // 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        packed = pack_padded_sequence(x.transpose(1, 2), lengths, batch_first=True, enforce_sorted=False)
        out, _ = pad_packed_sequence(super().forward(packed)[0], batch_first=True, total_length=x.shape[-1])
        return out.transpose(1, 2)


class StyledLayerNorm(nn.Module):
    """Layer norm over channels with scale and shift from a style [B, S]."""

    def __init__(self, style: int, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style, 2 * width)

    def forward(self, x: Tensor, style: Tensor) -> Tensor:
        gamma, beta = self.fc(style).chunk(2, dim=-1)
        normed = F.layer_norm(x.transpose(1, 2), (x.shape[1],))
        return ((1 + gamma[:, None]) * normed + beta[:, None]).transpose(1, 2)


class StyledNorm(nn.Module):
    """Instance norm over time with scale and shift from a style (AdaIN, Huang and Belongie 2017)."""

    def __init__(self, style: int, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(style, 2 * width)

    def scale_shift(self, style: Tensor) -> tuple[Tensor, Tensor]:
        """The scale, less 1, and the shift [B, C, 1] of a style [B, S]."""
        gamma, beta = self.fc(style)[..., None].chunk(2, dim=1)
        return gamma, beta

    def forward(self, x: Tensor, style: Tensor, mask: Tensor) -> Tensor:
        count = mask.sum(-1, keepdim=True)
        mean = (x * mask).sum(-1, keepdim=True) / count
        centred = (x - mean) * mask
        gamma, beta = self.scale_shift(style)
        scale = (1 + gamma) * torch.rsqrt(centred.square().sum(-1, keepdim=True) / count + 1e-5)
        return centred.mul_(scale).add_(beta)


class StyledBlock(nn.Module):
    """Two convolutions of 3 after styled norms, beside a shortcut; doubles the rate if `doubles`."""

    def __init__(self, inputs: int, outputs: int, style: int, *, doubles: bool = False) -> None:
        super().__init__()
        self.norm1, self.norm2 = StyledNorm(style, inputs), StyledNorm(style, outputs)
        self.conv1 = nn.Conv1d(inputs, outputs, 3, padding=1)
        self.conv2 = nn.Conv1d(outputs, outputs, 3, padding=1)
        self.conv1x1 = nn.Conv1d(inputs, outputs, 1, bias=False) if inputs != outputs else None
        self.pool = (
            nn.ConvTranspose1d(inputs, inputs, 3, stride=2, padding=1, output_padding=1, groups=inputs)
            if doubles
            else None
        )

    def forward(self, x: Tensor, style: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """The output for `x`, and its mask."""
        out = F.leaky_relu(self.norm1(x, style, mask), 0.2) * mask
        if self.pool is not None:
            out, x, mask = self.pool(out), x.repeat_interleave(2, -1), mask.repeat_interleave(2, -1)
        out = F.leaky_relu(self.norm2(self.conv1(out * mask), style, mask), 0.2)
        shortcut = x if self.conv1x1 is None else self.conv1x1(x)
        return (self.conv2(out * mask) + shortcut) / math.sqrt(2), mask


def styled_snake(x: Tensor, mask: Tensor, style: tuple[Tensor, Tensor], alpha: Tensor) -> Tensor:
    """y + sin(a y)^2 / a (snake, Ziyin et al. 2020) of y, which is `x` [B, C, T] after an instance norm with `style`'s
    scale - 1 and shift [B, C, 1]; `alpha` is [1, C, 1]. Zero beyond the mask. Few passes over `x`, for they are what
    costs: sums for the norm, and sin(z)^2 = (1 - cos(2 z)) / 2."""
    x = x * mask
    count = mask.sum(-1, keepdim=True)
    mean = x.sum(-1, keepdim=True) / count
    variance = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square() / count - mean.square()
    scale = (1 + style[0]) * torch.rsqrt(variance.clamp(min=0) + 1e-5)
    shift, half = style[1] - mean * scale, 0.5 / alpha
    wave = torch.addcmul(2 * alpha * shift, x, 2 * alpha * scale).cos()
    return torch.addcmul(torch.addcmul(shift + half, x, scale), wave, -half) * mask


StyledSnake = Callable[[Tensor, Tensor, tuple[Tensor, Tensor], Tensor], Tensor]


class Snake(nn.Module):
    """The parameters of `styled_snake`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, width, 1))


class SnakeBlock(nn.Module):
    """Three residual pairs of convolutions at growing dilations, after styled norms and snakes. `snake` is
    `styled_snake` or what it is compiled to."""

    DILATIONS = (1, 3, 5)

    def __init__(self, width: int, kernel: int, style: int, snake: StyledSnake = styled_snake) -> None:
        super().__init__()
        self.adain1 = nn.ModuleList(StyledNorm(style, width) for _ in self.DILATIONS)
        self.adain2 = nn.ModuleList(StyledNorm(style, width) for _ in self.DILATIONS)
        self.snake1 = nn.ModuleList(Snake(width) for _ in self.DILATIONS)
        self.snake2 = nn.ModuleList(Snake(width) for _ in self.DILATIONS)
        self.convs1 = nn.ModuleList(
            nn.Conv1d(width, width, kernel, dilation=d, padding=d * (kernel // 2)) for d in self.DILATIONS
        )
        self.convs2 = nn.ModuleList(nn.Conv1d(width, width, kernel, padding=kernel // 2) for _ in self.DILATIONS)
        self.styled_snake = snake

    def forward(self, x: Tensor, style: Tensor, mask: Tensor) -> Tensor:
        for layer in range(len(self.DILATIONS)):
            out = self.styled_snake(x, mask, self.adain1[layer].scale_shift(style), self.snake1[layer].alpha)
            out = self.styled_snake(
                self.convs1[layer](out), mask, self.adain2[layer].scale_shift(style), self.snake2[layer].alpha
            )
            x = x + self.convs2[layer](out)
        return x


class HarmonicSource(nn.Module):
    """A voice's excitation from its pitch: a sine for each harmonic where it is voiced, and noise (neural source-filter
    models, Wang et al. 2019)."""

    HARMONICS = 9
    SINE, NOISE, VOICED_HZ = 0.1, 0.003, 10.0

    def __init__(self, sample_rate: int, hop: int) -> None:
        super().__init__()
        self.l_linear = nn.Linear(self.HARMONICS, 1)
        self.sample_rate, self.hop = sample_rate, hop

    def forward(self, f0: Tensor, mask: Tensor, noise: torch.Generator | None) -> Tensor:
        """[B, T * hop] for a pitch [B, T] in Hz; without `noise` it is the sines alone. Not masked."""
        harmonics = torch.arange(1, self.HARMONICS + 1, device=f0.device)
        # In cycles, in float64: after a minute float32 would be off by a hundredth of one. Beyond the mask it rests.
        steps = (f0[:, None].double() * harmonics[:, None] / self.sample_rate).frac() * mask
        phase = F.pad(steps.cumsum(-1) * self.hop, (1, 1), mode="replicate")
        # Between the middles of two columns the phase is linear; half a column is cut at either end.
        share = (torch.arange(self.hop, device=f0.device) + 0.5) / self.hop
        along = phase[..., :-1].frac().float()[..., None] + phase.diff().float()[..., None] * share
        sines = torch.sin(2 * math.pi * along.flatten(2)[..., self.hop // 2 : -(self.hop - self.hop // 2)]) * self.SINE
        voiced = (f0 > self.VOICED_HZ).float().repeat_interleave(self.hop, -1)[:, None]
        sines = sines * voiced
        if noise is not None:
            loudness = voiced * self.NOISE + (1 - voiced) * self.SINE / 3
            sines = sines + loudness * torch.randn(sines.shape, device=f0.device, generator=noise)
        return torch.tanh(self.l_linear(sines.transpose(1, 2)))[..., 0]


class ShortFourier(nn.Module):
    """Spectra of `size` samples every `hop`, with Hann windows and reflected ends, and back to sound."""

    window: Tensor

    def __init__(self, size: int, hop: int) -> None:
        super().__init__()
        self.size, self.hop = size, hop
        self.register_buffer("window", torch.hann_window(size), persistent=False)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """Magnitudes and phases [B, size + 2, S / hop + 1] of sounds [B, S] that end after `lengths` [B] samples."""
        at = torch.arange(-(self.size // 2), x.shape[-1] + self.size // 2, device=x.device).abs()
        at = torch.minimum(at, 2 * (lengths[:, None] - 1) - at).clamp(min=0)
        frames = x.gather(-1, at).unfold(-1, self.size, self.hop)
        spectrum = torch.fft.rfft(frames * self.window).transpose(1, 2)
        return torch.cat([spectrum.abs(), spectrum.angle()], 1)

    def inverse(self, magnitude: Tensor, phase: Tensor, mask: Tensor) -> Tensor:
        """Sounds [B, (T - 1) * hop] of spectra [B, size / 2 + 1, T]; each ends as it would alone."""
        frames = torch.fft.irfft(torch.polar(magnitude, phase), self.size, dim=1) * self.window[:, None]
        shape = (1, (magnitude.shape[-1] - 1) * self.hop + self.size)

        def overlapped(columns: Tensor) -> Tensor:
            return F.fold(columns, shape, (1, self.size), stride=(1, self.hop))[:, 0, 0]

        sound = overlapped(frames * mask)
        weight = overlapped(self.window.square()[:, None] * mask)
        half = self.size // 2
        return (sound / weight.clamp(min=1e-3))[:, half:-half]
