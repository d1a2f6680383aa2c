"""A front process's side of the engines, which its parent keeps running: what it is told of them, and its links."""

import asyncio
import logging
import os
from collections.abc import Coroutine, Sequence

import msgspec
import zmq

from sonoro.core.errors import EngineClosed, EngineCrashed
from sonoro.transport import messages
from sonoro.transport.channel import MessageSocket, fronts_endpoint
from sonoro.transport.client import EngineRequests
from sonoro.transport.fleet import Fleet
from sonoro.transport.launch import Limits
from sonoro.transport.process import SupervisedEngine, cancel_tasks, decode_from_engine, encode_to_engine
from sonoro.transport.table import Count, Table

logger = logging.getLogger(__name__)


def essential(work: Coroutine[object, object, None]) -> asyncio.Task[None]:
    """A task of `work`, without which a front is of no use: its error ends this process, and the parent starts
    another."""

    def check(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("event=front_failed", exc_info=error)
            os._exit(1)

    task = asyncio.ensure_future(work)
    task.add_done_callback(check)
    return task


class EngineNews(msgspec.Struct, frozen=True):
    """What a parent tells its fronts of an engine: the address of its process, if one runs."""

    endpoint: str | None
    is_ready: bool
    restarts: int
    ready: messages.Ready | None
    closed: str | None

    @classmethod
    def of(cls, engine: SupervisedEngine) -> "EngineNews":
        """What is to be told of `engine` now."""
        return cls(engine.endpoint, engine.is_ready, engine.restarts, engine.last_ready, engine.closed_reason)


def load_column(engine: int) -> str:
    """The column of a table with the requests of an engine, by its number."""
    return f"load-{engine}"


class FrontEngine(EngineRequests):
    """An engine of the parent, as told by `take`. The link to it is this front's, named `front`."""

    def __init__(self, settings: messages.WorkerSettings, limits: Limits, front: str, load: Count) -> None:
        super().__init__(settings, limits)
        self.load, self._front = load, front
        self._link: MessageSocket | None = None
        self._endpoint: str | None = None
        self._reading: asyncio.Task[None] | None = None
        self._is_ready = False

    @property
    def is_ready(self) -> bool:
        return self._is_ready and self._closed is None

    async def start(self) -> None:
        """Wait until the parent's engine is ready for the first time. Raises `EngineClosed`."""
        while self._ready is None and self._closed is None:
            self._state_changed.clear()
            await self._state_changed.wait()
        if self._closed is not None:
            raise EngineClosed(str(self._closed))

    async def close(self) -> None:
        """Close the link; requests still running fail, as the engine is told by the parent."""
        self._closed = self._closed or EngineClosed("the engine was closed")
        self._fail_pending(self._closed)
        await self._unlink()
        await cancel_tasks(*self._fetches)

    async def take(self, news: EngineNews) -> None:
        """Take over what the parent tells."""
        if news.endpoint != self._endpoint:
            await self._unlink()
            self._fail_pending(EngineCrashed("the engine process ended"))
            self._endpoint = news.endpoint
            if news.endpoint is not None:
                self._link = MessageSocket(zmq.DEALER, self._front)
                self._link.connect(fronts_endpoint(news.endpoint))
                self._reading = essential(self._read(self._link))
        self._ready, self._is_ready, self.restarts = news.ready or self._ready, news.is_ready, news.restarts
        if news.closed is not None and self._closed is None:
            self._closed = EngineClosed(news.closed)
            self._fail_pending(self._closed)
        self._state_changed.set()

    async def _read(self, link: MessageSocket) -> None:
        while True:
            await link.wait()
            for batch in link.take():
                for message in decode_from_engine(batch):
                    self._handle(message)

    async def _unlink(self) -> None:
        link, self._link = self._link, None
        if self._reading is not None:
            await cancel_tasks(self._reading)
        if link is not None:
            link.close()

    def _send(self, message: messages.ToEngine, *, is_checked: bool = False) -> None:
        if self._link is not None:
            self._link.send(encode_to_engine(message, is_checked=is_checked))


class FrontFleet(Fleet):
    """The engines of the parent. `tell` takes a line of what it tells of all of them."""

    def __init__(
        self, settings: messages.WorkerSettings, devices: Sequence[str], limits: Limits, front: str, table: Table
    ) -> None:
        engines = [
            FrontEngine(
                msgspec.structs.replace(settings, device=device), limits, front, Count(table, load_column(number))
            )
            for number, device in enumerate(devices)
        ]
        super().__init__(settings, devices, limits, engines)

    async def tell(self, line: bytes) -> None:
        """Take over the news of a line."""
        for engine, news in zip(self.replicas, msgspec.json.decode(line, type=list[EngineNews]), strict=True):
            assert isinstance(engine, FrontEngine)
            await engine.take(news)
