"""Voices: of recordings, of files in each format of the official package, and what is refused."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny_pocket
import torch
from safetensors.numpy import save_file
from tiny_pocket_lm import cases, model_of

from sonoro.core.errors import CheckpointError, InvalidReference, TensorMismatch
from sonoro.core.types import Reference, SpeechRequest
from sonoro.models import registry
from sonoro.models.base import CloningModel, SavedVoice
from sonoro.models.pocket_tts.model import PocketTTS
from sonoro.models.pocket_tts.voice import PocketVoice, read_voice
from sonoro.nn.stored import read_all

STATE = "transformer.layers.{}.self_attn/{}"


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def model() -> PocketTTS:
    return model_of("lsd")


def official_state(root: Path, variant: str) -> dict[str, np.ndarray]:
    tensors = cases("runs", root)[variant].tensors
    return {name.replace("|", "/"): value for name, value in tensors.items() if "|" in name}


def recording() -> Reference:
    return Reference(pcm=tiny_pocket.sound().astype("<f4").tobytes(), sample_rate=24000, text="Not needed.")


def assert_alike(found: PocketVoice, expected: PocketVoice, atol: float = 0.0) -> None:
    for ours, theirs in zip(found.tensors, expected.tensors, strict=True):
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)


@pytest.mark.parametrize("variant", tiny_pocket.VARIANTS)
def test_a_cloned_voice_is_the_official_state(reference_root: Path, variant: str) -> None:
    """Sums of some dozen terms in another order, in the first layer of values near 1."""
    model = model_of(variant)
    assert isinstance(model, CloningModel)
    state = {name: torch.from_numpy(value) for name, value in official_state(reference_root, variant).items()}
    official = model.load_voice(SavedVoice(state, {})).data
    assert official.positions == 6 + (variant != "first")
    assert_alike(model.encode_voice((recording(),)).data, official, atol=1e-5 * float(official.keys.abs().max()))


def test_a_recording_needs_no_transcript(model: PocketTTS) -> None:
    alone = Reference(pcm=recording().pcm, sample_rate=24000)
    assert model.spec.resolve(SpeechRequest(id="1", text="So.", references=(alone,))).is_resolved
    model.spec.check_cloning("ref_audio", (alone,))


def test_every_format_of_a_state_is_the_same_voice(model: PocketTTS, tmp_path: Path) -> None:
    state = tiny_pocket.voice_state("lsd", spare=3)
    save_file(state, tmp_path / "new.safetensors")
    older = {name: value for name, value in state.items() if name.endswith("cache")}
    # Version 2: the number of positions is the length of a row.
    older |= {STATE.format(layer, "current_end"): np.zeros(19, np.float32) for layer in range(2)}
    save_file(older, tmp_path / "older.safetensors")
    short = {name: value[:, :, :19] if name.endswith("cache") else value for name, value in state.items()}
    save_file({name: np.ascontiguousarray(value) for name, value in short.items()}, tmp_path / "short.safetensors")
    files = [tmp_path / f"{name}.safetensors" for name in ("new", "older", "short")]
    new, old, exact = (read_voice(model._modules.lm, file, read_all(file)) for file in files)
    assert new.positions == 19
    assert new.keys.isfinite().all()
    for other in (old, exact, model._own_voice("alba")):
        assert_alike(other, new)
        assert np.array_equal(other.names, new.names)


def test_projected_latents_are_a_voice() -> None:
    """The first format."""
    model = model_of("first")
    made = model.encode_voice((recording(),)).data
    rows = model._modules.lm.embed_voice(made.latents)
    saved = SavedVoice({"audio_prompt": rows[None]}, {})
    assert_alike(model.load_voice(saved).data, made)


def test_a_saved_voice_is_restored_bit_for_bit(model: PocketTTS) -> None:
    cloned, own = (
        model.encode_voice((recording(),)),
        model.load_voice(
            SavedVoice({name: torch.from_numpy(value) for name, value in tiny_pocket.voice_state("lsd", 1).items()}, {})
        ),
    )
    for voice, kind in ((cloned, {"latents"}), (own, {"keys", "values"})):
        saved = model.save_voice(voice)
        assert set(saved.tensors) == kind
        restored = model.load_voice(saved)
        assert_alike(restored.data, voice.data)
        assert np.array_equal(restored.data.names, voice.data.names)
    # A minute of it has 24 KB.
    assert sum(tensor.nbytes for tensor in model.save_voice(cloned).tensors.values()) == 6 * 8 * 4


def test_voices_without_a_single_recording_are_refused(model: PocketTTS) -> None:
    for references in ((), (recording(), recording())):
        with pytest.raises(InvalidReference, match="exactly one"):
            model.encode_voice(references)


def changed(**changes: object) -> dict[str, np.ndarray]:
    state = tiny_pocket.voice_state("lsd")
    for part, change in changes.items():
        name = STATE.format(1, part)
        if change is None:
            del state[name]
        else:
            state[name] = change(state.get(name))
    return state


def poisoned(cache: np.ndarray) -> np.ndarray:
    cache[1, 0, 5] = np.inf
    return cache


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (changed(cache=None), "cache of layer 1"),
        (changed(offset=None), "for 0 positions"),
        (changed(offset=lambda old: old + 1), "for 20 positions"),
        (changed(offset=lambda old: old - 1), "different numbers"),
        (changed(offset=lambda old: old * 0), "for 0 positions"),
        (changed(pad=lambda old: old + 1), "for 0 positions"),
        (changed(cache=lambda old: old[:, :, :, :3].copy()), r"cache of layer 1 is \[2, 1, 19, 3, 16\]"),
        (changed(cache=poisoned), "not finite"),
        (tiny_pocket.voice_state("pointwise"), "3 layers; this model has 2"),
        (tiny_pocket.voice_state("drifting"), r"needs \[2, 1, P, 4, 16\]"),
        ({"weight": np.zeros(3, np.float32)}, "'weight' is not part of a voice"),
        ({"audio_prompt": np.zeros((1, 4, 32), np.float32)}, r"audio_prompt of the voice are \[4, 32\]"),
        ({"latents": np.zeros((4, 9), np.float32)}, r"latents of the voice are \[4, 9\]"),
        ({"latents": np.full((4, 8), np.nan, np.float32)}, "latents of the voice hold numbers that are not finite"),
        (
            {name: np.zeros((2, 5, 4, 8), np.float32) for name in ("keys", "values")},
            r"keys of the voice are \[2, 5, 4, 8\]",
        ),
    ],
)
def test_a_file_that_is_no_voice_of_this_model_is_named(
    model: PocketTTS, tmp_path: Path, state: dict[str, np.ndarray], reason: str
) -> None:
    file = tmp_path / "mine.safetensors"
    save_file(state, file)
    with pytest.raises(TensorMismatch, match=rf"mine\.safetensors: .*{reason}"):
        read_voice(model._modules.lm, file, read_all(file))


@pytest.mark.parametrize("kept", [0, 7, 100, 2000])
def test_a_damaged_file_is_named(model: PocketTTS, tmp_path: Path, kept: int) -> None:
    file = tmp_path / "mine.safetensors"
    save_file(tiny_pocket.voice_state("lsd"), file)
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"mine\.safetensors"):
        read_voice(model._modules.lm, file, read_all(file))


def test_a_voice_of_another_model_is_refused_as_the_folder_is_loaded(tmp_path: Path) -> None:
    tiny_pocket.write_checkpoint(tmp_path / "english_tiny")
    save_file(tiny_pocket.voice_state("pointwise"), tmp_path / "english_tiny" / "embeddings" / "mine.safetensors")
    with pytest.raises(TensorMismatch, match=r"mine\.safetensors: .*3 layers; this model has 2"):
        registry.load(tmp_path / "english_tiny", device="cpu")
