"""Registered voices where they outlast the engine: a folder with a safetensors file for each, or memory alone.

Knows no model: a voice is named tensors and facts, and belongs to whoever has the fingerprint it was saved with.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Hashable
from pathlib import Path

import msgspec
import safetensors
import safetensors.torch

from sonoro.core.errors import ConfigError, EngineError, VoiceExists
from sonoro.core.types import VoiceFacts, voice_name
from sonoro.models.base import SavedVoice

__all__ = ["FORMAT", "Entry", "FolderStore", "MemoryStore"]

logger = logging.getLogger(__name__)

FORMAT = "1"
"""Of the files; another is refused. Metadata: format, model, fingerprint, and as JSON facts and the model's own."""

_SUFFIX, _UNFINISHED = ".safetensors", ".tmp"
_ABANDONED_S = 3600.0
"""After this long nobody is writing a file any more: a process was killed at it."""

Entry = tuple[VoiceFacts, SavedVoice]


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


class FolderStore:
    """Voices in `folder`, made if it is missing, for the model called `model` with this `fingerprint`.

    Files are written whole or not at all, and never over another. Raises `ConfigError` if the folder cannot be used.
    """

    def __init__(self, folder: str, model: str, fingerprint: str) -> None:
        self._folder, self._model, self._fingerprint = Path(folder).expanduser(), model, fingerprint
        self._warned: set[str] = set()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._sweep()
        except OSError as error:
            raise ConfigError("voices_folder", folder, f"it must be a folder that can be used ({error})") from error

    def stamps(self) -> dict[str, Hashable]:
        """By name the files that could be voices, and what differs when another takes the place of one.

        Warns once of any other but those that are being written.
        """
        stamps: dict[str, Hashable] = {}
        for path in sorted(path for path in self._folder.iterdir() if not _is_unfinished(path)):
            if path.suffix == _SUFFIX:
                with contextlib.suppress(FileNotFoundError):
                    stamps[path.stem] = _stamp(path)
            elif path.name not in self._warned:
                self._warned.add(path.name)
                logger.warning(
                    "event=voice_passed_over file=%r reason='its name does not end with %s'", path.name, _SUFFIX
                )
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
        data = safetensors.torch.save(dict(_on_cpu(saved).tensors), metadata)
        path = self._path(facts.name)
        if path.exists():
            raise VoiceExists("name", facts.name, f"the folder of voices holds {path.name}, though not of this model")
        try:
            self._write(path, data)
            return _stamp(path)
        except OSError as error:
            raise EngineError(f"the voice {facts.name!r} could not be kept: {error.strerror}") from error

    def read(self, name: str) -> Entry:
        """The voice in the file of that name. Raises `EngineError` or a decoding error if it is none of this model."""
        path = self._path(name)
        if not path.is_file():
            raise EngineError(f"{path.name} is not a file")
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT:
                raise EngineError(f"its format is {metadata.get('format')!r}; it must be {FORMAT!r}")
            if metadata.get("fingerprint") != self._fingerprint:
                made_by = metadata.get("model")
                raise EngineError(
                    f"it was made by {made_by!r}, whose weights or dtype are not those of {self._model!r}"
                )
            facts = msgspec.json.decode(metadata.get("facts", ""), type=VoiceFacts)
            if voice_name(facts.name) != name:
                raise EngineError(f"it holds the voice {facts.name!r}, not {name!r}")
            own = msgspec.json.decode(metadata.get("voice", ""), type=dict[str, str])
            return facts, SavedVoice({key: file.get_tensor(key) for key in file.keys()}, own)  # noqa: SIM118

    def delete(self, name: str) -> None:
        """Remove a voice's file. Raises `EngineError` if it stays."""
        try:
            self._path(name).unlink(missing_ok=True)
            self._sync_folder()
        except OSError as error:
            raise EngineError(f"the voice {name!r} could not be deleted: {error.strerror}") from error

    def _write(self, path: Path, data: bytes) -> None:
        handle, unfinished = tempfile.mkstemp(dir=self._folder, prefix=f".{path.stem}.", suffix=_UNFINISHED)
        try:
            with open(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(unfinished)
            raise
        self._sync_folder()

    def _sync_folder(self) -> None:
        handle = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def _sweep(self) -> None:
        """Remove what was being written when its process was killed. Another engine may be writing right now."""
        for path in self._folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if _is_unfinished(path) and path.stat().st_mtime < time.time() - _ABANDONED_S:
                    path.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / (name + _SUFFIX)


def _stamp(path: Path) -> Hashable:
    facts = path.lstat()
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


def _is_unfinished(path: Path) -> bool:
    return path.name.startswith(".") and path.name.endswith(_UNFINISHED)


def _on_cpu(saved: SavedVoice) -> SavedVoice:
    return SavedVoice({name: tensor.cpu().contiguous() for name, tensor in saved.tensors.items()}, saved.facts)
