"""The engine's own configuration: declared here once, checked when constructed, read from YAML.

The only module that reads the environment. Knows no model.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml

from sonoro.core.errors import ConfigError
from sonoro.core.text import MIN_MAX_CHARACTERS

__all__ = ["LOG_LEVEL_VARIABLE", "EngineConfig", "log_level"]

LOG_LEVEL_VARIABLE = "SONORO_LOG_LEVEL"


@dataclass(frozen=True)
class EngineConfig:
    """How much the engine holds and how it divides its work. Raises `ConfigError` naming field, value and limit.

    `slots`: requests that run at once. `max_positions`: backbone positions of a slot, prompt and frames together.
    `max_frames`: frames of one segment. `max_text`: pending text ids of a slot. `max_characters`: letters of one
    segment (as `sonoro.core.text.spoken_length` counts). `max_prefills`: prompts per tick. `max_voices`: encoded
    references kept. A request's first chunk is `first_chunk_frames` long; each later one `chunk_growth` times the one
    before, up to `max_chunk_frames`.
    """

    slots: int = 4
    max_positions: int = 2048
    max_frames: int = 1024
    max_text: int = 1024
    max_characters: int = 300
    max_prefills: int = 4
    max_voices: int = 32
    first_chunk_frames: int = 1
    chunk_growth: float = 2.0
    max_chunk_frames: int = 12

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            self._check_type(field.name, is_whole=field.type == "int")
        self._check("slots", 1, 4096)
        self._check("max_frames", 1, 1_000_000)
        self._check("max_positions", self.max_frames + 1, 10_000_000, "room for a prompt before max_frames frames")
        self._check("max_text", 1, 1_000_000)
        self._check("max_characters", MIN_MAX_CHARACTERS, 100_000)
        self._check("max_prefills", 1, 4096)
        self._check("max_voices", 1, 1_000_000)
        self._check("first_chunk_frames", 1, self.max_frames, "at most max_frames")
        self._check("chunk_growth", 1.0, 100.0)
        self._check("max_chunk_frames", self.first_chunk_frames, self.max_frames, "first_chunk_frames to max_frames")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """The defaults with `values` over them. Raises `ConfigError` for a key that is not a field."""
        known = [field.name for field in dataclasses.fields(cls)]
        for key, value in values.items():
            if key not in known:
                raise ConfigError(str(key), value, "there is no such key; known keys: " + ", ".join(known))
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """The defaults with the YAML mapping at `path` over them. Raises `ConfigError`."""
        try:
            values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("config", str(path), f"it must be a readable file ({error})") from error
        except yaml.YAMLError as error:
            reason = " ".join(str(error).split())
            raise ConfigError("config", str(path), f"it must be YAML ({reason})") from error
        if values is None:
            return cls()
        if not isinstance(values, dict):
            raise ConfigError("config", str(path), f"it must hold keys and values, not a {type(values).__name__}")
        return cls.from_mapping(values)

    def _check_type(self, name: str, *, is_whole: bool) -> None:
        value = getattr(self, name)
        accepted = (int,) if is_whole else (int, float)
        if isinstance(value, bool) or not isinstance(value, accepted):
            raise ConfigError(name, value, f"it must be a {'whole number' if is_whole else 'number'}")

    def _check(self, name: str, low: float, high: float, reason: str = "") -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            because = f" ({reason})" if reason else ""
            raise ConfigError(name, value, f"it must be at least {low:.15g} and at most {high:.15g}{because}")


def log_level() -> int:
    """The level named by `SONORO_LOG_LEVEL`, warnings by default. Raises `ConfigError` if it names none."""
    name = os.environ.get(LOG_LEVEL_VARIABLE, "WARNING")
    levels = logging.getLevelNamesMapping()
    if name.upper() not in levels:
        raise ConfigError(LOG_LEVEL_VARIABLE, name, "one of " + ", ".join(levels))
    return levels[name.upper()]
