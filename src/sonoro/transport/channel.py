"""The link between an engine process and its client: a pair of ZMQ sockets over a Unix socket in a folder of its own.

ZMQ's own threads move the bytes, so neither side ever waits for the other to read. No queue here has a bound: a client
pauses requests whose audio it does not read, and a client that stops altogether holds what its running requests make.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import zmq
import zmq.asyncio

from sonoro.transport.messages import (
    FromEngine,
    ToEngine,
    decode_from_engine,
    decode_to_engine,
    encode_from_engine,
    encode_to_engine,
)

__all__ = ["ClientLink", "WorkerLink", "remove_endpoint"]

_SCHEME = "ipc://"

FAREWELL_S = 2.0
"""How long a worker that ends waits for its last messages to be read."""


class ClientLink:
    """The client's end, made before the engine process is; belongs to the running event loop."""

    def __init__(self) -> None:
        # mkdtemp gives a folder that nobody else may enter, so nobody else can connect.
        self.endpoint = f"{_SCHEME}{tempfile.mkdtemp(prefix='sonoro-')}/link"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        try:
            self._socket.bind(self.endpoint)
        except zmq.ZMQError:
            self.close()
            raise

    async def receive(self) -> list[FromEngine]:
        """The next messages that came together."""
        return decode_from_engine(await self._socket.recv())

    def send(self, message: ToEngine) -> None:
        """Send `message`; it is lost if the engine process is gone. Raises `InvalidRequest` as its encoding does."""
        sent = cast("asyncio.Future[object]", self._socket.send(encode_to_engine(message), zmq.NOBLOCK))
        assert sent.done()
        if not isinstance(sent.exception(), zmq.Again):
            sent.result()

    def settle(self) -> None:
        """The other end is there: nobody else has to find it, and nothing lies about whichever of them dies first."""
        remove_endpoint(self.endpoint)

    def close(self) -> None:
        """Drop what was not sent and remove the Unix socket with its folder."""
        self._socket.close(linger=0)
        self._context.term()
        remove_endpoint(self.endpoint)


class WorkerLink:
    """The engine process's end: nothing here waits, but `receive` if it is asked to."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.connect(endpoint)

    def receive(self, timeout_s: float) -> list[ToEngine]:
        """All that has come, after waiting up to `timeout_s` for the first."""
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
            # Without a peer there is nobody to tell; the process is about to find its parent dead.
            return

    def close(self) -> None:
        """Wait a moment until the last messages are read, then leave."""
        self._context.destroy(linger=int(FAREWELL_S * 1000))


def remove_endpoint(endpoint: str) -> None:
    """Remove the Unix socket of `endpoint` and its folder, if they are still there."""
    shutil.rmtree(Path(endpoint.removeprefix(_SCHEME)).parent, ignore_errors=True)
