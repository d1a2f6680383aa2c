"""Links between processes: ZMQ sockets over Unix sockets in a folder of their own.

ZMQ's threads move the bytes, so neither side waits for the other to read. Queues are unbounded: the client pauses
requests whose audio it does not read. A `WorkerLink` is an engine process's end, a `MessageSocket` that of a process
with an event loop."""

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import zmq

from sonoro.transport.messages import FromEngine, ToEngine

_SCHEME = "ipc://"

LINGER_S = 2.0
"""How long an ending worker waits for its last messages to be read."""


class WorkerLink:
    """The engine process's end of the link; only `receive` and `close` may block."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(endpoint)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """All messages that have arrived, after waiting up to `timeout_s` for the first."""
        messages: list[ToEngine] = []
        if self._socket.poll(int(timeout_s * 1000)):
            messages.append(decode_to_engine(self._socket.recv()))
            while self._socket.poll(0):
                messages.append(decode_to_engine(self._socket.recv()))
        return messages

    def send(self, messages: Sequence[FromEngine]) -> None:
        """Send `messages` together; they are lost if the client is gone."""
        try:
            self._socket.send(encode_from_engine(messages), zmq.NOBLOCK)
        except zmq.Again:
            # No peer: the parent is dead, which this process is about to notice.
            return

    def close(self) -> None:
        """Wait up to `LINGER_S` until the last messages are read, then close."""
        self._context.destroy(linger=int(LINGER_S * 1000))


class MessageSocket:
    """A ZMQ socket of the running event loop. Without `zmq.asyncio`, whose futures cost more than the messages."""

    def __init__(self, kind: int, name: str = "") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        if name:
            self._socket.setsockopt(zmq.IDENTITY, name.encode())
        self._socket.set_hwm(0)
        self._loop, self._file = asyncio.get_running_loop(), int(self._socket.getsockopt(zmq.FD))
        self._received: list[bytes] = []
        self._event = asyncio.Event()
        self._loop.add_reader(self._file, self._read)

    def bind(self, endpoint: str) -> None:
        self._socket.bind(endpoint)

    def connect(self, endpoint: str) -> None:
        self._socket.connect(endpoint)

    def send(self, data: bytes) -> None:
        """Send `data`; it is lost without a peer."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(data, zmq.NOBLOCK)
        # The file tells of a change once, and sending may have taken notice of it.
        if int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._loop.call_soon(self._read)

    def take(self) -> list[bytes]:
        """The messages that have arrived."""
        taken, self._received = self._received, []
        return taken

    async def wait(self, timeout_s: float | None = None, *, is_woken: bool = True) -> bool:
        """Wait until a message is there, `wake` was called, if it `is_woken` by that, or so long; returns whether there
        is a message."""
        if timeout_s is None:
            await self._until_event(is_woken=is_woken)
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._until_event(is_woken=is_woken)
        return bool(self._received)

    async def _until_event(self, *, is_woken: bool) -> None:
        while not self._received:
            await self._event.wait()
            self._event.clear()
            if is_woken:
                return

    def wake(self) -> None:
        """End a `wait`, or the next one."""
        self._event.set()

    def close(self) -> None:
        """Close the socket; messages that were not sent are lost."""
        self._loop.remove_reader(self._file)
        self._socket.close(linger=0)
        self._context.term()

    def _read(self) -> None:
        if self._socket.closed:
            return
        with contextlib.suppress(zmq.Again):
            while True:
                self._received.append(self._socket.recv(zmq.NOBLOCK))
        if self._received:
            self._event.set()


def new_endpoint() -> str:
    """An address for one pair of processes: a Unix socket in a folder that only this user may enter."""
    return f"{_SCHEME}{tempfile.mkdtemp(prefix='sonoro-')}/link"


def fronts_endpoint(endpoint: str) -> str:
    """The address, beside `endpoint`, at which an engine listens for front processes."""
    return f"{endpoint}-fronts"


def remove_endpoint(endpoint: str) -> None:
    """Remove the Unix socket of `endpoint` and its folder, if they are still there."""
    shutil.rmtree(Path(endpoint.removeprefix(_SCHEME)).parent, ignore_errors=True)


encode_from_engine: Callable[[Sequence[FromEngine]], bytes] = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
