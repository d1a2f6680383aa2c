"""Quotas as the configuration gives them, and the names that keys have there, in logs and in metrics."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from sonoro.core.config import Settings, setting
from sonoro.core.errors import ConfigError

DEFAULT = "default"
"""The name of what holds for each key without a quota of its own."""

_MOST = 10**12


@dataclass(frozen=True)
class Quota(Settings):
    """What one key may use; 0 is no limit. Raises `ConfigError` naming field, value and limit."""

    concurrent_requests: int = setting(0, "requests that run or wait at once", 0, 100_000)
    requests_per_minute: int = setting(0, "requests, of which as many may come at once", 0, 1_000_000)
    characters_per_day: int = setting(0, "characters of texts from 0:00 to 24:00 UTC", 0, _MOST)
    stored_voices: int = setting(0, "uploaded voices; 0 for an equal share of max_registered_voices", 0, 1_000_000)
    weight: int = setting(1, "its part of a full server, beside the weights of others that wait", 1, 1000)


def owner_of(key: str) -> str:
    """The owner id of a key: a digest, which does not reveal the key."""
    return hashlib.sha256(b"sonoro voices " + key.encode()).hexdigest()[:16]


def key_name(key: str) -> str:
    """The name of a key in logs, metrics and quotas."""
    return owner_of(key)[:8]


def read_quotas(given: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """`given` by the names of keys, for which it may have the keys themselves. Raises `ConfigError`."""
    known = re.compile(rf"{DEFAULT}|[0-9a-f]{{8}}")
    named = {name if known.fullmatch(name) else key_name(name): dict(limits) for name, limits in given.items()}
    for name, limits in named.items():
        try:
            Quota.from_mapping(limits)
        except ConfigError as error:
            raise ConfigError(f"quotas.{name}.{error.field}", error.value, error.limit) from None
    return named
