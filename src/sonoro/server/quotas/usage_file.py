"""Keeps the usage of keys in a SQLite file, a row for each key and day. Knows no request."""

import asyncio
import logging
import sqlite3
import time
from typing import NoReturn

from sonoro.core.errors import ConfigError
from sonoro.server.config import ServerConfig
from sonoro.server.quotas.counts import DAY_S, KINDS, Quotas, Used
from sonoro.transport.process import cancel_tasks

logger = logging.getLogger(__name__)

WRITE_S = 1.0
"""How often the file is written; a server that is killed whole loses what it counted since."""

_TABLE = """CREATE TABLE IF NOT EXISTS usage (
    key TEXT, day TEXT, requests INTEGER NOT NULL, characters INTEGER NOT NULL, PRIMARY KEY (key, day))"""
_ADD = """INSERT INTO usage VALUES (?, ?, ?, ?) ON CONFLICT (key, day) DO UPDATE SET
    requests = requests + excluded.requests, characters = characters + excluded.characters"""
_READ = f"SELECT key, {', '.join(f'sum({kind} * (day = ?)), sum({kind})' for kind in KINDS)} FROM usage GROUP BY key"


class UsageFile:
    """The file at `path`, which goes on with the usage that it has. Servers of one machine may share it: each adds what
    it counts. Raises `ConfigError` if it cannot be written."""

    def __init__(self, path: str, quotas: Quotas) -> None:
        self._path, self._quotas = path, quotas
        self._keeping: asyncio.Task[None] | None = None
        try:
            self._file = sqlite3.connect(path, check_same_thread=False)
            with self._file:
                self._file.execute(_TABLE)
            rows = self._file.execute(_READ, [_date(quotas.today)] * len(KINDS)).fetchall()
        except sqlite3.Error as error:
            self._refuse(error)
        quotas.restore({key: {"requests": Used(*used[:2]), "characters": Used(*used[2:])} for key, *used in rows})
        self._written = quotas.all_used()

    @classmethod
    def of(cls, config: ServerConfig, quotas: Quotas | None) -> "UsageFile | None":
        """That of a server, if it has one."""
        return cls(config.usage_file, quotas) if config.usage_file and quotas is not None else None

    def _refuse(self, error: sqlite3.Error) -> NoReturn:
        limit = f"it must be a SQLite file that can be written ({error})"
        raise ConfigError("usage_file", self._path, limit) from error

    def start(self) -> None:
        """Write from now on what is counted, in batches off the event loop."""
        self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S)
            # To its end, or `close` would write the same again.
            writing = asyncio.create_task(asyncio.to_thread(self._write, self._quotas.all_used(), self._quotas.today))
            try:
                await asyncio.shield(writing)
            except asyncio.CancelledError:
                await writing
                raise

    async def close(self) -> None:
        """Write the rest."""
        if self._keeping is not None:
            await cancel_tasks(self._keeping)
        await asyncio.to_thread(self._write, self._quotas.all_used(), self._quotas.today)
        self._file.close()

    def _write(self, used: dict[str, list[Used]], day: int) -> None:
        """Add what was `used` by that `day` and is not written yet: to the day what is of it, and the rest to the day
        before, which has just ended. What cannot be written stays for the next time."""
        added = []
        for name, counts in used.items():
            new = [count.total - before.total for count, before in zip(counts, self._written[name], strict=True)]
            of_day = [min(each, count.today) for each, count in zip(new, counts, strict=True)]
            of_before = [each - own for each, own in zip(new, of_day, strict=True)]
            added += [(name, _date(at), *each) for at, each in ((day, of_day), (day - 1, of_before)) if any(each)]
        if not added:
            return
        try:
            with self._file:
                self._file.executemany(_ADD, added)
        except sqlite3.Error as error:
            logger.error("event=usage_not_written file=%r reason=%r", self._path, str(error))
        else:
            self._written = used


def _date(day: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(day * DAY_S))
