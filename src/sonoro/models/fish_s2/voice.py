"""Encode references to a voice: the codes and transcript of each. Save and load voices."""

import json
from collections.abc import Sequence

import torch

from sonoro.audio.pcm import resample
from sonoro.audio.references import check_duration
from sonoro.core.errors import InvalidReference, TensorMismatch
from sonoro.core.types import Reference
from sonoro.models.base import SavedVoice, Voice

from .codec import FishCodec
from .prompt import FishVoice


@torch.no_grad()
def encode_voice(references: Sequence[Reference], codec: FishCodec, device: torch.device) -> Voice:
    """Encode `references`, one for each speaker, in order. The voice does not prime the codec.
    Raises `InvalidReference` for one without a transcript, or not of 0.5 s to 60 s."""
    frames = []
    for reference in references:
        if reference.use != "prompt" or reference.text is None:
            raise InvalidReference("ref_text", reference.text, "this model needs the transcript of every reference")
        check_duration(reference.duration_s)
        samples = resample(reference.samples, reference.sample_rate, codec.sample_rate)
        frames.append(codec.encode(torch.tensor(samples).to(device)).cpu())
    return Voice(data=FishVoice(tuple(reference.text or "" for reference in references), torch.cat(frames)))


def save_voice(voice: Voice) -> SavedVoice:
    """The `frames` of `voice` as a tensor, its transcripts as a fact (JSON list)."""
    return SavedVoice({"frames": voice.data.frames}, {"transcripts": json.dumps(voice.data.transcripts)})


def load_voice(codebooks: int, codes: int, saved: SavedVoice) -> Voice:
    """Restore a saved voice. Raises `TensorMismatch` if it does not fit `codebooks` codebooks of `codes` codes."""
    frames = saved.tensors.get("frames")
    if frames is None or len(saved.tensors) > 1 or frames.dtype != torch.int64 or frames.shape[1:] != (codebooks,):
        raise TensorMismatch(f"a voice of this model is frames [R, {codebooks}] int64 and nothing else")
    if not len(frames) or frames.min() < 0 or frames.max() >= codes:
        raise TensorMismatch(f"frames of the voice must be codes from 0 to {codes - 1}")
    try:
        transcripts = json.loads(saved.facts["transcripts"])
    except (KeyError, ValueError, TypeError) as error:
        raise TensorMismatch(f"a voice of this model has transcripts, as a list: {error!r}") from error
    if not isinstance(transcripts, list) or not all(isinstance(text, str) for text in transcripts):
        raise TensorMismatch(f"a voice of this model has transcripts, as a list of strings, not {transcripts!r}")
    return Voice(data=FishVoice(tuple(transcripts), frames.cpu()))
