"""The codec as it is trained: its quantiser, its loss, and a few steps of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from builtin_voice import settings
from builtin_voice.codec_training import ResidualQuantizer, SpectralLoss, VoiceCodec, train_codec
from builtin_voice.critic import Critic, critic_loss, maker_losses
from builtin_voice.settings import CodecTraining
from builtin_voice.training import Run, Unfinished
from sonoro.models.qwen3_tts.config import CodecConfig
from sonoro.nn.configs import build

Chords = Callable[[int, int], Tensor]


def quantizer(*, is_training: bool) -> ResidualQuantizer:
    torch.manual_seed(1)
    made = ResidualQuantizer(width_in=6, width=4, width_out=5, books=3, size=8)
    made.is_seeded = True
    return made.train(is_training)


def test_codes_give_the_quantised_value_and_the_nearest_of_it() -> None:
    chain = quantizer(is_training=False)
    latents = torch.randn(2, 6, 11)
    quantized, codes, commitment = chain(latents)
    assert codes.shape == (2, 11, 3)
    assert commitment > 0
    total = torch.stack([book[codes[..., index]] for index, book in enumerate(chain.books)]).sum(0)
    # Float32: the straight-through value is (total - projected) + projected.
    torch.testing.assert_close(quantized, chain.project_out(total.mT), atol=1e-5, rtol=0)
    residual = chain.project_in(latents).mT
    for index, book in enumerate(chain.books):
        distance = torch.cdist(residual, book.expand(2, -1, -1))
        assert torch.equal(codes[..., index], distance.argmin(-1))
        residual = residual - book[codes[..., index]]


def test_gradients_pass_the_quantiser_as_if_it_were_not_there() -> None:
    chain = quantizer(is_training=False)
    latents, given = torch.randn(2, 6, 11, requires_grad=True), torch.randn(2, 5, 11)
    quantized, _, commitment = chain(latents)
    assert commitment.requires_grad
    (found,) = torch.autograd.grad((quantized * given).sum(), latents, retain_graph=True)
    (expected,) = torch.autograd.grad((chain.project_out(chain.project_in(latents)) * given).sum(), latents)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    (pull,) = torch.autograd.grad(commitment, latents)
    assert pull.abs().max() > 0


def test_books_follow_what_falls_to_their_codes_and_dead_codes_move() -> None:
    chain = quantizer(is_training=True)
    with torch.no_grad():
        chain.usage.fill_(25.0)
        chain.sums.copy_(chain.books * 25)
        chain.books[0, 3], chain.sums[0, 3], chain.usage[0, 3] = 1000.0, 100.0, 0.1
    before, sums, usage = chain.books[0].clone(), chain.sums[0].clone(), chain.usage[0].clone()
    latents = torch.randn(4, 6, 50)
    _, codes, _ = chain(latents)
    projected = chain.project_in(latents).detach().mT.flatten(0, 1)
    fallen = codes[..., 0].flatten()
    assert not (fallen == 3).any()
    assert (projected == chain.books[0, 3]).all(-1).any(), "the dead code lies on a latent of the batch"
    assert chain.usage[0, 3] == 200 / 8 / 2, "half of what every code of 8 has of 200 latents"
    for code in set(fallen.tolist()):
        count = 0.99 * usage[code] + 0.01 * (fallen == code).sum()
        total = 0.99 * sums[code] + 0.01 * projected[fallen == code].sum(0)
        torch.testing.assert_close(chain.books[0, code], total / count, atol=1e-5, rtol=0)
        assert not torch.equal(chain.books[0, code], before[code])


def test_the_first_training_forward_seeds_every_book() -> None:
    chain = quantizer(is_training=True)
    chain.is_seeded = False
    latents = torch.randn(4, 6, 50) + 30
    _, _, commitment = chain(latents)
    # Codes stay on their latents, which are far from where books are drawn, up to one step of their averages.
    assert chain.project_in(latents).square().mean() > 10
    assert commitment < 10
    assert chain.is_seeded


def test_spectral_loss_is_nothing_for_equal_sounds_and_sees_level_and_pitch(chords: Chords) -> None:
    loss = SpectralLoss(settings.SAMPLE_RATE)
    sound = chords(2, 12000)
    assert loss(sound, sound) == 0
    quiet, other = loss(0.5 * sound, sound), loss(sound.flip(0), sound)
    assert quiet > 0.3
    assert other > 0.3


def trained(
    codec_values: dict[str, Any], sound: Tensor, state: Path, *, steps: int, figures: list[dict[str, float]]
) -> VoiceCodec:
    """A small codec after `steps` steps on one `sound`, the critic listening to the last half."""
    training = CodecTraining(steps=steps, batch=1, crop_frames=2, learning_rate=2e-3, warmup_steps=5, critic_from=0.5)
    config = build(CodecConfig, codec_values, "codec")
    run = Run(float("inf"), figures.append, state)
    return train_codec(config, lambda batch: sound, training, torch.device("cpu"), run)


def test_training_makes_the_sound_closer(chords: Chords, codec_values: dict[str, Any], tmp_path: Path) -> None:
    figures: list[dict[str, float]] = []
    trained(codec_values, chords(1, 2 * settings.HOP), tmp_path / "state.pt", steps=25, figures=figures)
    assert [record["step"] for record in figures] == [0, 24]
    assert figures[-1]["spectral"] < 0.8 * figures[0]["spectral"]
    assert "critic" not in figures[0]
    assert figures[-1]["critic"] < 1.5


def test_training_goes_on_where_its_time_was_up(
    chords: Chords, codec_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in each half: the weights are those of a run that was not."""
    sound = chords(1, 2 * settings.HOP)
    whole = trained(codec_values, sound, tmp_path / "whole.pt", steps=6, figures=[])
    training = CodecTraining(steps=6, batch=1, crop_frames=2, learning_rate=2e-3, warmup_steps=5, critic_from=0.5)
    config, now = build(CodecConfig, codec_values, "codec"), [0.0]
    monkeypatch.setattr("builtin_voice.training.time.monotonic", lambda: now[0])

    def crops(batch: int) -> Tensor:
        now[0] += 1
        return sound

    run = Run(1.5, lambda record: None, tmp_path / "parts.pt")
    for _ in range(2):
        now[0] = 0.0
        with pytest.raises(Unfinished, match="of 6 steps"):
            train_codec(config, crops, training, torch.device("cpu"), run)
    now[0] = -10.0
    parts = train_codec(config, crops, training, torch.device("cpu"), run)
    for (name, left), right in zip(whole.state_dict().items(), parts.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, atol=0, rtol=0, msg=name)


def test_the_critic_tells_real_from_made_and_pulls_them_together(chords: Chords) -> None:
    torch.manual_seed(0)
    critic = Critic(windows=(256, 512), channels=4)
    real = chords(2, 6000)
    made = torch.nn.Parameter(0.1 * torch.randn(2, 6000))
    assert [verdict.scores.shape[:2] for verdict in critic(real)] == [(2, 1), (2, 1)]
    optimizer = torch.optim.Adam(critic.parameters(), 1e-2)
    before = critic_loss(critic(real), critic(made.detach())).item()
    for _ in range(80):
        optimizer.zero_grad()
        loss = critic_loss(critic(real), critic(made.detach()))
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.2 * before
    passing, matching = maker_losses(critic(real), critic(made))
    own, nothing = maker_losses(critic(real), critic(real))
    assert own < passing / 2
    assert nothing == 0
    (pull,) = torch.autograd.grad(passing + matching, made)
    closer = (made - 0.05 * pull / pull.abs().max()).detach()
    assert sum(maker_losses(critic(real), critic(closer))) < passing + matching
