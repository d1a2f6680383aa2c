"""The codec: the official audio, whole and streamed, and the official latents of a recording."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_pocket
import torch
from tiny_pocket_lm import cases, model_of
from torch import Tensor

from sonoro.models.pocket_tts.decoder import _FADE_SAMPLES as FADE
from sonoro.models.pocket_tts.voice import end_on_pause
from sonoro.nn.history import WHOLE

SPLITS = ([6], [1] * 6, [3, 1, 2], [2, 4])


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def faded(audio: Tensor) -> Tensor:
    rise = torch.linspace(0, 1, FADE, dtype=audio.dtype)
    return torch.cat((audio[:FADE] * rise, audio[FADE:]))


def streamed(codec: object, frames: Tensor, split: list[int]) -> Tensor:
    """`frames` [B, T, 1, D] in slots of a history that others have used."""
    history, slots = codec.allocate(4), torch.tensor([3, 1][: len(frames)])
    codec.decode(frames[:, :2], slots, history)
    codec.reset(history, slots)
    return torch.cat([codec.decode(part, slots, history) for part in frames.split(split, dim=1)], dim=1)


@pytest.mark.parametrize("variant", tiny_pocket.VARIANTS)
def test_audio_is_the_official_one_whole_and_streamed(reference_root: Path, variant: str) -> None:
    case, model = cases("runs", reference_root)[variant], model_of(variant)
    expected = torch.from_numpy(case.tensors["audio"])
    peak = expected.abs().max()
    assert 0.05 < expected.std() < peak < 3
    latents = torch.from_numpy(case.tensors["frames"][: tiny_pocket.AUDIO_FRAMES])
    frames = model._modules.lm.denormalize(latents)[None, :, None]
    torch.testing.assert_close(model.codec.decode(frames)[0], faded(expected), atol=float(1e-5 * peak), rtol=0)
    for split in SPLITS:
        made = streamed(model.codec, frames, split)[0]
        torch.testing.assert_close(made, faded(expected), atol=float(1e-5 * peak), rtol=0)


@pytest.mark.parametrize("variant", ["lsd", "drifting"])
def test_any_split_is_the_whole_in_float64(variant: str) -> None:
    """Far beyond the window of its transformer; two streams at once."""
    codec = model_of(variant).codec.to(torch.float64)
    codec.finalize()
    frames = torch.randn(2, 9, 1, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = codec.decode(frames)
    for split in ([1] * 9, [4, 1, 4], [7, 2]):
        torch.testing.assert_close(streamed(codec, frames, split), whole, atol=1e-9, rtol=0)


@pytest.mark.parametrize("variant", tiny_pocket.VARIANTS)
def test_a_recording_has_the_official_latents(reference_root: Path, variant: str) -> None:
    case, codec = cases("runs", reference_root)[variant], model_of(variant).codec
    expected = torch.from_numpy(case.tensors["latents"])
    made = codec.encode(torch.from_numpy(end_on_pause(tiny_pocket.sound(), 24000)))
    assert len(expected) == -(-(9600 + 1920) // 1920)
    assert expected.std() > 0.1
    torch.testing.assert_close(made, expected, atol=float(1e-5 * expected.abs().max()), rtol=0)


def test_a_long_recording_is_encoded_in_pieces_as_whole() -> None:
    encoder = model_of("lsd").codec.encoder.to(torch.float64)
    audio = torch.randn(110 * 1920, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.1
    whole = encoder(audio[None], WHOLE)
    expected = encoder.downsample(torch.nn.functional.pad(whole.mT, (16, 0), "replicate"))[0].mT
    torch.testing.assert_close(encoder.encode(audio), expected, atol=1e-9, rtol=0)


def test_silence_at_the_end_of_a_recording_becomes_a_pause() -> None:
    tone = torch.sin(torch.arange(24000) / 7.0)
    made = torch.from_numpy(end_on_pause(torch.cat((tone, torch.zeros(24000), 0.005 * tone)).numpy(), 24000))
    assert len(made) == 24000 + 1920
    torch.testing.assert_close(made[: 24000 - 480], tone[: 24000 - 480])
    torch.testing.assert_close(made[24000 - 480 : 24000], tone[-480:] * torch.linspace(1, 0, 480))
    assert not made[24000:].any()
    assert len(end_on_pause(tone[:100].numpy(), 24000)) == 100
