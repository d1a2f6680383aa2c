"""Encoded voices, made and loaded by an engine, registered and stored by a server: names, facts, and the file format,
safetensors. Imports no torch.

The file's metadata: `format`, `model`, `fingerprint` (only engines with the same one can load the voice), the model's
own facts (`voice`), and, once a server stores it, its `facts`; both are JSON."""

import re
from typing import Any, NamedTuple

import msgspec

from sonoro.core.errors import EngineError, InvalidRequest
from sonoro.core.types import ReferenceUse

FORMAT = "1"

_METADATA = "__metadata__"
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
_OWNER = re.compile(r"[0-9a-f]{16}")


def voice_name(name: str) -> str:
    """`name` in lower case. Raises `InvalidRequest` if no voice can be registered under it."""
    # The Kelvin sign becomes a k in lower case.
    if not isinstance(name, str) or not name.isascii() or not _NAME.fullmatch(name.lower()):
        limit = "it must have 1 to 64 letters (a to z), digits, - or _, and begin with a letter or digit"
        raise InvalidRequest("name", name, limit)
    return name.lower()


def voice_id(text: str) -> str:
    """`text` in lower case. Raises `InvalidRequest` unless it is the id of a voice: a name, or NAME.OWNER."""
    name, dot, owner = text.partition(".") if isinstance(text, str) else (text, "", "")
    name, owner = voice_name(name), owner.lower()
    if dot and not _OWNER.fullmatch(owner):
        raise InvalidRequest("name", text, "after a dot it must have the 16 digits of an owner")
    return name + dot + owner


class VoiceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A registered voice, without its data.
    `name` is its id: NAME.OWNER, or NAME if it is everybody's. `use` is that of its references, `duration_s` that of
    the recording, `consent` a statement stored with it, `created_at_s` a Unix time, `digest` that of the content."""

    name: str
    use: ReferenceUse
    duration_s: float
    created_at_s: float
    transcript: str | None = None
    consent: str | None = None
    digest: str = ""

    @property
    def called(self) -> str:
        """The name without the owner."""
        return self.name.partition(".")[0]

    @property
    def owner(self) -> str:
        """The owner's id; "" if the voice is everybody's."""
        return self.name.partition(".")[2]


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
    The safetensors library writes metadata in random order."""
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
