"""Encoded voices as bytes, which a server keeps and gives back: a safetensors file each. Knows no model.

A voice is named tensors and facts, and belongs to whoever has the fingerprint it was saved with.
"""

from __future__ import annotations

import msgspec
import safetensors.torch

from sonoro.core.encoded_voice import FORMAT, read_metadata, with_metadata
from sonoro.core.errors import EngineError
from sonoro.models.base import SavedVoice

__all__ = ["dump", "parse"]


def dump(saved: SavedVoice, model: str, fingerprint: str) -> bytes:
    """`saved` of the model called `model`; the same bytes for the same voice."""
    metadata = {
        "format": FORMAT,
        "model": model,
        "fingerprint": fingerprint,
        "voice": msgspec.json.encode(dict(saved.facts)).decode(),
    }
    tensors = {name: tensor.cpu().contiguous() for name, tensor in saved.tensors.items()}
    return with_metadata(safetensors.torch.save(tensors), metadata)


def parse(data: bytes, fingerprint: str) -> SavedVoice:
    """What was saved as `data`. Raises `EngineError` if it is none of the model with that fingerprint."""
    metadata = read_metadata(data, fingerprint)
    try:
        facts = msgspec.json.decode(metadata.get("voice", ""), type=dict[str, str])
        return SavedVoice(safetensors.torch.load(data), facts)
    except (msgspec.MsgspecError, safetensors.SafetensorError, ValueError, KeyError) as error:
        raise EngineError(f"the voice cannot be read: {error}") from error
