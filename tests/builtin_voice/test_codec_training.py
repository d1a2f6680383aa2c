"""The codec as it is trained: its quantiser, its spectra, and a few steps of both its stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from builtin_voice import settings
from builtin_voice.codec_training import train_codec, train_encoder
from builtin_voice.critic import Critic, critic_loss, maker_losses
from builtin_voice.quantizer import ResidualQuantizer
from builtin_voice.settings import CodecTraining, EncoderTraining
from builtin_voice.spectra import FLOOR, Bands, SpectralLoss, SpeechSpectra
from builtin_voice.training import Run, Unfinished
from builtin_voice.voice_codec import CONTEXT_FRAMES, VoiceCodec
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
    quantized, first, codes, commitment = chain(latents)
    assert codes.shape == (2, 11, 3)
    assert commitment > 0
    total = torch.stack([book[codes[..., index]] for index, book in enumerate(chain.books)]).sum(0)
    # Float32: the straight-through value is (total - projected) + projected.
    torch.testing.assert_close(quantized, chain.project_out(total.mT), atol=1e-5, rtol=0)
    torch.testing.assert_close(chain.looked_up(codes), total, atol=1e-6, rtol=0)
    torch.testing.assert_close(first.mT, chain.books[0][codes[..., 0]], atol=1e-5, rtol=0)
    residual = chain.project_in(latents).mT
    for index, book in enumerate(chain.books):
        distance = torch.cdist(residual, book.expand(2, -1, -1))
        assert torch.equal(codes[..., index], distance.argmin(-1))
        residual = residual - book[codes[..., index]]


def test_gradients_pass_the_quantiser_as_if_it_were_not_there() -> None:
    chain = quantizer(is_training=False)
    latents, given = torch.randn(2, 6, 11, requires_grad=True), torch.randn(2, 5, 11)
    quantized, first, _, commitment = chain(latents)
    assert commitment.requires_grad
    projected = chain.project_in(latents)
    for passed, plain in ((quantized, chain.project_out(projected)), (first, projected)):
        weights = given[:, : plain.shape[1]]
        (found,) = torch.autograd.grad((passed * weights).sum(), latents, retain_graph=True)
        (expected,) = torch.autograd.grad((plain * weights).sum(), latents, retain_graph=True)
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
    codes = chain(latents).codes
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
    commitment = chain(latents).commitment
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


def test_what_is_below_the_floor_is_nothing_to_learn() -> None:
    loss = SpectralLoss(settings.SAMPLE_RATE)
    torch.manual_seed(0)
    noise, other = torch.randn(2, 1, 12000)
    hiss = 10 ** (-80 / 20) * noise
    voice = 0.1 * other * (torch.arange(12000) > 6000)
    assert loss(voice + hiss, voice) < 0.02
    assert loss(voice + 100 * hiss, voice) > 0.5
    bands = Bands(settings.SAMPLE_RATE, 1024, 256, 80, 12000)
    level = bands.log_mel(bands.magnitudes(10 ** (-69 / 20) * noise)).exp().mean()
    assert FLOOR < level < 1.5 * FLOOR


def test_what_is_not_made_at_all_is_missed() -> None:
    """Far below the floor there is still a gradient towards what should be there, and none where nothing should."""
    bands = Bands(settings.SAMPLE_RATE, 512, 128, 64, 12000)
    torch.manual_seed(0)
    voice = 0.1 * torch.randn(1, 6000)
    for wanted, is_missed in ((voice, True), (1e-5 * voice, False)):
        made = (1e-3 * voice).requires_grad_()
        distance = bands.distance(bands.magnitudes(made), bands.magnitudes(wanted))
        (pull,) = torch.autograd.grad(distance, made)
        assert bool(pull.abs().max() > 0) == is_missed
        assert (distance > 3) == is_missed
    assert bands.distance(bands.magnitudes(voice), bands.magnitudes(voice)) == 0


def test_a_column_of_spectra_tells_what_sounds_in_its_time_and_pitch() -> None:
    spectra = SpeechSpectra(settings.SAMPLE_RATE)
    columns, column = 40, spectra.column
    seconds = torch.arange(columns * column) / settings.SAMPLE_RATE
    silent = spectra(torch.zeros(1, columns * column))
    assert silent.shape == (1, columns, spectra.width)
    sounding = torch.sin(2 * torch.pi * torch.tensor([[120.0], [150.0]]) * seconds)
    sounding[:, : 20 * column] = 0
    low, high = spectra(0.1 * sounding)
    assert torch.equal(low[:18], silent[0, :18])
    assert (low[20:] - silent[0, 20:]).max(-1).values.min() > 2
    assert (low[30] - high[30]).abs().max() > 1


def test_a_code_hangs_on_its_frame_and_little_around_it(tiny_codec: VoiceCodec, chords: Chords) -> None:
    hop, margin = settings.HOP, CONTEXT_FRAMES
    sound = chords(2, 20 * hop)
    whole = tiny_codec.codes(sound)
    assert whole.shape == (2, 20, settings.CODEBOOKS)
    inner = tiny_codec.inner_codes(sound[:, (6 - margin) * hop : (12 + margin) * hop])
    assert torch.equal(inner, whole[:, 6:12])
    changed = sound.clone()
    changed[:, 9 * hop : 10 * hop] = 0
    is_same = (tiny_codec.codes(changed) == whole).all(-1).all(0)
    assert is_same[: 10 - margin].all()
    assert is_same[9 + margin :].all()
    assert not is_same[9]


TRAININGS = {
    "encoder": EncoderTraining(steps=6, batch=1, crop_frames=2, learning_rate=6e-3, warmup_steps=5),
    "codec": CodecTraining(
        steps=6, batch=1, crop_frames=2, learning_rate=2e-3, warmup_steps=5, critic_from=0.5, average_decay=0.0
    ),
}


FIGURES = {"encoder": "sketch", "codec": "spectral"}


def trained(
    stage: str, values: dict[str, Any], crops: Callable[[int], Tensor], run: Run, *, steps: int = 6, device: str = "cpu"
) -> VoiceCodec:
    """A small codec after `steps` steps of a stage; in the second the critic listens to the last half."""
    config, training = build(CodecConfig, values, "codec"), replace(TRAININGS[stage], steps=steps)
    if isinstance(training, EncoderTraining):
        phones = torch.arange(2 * settings.HOP // SpeechSpectra.column, device=device)[None] // 3
        return train_encoder(config, lambda batch: (crops(batch), phones), training, torch.device(device), run)
    torch.manual_seed(3)
    codec, critic = VoiceCodec(config).to(device), Critic(windows=(512,), periods=(2,), channels=2)
    return train_codec(codec, crops, training, settings.SAMPLE_RATE, run, critic=critic)


@pytest.mark.parametrize("stage", FIGURES)
def test_training_makes_the_sound_closer(
    stage: str, chords: Chords, codec_values: dict[str, Any], tmp_path: Path
) -> None:
    figures: list[dict[str, float]] = []
    sound, run = chords(1, 10 * settings.HOP), Run(float("inf"), figures.append, tmp_path / "state.pt")
    trained(stage, codec_values, lambda batch: sound, run, steps=25)
    assert [record["step"] for record in figures] == [0, 24]
    assert figures[-1][FIGURES[stage]] < 0.8 * figures[0][FIGURES[stage]]
    if stage == "encoder":
        for name in ("phones", "first_phones"):
            assert figures[-1][name] < 0.95 * figures[0][name]
    assert "critic" not in figures[0]
    assert ("critic" in figures[-1]) == (stage == "codec")


def test_only_the_way_from_codes_to_sound_is_learned_last(
    chords: Chords, codec_values: dict[str, Any], tmp_path: Path
) -> None:
    sound, run = chords(1, 10 * settings.HOP), Run(float("inf"), lambda record: None, tmp_path / "state.pt")
    codec = trained("codec", codec_values, lambda batch: sound, run)
    torch.manual_seed(3)
    drawn = VoiceCodec(build(CodecConfig, codec_values, "codec"))
    assert torch.equal(codec.codes(sound), drawn.eval().codes(sound))
    moved = {name for name, tensor in codec.state_dict().items() if not torch.equal(tensor, drawn.state_dict()[name])}
    assert {name.split(".")[0] for name in moved} == {"decoder", "quantizer"}
    assert [name for name in moved if name.startswith("quantizer")] == ["quantizer.project_out.weight"]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # of torch.compile itself
@pytest.mark.parametrize("stage", FIGURES)
def test_steps_from_a_graph_are_the_steps(
    stage: str, chords: Chords, codec_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of step runs as it is at first, then from its graph. A GPU sums in no fixed order: 5% are let pass."""
    sound, found = chords(1, 10 * settings.HOP).cuda(), []
    for number in range(2):
        figures: list[dict[str, float]] = []
        run = Run(float("inf"), figures.append, tmp_path / f"{number}.pt")
        trained(stage, codec_values, lambda batch: sound, run, steps=40, device="cuda")
        found.append(figures[-1][FIGURES[stage]])
        monkeypatch.setattr("builtin_voice.codec_training.Captured", lambda step: step)
    assert found[0] == pytest.approx(found[1], rel=0.05)


