"""The server's end of a link, bare: messages to an engine and from it, without a process being started for it."""

import zmq
import zmq.asyncio

from sonoro.transport.channel import new_endpoint, remove_endpoint
from sonoro.transport.messages import FromEngine, ToEngine
from sonoro.transport.process import decode_from_engine, encode_to_engine


class Peer:
    """Belongs to the running event loop."""

    def __init__(self) -> None:
        self.endpoint = new_endpoint()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.bind(self.endpoint)

    async def receive(self) -> list[FromEngine]:
        return decode_from_engine(await self._socket.recv())

    def send(self, message: ToEngine) -> None:
        sent = self._socket.send(encode_to_engine(message), zmq.NOBLOCK)
        if not isinstance(sent.exception(), zmq.Again):  # lost, if nobody is there
            sent.result()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        remove_endpoint(self.endpoint)
