"""Reference audio to a voice: mel and x-vector against the official implementation, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from parity import Case, audio_of
from sine_engines import Engine, audio, drain, end, speak
from tiny_checkpoint import write_checkpoint

from sonoro.core.config import EngineConfig
from sonoro.core.errors import InvalidReference, InvalidRequest, TensorMismatch
from sonoro.core.types import Reference, SpeechRequest
from sonoro.models import registry
from sonoro.models.base import SavedVoice, SpeechModel
from sonoro.models.qwen3_tts import weights
from sonoro.models.qwen3_tts.config import Configs, read_configs
from sonoro.models.qwen3_tts.voice import SpeakerEncoder, encode_voice, log_mel, mel_filterbank
from sonoro.models.qwen3_tts.weights import Modules


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Configs]:
    folder = tmp_path_factory.mktemp("base")
    write_checkpoint(folder, variant="base")
    return folder, read_configs(folder)


@pytest.fixture(scope="module")
def modules(configs: tuple[Path, Configs]) -> Modules:
    return weights.FILES.load(*configs, device=torch.device("cpu"), dtype=torch.float32)


@pytest.fixture(scope="module")
def encoder(modules: Modules) -> SpeakerEncoder:
    assert modules.lm.speaker_encoder is not None
    return modules.lm.speaker_encoder


def noise(duration_s: float, rate: int = 24000) -> np.ndarray:
    samples = np.random.default_rng(0).standard_normal(round(duration_s * rate))
    return (0.1 * samples).astype(np.float32)


def voice(modules: Modules, configs: tuple[Path, Configs], *references: Reference):
    config = configs[1].model.speaker_encoder_config
    assert modules.lm.speaker_encoder is not None
    assert config is not None
    return encode_voice(references, modules.lm.speaker_encoder, config, modules.codec)


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


@pytest.mark.parametrize(("duration_s", "shown"), [(0.4, r"0\.40 s"), (61.0, "more than 60 s")])
def test_a_reference_of_a_wrong_length_is_refused(
    modules: Modules, configs: tuple[Path, Configs], duration_s: float, shown: str
) -> None:
    with pytest.raises(InvalidReference, match=rf"ref_audio: '?{shown}'?\b.*at least 0\.5 s and at most 60 s"):
        voice(modules, configs, reference_of(noise(duration_s, 8000), 8000))


def test_only_one_reference_is_taken(modules: Modules, configs: tuple[Path, Configs]) -> None:
    with pytest.raises(InvalidReference, match="references: 2 is not allowed"):
        voice(modules, configs, reference_of(noise(1.0)), reference_of(noise(1.0)))


@pytest.fixture(scope="module")
def model(configs: tuple[Path, Configs]) -> SpeechModel:
    return registry.load(configs[0], device="cpu").model


def spoken(engine: Engine, **fields: object) -> np.ndarray:
    request = SpeechRequest(id="a", text="Some words.", max_frames=9, ignore_eos=True, seed=3, **fields)
    return speak(request, engine)[0]


CONFIG = EngineConfig(slots=2, max_positions=256, max_frames=32, chunk_frames=(4,))
"""Chunks of one length: other lengths, which follow the clock, round differently."""

IN_CONTEXT = reference_of(noise(1.7), text="some noise")
TIMBRE = reference_of(noise(1.7))


@pytest.mark.parametrize("given", [IN_CONTEXT, TIMBRE], ids=["in context", "timbre"])
def test_a_voice_that_was_kept_speaks_bit_by_bit_like_its_reference(model: SpeechModel, given: Reference) -> None:
    first, other = Engine(model, CONFIG), Engine(model, CONFIG)
    expected = spoken(first, references=(given,))
    assert np.abs(expected).max() > 1e-3
    digest, data = first.encode_voice((given,)).result(0)
    fields = {"text": "Some words.", "max_frames": 9, "ignore_eos": True, "seed": 3}
    anna = SpeechRequest(id="a", voice="anna", voice_digest=digest, **fields)
    np.testing.assert_array_equal(speak(anna, first)[0], expected)
    other.submit(anna)
    assert other.voices.take_wanted() == [digest]
    other.voices.load(digest, data)
    np.testing.assert_array_equal(audio(drain(other), "a"), expected)


def test_a_voice_primed_elsewhere_is_one_primed_in_place(model: SpeechModel) -> None:
    """And one that was saved and loaded: row 2 of 3, or the only one, the history is the same to the last bit."""
    histories = []
    for slots, slot, is_saved in ((1, 0, False), (3, 2, False), (3, 1, True)):
        made = model.encode_voice([IN_CONTEXT])
        history, row = model.codec.allocate(slots), torch.tensor([slot])
        if is_saved:
            model.codec.prime(model.codec.allocate(1), torch.tensor([0]), made)
            made = model.load_voice(model.save_voice(made))
        model.codec.prime(history, row, made)
        histories.append(history.save(row))
    first, *others = histories
    assert any(columns.any() for columns in first.columns.values())
    for other in others:
        assert torch.equal(other.seen, first.seen)
        assert all(torch.equal(columns, first.columns[key]) for key, columns in other.columns.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop("x_vector"), "x_vector of the voice is missing"),
        (
            lambda tensors: tensors.update(x_vector=torch.zeros(3)),
            r"x_vector of the voice is \(\(3,\), torch.float32\)",
        ),
        (lambda tensors: tensors.update(extra=torch.zeros(3)), "extra of the voice is .* needs unknown"),
        (
            lambda tensors: tensors.update(seen=torch.tensor([3])),
            "must have a transcript, and the same count in `seen`",
        ),
        (lambda tensors: tensors["frames"].fill_(10_000), "frames of the voice must be codes from 0 to"),
        (lambda tensors: tensors["frames"].fill_(-1), "frames of the voice must be codes from 0 to"),
        (lambda tensors: tensors.update(frames=tensors["frames"].float()), "frames of the voice is"),
        (lambda tensors: tensors.update(frames=torch.tensor(1)), "frames of the voice is"),
        (
            lambda tensors: tensors["x_vector"].fill_(torch.nan),
            "x_vector of the voice holds numbers that are not finite",
        ),
        (
            lambda tensors: tensors[min(name for name in tensors if "history" in name)].fill_(torch.inf),
            "history.* of the voice holds numbers that are not finite",
        ),
        (lambda tensors: tensors.pop(min(name for name in tensors if "history" in name)), "history.* is missing"),
    ],
)
def test_what_is_no_voice_of_this_model_is_refused(
    model: SpeechModel, change: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    made = model.encode_voice([IN_CONTEXT])
    model.codec.prime(model.codec.allocate(1), torch.tensor([0]), made)
    saved = model.save_voice(made)
    tensors = {name: tensor.clone() for name, tensor in saved.tensors.items()}
    assert model.load_voice(SavedVoice(tensors, saved.facts)).data.transcript == "some noise"
    with pytest.raises(TensorMismatch, match="must have a transcript"):
        model.load_voice(SavedVoice(tensors, {}))
    change(tensors)
    with pytest.raises(TensorMismatch, match=words):
        model.load_voice(SavedVoice(tensors, saved.facts))


def test_a_speaker_embedding_speaks_like_the_recording_it_is_of(model: SpeechModel) -> None:
    x_vector = model.encode_voice([TIMBRE]).data.x_vector
    assert model.spec.speaker_embedding_size == len(x_vector)
    engine = Engine(model, CONFIG)
    embedded = spoken(engine, speaker_embedding=tuple(x_vector.tolist()))
    np.testing.assert_array_equal(embedded, spoken(engine, references=(TIMBRE,)))


def test_other_weights_or_dtypes_have_another_fingerprint(
    model: SpeechModel, configs: tuple[Path, Configs], tmp_path: Path
) -> None:
    same = registry.load(configs[0], device="cpu").model
    half = registry.load(configs[0], device="cpu", dtype="bfloat16").model
    random = registry.load(configs[0], device="cpu", load_format="dummy").model
    assert model.fingerprint == same.fingerprint
    assert len({model.fingerprint, half.fingerprint, random.fingerprint}) == 3


def test_a_model_that_cannot_clone_takes_no_embedding(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, variant="custom_voice")
    engine = Engine(registry.load(tmp_path, device="cpu").model, CONFIG)
    with pytest.raises(InvalidRequest, match=r"speaker_embedding: 3 numbers; .* does not take any"):
        spoken(engine, speaker_embedding=(1.0, 2.0, 3.0))
    with pytest.raises(InvalidReference, match="cannot clone voices"):
        engine.encode_voice((TIMBRE,)).result(0)


@pytest.mark.gpu
@pytest.mark.parametrize("use", ["prompt", "reference"])
def test_on_a_gpu_a_voice_made_beside_running_streams_is_the_one_made_alone(use: str) -> None:
    """To the last bit: the same kernels run, and no memory of the one stream is used by the other meanwhile."""
    model = registry.load("qwen3-tts-0.6b-base", device="cuda", load_format="dummy").model
    config = EngineConfig(slots=4, chunk_frames=(1, 4))
    engine = Engine(model, config, executor=ThreadPoolExecutor(1))
    engine.voices.encoder.warm_up()
    reference, others = reference_of(noise(20.0), text="Noise." if use == "prompt" else None), []
    for turn in range(3):
        # What has been encoded is kept under its digest.
        made = engine.encode_voice((msgspec.structs.replace(reference, digest=str(turn)),))
        for number in range(3):
            embedding = tuple(np.random.default_rng(number).standard_normal(model.spec.speaker_embedding_size))
            stream = {"text": "Some words.", "max_frames": 60, "ignore_eos": True, "speaker_embedding": embedding}
            engine.submit(SpeechRequest(id=str(number), **stream))
        events = drain(engine)
        assert [end(events, str(number)).frames for number in range(3)] == [60] * 3
        others.append(made.result(60).data)
    assert {*others, Engine(model, config).encode_voice((reference,)).result(0).data} == {others[0]}
