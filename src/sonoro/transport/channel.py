"""The engine process's end of its link to the server: a ZMQ socket over a Unix socket in a folder of its own.

ZMQ's threads move the bytes, so neither side waits for the other to read. Queues are unbounded: the client pauses
requests whose audio it does not read. The other end is `transport.process.EngineProcess`."""

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


def new_endpoint() -> str:
    """An address for one pair of processes: a Unix socket in a folder that only this user may enter."""
    return f"{_SCHEME}{tempfile.mkdtemp(prefix='sonoro-')}/link"


def remove_endpoint(endpoint: str) -> None:
    """Remove the Unix socket of `endpoint` and its folder, if they are still there."""
    shutil.rmtree(Path(endpoint.removeprefix(_SCHEME)).parent, ignore_errors=True)


encode_from_engine: Callable[[Sequence[FromEngine]], bytes] = msgspec.msgpack.Encoder().encode
decode_to_engine: Callable[[bytes], ToEngine] = msgspec.msgpack.Decoder(ToEngine).decode
