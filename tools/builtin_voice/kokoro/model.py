"""Kokoro-82M in PyTorch: phoneme ids and styles to durations, and on to sound, for batches of any lengths.

Written from the public ONNX graph of the model and the papers named in `layers`; modules have the names of the graph's
nodes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from builtin_voice.kokoro.layers import (
    HarmonicSource,
    PackedLSTM,
    ShortFourier,
    SnakeBlock,
    StyledBlock,
    StyledLayerNorm,
    StyledSnake,
    mask_of,
    styled_snake,
)


@dataclass(frozen=True)
class Sizes:
    """Kokoro-82M's own. A duration frame is `2 * prod(upsampling) * fourier_hop` samples: 25 ms."""

    symbols: int = 178
    width: int = 512
    style: int = 128
    longest: int = 50
    max_positions: int = 512
    bert_embedding: int = 128
    bert_width: int = 768
    bert_heads: int = 12
    bert_inner: int = 2048
    bert_layers: int = 12
    decoder_width: int = 1024
    asr_width: int = 64
    upsampling: tuple[int, int] = (10, 6)
    kernels: tuple[int, ...] = (3, 7, 11)
    noise_kernels: tuple[int, int] = (7, 11)
    fourier_size: int = 20
    fourier_hop: int = 5
    sample_rate: int = 24_000

    @property
    def pitch_hop(self) -> int:
        """Samples to a value of the pitch."""
        return self.upsampling[0] * self.upsampling[1] * self.fourier_hop

    @property
    def frame(self) -> int:
        """Samples to a duration frame."""
        return 2 * self.pitch_hop


