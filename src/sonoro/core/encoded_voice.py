"""Encoded voices: a safetensors file each, made and loaded by an engine, kept by a server. Knows no model, no tensor.

Its metadata: format, model, fingerprint (whose voices that model's engines can load), the model's own words about it
(`voice`) and, once a server keeps it, its `facts`; both are JSON.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from sonoro.core.errors import EngineError
from sonoro.core.types import VoiceFacts

__all__ = ["FORMAT", "EncodedVoice", "read_facts", "read_metadata", "with_facts", "with_metadata"]

FORMAT = "1"

_METADATA = "__metadata__"


class EncodedVoice(NamedTuple):
    """What a model made of references, as bytes that it can load, and the digest of their content."""

    digest: str
    data: bytes


def read_metadata(data: bytes, fingerprint: str) -> dict[str, str]:
    """What stands beside the tensors. Raises `EngineError` for what is no voice of the model with that fingerprint."""
    metadata = _header(data)[_METADATA]
    if metadata.get("format") != FORMAT:
        raise EngineError(f"its format is {metadata.get('format')!r}; it must be {FORMAT!r}")
    if metadata.get("fingerprint") != fingerprint:
        raise EngineError(f"it was made by {metadata.get('model')!r}, whose weights or dtype are others")
    return metadata


def read_facts(data: bytes, fingerprint: str) -> VoiceFacts:
    """The facts that a server has added. Raises `EngineError` as `read_metadata` does, or if there are none."""
    try:
        return msgspec.json.decode(read_metadata(data, fingerprint).get("facts", ""), type=VoiceFacts)
    except msgspec.MsgspecError as error:
        raise EngineError(f"what it says of itself cannot be read: {error}") from error


def with_facts(data: bytes, facts: VoiceFacts) -> bytes:
    """An encoded voice with its facts beside the tensors."""
    return with_metadata(data, {"facts": msgspec.json.encode(facts).decode()})


def with_metadata(data: bytes, metadata: dict[str, str]) -> bytes:
    """A safetensors file with `metadata` added to what stands beside the tensors, in its order: the same for the same.

    What writes such files by itself puts metadata in an order of chance.
    """
    header = _header(data)
    header[_METADATA] |= metadata
    # Tensors begin at a multiple of eight bytes.
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


def _header(data: bytes) -> dict[str, dict[str, Any]]:
    """Metadata and tensors by name, all of whose bytes are there. Raises `EngineError`."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, dict[str, Any]])
        metadata = msgspec.convert(header.get(_METADATA, {}), dict[str, str])
        ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != _METADATA]
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError, ValueError) as error:
        raise EngineError(f"it is no encoded voice: {error}") from error
    if len(data) != 8 + length + max(ends, default=0):
        raise EngineError(f"it has {len(data)} bytes, and should have {8 + length + max(ends, default=0)}")
    return {**header, _METADATA: metadata}
