"""Checks requests against the quotas of their keys and counts them, in the table that all front processes share.

Changes are made under the table's lock, so that limits hold exactly for the whole server. Knows no HTTP but the headers
that tell of limits."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from sonoro.server.config import ServerConfig
from sonoro.server.errors import TooManyRequests
from sonoro.server.keys import ANONYMOUS, Keys
from sonoro.server.quotas.limits import DEFAULT, Quota
from sonoro.transport.table import Table

MINUTE_NS = 60 * 10**9
DAY_S = 24 * 60 * 60

KINDS = ("requests", "characters")
"""What is counted."""

LIMIT_HEADERS = (
    *(f"x-ratelimit-{part}-{kind}" for kind in KINDS for part in ("limit", "remaining", "reset")),
    *("ratelimit-policy", "ratelimit"),
)
"""The response headers that tell what a quota leaves."""


class OverQuota(TooManyRequests, code="rate_limit_exceeded", status=429):
    """The key has made its requests of the minute."""

    def __init__(self, message: str, headers: Mapping[str, str], retry_s: int) -> None:
        super().__init__(message)
        self.headers = {**headers, "Retry-After": str(retry_s)}


class TooManyAtOnce(OverQuota, code="too_many_concurrent_requests", status=429):
    """The key has as many requests as it may at once."""


class DayUsedUp(OverQuota, code="quota_exceeded", status=429):
    """The key has fewer characters left today than the text has."""


class Used(NamedTuple):
    """Requests, or characters, of a key: since 0:00 UTC, and in all."""

    today: int
    total: int


class _Window(NamedTuple):
    """The state of a limit: of `most` in `long_s` there are `left`, and all again in `reset_s`."""

    kind: str
    most: int
    long_s: int
    left: int
    reset_s: int


class Quotas:
    """The quotas and the usage of all `limits`, by the owner of requests; those of all admin keys together. `names` are
    those of owners, as others may see them.

    A minute is a bucket: full it has as many requests as a minute may have, and it refills evenly. So at most twice as
    many pass in any 60 s. A day is one of UTC."""

    def __init__(
        self,
        config: ServerConfig,
        table: Table,
        *,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self.limits, self._table, self._clock_ns, self._now_s = quotas_of(config), table, clock_ns, now_s
        everybody = "admin" if config.api_keys or config.admin_keys else "all"
        others = {"": everybody, ANONYMOUS.owner: "anonymous"}
        self.names = {owner: others.get(owner, owner[:8]) for owner in self.limits}

    @classmethod
    def of(cls, config: ServerConfig, table: Table) -> Quotas | None:
        """Those of a server; None where nothing is to be counted."""
        return cls(config, table) if is_counted(config) else None

    def admit(self, owner: str, characters: int, held: int) -> None:
        """Count a request of `owner`, who has `held` others at once; call it under the table's lock, under which these
        were counted. Raises `OverQuota`."""
        quota, table = self.limits[owner], self._table
        self._begin_day()
        if 0 < quota.concurrent_requests <= held:
            most = f"concurrent_requests: this key has {held} at once and may have {quota.concurrent_requests}"
            raise TooManyAtOnce(f"{most}; try again when one has ended", self.headers(owner), 1)
        self._check_characters(owner, characters)
        self._take_turn(owner, quota.requests_per_minute)
        table.add(f"requests-{owner}", 1)
        table.add(f"characters-{owner}", characters)

    def _take_turn(self, owner: str, most: int) -> None:
        """Take a request from the bucket of the minute, which is full at a time, and empty a minute before. Raises
        `OverQuota`."""
        if not most:
            return
        table, now_ns = self._table, self._clock_ns()
        full_at_ns = max(table.get(f"rate-{owner}", table.server), now_ns) + MINUTE_NS // most
        if (early_ns := full_at_ns - now_ns - MINUTE_NS) > 0:
            message = f"requests_per_minute: this key has made {most}, as many as it may"
            wait = f"try again in {early_ns / 1e9:.3g} s"
            raise OverQuota(f"{message}; {wait}", self.headers(owner), math.ceil(early_ns / 1e9))
        table.set(f"rate-{owner}", full_at_ns, table.server)

    def take_back(self, owner: str, characters: int) -> None:
        """Count a request that `admit` counted no more."""
        quota, table = self.limits[owner], self._table
        with table.lock():
            if quota.requests_per_minute:
                table.add(f"rate-{owner}", -(MINUTE_NS // quota.requests_per_minute), table.server)
            table.add(f"requests-{owner}", -1)
            table.add(f"characters-{owner}", -characters)

    def append(self, owner: str, characters: int) -> None:
        """Count more text of a request. Raises `OverQuota`."""
        with self._table.lock():
            self._begin_day()
            self._check_characters(owner, characters)
            self._table.add(f"characters-{owner}", characters)

    def _check_characters(self, owner: str, characters: int) -> None:
        most, used = self.limits[owner].characters_per_day, self.used(owner, "characters").today
        if most and used + characters > most:
            message = f"characters_per_day: this key has used {used} of {most}, and this text has {characters}"
            raise DayUsedUp(f"{message}; the day ends at 24:00 UTC", self.headers(owner), self._day_left_s)

    def used(self, owner: str, kind: str) -> Used:
        """How many of `kind` the owner has used."""
        total, before = self._table.total(f"{kind}-{owner}"), f"{kind}_before-{owner}"
        is_today = self._table.get("day", self._table.server) == self.today
        return Used(max(0, total - self._table.get(before, self._table.server)) if is_today else 0, total)

    def all_used(self) -> dict[str, list[Used]]:
        """What each name has used, by `KINDS`."""
        with self._table.lock():
            return {self.names[owner]: [self.used(owner, kind) for kind in KINDS] for owner in self.limits}

    def restore(self, used: Mapping[str, Mapping[str, Used]]) -> None:
        """Go on from what names had used by kind before this start."""
        table = self._table
        self._begin_day()
        for owner, name in self.names.items():
            for kind, count in used.get(name, {}).items():
                table.set(f"{kind}-{owner}", count.total, table.server)
                table.set(f"{kind}_before-{owner}", count.total - count.today, table.server)

    def headers(self, owner: str) -> dict[str, str]:
        """The headers that tell what is left to `owner`: OpenAI's, and those of the IETF's draft (`RateLimit`)."""
        if not (windows := self._windows(owner)):
            return {}
        shown = {}
        for each in windows:
            shown[f"x-ratelimit-limit-{each.kind}"] = str(each.most)
            shown[f"x-ratelimit-remaining-{each.kind}"] = str(each.left)
            shown[f"x-ratelimit-reset-{each.kind}"] = f"{each.reset_s}s"
        policies = (f'"{each.kind}";q={each.most};w={each.long_s}' for each in windows)
        states = (f'"{each.kind}";r={each.left};t={each.reset_s}' for each in windows)
        return {**shown, "ratelimit-policy": ", ".join(policies), "ratelimit": ", ".join(states)}

    def _windows(self, owner: str) -> list[_Window]:
        quota, windows = self.limits[owner], list[_Window]()
        if most := quota.requests_per_minute:
            used_ns = max(0, self._table.get(f"rate-{owner}", self._table.server) - self._clock_ns())
            left = min(most, (MINUTE_NS - used_ns) // (MINUTE_NS // most))
            windows.append(_Window("requests", most, 60, left, math.ceil(used_ns / 1e9)))
        if most := quota.characters_per_day:
            left = max(0, most - self.used(owner, "characters").today)
            windows.append(_Window("characters", most, DAY_S, left, self._day_left_s))
        return windows

    @property
    def today(self) -> int:
        """The day, in UTC, as days since the first of January 1970."""
        return int(self._now_s() // DAY_S)

    @property
    def _day_left_s(self) -> int:
        return math.ceil(DAY_S - self._now_s() % DAY_S)

    def _begin_day(self) -> None:
        """Note what was used before today, if the day has just begun."""
        table, today = self._table, self.today
        if table.get("day", table.server) != today:
            table.set("day", today, table.server)
            for owner in self.limits:
                for kind in KINDS:
                    table.set(f"{kind}_before-{owner}", table.total(f"{kind}-{owner}"), table.server)


def is_counted(config: ServerConfig) -> bool:
    """Whether usage is counted: wherever there are keys, a quota or a file of usage."""
    return bool(config.api_keys or config.admin_keys or config.quotas or config.usage_file)


def quotas_of(config: ServerConfig) -> dict[str, Quota]:
    """The quota of each owner of requests. What a key's own does not set is as `default`; admin keys have no limits."""
    owners, has_keys = Keys(config).ids, bool(config.api_keys or config.admin_keys)
    common = config.quotas.get(DEFAULT, {})
    return {
        owner: Quota() if has_keys and not owner else Quota.from_mapping({**common, **config.quotas.get(owner[:8], {})})
        for owner in owners
    }


def usage_columns(config: ServerConfig) -> list[str]:
    """The columns of a table whose numbers stay when a front has ended."""
    return _columns(KINDS, config)


def quota_columns(config: ServerConfig) -> list[str]:
    """All columns of a table that `Quotas` need."""
    if not is_counted(config):
        return []
    return ["day", *usage_columns(config), *_columns((*(f"{kind}_before" for kind in KINDS), "rate"), config)]


def _columns(kinds: Iterable[str], config: ServerConfig) -> list[str]:
    return [f"{kind}-{owner}" for kind in kinds for owner in Keys(config).ids] if is_counted(config) else []
