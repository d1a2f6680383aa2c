"""What the front processes of a server share: its counts, by names; and what each is told when it starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from sonoro.server.config import ServerConfig
from sonoro.server.gate import gate_columns
from sonoro.server.keys import Keys
from sonoro.server.quotas.counts import Quotas, quota_columns, quotas_of
from sonoro.transport.front_link import load_column
from sonoro.transport.messages import WorkerSettings
from sonoro.transport.table import Changes, Count, Table

BEAT = "beat_ms"
"""The column with the monotonic time at which a front's event loop last ran."""

ENDED = 3
"""The exit code after an end that the parent knows of: the engines', or its own."""


_COUNTS = ("sessions", "guests", "bodies", "answers", "references", BEAT, "voices", "lexicons")


def columns(config: ServerConfig, engines: int) -> list[str]:
    """The columns of the table of a server with so many engines."""
    of_gate = gate_columns(Keys(config).ids)
    return [*_COUNTS, *of_gate, *quota_columns(config), *map(load_column, range(engines))]


@dataclass(frozen=True)
class Shared:
    """The `table` of a server, alone or with other fronts, the weight of each owner of requests, and their `quotas`,
    None where nothing is counted. Fronts have a `folder` that lasts as long as the server."""

    table: Table
    weights: Mapping[str, float]
    quotas: Quotas | None
    folder: Path | None = None

    @classmethod
    def of(
        cls, config: ServerConfig, engines: int, fronts: int = 1, front: int = 0, folder: Path | None = None
    ) -> Shared:
        """That of front number `row` of a server, or, without a `folder`, of a server of one process."""
        table = Table(columns(config, engines), fronts, front, folder)
        weights = {owner: float(quota.weight) for owner, quota in quotas_of(config).items()}
        return cls(table, weights, Quotas.of(config, table), folder)

    def count(self, name: str) -> Count:
        """One of the counts."""
        return Count(self.table, name)

    def changes(self, name: str) -> Changes:
        """Those of the `voices` or `lexicons` that callers have stored."""
        return Changes(self.table, name)

    def location(self, name: str, given: str) -> str:
        """Where these are stored: as `given`, or in the server's folder; "" for memory."""
        return given or ("" if self.folder is None else str(self.folder / name))


class FrontFacts(msgspec.Struct, frozen=True):
    """What a front is told when it starts: the `name`, no other's ever, by which engines know it; which one it is, of
    how many; its listening sockets; and the server's."""

    name: str
    number: int
    count: int
    listeners: tuple[int, ...]
    folder: str
    config: dict[str, object]
    settings: WorkerSettings
    devices: tuple[str, ...]
    limits: dict[str, object]