class Bert(nn.Module):
    """ALBERT (Lan et al. 2019) over phonemes: one layer of shared weights, run `bert_layers` times. ids [B, T] int64
    and their mask to [B, T, bert_width]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, embedding = sizes.bert_width, sizes.bert_embedding
        self.heads, self.layers = sizes.bert_heads, sizes.bert_layers
        self.word = nn.Embedding(sizes.symbols, embedding)
        self.position = nn.Embedding(sizes.max_positions, embedding)
        self.token_type = nn.Embedding(2, embedding)
        self.norm = nn.LayerNorm(embedding, eps=1e-12)
        self.mapping_in = nn.Linear(embedding, width)
        self.query, self.key, self.value, self.dense = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm = nn.LayerNorm(width, eps=1e-12)
        self.ffn, self.ffn_output = nn.Linear(width, sizes.bert_inner), nn.Linear(sizes.bert_inner, width)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        B, T = ids.shape  # noqa: N806
        positions = self.position.weight[:T] + self.token_type.weight[0]
        x = self.mapping_in(self.norm(self.word(ids) + positions))
        keep = mask.bool()[:, None]
        for _ in range(self.layers):
            q, k, v = (
                part(x).view(B, T, self.heads, -1).transpose(1, 2) for part in (self.query, self.key, self.value)
            )
            heard = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
            x = self.attention_norm(x + self.dense(heard.transpose(1, 2).reshape(B, T, -1)))
            x = self.output_norm(x + self.ffn_output(F.gelu(self.ffn(x), approximate="tanh")))
        return x


class TextEncoder(nn.Module):
    """Phonemes as the decoder hears them: ids [B, T] to [B, width, T]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.embedding = nn.Embedding(sizes.symbols, width)
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.lstm = PackedLSTM(width, width)

    def forward(self, ids: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
        x = self.embedding(ids).transpose(1, 2) * mask
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.leaky_relu(norm(conv(x).transpose(1, 2)), 0.2).transpose(1, 2) * mask
        return self.lstm(x, lengths)


class Predictor(nn.Module):
    """How long phonemes last, and pitch and loudness in time."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, style = sizes.width, sizes.style
        self.lstms = nn.ModuleList(PackedLSTM(width + style, width) for _ in range(3))
        self.norms = nn.ModuleList(StyledLayerNorm(style, width) for _ in range(3))
        self.lstm = PackedLSTM(width + style, width)
        self.duration_proj = nn.Linear(width, sizes.longest)
        self.shared = PackedLSTM(width + style, width)
        self.F0, self.N = (
            nn.ModuleList(
                [
                    StyledBlock(width, width, style),
                    StyledBlock(width, width // 2, style, doubles=True),
                    StyledBlock(width // 2, width // 2, style),
                ]
            )
            for _ in range(2)
        )
        self.F0_proj, self.N_proj = (nn.Conv1d(width // 2, 1, 1) for _ in range(2))

    def encode(self, x: Tensor, style: Tensor, lengths: Tensor) -> Tensor:
        """[B, width, T] to [B, width + style, T]."""
        along = style[..., None].expand(-1, -1, x.shape[-1])
        for lstm, norm in zip(self.lstms, self.norms, strict=True):
            x = norm(lstm(torch.cat([x, along], 1), lengths), style)
        return torch.cat([x, along], 1)

    def durations(self, encoded: Tensor, lengths: Tensor) -> Tensor:
        """[B, T] float32, in frames, before they are rounded."""
        return self.duration_proj(self.lstm(encoded, lengths).transpose(1, 2)).sigmoid().sum(-1)

    def curves(self, x: Tensor, style: Tensor, mask: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Pitch in Hz and loudness [B, 2 T] of [B, width + style, T], zero beyond the mask, and that mask."""
        shared, found = self.shared(x, lengths), []
        for blocks, projection in ((self.F0, self.F0_proj), (self.N, self.N_proj)):
            out, at = shared, mask
            for block in blocks:
                out, at = block(out, style, at)
            found.append((projection(out) * at)[:, 0])
        return found[0], found[1], at


class Generator(nn.Module):
    """ISTFTNet with a harmonic source: [B, C, 2 T] and a pitch [B, 2 T] to sounds [B, T * frame]."""

    def __init__(self, sizes: Sizes, snake: StyledSnake) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.decoder_width // 2
        bins = sizes.fourier_size + 2
        self.m_source = HarmonicSource(sizes.sample_rate, sizes.pitch_hop)
        self.stft = ShortFourier(sizes.fourier_size, sizes.fourier_hop)
        second = sizes.upsampling[1]
        self.ups = nn.ModuleList(
            nn.ConvTranspose1d(width >> layer, width >> layer + 1, 2 * rate, stride=rate, padding=rate // 2)
            for layer, rate in enumerate(sizes.upsampling)
        )
        self.noise_convs = nn.ModuleList(
            [
                nn.Conv1d(bins, width // 2, 2 * second, stride=second, padding=second // 2),
                nn.Conv1d(bins, width // 4, 1),
            ]
        )
        self.noise_res = nn.ModuleList(
            SnakeBlock(width >> layer + 1, kernel, sizes.style, snake)
            for layer, kernel in enumerate(sizes.noise_kernels)
        )
        self.resblocks = nn.ModuleList(
            SnakeBlock(width >> layer + 1, kernel, sizes.style, snake)
            for layer in range(len(sizes.upsampling))
            for kernel in sizes.kernels
        )
        self.conv_post = nn.Conv1d(width // 4, bins, 7, padding=3)

    def forward(
        self, x: Tensor, style: Tensor, f0: Tensor, *, mask: Tensor, lengths: Tensor, noise: torch.Generator | None
    ) -> Tensor:
        """`mask` is of the pitch, `lengths` [B] is in values of it."""
        source = self.m_source(f0, mask, noise)
        columns = lengths * self.sizes.upsampling[0] * self.sizes.upsampling[1] + 1
        harmonics = self.stft(source, lengths * self.sizes.pitch_hop)
        heard = mask_of(columns, harmonics.shape[-1])
        harmonics = harmonics * heard
        for layer, rate in enumerate(self.sizes.upsampling):
            is_last = layer == len(self.sizes.upsampling) - 1
            x = self.ups[layer](F.leaky_relu(x, 0.1) * mask)
            mask = heard if is_last else mask.repeat_interleave(rate, -1)
            if is_last:
                x = F.pad(x, (1, 0), mode="reflect")
            x = x + self.noise_res[layer](self.noise_convs[layer](harmonics), style, mask)
            count = len(self.sizes.kernels)
            blocks = self.resblocks[layer * count : (layer + 1) * count]
            x = sum(block(x, style, mask) for block in blocks) / count
        spectrum = self.conv_post(F.leaky_relu(x, 0.01) * mask)
        bins = self.sizes.fourier_size // 2 + 1
        return self.stft.inverse(spectrum[:, :bins].exp(), spectrum[:, bins:].sin(), mask)


class Decoder(nn.Module):
    """Phonemes in time with their pitch and loudness to sound."""

    def __init__(self, sizes: Sizes, snake: StyledSnake) -> None:
        super().__init__()
        width, style = sizes.decoder_width, sizes.style
        with_all = width + sizes.asr_width + 2
        self.F0_conv, self.N_conv = (nn.Conv1d(1, 1, 3, stride=2, padding=1) for _ in range(2))
        self.asr_res = nn.Conv1d(sizes.width, sizes.asr_width, 1)
        self.encode = StyledBlock(sizes.width + 2, width, style)
        self.decode = nn.ModuleList(
            [
                *(StyledBlock(with_all, width, style) for _ in range(3)),
                StyledBlock(with_all, width // 2, style, doubles=True),
            ]
        )
        self.generator = Generator(sizes, snake)

    def forward(
        self,
        asr: Tensor,
        f0: Tensor,
        loudness: Tensor,
        style: Tensor,
        *,
        mask: Tensor,
        lengths: Tensor,
        noise: torch.Generator | None,
    ) -> Tensor:
        curves = torch.cat([self.F0_conv(f0[:, None]), self.N_conv(loudness[:, None])], 1)
        x, _ = self.encode(torch.cat([asr, curves], 1), style, mask)
        beside = torch.cat([self.asr_res(asr), curves], 1)
        at = mask
        for block in self.decode:
            x, at = block(torch.cat([x, beside], 1), style, at)
        return self.generator(x, style, f0, mask=at, lengths=2 * lengths, noise=noise)


class Kokoro(nn.Module):
    """The whole speaker. Lengths are int64 on the CPU, in phonemes or frames."""

    def __init__(self, sizes: Sizes | None = None, snake: StyledSnake = styled_snake) -> None:
        super().__init__()
        self.sizes = sizes = sizes or Sizes()
        self.bert = Bert(sizes)
        self.bert_encoder = nn.Linear(sizes.bert_width, sizes.width)
        self.predictor = Predictor(sizes)
        self.text_encoder = TextEncoder(sizes)
        self.decoder = Decoder(sizes, snake)

    def durations(self, ids: Tensor, style: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Frames [B, T] int64 of phonemes `ids` [B, T], zero beyond `lengths`, and what `sound` needs beside them
        [B, width + style, T]. `style` is [B, 2 * style]."""
        mask = mask_of(lengths.to(ids.device), ids.shape[1])
        known = self.bert_encoder(self.bert(ids, mask)).transpose(1, 2)
        encoded = self.predictor.encode(known, style[:, self.sizes.style :], lengths)
        frames = self.predictor.durations(encoded, lengths).round().clamp(min=1).long()
        return frames * mask[:, 0].long(), encoded

    def sound(
        self,
        ids: Tensor,
        style: Tensor,
        lengths: Tensor,
        *,
        frames: Tensor,
        encoded: Tensor,
        noise: torch.Generator | None,
    ) -> Tensor:
        """Sounds [B, S] float32; utterance i has `frames[i].sum() * sizes.frame` samples. `noise` gives the breath of
        the source, which is none without."""
        ends = frames.cumsum(-1)
        totals = ends[:, -1]
        totals_cpu = totals.cpu()
        longest = int(totals_cpu.max())
        mask = mask_of(totals, longest)
        at = torch.arange(longest, device=ids.device).expand(len(ids), -1).contiguous()
        phoneme = torch.searchsorted(ends, at, right=True).clamp(max=ids.shape[1] - 1)

        def in_time(x: Tensor) -> Tensor:
            return x.gather(-1, phoneme[:, None].expand(-1, x.shape[1], -1)) * mask

        own, manner = style[:, : self.sizes.style], style[:, self.sizes.style :]
        f0, loudness, _ = self.predictor.curves(in_time(encoded), manner, mask, totals_cpu)
        text = self.text_encoder(ids, mask_of(lengths.to(ids.device), ids.shape[1]), lengths)
        return self.decoder(in_time(text), f0, loudness, own, mask=mask, lengths=totals, noise=noise)
