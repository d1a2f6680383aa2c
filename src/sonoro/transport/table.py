"""Counters that the processes of one server share: a row for each process, a column for each name.

A row has what its process holds; so that is known, and is cleared, when the process has died. One further row is the
server's own, which outlasts them. Counts are exact, as `add` takes the lock. A server of one process has a table in its
own memory."""

import asyncio
import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from pathlib import Path

_BYTES = 8


class Table:
    """Whole numbers by `columns` and `fronts`, of which `front` is this process's. With a `folder` they are in a file
    there, which `create` makes, and processes can `wake` each other by sockets beside it."""

    def __init__(self, columns: Sequence[str], fronts: int = 1, front: int = 0, folder: Path | None = None) -> None:
        self._columns = {name: number for number, name in enumerate(columns)}
        self.fronts, self.front, self._width = fronts, front, len(columns)
        self.server = fronts
        """The row of the server, to be named in place of a front's."""
        self._folder, self._lock_file, self._is_locked = folder, -1, False
        self._poked: socket.socket | None = None
        length = _BYTES * (fronts + 1) * self._width
        if folder is None:
            self._cells = memoryview(bytearray(length)).cast("q")
        else:
            self._lock_file = os.open(folder / "table", os.O_RDWR)
            self._cells = memoryview(mmap.mmap(self._lock_file, length)).cast("q")

    @staticmethod
    def create(columns: Sequence[str], fronts: int, folder: Path) -> None:
        """Make the file of a table of zeros."""
        (folder / "table").write_bytes(bytes(_BYTES * (fronts + 1) * len(columns)))

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """A block that no other process runs at the same time. The system ends it with its process. May be nested."""
        if self._lock_file < 0 or self._is_locked:
            yield
            return
        fcntl.flock(self._lock_file, fcntl.LOCK_EX)
        self._is_locked = True
        try:
            yield
        finally:
            self._is_locked = False
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def get(self, name: str, front: int | None = None) -> int:
        """The number of a front, by default this process's."""
        return self._cells[(self.front if front is None else front) * self._width + self._columns[name]]

    def set(self, name: str, value: int, front: int | None = None) -> None:
        self._cells[(self.front if front is None else front) * self._width + self._columns[name]] = value

    def add(self, name: str, count: int, front: int | None = None) -> None:
        """Add to the number of a front, by default this process's. Takes the lock: another front may change it too."""
        at = (self.front if front is None else front) * self._width + self._columns[name]
        with self.lock():
            self._cells[at] += count

    def total(self, name: str) -> int:
        """The sum over all rows."""
        if self.fronts == 1:
            return self._cells[self._columns[name]] + self._cells[self._columns[name] + self._width]
        return sum(self._cells[self._columns[name] :: self._width])

    def take(self, name: str, count: int, most: int) -> bool:
        """Add `count` unless the sum would exceed `most`; returns whether it was added."""
        with self.lock():
            if self.total(name) + count > most:
                return False
            self.add(name, count)
            return True

    def clear(self, front: int, kept: Collection[str] = ()) -> None:
        """Set a front to zeros; what it has in the columns `kept` is added to the server's row."""
        with self.lock():
            for name in kept:
                self.add(name, self.get(name, front), self.server)
            for name in self._columns:
                self.set(name, 0, front)

    def listen(self, call: Callable[[], None]) -> None:
        """Call `call` in the running event loop whenever another process wakes this one."""
        assert self._folder is not None
        path = self._folder / f"wake-{self.front}"
        path.unlink(missing_ok=True)
        self._poked = poked = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        poked.bind(str(path))
        poked.setblocking(False)

        def read() -> None:
            with contextlib.suppress(BlockingIOError):
                while poked.recv(1):
                    pass
            call()

        asyncio.get_running_loop().add_reader(poked, read)

    def close(self) -> None:
        """Stop listening."""
        if self._poked is not None:
            with contextlib.suppress(RuntimeError):  # no event loop runs
                asyncio.get_running_loop().remove_reader(self._poked)
            self._poked.close()
            self._poked = None

    def wake(self, front: int) -> None:
        """Let the process of `front` call what it gave to `listen`. Nothing happens if it has ended."""
        if self._folder is None:
            return
        if self._poked is None:
            self._poked = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        # Full: it will be woken by what fills it.
        with contextlib.suppress(OSError):
            self._poked.sendto(b"1", socket.MSG_DONTWAIT, str(self._folder / f"wake-{front}"))


class Count:
    """One column of a table."""

    def __init__(self, table: Table | None = None, name: str = "") -> None:
        self._table, self._name = table or Table([name]), name

    @property
    def total(self) -> int:
        return self._table.total(self._name)

    def add(self, count: int) -> None:
        self._table.add(self._name, count)

    def take(self, count: int, most: int) -> bool:
        """Add `count` unless the sum over all processes would exceed `most`; returns whether it was added."""
        return self._table.take(self._name, count, most)


class Changes:
    """How often something that all processes store was changed, in the server's row of one column, and how many of the
    changes this process has read. Use it in the event loop alone."""

    def __init__(self, table: Table | None = None, name: str = "") -> None:
        self._table, self._name, self._read = table or Table([name]), name, 0

    def note(self) -> None:
        """Note that this process has changed it. Call it before anybody is told of the change."""
        with self._table.lock():
            self._read += self._read == self._table.get(self._name, self._table.server)
            self._table.add(self._name, 1, self._table.server)

    @property
    def are_read(self) -> bool:
        """Whether this process has read all that others have noted."""
        return self._table.get(self._name, self._table.server) == self._read

    async def catch_up(self, read: Callable[[], Awaitable[object]]) -> None:
        """Call `read` if another process has changed it since the last call."""
        if (count := self._table.get(self._name, self._table.server)) != self._read:
            await read()
            self._read = count
