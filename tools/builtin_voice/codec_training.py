"""Train the built-in voice's codec in two stages: first the codes, then the sound.

The encoder is trained so that spectra and phones can be predicted from the codes by the first half of the decoder:
through an untrained vocoder it would get no useful gradient for long. Then the decoder is trained on fixed codes, with
multi-resolution spectral losses and, after a while, a critic. The result is a moving average of its weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from builtin_voice.critic import Critic, critic_loss, maker_losses
from builtin_voice.phones import UNHEARD
from builtin_voice.settings import CodecTraining, EncoderTraining
from builtin_voice.spectra import SpectralLoss
from builtin_voice.training import Average, Captured, Run, adam, descend, set_rate, steps_of
from builtin_voice.voice_codec import CONTEXT_FRAMES, VoiceCodec
from sonoro.models.qwen3_tts.config import CodecConfig

__all__ = ["train_codec", "train_encoder"]

_LOGGED_EVERY = 200


def train_encoder(
    config: CodecConfig,
    crops: Callable[[int], tuple[Tensor, Tensor]],
    training: EncoderTraining,
    device: torch.device,
    run: Run,
) -> VoiceCodec:
    """Train the encoder and the codebooks on `crops(batch)`: audio [B, S] float32 with context, and phone classes [B,
    N] int64 of the columns between; returns the codec. Raises `Unfinished` when the time is up."""
    torch.manual_seed(training.seed)
    codec = VoiceCodec(config).to(device).train()
    optimizer = adam(codec, (0.8, 0.99), 1e-3)

    def learn(audio: Tensor, phones: Tensor) -> dict[str, Tensor]:
        told = codec.told(audio)
        missed = (told.sketch - told.wanted).abs().mean()
        mistaken, first = (
            F.cross_entropy(scores.flatten(0, 1), phones.flatten(), ignore_index=UNHEARD)
            for scores in (told.phones, told.first)
        )
        loss = missed + training.phone_weight * mistaken + training.first_weight * first
        loss = loss + training.commitment_weight * told.commitment
        return {
            "sketch": missed.detach(),
            "phones": mistaken.detach(),
            "first_phones": first.detach(),
            "commitment": told.commitment.detach(),
            "gradient": descend(codec, optimizer, loss),
        }

    captured = Captured(learn)
    for step in steps_of(training, run, {"codec": codec, "optimizer": optimizer}):
        set_rate(optimizer, step.rate)
        codec.quantizer.is_seeded = step.number > 0
        figures = captured(*crops(training.batch))
        if step.is_logged(_LOGGED_EVERY):
            figures = figures | {"books_used": codec.quantizer.used(training.batch * training.crop_frames)}
            run.log({"step": step.number} | {name: value.item() for name, value in figures.items()})
    return codec.eval()


class Lesson:
    """One training step of the decoder, alone or with the critic, on audio [B, S] whose first and last `CONTEXT_FRAMES`
    are context only: what `train_codec` captures. Metrics are tensors."""

    def __init__(self, codec: VoiceCodec, critic: Critic, training: CodecTraining, sample_rate: int) -> None:
        self.codec, self.critic, self.training = codec, critic, training
        self.optimizer, self.judging = (adam(module, (0.8, 0.99), 1e-3) for module in (codec, critic))
        self._device = next(codec.parameters()).device
        self._loss_of = SpectralLoss(sample_rate).to(self._device)
        self._speak = torch.compile(codec.spoken) if self._device.type == "cuda" else codec.spoken

    def alone(self, audio: Tensor) -> dict[str, Tensor]:
        _, _, loss, figures = self._hear(audio)
        return figures | {"gradient": descend(self.codec, self.optimizer, loss)}

    def with_critic(self, audio: Tensor) -> dict[str, Tensor]:
        made, wanted, loss, figures = self._hear(audio)
        made, wanted = made[: self.training.judged], wanted[: self.training.judged]
        with self._half():
            missed = critic_loss(self.critic(wanted), self.critic(made.detach()))
        descend(self.critic, self.judging, missed)
        self.critic.requires_grad_(False)
        with self._half():
            with torch.no_grad():
                real = self.critic(wanted)
            passing, matching = maker_losses(real, self.critic(made))
        self.critic.requires_grad_(True)
        figures |= {"passing": passing.detach(), "matching": matching.detach(), "critic": missed.detach()}
        loss = loss + passing + self.training.matching_weight * matching
        return figures | {"gradient": descend(self.codec, self.optimizer, loss)}

    def _half(self) -> torch.autocast:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._device.type == "cuda")

    def _hear(self, audio: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Encode and decode `audio`; returns the result, the target, the loss, and metrics."""
        margin = CONTEXT_FRAMES * self.codec.decoder.hop
        wanted = audio[:, margin:-margin]
        codes = self.codec.inner_codes(audio)
        with self._half():
            made = self._speak(codes).float()
        spectral = self._loss_of(made, wanted)
        return made, wanted, self.training.spectral_weight * spectral, {"spectral": spectral.detach()}


def train_codec(
    codec: VoiceCodec,
    crops: Callable[[int], Tensor],
    training: CodecTraining,
    sample_rate: int,
    run: Run,
    *,
    critic: Critic | None = None,
) -> VoiceCodec:
    """Train the decoder of `codec`, with fixed codes, on `crops(batch)` [B, S] float32 with context; returns the
    average of its weights. A trained `critic` is continued. Raises `Unfinished` when the time is up."""
    torch.manual_seed(training.seed)
    codec.eval()
    critic = (critic or Critic()).to(next(codec.parameters()).device)
    lesson, average = Lesson(codec, critic, training, sample_rate), Average(codec, training.average_decay)
    alone, with_critic = Captured(lesson.alone), Captured(lesson.with_critic)
    optimizers = {"optimizer": lesson.optimizer, "judging": lesson.judging}
    parts = {"codec": codec, "critic": critic, "average": average} | optimizers

    def learned() -> dict[str, dict[str, Tensor]]:
        speaking = ("decoder.", "quantizer.project_out.")  # the codes must not change
        weights = {name: value for name, value in average.state_dict().items() if name.startswith(speaking)}
        return {"codec": weights, "critic": lesson.critic.state_dict()}

    for step in steps_of(training, run, parts, learned):
        for optimizer in optimizers.values():
            set_rate(optimizer, step.rate)
        learn = with_critic if step.progress >= training.critic_from else alone
        figures = learn(crops(training.batch))
        average.follow(step.number)
        if step.is_logged(_LOGGED_EVERY):
            run.log({"step": step.number} | {name: value.item() for name, value in figures.items()})
    return average.module
