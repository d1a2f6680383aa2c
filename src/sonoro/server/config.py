"""The server's configuration: declared here once, validated when constructed, read from YAML beside the engine's.

Knows no engine and no model."""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, get_args

from sonoro.core.config import SECTIONS, EngineConfig, Settings, read_yaml, section_of, setting
from sonoro.core.errors import ConfigError
from sonoro.core.types import ModelSpec, VoiceSex
from sonoro.core.version import extra
from sonoro.server.quotas.limits import DEFAULT, key_name, read_quotas

OPENAI_VOICES: dict[str, VoiceSex] = {
    **{"alloy": "female", "ash": "male", "ballad": "male", "cedar": "male", "coral": "female", "echo": "male"},
    **{"fable": "male", "marin": "female", "nova": "female", "onyx": "male", "sage": "female", "shimmer": "female"},
    "verse": "male",
}
"""The voices of OpenAI's API and their sex: each is mapped to one of the model's voices of that sex in turn, or to any
of its voices if it has none."""


LOG_FORMATS = ("text", "json")


@dataclass(frozen=True)
class ServerConfig(Settings):
    """Address, keys, limits and timeouts of a server. Raises `ConfigError` naming field, value and limit.
    Without keys no request needs one. An uploaded voice belongs to its key, and other keys do not see it; a voice
    uploaded with an admin key is everybody's. A server without engines exits."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one", 0, 65535)
    front_processes: int = setting(
        0,
        "processes that speak HTTP; 0 for one, or with several GPUs one for every four cores, at most two a GPU",
        0,
        64,
    )
    api_keys: tuple[str, ...] = setting((), "a key that clients must send", flag="api_key")
    admin_keys: tuple[str, ...] = setting((), "a key that may use and delete everybody's voices", flag="admin_key")
    quotas: Mapping[str, Mapping[str, int]] = setting(
        {}, "KEY=LIMIT:COUNT,...: what a key, or by the name default any key, may use", flag="quota"
    )
    usage_file: str = setting("", "SQLite file that keeps the usage of keys across restarts; empty for none")
    traces: bool = setting(False, "send a span of each text to an OpenTelemetry collector (OTEL_... variables)")
    max_body_bytes: int = setting(16 * 2**20, "largest body of a request", 1024, 2**30)
    max_total_body_bytes: int = setting(256 * 2**20, "request bodies in memory, together", 1024, 2**40)
    max_upload_bytes: int = setting(10 * 2**20, "largest recording", 1024, 2**30)
    max_characters: int = setting(4096, "longest text of a request", 1, 1_000_000)
    max_batch_characters: int = setting(32_768, "longest texts of a batch, together", 1, 100_000_000)
    max_answer_bytes: int = setting(
        128 * 2**20, "largest possible response held in memory: to a batch, or in one JSON object", 1024, 2**40
    )
    max_total_answer_bytes: int = setting(512 * 2**20, "responses held in memory, together", 1024, 2**40)
    max_concurrency: int = setting(0, "requests that run at once; 0 for the slots of all engines", 0, 100_000)
    max_waiting: int = setting(1024, "requests that may wait to run", 0, 100_000)
    max_sessions: int = setting(1024, "WebSocket sessions at once", 0, 100_000)
    max_queue_wait_ms: int = setting(5000, "how long a request waits before it is refused", 0, 600_000)
    head_timeout_s: float = setting(10.0, "how long the head of a request may take to arrive", 0.01, 3600)
    keep_alive_timeout_s: int = setting(75, "how long a connection may idle between requests", 1, 3600)
    body_timeout_s: float = setting(30.0, "how long the body of a request may take to arrive", 0.01, 3600)
    slow_reader_timeout_s: float = setting(60.0, "how long a client may read nothing of its response", 0.01, 3600)
    session_idle_timeout_s: float = setting(60.0, "how long a session may be idle", 0.01, 3600)
    shutdown_timeout_s: float = setting(30.0, "how long running requests may go on at shutdown", 0.01, 3600)
    max_restarts: int = setting(3, "replacements of an engine within restart_window_s", 0, 1_000_000)
    restart_window_s: float = setting(600.0, "the window in which crashes of an engine are counted", 0.01, 1e7)
    model_aliases: tuple[str, ...] = setting(
        ("tts-1", "tts-1-hd", "gpt-4o-mini-tts"),
        "a further name of the model, in place of OpenAI's",
        flag="model_alias",
    )
    voice_aliases: Mapping[str, str] = setting({}, "NAME=VOICE of the model", flag="voice_alias")
    dialects_off: tuple[str, ...] = setting(
        (), "a wire format of other speech servers to switch off", flag="dialects_off"
    )
    cors_origins: tuple[str, ...] = setting((), "an origin that browsers may call from; * for all", flag="cors_origin")
    allowed_hosts: tuple[str, ...] = setting((), "a Host name to accept besides host; * for any", flag="allowed_host")
    allow_reference_urls: bool = setting(False, "fetch recordings by URL from public hosts")
    log_format: str = setting("text", "text or json", choices=LOG_FORMATS)
    reference_folder: str = setting("", "folder of recordings that requests may name; empty for none")
    lexicons: tuple[str, ...] = setting((), "file of words and how they are said, for every text", flag="lexicon")
    lexicons_folder: str = setting("", "folder or bucket (s3://...) for registered lexicons; empty: in memory")
    wyoming: str = setting("", "PORT or HOST:PORT for Home Assistant's protocol Wyoming, which has no keys")
    wyoming_name: str = setting("", "name announced to Home Assistant; empty for no announcement")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.host:
            raise ConfigError("host", self.host, "it must be a name or an address")
        for host in self.allowed_hosts:
            if "/" in host or (":" in host and host.count(":") < 2):
                raise ConfigError("allowed_hosts", host, "it must be a name or an address, without scheme and port")
        if self.reference_folder and not Path(self.reference_folder).is_dir():
            raise ConfigError("reference_folder", self.reference_folder, "it must be a folder that is there, or empty")
        if not all(word for pair in self.voice_aliases.items() for word in pair):
            raise ConfigError("voice_aliases", self.voice_aliases, "it must map names to voices of the model")
        object.__setattr__(self, "voice_aliases", MappingProxyType(dict(self.voice_aliases)))
        object.__setattr__(self, "quotas", MappingProxyType(read_quotas(self.quotas)))

    def resolve(self, slots: int) -> Self:
        """Fill in the fields that depend on the engines, which have `slots` slots in all. Raises `ConfigError` for the
        quota of a key that is not there, and for `traces` without the extra."""
        named = {DEFAULT, *map(key_name, self.api_keys)}
        for name, limits in self.quotas.items():
            ConfigError.unless(name in named, f"quotas.{name}", limits, f"keys are {', '.join(sorted(named))}")
        if self.traces:
            try:
                import_module("sonoro.server.traces").exporter()
            except ImportError as error:
                raise ConfigError("traces", True, f"it needs OpenTelemetry: {extra('otel')}") from error
        return dataclasses.replace(self, max_concurrency=self.max_concurrency or slots)

    @property
    def max_message_bytes(self) -> int:
        """Bound of a message that brings text; a character takes up to 12 bytes in JSON, two escaped surrogates."""
        return 2**16 + 12 * self.max_characters

    @property
    def values(self) -> dict[str, Any]:
        """Every field, as `from_mapping` takes them."""
        values = {entry.name: getattr(self, entry.name) for entry in dataclasses.fields(self)}
        return {**values, "voice_aliases": dict(self.voice_aliases), "quotas": dict(self.quotas)}

    @property
    def shown(self) -> dict[str, Any]:
        """Every field; of the keys only their number."""
        values = self.values
        secret = [entry.name for entry in dataclasses.fields(self) if not entry.repr]
        counts = {name: f"{len(values[name])} set" for name in secret}
        return {**values, **counts}

    @property
    def public(self) -> dict[str, Any]:
        """What of `shown` clients may know."""
        paths = ("reference_folder", "lexicons_folder", "usage_file")
        folders = {name: "set" if getattr(self, name) else "" for name in paths}
        values = {**self.shown, **folders, "lexicons": f"{len(self.lexicons)} set"}
        hidden = ("host", "port", "wyoming", "api_keys", "admin_keys", "quotas")
        return {name: value for name, value in values.items() if name not in hidden}

    def aliases(self, spec: ModelSpec) -> dict[str, str]:
        """Aliases in lower case to voices of `spec`. Raises `ConfigError` for a voice that it does not have."""
        for name, voice in self.voice_aliases.items():
            if voice.lower() not in (*spec.voices, *spec.voice_aliases):
                known = ", ".join(spec.voices) or "none"
                raise ConfigError(f"voice_aliases.{name}", voice, f"{spec.name} has no such voice; it has {known}")
        openai: dict[str, str] = {}
        voices = {
            sex: itertools.cycle([voice for voice in spec.voices if spec.voice_sexes.get(voice) == sex])
            for sex in get_args(VoiceSex)
        }
        anybody = itertools.cycle(spec.voices)
        if spec.voices:
            openai = {name: next(voices[sex], None) or next(anybody) for name, sex in OPENAI_VOICES.items()}
        given = {
            name.lower(): spec.voice_aliases.get(voice.lower(), voice.lower())
            for name, voice in self.voice_aliases.items()
        }
        return {name: voice for name, voice in (openai | spec.voice_aliases | given).items() if name not in spec.voices}


def read_sections(path: str | Path, **defaults: Any) -> tuple[EngineConfig, ServerConfig]:
    """The sections `engine` and `server` of the YAML file at `path`, either of which may be missing; `defaults` are
    fields of the engine for which the file has none.
    Raises `ConfigError` for a file that cannot be read and for any key that is not known."""
    sections = read_yaml(path, "sections")
    for name, section in sections.items():
        if name not in SECTIONS:
            raise ConfigError(str(name), section, f"there is no such section; known sections: {', '.join(SECTIONS)}")
    engine, server = (section_of(sections, name) for name in SECTIONS)
    return EngineConfig.from_mapping({**defaults, **engine}), ServerConfig.from_mapping(server)
