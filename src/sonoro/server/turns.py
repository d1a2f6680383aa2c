"""What waits at the gate, and whose turn is next: start-time fair queueing among keys, and among the fronts of a key.

A turn begins after the last one of the same key, but not before the last turn of any key, and is as long as the
characters of the text by the weight of the key. The key whose next turn begins first is next. So one that asks again
has neither saved turns nor lost them. The counts are in a table, which all fronts share. Knows no request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from sonoro.transport.table import Table

LEAST_CHARACTERS = 100
"""What a request counts for at least: it has a cost of its own, and live text grows."""

TURN = 2**10
"""How long a turn is by character, in whole numbers."""


class Turns:
    """The turns of owners of requests, which have `weights`. Call its methods under the lock of the `table`."""

    def __init__(self, table: Table, weights: Mapping[str, float]) -> None:
        self._table, self._weights = table, weights

    def wait(self, owner: str, characters: int) -> None:
        """Count a request of `owner` that begins to wait at this front."""
        for column in ("waiting", f"waiting-{owner}"):
            self._table.add(column, 1)
        self._table.add(f"text-{owner}", max(characters, LEAST_CHARACTERS))

    def leave(self, owner: str, front: int) -> int:
        """Count one less at `front`. Returns its characters as the mean of those that wait there: the front decides
        which one it was, and over time the sum is the same."""
        table = self._table
        characters = table.get(f"text-{owner}", front) // table.get(f"waiting-{owner}", front)
        for column, count in (("waiting", 1), (f"waiting-{owner}", 1), (f"text-{owner}", characters)):
            table.add(column, -count, front)
        return characters

    def take(self) -> tuple[str, int]:
        """Take a request of the owner and front whose turn it is; call it while any waits. Fronts have turns in
        proportion to how many wait there: by the most alone one could always be next, as its clients ask again."""
        table = self._table
        wanting = [owner for owner in self._weights if table.total(f"waiting-{owner}") > 0]
        owner = min(wanting, key=lambda one: table.get(f"turn-{one}", table.server))
        waiting = {front: count for front in range(table.fronts) if (count := table.get(f"waiting-{owner}", front)) > 0}
        front = min(waiting, key=lambda one: table.get(f"turn-{owner}", one))
        length = TURN * self.leave(owner, front)
        self._begin("now", owner, table.server, length / self._weights[owner])
        self._begin(f"now-{owner}", owner, front, length / waiting[front])
        return owner, front

    def _begin(self, now: str, owner: str, row: int, length: float) -> None:
        """Begin the turn of a row; `now` has the beginning of the last turn of any row."""
        table = self._table
        begin = max(table.get(now, table.server), table.get(f"turn-{owner}", row))
        table.set(now, begin, table.server)
        table.set(f"turn-{owner}", begin + round(length), row)


def turn_columns(owners: Iterable[str]) -> list[str]:
    """The columns of turns in a table."""
    by_owner = [f"{name}-{owner}" for name in ("waiting", "text", "turn", "now") for owner in owners]
    return ["waiting", "now", *by_owner]
