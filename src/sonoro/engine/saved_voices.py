"""Serialises encoded voices as safetensors bytes, which a server stores and sends back. Knows no model.

A voice is named tensors and facts, bound to the fingerprint of the model that encoded it.
"""

from __future__ import annotations

import msgspec
import safetensors.torch

from sonoro.core.errors import EngineError
from sonoro.models.base import SavedVoice
from sonoro.transport.encoded_voice import FORMAT, read_metadata, with_metadata


def dump(saved: SavedVoice, model: str, fingerprint: str) -> bytes:
    """Serialise `saved`, a voice of the model named `model`. Deterministic: equal voices give equal bytes."""
    metadata = {
        "format": FORMAT,
        "model": model,
        "fingerprint": fingerprint,
        "voice": msgspec.json.encode(dict(saved.facts)).decode(),
    }
    tensors = {name: tensor.cpu().contiguous() for name, tensor in saved.tensors.items()}
    return with_metadata(safetensors.torch.save(tensors), metadata)


def parse(data: bytes, fingerprint: str) -> SavedVoice:
    """Parse the output of `dump`. Raises `EngineError` if it is damaged or of another `fingerprint`."""
    metadata = read_metadata(data, fingerprint)
    try:
        facts = msgspec.json.decode(metadata.get("voice", ""), type=dict[str, str])
        return SavedVoice(safetensors.torch.load(data), facts)
    except (msgspec.MsgspecError, safetensors.SafetensorError, ValueError, KeyError) as error:
        raise EngineError(f"the voice cannot be read: {error}") from error
