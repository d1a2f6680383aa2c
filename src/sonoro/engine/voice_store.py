"""Registered voices where they outlast the engine: a safetensors file for each, or memory alone.

Knows no model: a voice is named tensors and facts, and belongs to whoever has the fingerprint it was saved with.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable

import msgspec
import safetensors.torch

from sonoro.core.errors import ConfigError, EngineError, VoiceExists
from sonoro.core.types import VoiceFacts, voice_id
from sonoro.engine.voice_files import Bucket, Files, Folder
from sonoro.models.base import SavedVoice

__all__ = ["FORMAT", "Entry", "FileStore", "MemoryStore", "OutOfReach", "store_at"]

logger = logging.getLogger(__name__)

FORMAT = "1"
"""Of the files; another is refused. Metadata: format, model, fingerprint, and as JSON facts and the model's own."""

_SUFFIX = ".safetensors"

Entry = tuple[VoiceFacts, SavedVoice]


class OutOfReach(EngineError):
    """Where a voice is kept does not answer now; another time it may."""


class MemoryStore:
    """Voices that are gone with the process, kept on the CPU."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def stamps(self) -> dict[str, Hashable]:
        return {name: facts for name, (facts, _) in self._entries.items()}

    def write(self, facts: VoiceFacts, saved: SavedVoice) -> Hashable:
        self._entries[facts.name] = facts, _on_cpu(saved)
        return facts

    def read(self, name: str) -> Entry:
        return self._entries[name]

    def delete(self, name: str) -> None:
        del self._entries[name]


class FileStore:
    """Voices in `files`, never one over another, for the model called `model` with this `fingerprint`."""

    def __init__(self, files: Files, model: str, fingerprint: str) -> None:
        self._files, self._model, self._fingerprint = files, model, fingerprint
        self._warned: set[str] = set()

    def stamps(self) -> dict[str, Hashable]:
        """By name the files that could be voices, and what differs when another takes the place of one.

        Warns once of any other.
        """
        stamps: dict[str, Hashable] = {}
        for file, stamp in self._files.stamps().items():
            if file.endswith(_SUFFIX):
                stamps[file.removesuffix(_SUFFIX)] = stamp
            elif file not in self._warned:
                self._warned.add(file)
                logger.warning("event=voice_passed_over file=%r reason='its name does not end with %s'", file, _SUFFIX)
        return stamps

    def write(self, facts: VoiceFacts, saved: SavedVoice) -> Hashable:
        """Keep a voice; its stamp. Raises `VoiceExists` if there is a file of its name, `EngineError` if not kept."""
        metadata = {
            "format": FORMAT,
            "model": self._model,
            "fingerprint": self._fingerprint,
            "facts": msgspec.json.encode(facts).decode(),
            "voice": msgspec.json.encode(dict(saved.facts)).decode(),
        }
        file, data = facts.name + _SUFFIX, safetensors.torch.save(dict(_on_cpu(saved).tensors), metadata)
        try:
            return self._files.create(file, data)
        except FileExistsError as error:
            limit = f"the folder of voices holds {file}, of another model or registered just now"
            raise VoiceExists("name", facts.name, limit) from error
        except OSError as error:
            raise EngineError(f"the voice {facts.name!r} could not be kept: {error.strerror or error}") from error

    def read(self, name: str) -> Entry:
        """The voice in the file of that name.

        Raises `OutOfReach` if it cannot be read now, `EngineError` or a decoding error if it is none of this model.
        """
        try:
            data = self._files.read(name + _SUFFIX)
        except IsADirectoryError as error:
            raise EngineError(str(error)) from error
        except OSError as error:
            raise OutOfReach(f"the voice {name!r} could not be read: {error.strerror or error}") from error
        tensors, metadata = safetensors.torch.load(data), _metadata_of(data)
        if metadata.get("format") != FORMAT:
            raise EngineError(f"its format is {metadata.get('format')!r}; it must be {FORMAT!r}")
        if metadata.get("fingerprint") != self._fingerprint:
            made_by = metadata.get("model")
            raise EngineError(f"it was made by {made_by!r}, whose weights or dtype are not those of {self._model!r}")
        facts = msgspec.json.decode(metadata.get("facts", ""), type=VoiceFacts)
        if voice_id(facts.name) != name:
            raise EngineError(f"it holds the voice {facts.name!r}, not {name!r}")
        return facts, SavedVoice(tensors, msgspec.json.decode(metadata.get("voice", ""), type=dict[str, str]))

    def delete(self, name: str) -> None:
        """Remove a voice's file. Raises `EngineError` if it stays."""
        try:
            self._files.delete(name + _SUFFIX)
        except OSError as error:
            raise EngineError(f"the voice {name!r} could not be deleted: {error.strerror or error}") from error


def store_at(place: str, model: str, fingerprint: str) -> FileStore | MemoryStore:
    """Voices of that model in a folder, in a bucket by its URL, or in memory if `place` is empty.

    Raises `ConfigError` if it cannot be used.
    """
    if not place:
        return MemoryStore()
    is_url = "://" in place
    try:
        files = Bucket(place) if is_url else Folder(place)
    except OSError as error:
        limit = f"it must be {'a bucket' if is_url else 'a folder'} that can be used ({error})"
        raise ConfigError("voices_folder", place, limit) from error
    return FileStore(files, model, fingerprint)


def _metadata_of(data: bytes) -> dict[str, str]:
    """What stands beside the tensors of a file that could be read: in a header of JSON, after its length."""
    header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])
    metadata: dict[str, str] = header.get("__metadata__", {})
    return metadata


def _on_cpu(saved: SavedVoice) -> SavedVoice:
    return SavedVoice({name: tensor.cpu().contiguous() for name, tensor in saved.tensors.items()}, saved.facts)
