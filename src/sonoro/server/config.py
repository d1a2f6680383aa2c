"""The server's own configuration: declared here once, checked when constructed, read from YAML beside the engine's.

Knows no engine and no model.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, get_args

import yaml

from sonoro.core.config import EngineConfig, StrictLoader
from sonoro.core.errors import ConfigError, suggestion
from sonoro.core.types import ModelSpec, VoiceSex

__all__ = ["OPENAI_VOICES", "ServerConfig", "read_sections"]

OPENAI_VOICES: dict[str, VoiceSex] = {
    **{"alloy": "female", "ash": "male", "ballad": "male", "cedar": "male", "coral": "female", "echo": "male"},
    **{"fable": "male", "marin": "female", "nova": "female", "onyx": "male", "sage": "female", "shimmer": "female"},
    "verse": "male",
}
"""Names that clients of that API send, and whom people expect to hear: each stands for one of the model's voices of
that sex in turn, or of all its voices where it has none."""


_SECRET = ("api_keys", "admin_keys")

LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class ServerConfig:
    """Who is served, and how much of what. Raises `ConfigError` naming field, value and limit.

    `port` 0 takes any that is free. `api_keys` and `admin_keys`: one of them must come with each request under /v1; if
    there are none, none is asked for. An uploaded voice belongs to the key that made it and no other knows of it;
    one that an admin key made is everybody's, and those keys may use and delete all.
    `max_body_bytes` and `max_characters` of the text bound one request, and its body must arrive in `body_timeout_s`;
    `max_upload_bytes` bounds one recording, `max_total_body_bytes` all bodies at once, `max_batch_characters` the texts
    of a batch, `max_answer_bytes` what its answer, which is held whole, could come to, and `max_total_answer_bytes`
    all such answers at once. A head must arrive in `head_timeout_s`; a connection may idle for `keep_alive_timeout_s`.
    Recordings come with the request; with `allow_reference_urls` they are fetched from public hosts too, and opened in
    the folder `reference_folder` if one is given.
    `max_concurrency`: requests spoken at once, 0 for the slots of all engines. Others wait for a place, `max_waiting`
    of them at most, each for `max_queue_wait_ms` at most. A client that takes nothing for `slow_reader_timeout_s` is
    given up, of `max_sessions` over WebSockets one in which it neither says nor awaits anything for
    `session_idle_timeout_s` is closed; at the end requests under way get `shutdown_timeout_s`. An engine that crashes
    is replaced, `max_restarts` times within `restart_window_s`; once none is left the server ends. `model_aliases` are
    further names of the model; `voice_aliases` give names to its voices: those of OpenAI that are not in it go
    round those of the sex people expect. Of the wire formats of other servers' clients those in `dialects_off` are not
    answered. `cors_origins` may call from a browser, "*" for all. `allowed_hosts` are
    names by which clients may ask beside what the server is bound to, "*" for any; bound to all addresses, with none
    given, it is any. `log_format` is text or json. Wyoming, which has no keys, is spoken at `wyoming`, "PORT" on this
    machine alone or "HOST:PORT", nowhere if empty, and announced to Home Assistant as `wyoming_name`, unless empty.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    admin_keys: tuple[str, ...] = field(default=(), repr=False)
    max_body_bytes: int = 16 * 2**20
    max_total_body_bytes: int = 256 * 2**20
    max_upload_bytes: int = 10 * 2**20
    max_characters: int = 4096
    max_batch_characters: int = 32_768
    max_answer_bytes: int = 128 * 2**20
    max_total_answer_bytes: int = 512 * 2**20
    max_concurrency: int = 0
    max_waiting: int = 1024
    max_sessions: int = 1024
    max_queue_wait_ms: int = 5000
    head_timeout_s: float = 10.0
    keep_alive_timeout_s: int = 5
    body_timeout_s: float = 30.0
    slow_reader_timeout_s: float = 60.0
    session_idle_timeout_s: float = 60.0
    shutdown_timeout_s: float = 30.0
    max_restarts: int = 3
    restart_window_s: float = 600.0
    model_aliases: tuple[str, ...] = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
    voice_aliases: Mapping[str, str] = field(default_factory=dict)
    dialects_off: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    allow_reference_urls: bool = False
    log_format: str = "text"
    reference_folder: str = ""
    wyoming: str = ""
    wyoming_name: str = ""

    def __post_init__(self) -> None:
        self._check_host()
        for name, low, high in (
            ("port", 0, 65535),
            ("max_body_bytes", 1024, 2**30),
            ("max_total_body_bytes", 1024, 2**40),
            ("max_upload_bytes", 1024, 2**30),
            ("max_characters", 1, 1_000_000),
            ("max_batch_characters", 1, 100_000_000),
            ("max_answer_bytes", 1024, 2**40),
            ("max_total_answer_bytes", 1024, 2**40),
            ("max_concurrency", 0, 100_000),
            ("max_waiting", 0, 100_000),
            ("max_sessions", 0, 100_000),
            ("max_queue_wait_ms", 0, 600_000),
            ("keep_alive_timeout_s", 1, 3600),
            ("max_restarts", 0, 1_000_000),
        ):
            self._check_number(name, low, high, is_whole=True)
        for name in (
            "head_timeout_s",
            "body_timeout_s",
            "slow_reader_timeout_s",
            "session_idle_timeout_s",
            "shutdown_timeout_s",
        ):
            self._check_number(name, 0.01, 3600, is_whole=False)
        self._check_number("restart_window_s", 0.01, 1e7, is_whole=False)
        for name in (*_SECRET, "model_aliases", "dialects_off", "cors_origins", "allowed_hosts"):
            self._check_names(name)
        for host in self.allowed_hosts:
            if "/" in host or (":" in host and host.count(":") < 2):
                raise ConfigError("allowed_hosts", host, "it must be a name or an address, without scheme and port")
        for name in ("wyoming", "wyoming_name"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(name, getattr(self, name), "it must be a string; it may be empty")
        if self.log_format not in LOG_FORMATS:
            raise ConfigError("log_format", self.log_format, f"it must be {' or '.join(LOG_FORMATS)}")
        self._check_voices()
        self._check_references()

    def resolve(self, slots: int) -> Self:
        """This configuration with what was left to the engines, which have `slots` together, filled in."""
        return dataclasses.replace(self, max_concurrency=self.max_concurrency or slots)

    @property
    def shown(self) -> dict[str, Any]:
        """Every field, the keys counted only."""
        values = {name.name: getattr(self, name.name) for name in dataclasses.fields(self)}
        counts = {name: f"{len(values[name])} set" for name in _SECRET}
        return {**values, **counts, "voice_aliases": dict(self.voice_aliases)}

    @property
    def public(self) -> dict[str, Any]:
        """What of `shown` clients may know."""
        values = {**self.shown, "reference_folder": "set" if self.reference_folder else ""}
        return {name: value for name, value in values.items() if name not in ("host", "port", "wyoming", *_SECRET)}

    def aliases(self, spec: ModelSpec) -> dict[str, str]:
        """The names, lower case, that stand for a voice of `spec`. Raises `ConfigError` for one that it lacks."""
        for name, voice in self.voice_aliases.items():
            if voice.lower() not in (*spec.voices, *spec.voice_aliases):
                known = ", ".join(spec.voices) or "none"
                raise ConfigError(f"voice_aliases.{name}", voice, f"{spec.name} has no such voice; it has {known}")
        turns: dict[str, str] = {}
        voices = {
            sex: itertools.cycle([voice for voice in spec.voices if spec.voice_sexes.get(voice) == sex])
            for sex in get_args(VoiceSex)
        }
        anybody = itertools.cycle(spec.voices)
        for name, sex in OPENAI_VOICES.items():
            if spec.voices:
                turns[name] = next(voices[sex], None) or next(anybody)
        given = {
            name.lower(): spec.voice_aliases.get(voice.lower(), voice.lower())
            for name, voice in self.voice_aliases.items()
        }
        return {name: voice for name, voice in (turns | spec.voice_aliases | given).items() if name not in spec.voices}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """The defaults with `values` over them. Raises `ConfigError` for a key that is not a field."""
        known = [entry.name for entry in dataclasses.fields(cls)]
        for key, value in values.items():
            if key not in known:
                nearest = suggestion(str(key), known)
                limit = f"there is no such key; {nearest}{' ' * bool(nearest)}known keys: {', '.join(known)}"
                raise ConfigError(str(key), value, limit)
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
        }
        return cls(**fields)

    def _check_host(self) -> None:
        if not isinstance(self.host, str) or not self.host:
            raise ConfigError("host", self.host, "it must be a name or an address")

    def _check_number(self, name: str, low: float, high: float, *, is_whole: bool) -> None:
        value = getattr(self, name)
        kinds = int if is_whole else (int, float)
        if not isinstance(value, kinds) or isinstance(value, bool) or not low <= value <= high:
            kind = "a whole number" if is_whole else "a number"
            raise ConfigError(name, value, f"it must be {kind} of at least {low:.15g} and at most {high:.15g}")

    def _check_names(self, name: str) -> None:
        values = getattr(self, name)
        if not isinstance(values, tuple) or not all(isinstance(value, str) and value for value in values):
            shown = "..." if name in _SECRET else values
            raise ConfigError(name, shown, "it must be a list of strings that are not empty")

    def _check_references(self) -> None:
        if not isinstance(self.allow_reference_urls, bool):
            raise ConfigError("allow_reference_urls", self.allow_reference_urls, "it must be true or false")
        folder = self.reference_folder
        if not isinstance(folder, str) or (folder and not Path(folder).is_dir()):
            raise ConfigError("reference_folder", folder, "it must be a folder that is there, or empty for none")

    def _check_voices(self) -> None:
        voices = self.voice_aliases
        if not isinstance(voices, Mapping) or not all(
            isinstance(word, str) and word for pair in voices.items() for word in pair
        ):
            raise ConfigError("voice_aliases", voices, "it must map names to voices of the model")
        object.__setattr__(self, "voice_aliases", MappingProxyType(dict(voices)))


def read_sections(path: str | Path) -> tuple[EngineConfig, ServerConfig]:
    """The sections `engine` and `server` of the YAML file at `path`, either of which may be missing.

    Raises `ConfigError` for a file that cannot be read and for any key that is not known.
    """
    try:
        values = yaml.load(Path(path).read_text(encoding="utf-8"), StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"it must be a readable file ({error})") from error
    except yaml.YAMLError as error:
        raise ConfigError("config", str(path), f"it must be YAML ({' '.join(str(error).split())})") from error
    sections = {} if values is None else values
    if not isinstance(sections, dict):
        raise ConfigError("config", str(path), f"it must hold sections, not a {type(sections).__name__}")
    for name, section in sections.items():
        if name not in ("engine", "server"):
            raise ConfigError(str(name), section, "there is no such section; known sections: engine, server")
        if section is not None and not isinstance(section, dict):
            raise ConfigError(name, section, f"it must hold keys and values, not a {type(section).__name__}")
    engine, server = sections.get("engine") or {}, sections.get("server") or {}
    return EngineConfig.from_mapping(engine), ServerConfig.from_mapping(server)