@pytest.mark.parametrize("stage", FIGURES)
def test_training_goes_on_where_its_time_was_up(
    stage: str, chords: Chords, codec_values: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interrupted in each half: the weights are those of a run that was not."""
    sound = chords(1, 10 * settings.HOP)
    endless = Run(float("inf"), lambda record: None, tmp_path / "whole.pt")
    whole = trained(stage, codec_values, lambda batch: sound, endless)
    now = [0.0]
    monkeypatch.setattr("builtin_voice.training.time.monotonic", lambda: now[0])

    def crops(batch: int) -> Tensor:
        now[0] += 1
        return sound

    run = Run(1.5, lambda record: None, tmp_path / "parts.pt")
    for _ in range(2):
        now[0] = 0.0
        with pytest.raises(Unfinished, match="of 6 steps"):
            trained(stage, codec_values, crops, run)
    now[0] = -10.0
    parts = trained(stage, codec_values, crops, run)
    for (name, left), right in zip(whole.state_dict().items(), parts.state_dict().values(), strict=True):
        torch.testing.assert_close(left, right, atol=0, rtol=0, msg=name)


def test_the_critic_tells_real_from_made_and_pulls_them_together(chords: Chords) -> None:
    torch.manual_seed(0)
    critic = Critic(windows=(256, 512), periods=(2, 3), channels=4)
    real = chords(2, 6000)
    made = torch.nn.Parameter(0.1 * torch.randn(2, 6000))
    assert [verdict.scores.shape[:2] for verdict in critic(real)] == [(2, 1)] * 4
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
