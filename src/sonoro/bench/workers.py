"""Worker processes that each send a share of the load, for loads that one process cannot send."""

import contextlib
import multiprocessing
from multiprocessing.connection import Connection, wait
from typing import Self

from sonoro.bench.level import Level
from sonoro.bench.metrics import Exchange
from sonoro.core.errors import EngineError

LEAD_S = 0.25
"""Delay from handing a level to the workers to its start, so that all start together."""

_START_S, _END_S = 60.0, 5.0


class Workers:
    """A context with `count` worker processes, which also end if this process is killed.
    Raises `EngineError` if one does not start."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for number in range(self._count):
            ours, theirs = context.Pipe()
            # A daemon ends with this process, whatever was raised.
            process = context.Process(target=_work, args=(theirs,), daemon=True, name=f"client-{number}")
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        with contextlib.ExitStack() as starting:
            starting.callback(self.__exit__)
            self._receive(self._count, _START_S)
            starting.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(0 if error and error[0] else _END_S)
            if process.is_alive():
                process.kill()
                process.join()

    def exchanges(self, level: Level, shares: int) -> list[Exchange]:
        """Send `level` in `shares` shares, one per process; returns all exchanges, in no order.
        Raises `EngineError` as soon as a process ends."""
        for share, pipe in enumerate(self._pipes[:shares]):
            pipe.send((level, share, shares))
        return [exchange for received in self._receive(shares, None) for exchange in received]

    def _receive(self, count: int, timeout_s: float | None) -> list[list[Exchange]]:
        """Receive one message from each of the first `count` processes."""
        waiting: list[Connection] = self._pipes[:count]
        received = []
        while waiting:
            ready = wait(waiting, timeout_s)
            if not ready:
                raise EngineError(f"a client process did not start within {timeout_s:g} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                try:
                    received.append(pipe.recv())
                except (EOFError, OSError) as error:
                    raise self._ended(self._pipes.index(pipe)) from error
                waiting.remove(pipe)
        return received

    def _ended(self, number: int) -> EngineError:
        """The error about process `number`, which has ended."""
        self._processes[number].join(_END_S)
        code = self._processes[number].exitcode
        return EngineError(f"client process {number} of {self._count} ended with code {code}")


def _work(pipe: Connection) -> None:
    """Main function of a worker: send the shares received from `pipe`, until it is closed."""
    pipe.send([])
    while True:
        try:
            level, share, shares = pipe.recv()
            pipe.send(level.exchanges(share, shares))
        except (EOFError, BrokenPipeError, KeyboardInterrupt):
            return
