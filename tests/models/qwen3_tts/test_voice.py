"""Reference audio to a voice: mel and x-vector against the official implementation, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from reference_assets import Case, audio_of
from sonoro.core.errors import InvalidReference
from sonoro.core.types import Reference
from sonoro.models.qwen3_tts import weights
from sonoro.models.qwen3_tts.config import Configs, read_configs
from sonoro.models.qwen3_tts.voice import SpeakerEncoder, encode_voice, log_mel, mel_filterbank
from sonoro.models.qwen3_tts.weights import Modules
from tiny_checkpoint import write_checkpoint


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Configs]:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(folder, variant="base")
    return folder, read_configs(folder)


@pytest.fixture(scope="module")
def modules(configs: tuple[Path, Configs]) -> Modules:
    return weights.load(*configs, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def encoder(modules: Modules) -> SpeakerEncoder:
    assert modules.speaker_encoder is not None
    return modules.speaker_encoder


def noise(duration_s: float, rate: int = 24000) -> np.ndarray:
    samples = np.random.default_rng(0).standard_normal(round(duration_s * rate))
    return (0.1 * samples).astype(np.float32)


def voice(modules: Modules, configs: tuple[Path, Configs], *references: Reference):
    config = configs[1].model.speaker_encoder_config
    assert modules.speaker_encoder is not None
    assert config is not None
    return encode_voice(references, modules.speaker_encoder, config, modules.codec)


def reference_of(samples: np.ndarray, rate: int = 24000, text: str | None = None) -> Reference:
    return Reference(
        pcm=samples.astype("<f4").tobytes(), sample_rate=rate, text=text, use="prompt" if text else "reference"
    )


def test_mel_and_x_vector_are_the_official_ones(
    encoder: SpeakerEncoder, reference: Callable[[str], dict[str, Case]]
) -> None:
    """Float32. The logarithm of a mel at its floor magnifies a rounding of the magnitude by up to 1e3: 1e-4 there."""
    cases = reference("speaker")
    assert cases
    for case in cases.values():
        mel = log_mel(torch.from_numpy(audio_of(case)), 24000, 128)
        torch.testing.assert_close(mel.T, torch.from_numpy(case.tensors["mel"]), atol=1e-4, rtol=0)
        with torch.inference_mode():
            embedding = encoder(mel[None])[0]
        torch.testing.assert_close(embedding, torch.from_numpy(case.tensors["embedding"]), atol=1e-5, rtol=0)


def test_mel_filters_have_unit_area_and_cover_every_frequency_once() -> None:
    filters = mel_filterbank(24000, 1024, 128, 0.0, 12000.0)
    assert filters.shape == (128, 513)
    # A triangle's sum over bins 23.4 Hz apart equals its area only roughly where it spans few of them (30 Hz at 0 Hz).
    areas = filters.astype(np.float64).sum(axis=1) * 24000 / 1024
    np.testing.assert_allclose(areas[40:], 1.0, atol=0.1)
    assert (filters.sum(axis=0)[1:-1] > 0).all()


def test_mel_filters_begin_where_they_are_told() -> None:
    filters = mel_filterbank(16000, 512, 20, 500.0, 4000.0)
    bins_hz = np.linspace(0, 8000, 257)
    heard = bins_hz[filters.sum(axis=0) > 0]
    assert 500 < heard.min() < 600
    assert 3900 < heard.max() < 4000


def test_a_cloned_voice_in_context_has_frames_and_transcript(
    modules: Modules, configs: tuple[Path, Configs], reference: Callable[[str], dict[str, Case]]
) -> None:
    case = reference("clone")["in_context"]
    samples = case.tensors["ref_audio"].astype(np.float32) / 32768
    cloned = voice(modules, configs, reference_of(samples, text=case.facts["ref_text"]))
    assert cloned.reference_frames is not None
    assert torch.equal(cloned.reference_frames, torch.from_numpy(case.tensors["ref_codes"]))
    torch.testing.assert_close(cloned.data.x_vector, torch.from_numpy(case.tensors["x_vector"]), atol=1e-5, rtol=0)
    assert cloned.data.transcript == case.facts["ref_text"]


def test_an_x_vector_only_voice_has_neither(modules: Modules, configs: tuple[Path, Configs]) -> None:
    cloned = voice(modules, configs, reference_of(noise(1.0)))
    assert cloned.reference_frames is None
    assert cloned.data.transcript is None
    assert cloned.data.x_vector.dtype == torch.float32


def test_a_recording_of_any_rate_is_resampled_for_both_encoders(
    modules: Modules, configs: tuple[Path, Configs]
) -> None:
    """A tone sounds the same at 48 kHz; resampling is accurate to about 1e-4 but for the edges."""
    tones = {
        rate: (0.3 * np.sin(2 * np.pi * 440 * np.arange(2 * rate) / rate)).astype(np.float32) for rate in (24000, 48000)
    }
    native, resampled = (
        voice(modules, configs, reference_of(samples, rate, "A tone.")) for rate, samples in tones.items()
    )
    assert native.reference_frames is not None
    assert resampled.reference_frames is not None
    assert native.reference_frames.shape == resampled.reference_frames.shape == (25, 4)
    distance = (native.data.x_vector - resampled.data.x_vector).norm() / native.data.x_vector.norm()
    assert distance < 0.02


@pytest.mark.parametrize(("duration_s", "shown"), [(0.4, r"0\.40 s"), (61.0, r"61\.00 s")])
def test_a_reference_of_a_wrong_length_is_refused(
    modules: Modules, configs: tuple[Path, Configs], duration_s: float, shown: str
) -> None:
    with pytest.raises(InvalidReference, match=rf"ref_audio: '{shown}'.*at least 0\.5 s and at most 60 s"):
        voice(modules, configs, reference_of(noise(duration_s, 8000), 8000))


def test_only_one_reference_is_taken(modules: Modules, configs: tuple[Path, Configs]) -> None:
    with pytest.raises(InvalidReference, match="references: 2 is not allowed"):
        voice(modules, configs, reference_of(noise(1.0)), reference_of(noise(1.0)))
