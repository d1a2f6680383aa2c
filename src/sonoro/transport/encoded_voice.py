"""The file format of encoded voices: safetensors, made and loaded by an engine, stored by a server. Imports no torch.

Its metadata: `format`, `model`, `fingerprint` (only engines with the same one can load the voice), the model's own
facts (`voice`), and, once a server stores it, its `facts`; both are JSON.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from sonoro.core.errors import EngineError
from sonoro.core.types import VoiceFacts

FORMAT = "1"

_METADATA = "__metadata__"


class EncodedVoice(NamedTuple):
    """A voice encoded by a model, as bytes that it can load, and the digest of the references' content."""

    digest: str
    data: bytes


def read_metadata(data: bytes, fingerprint: str) -> dict[str, str]:
    """The metadata of an encoded voice. Raises `EngineError` if `data` is none, or of another `fingerprint`."""
    metadata = _header(data)[_METADATA]
    if metadata.get("format") != FORMAT:
        raise EngineError(f"its format is {metadata.get('format')!r}; it must be {FORMAT!r}")
    if metadata.get("fingerprint") != fingerprint:
        raise EngineError(f"it was made by {metadata.get('model')!r} with other weights or another dtype")
    return metadata


def read_facts(data: bytes, fingerprint: str) -> VoiceFacts:
    """The facts that a server has added. Raises `EngineError` as `read_metadata` does, or without facts."""
    try:
        return msgspec.json.decode(read_metadata(data, fingerprint).get("facts", ""), type=VoiceFacts)
    except msgspec.MsgspecError as error:
        raise EngineError(f"its facts cannot be read: {error}") from error


def with_facts(data: bytes, facts: VoiceFacts) -> bytes:
    """Add `facts` to the metadata of an encoded voice."""
    return with_metadata(data, {"facts": msgspec.json.encode(facts).decode()})


def with_metadata(data: bytes, metadata: dict[str, str]) -> bytes:
    """Add `metadata` to that of a safetensors file, in a fixed order: equal input gives equal bytes.

    The safetensors library writes metadata in random order.
    """
    header = _header(data)
    header[_METADATA] |= metadata
    # Pad the header, as tensors begin at a multiple of eight bytes.
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


def _header(data: bytes) -> dict[str, dict[str, Any]]:
    """Parse the header: metadata, and tensors by name. Raises `EngineError` if it is invalid or data is missing."""
    length = int.from_bytes(data[:8], "little")
    try:
        header = msgspec.json.decode(data[8 : 8 + length], type=dict[str, dict[str, Any]])
        metadata = msgspec.convert(header.get(_METADATA, {}), dict[str, str])
        ends = [int(tensor["data_offsets"][1]) for name, tensor in header.items() if name != _METADATA]
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError, ValueError, RecursionError) as error:
        raise EngineError(f"it is no encoded voice: {error}") from error
    if len(data) != 8 + length + max(ends, default=0):
        raise EngineError(f"it has {len(data)} bytes; its header says {8 + length + max(ends, default=0)}")
    return {**header, _METADATA: metadata}
