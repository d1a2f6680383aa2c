"""Trains the built-in voice's codec: the engine's own encoder and decoder around one residual quantiser.

The released layout has two output projections (first book, remaining books). Here both hold the same weights, so that
it stores a plain residual chain. Losses: mel and magnitude spectra at several resolutions, the commitment of the
encoder to its codes and, in the later part, a critic. Codebooks follow by exponential averages; a code that falls out
of use is moved onto a latent of the batch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from builtin_voice.critic import Critic, critic_loss, maker_losses
from builtin_voice.settings import CodecTraining
from builtin_voice.training import Captured, Run, adam, descend, set_rate, steps_of
from sonoro.models.qwen3_tts.codec import CodecDecoder
from sonoro.models.qwen3_tts.config import CodecConfig
from sonoro.models.qwen3_tts.encoder import DOWNSAMPLE_STRIDE, CodecEncoder
from sonoro.models.qwen3_tts.voice import mel_filterbank

__all__ = ["ResidualQuantizer", "SpectralLoss", "VoiceCodec", "train_codec"]

BOOK_DECAY = 0.99
DEAD_BELOW = 0.15
"""A code whose average use falls below this share of its book's mean is moved onto a latent of the current batch."""


class ResidualQuantizer(nn.Module):
    """A chain of K codebooks in a narrow space between two projections. In training mode a forward moves the books:
    the first puts them onto its latents, each later one follows what fell to every code."""

    def __init__(self, width_in: int, width: int, width_out: int, books: int, size: int) -> None:
        super().__init__()
        self.project_in = nn.Conv1d(width_in, width, 1, bias=False)
        self.project_out = nn.Conv1d(width, width_out, 1, bias=False)
        self.register_buffer("books", torch.randn(books, size, width) * 0.1)
        self.register_buffer("usage", torch.ones(books, size))
        self.register_buffer("sums", self.books.clone())
        self.is_seeded = False

    def forward(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`latents` [B, C, T] to (quantised [B, C_out, T] with straight-through gradients, codes [B, T, K] int64,
        commitment loss, summed over the books)."""
        projected = self.project_in(latents).transpose(1, 2).float()
        residual, commitment, codes = projected, projected.new_zeros(()), []
        total = torch.zeros_like(projected)
        for book in range(self.books.shape[0]):
            if self.training and not self.is_seeded:
                self._move(book, residual.detach(), torch.ones(self.books.shape[1], dtype=torch.bool))
            code = self._nearest(book, residual.detach())
            chosen = F.embedding(code, self.books[book])
            commitment = commitment + F.mse_loss(residual, chosen.detach())
            if self.training:
                self._follow(book, residual.detach(), code)
            total = total + chosen
            residual = residual - chosen
            codes.append(code)
        self.is_seeded = True
        passed = projected + (total - projected).detach()
        return self.project_out(passed.transpose(1, 2)), torch.stack(codes, dim=-1), commitment

    def _nearest(self, book: int, x: Tensor) -> Tensor:
        entries = self.books[book]
        scores = x @ entries.T - entries.square().sum(-1) / 2
        return scores.argmax(-1)

    @torch.no_grad()
    def _follow(self, book: int, x: Tensor, code: Tensor) -> None:
        one_hot = (code.flatten()[:, None] == torch.arange(self.books.shape[1], device=code.device)).to(x.dtype)
        self.usage[book].lerp_(one_hot.sum(0), 1 - BOOK_DECAY)
        self.sums[book].lerp_(one_hot.T @ x.flatten(0, 1), 1 - BOOK_DECAY)
        self.books[book] = self.sums[book] / self.usage[book].clamp(min=1e-5)[:, None]
        self._move(book, x, self.usage[book] < DEAD_BELOW * _mean_use(x, self.books))

    @torch.no_grad()
    def _move(self, book: int, x: Tensor, dead: Tensor) -> None:
        """Put the `dead` codes of a book onto latents of this batch, as codes of half the mean use."""
        dead, use = dead.to(x.device), _mean_use(x, self.books) / 2
        live = x.flatten(0, 1)
        picks = live[torch.randint(live.shape[0], (dead.shape[0],), device=x.device)]
        self.books[book] = torch.where(dead[:, None], picks, self.books[book])
        self.usage[book] = torch.where(dead, use, self.usage[book])
        self.sums[book] = torch.where(dead[:, None], picks * use, self.sums[book])

    def used(self, positions: int) -> Tensor:
        """The share of codes that are alive by far, where batches have so many latents."""
        return (self.usage > 2 * DEAD_BELOW * positions / self.books.shape[1]).float().mean()


def _mean_use(x: Tensor, books: Tensor) -> float:
    """How often a code of `books` [K, V, C] is used for latents `x` [B, T, C] if all are used alike."""
    return x.shape[0] * x.shape[1] / books.shape[1]


class VoiceCodec(nn.Module):
    """Encoder, quantiser and decoder as they are trained together. The encoder attends as far back as the decoder,
    which is a crop: what is further back than any training goes is not seen in use either."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        assert config.encoder_config is not None
        decoder = config.decoder_config
        self.encoder = CodecEncoder(config.encoder_config, config.encoder_valid_num_quantizers)
        self.decoder = CodecDecoder(decoder)
        self.quantizer = ResidualQuantizer(
            config.encoder_config.hidden_size,
            decoder.codebook_dim // 2,
            decoder.codebook_dim,
            decoder.num_quantizers,
            decoder.codebook_size,
        )
        self._window = decoder.sliding_window * DOWNSAMPLE_STRIDE

    def latents(self, audio: Tensor) -> Tensor:
        """What is quantised of `audio` [B, 1, S]: [B, C, ceil(S / hop)]."""
        return self.encoder.latents(audio, window=self._window)

    @torch.no_grad()
    def codes(self, audio: Tensor) -> Tensor:
        """`audio` [B, 1, S] -> codes [B, T, K] int64."""
        return self.quantizer(self.latents(audio))[1]

    @torch.no_grad()
    def released_decoder(self) -> CodecDecoder:
        """The decoder with the trained codebooks and their projection in the places a checkpoint keeps them."""
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


class SpectralLoss(nn.Module):
    """L1 between log-mel spectra plus relative error of magnitude spectra of two waveforms [B, S], averaged over
    window lengths."""

    def __init__(self, sample_rate: int, windows: tuple[int, ...] = (256, 512, 1024, 2048)) -> None:
        super().__init__()
        self.windows = windows
        for length in windows:
            bands = {256: 32, 512: 64, 1024: 80, 2048: 128}[length]
            bank = torch.as_tensor(mel_filterbank(sample_rate, length, bands, 0.0, sample_rate / 2)).float()
            self.register_buffer(f"window_{length}", torch.hann_window(length))
            self.register_buffer(f"bank_{length}", bank)

    def forward(self, made: Tensor, wanted: Tensor) -> Tensor:
        total = made.new_zeros(())
        for length in self.windows:
            left, right = self._spectrum(made, length), self._spectrum(wanted, length)
            bank = getattr(self, f"bank_{length}")
            mel_left, mel_right = bank @ left, bank @ right
            total = total + F.l1_loss(mel_left.clamp(min=1e-5).log(), mel_right.clamp(min=1e-5).log())
            total = total + (left - right).norm(dim=(1, 2)).div(right.norm(dim=(1, 2)) + 1e-3).mean()
        return total / len(self.windows)

    def _spectrum(self, audio: Tensor, length: int) -> Tensor:
        window = getattr(self, f"window_{length}")
        bins = torch.stft(audio, length, length // 4, window=window, center=True, return_complex=True)
        return (bins.real.square() + bins.imag.square() + 1e-9).sqrt()


class Lesson:
    """One step of the training, alone or with the critic: what `train_codec` captures. Figures are tensors."""

    def __init__(self, codec: VoiceCodec, critic: Critic, training: CodecTraining, sample_rate: int) -> None:
        self.codec, self.critic, self.training = codec, critic, training
        self.optimizer, self.judging = (adam(module, (0.8, 0.99), 1e-3) for module in (codec, critic))
        self._device = next(codec.parameters()).device
        self._loss_of = SpectralLoss(sample_rate).to(self._device)
        self._encode, self._decode = codec.latents, codec.decoder
        if self._device.type == "cuda":
            self._encode, self._decode = torch.compile(self._encode), torch.compile(self._decode)

    def alone(self, audio: Tensor) -> dict[str, Tensor]:
        _, loss, figures = self._hear(audio)
        return figures | {"gradient": descend(self.codec, self.optimizer, loss)}

    def with_critic(self, audio: Tensor) -> dict[str, Tensor]:
        made, loss, figures = self._hear(audio)
        made, audio = made[: self.training.judged], audio[: self.training.judged]
        with self._half():
            missed = critic_loss(self.critic(audio), self.critic(made.detach()))
        descend(self.critic, self.judging, missed)
        self.critic.requires_grad_(False)
        with self._half():
            with torch.no_grad():
                real = self.critic(audio)
            passing, matching = maker_losses(real, self.critic(made))
        self.critic.requires_grad_(True)
        figures |= {"passing": passing.detach(), "matching": matching.detach(), "critic": missed.detach()}
        loss = loss + passing + self.training.matching_weight * matching
        return figures | {"gradient": descend(self.codec, self.optimizer, loss)}

    def _half(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda")

    def _hear(self, audio: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """`audio` [B, S] coded and decoded, the loss of that, and its figures."""
        with self._half():
            latents = self._encode(audio[:, None])
        quantized, _, commitment = self.codec.quantizer(latents.float())
        # In float32 (TF32): where a voice has next to no energy, what bfloat16 rounds off is all that would be heard.
        made = self._decode(quantized)
        spectral = self._loss_of(made, audio)
        figures = {"spectral": spectral.detach(), "commitment": commitment.detach()}
        return made, self.training.spectral_weight * (spectral + 0.25 * commitment), figures


def train_codec(
    config: CodecConfig, crops: Callable[[int], Tensor], training: CodecTraining, device: torch.device, run: Run
) -> VoiceCodec:
    """Train on `crops(batch)` [B, S] float32; raises `Unfinished` when the time is up."""
    torch.manual_seed(training.seed)
    codec, critic = VoiceCodec(config).to(device).train(), Critic().to(device)
    open_branches(codec)
    lesson = Lesson(codec, critic, training, config.output_sample_rate)
    alone, with_critic = Captured(lesson.alone), Captured(lesson.with_critic)
    optimizers = {"optimizer": lesson.optimizer, "judging": lesson.judging}
    parts = {"codec": codec, "critic": critic} | optimizers
    for step in steps_of(training, run, parts):
        for optimizer in optimizers.values():
            set_rate(optimizer, step.rate)
        codec.quantizer.is_seeded = step.number > 0
        learn = with_critic if step.number >= training.critic_from * training.steps else alone
        figures = learn(crops(training.batch))
        if step.number % 200 == 0 or step.is_last:
            figures = figures | {"books_used": codec.quantizer.used(training.batch * training.crop_frames)}
            run.log({"step": step.number} | {name: value.item() for name, value in figures.items()})
    return codec.eval()


@torch.no_grad()
def open_branches(codec: VoiceCodec) -> None:
    """Set the scales of residual branches to 0.1: new modules have them almost shut, which a short training does not
    outgrow."""
    for name, parameter in codec.named_parameters():
        if name.endswith(("gamma", "layer_scale.scale")):
            nn.init.constant_(parameter, 0.1)
