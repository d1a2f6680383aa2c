"""Encode recordings to a voice: patches to continue, with their transcript, or to imitate. Save and load voices."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sonoro.audio.pcm import resample
from sonoro.audio.references import check_duration
from sonoro.core.errors import InvalidReference, TensorMismatch
from sonoro.core.types import Reference
from sonoro.models.base import SavedVoice, Voice

from .codec import VoxCodec
from .config import ModelConfig
from .prompt import VoxVoice

_NAMES = ("prompt", "reference")


@torch.no_grad()
def encode_voice(
    config: ModelConfig,
    codec: VoxCodec,
    device: torch.device,
    references: Sequence[Reference],
    priming: int | None = None,
) -> Voice:
    """Encode `references`: one to continue (`prompt`), one to imitate (`reference`), or both.
    Silence pads them to whole patches: before a prompt, after a reference. The last `priming` patches of the prompt, or
    all for None, prime the codec. Raises `InvalidReference` for two of a kind, or one not of 0.5 s to 60 s."""
    made: dict[str, Tensor] = {}
    for reference in references:
        if reference.use in made:
            raise InvalidReference("ref_audio", reference.use, "this model takes one to continue and one to sound like")
        check_duration(reference.duration_s)
        samples = torch.tensor(resample(reference.samples, reference.sample_rate, config.codec.sample_rate))
        is_continued = reference.use == "prompt"
        made[reference.use] = codec.encode(samples.to(device), "before" if is_continued else "after").cpu()
    transcript = next((reference.text or "" for reference in references if reference.use == "prompt"), "")
    return _voice(config, made, transcript, priming)


def save_voice(voice: Voice) -> SavedVoice:
    """The `prompt` and `reference` of `voice`, where present, as tensors; its transcript as a fact."""
    tensors = {name: getattr(voice.data, name) for name in _NAMES if len(getattr(voice.data, name))}
    return SavedVoice(tensors, {"transcript": voice.data.transcript})


def load_voice(config: ModelConfig, saved: SavedVoice, priming: int | None = None) -> Voice:
    """Restore a saved voice; `priming` as in `encode_voice`.
    Raises `TensorMismatch` if it does not fit a model of `config`."""
    shape = (config.patch_size, config.feat_dim)
    for name, patches in saved.tensors.items():
        is_patches = patches.dtype == torch.float32 and patches.shape[1:] == shape and len(patches) > 0
        if name not in _NAMES or not is_patches or not patches.isfinite().all():
            raise TensorMismatch(f"a voice of this model is finite patches [N, {shape[0]}, {shape[1]}] float32: {name}")
    if not saved.tensors or not isinstance(saved.facts.get("transcript"), str):
        raise TensorMismatch("a voice of this model has prompt or reference patches, and a transcript")
    made = {name: patches.cpu() for name, patches in saved.tensors.items()}
    return _voice(config, made, saved.facts["transcript"], priming)


def _voice(config: ModelConfig, made: dict[str, Tensor], transcript: str, priming: int | None) -> Voice:
    """A voice whose prompt primes the codec, so that audio continues where the recording ends."""
    nothing = torch.zeros(0, config.patch_size, config.feat_dim)
    prompt, reference = (made.get(name, nothing) for name in _NAMES)
    primes = prompt if priming is None else prompt[len(prompt) - min(priming, len(prompt)) :]
    return Voice(VoxVoice(transcript, prompt, reference), primes if len(primes) else None)
