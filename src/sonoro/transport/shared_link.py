"""The engine process's end of its links to several front processes, beside that to the process which started it.

A front's requests, statistics and voices are answered to that front alone; `Ready`, `Pong` and `Fatal` go to the
parent. The engine sees one link, and knows of no front."""

import itertools
from collections import deque
from collections.abc import Sequence

import msgspec
import zmq

from sonoro.core.types import AudioChunk, Failed, Finished
from sonoro.transport.channel import WorkerLink, decode_to_engine, encode_from_engine, fronts_endpoint
from sonoro.transport.messages import (
    Cancel,
    EncodeVoice,
    FromEngine,
    FrontEnded,
    Stats,
    StatsRequest,
    Submit,
    ToEngine,
    VoiceEncoded,
    VoiceFailed,
    VoiceWanted,
)


class SharedWorkerLink(WorkerLink):
    """A `WorkerLink` that front processes connect to, at `fronts_endpoint` of its own."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._fronts = self._context.socket(zmq.ROUTER)
        self._fronts.set_hwm(0)
        self._fronts.bind(fronts_endpoint(endpoint))
        self._poller = zmq.Poller()
        for link in (self._socket, self._fronts):
            self._poller.register(link, zmq.POLLIN)
        self._owners: dict[str, bytes] = {}
        self._known: set[bytes] = set()
        self._ended: set[bytes] = set()
        self._asked: deque[bytes] = deque()
        self._numbers = itertools.count()
        self._encoding: dict[int, tuple[bytes, int]] = {}

    def receive(self, timeout_s: float) -> list[ToEngine]:
        messages: list[ToEngine] = []
        ready = self._poller.poll(int(timeout_s * 1000))
        while ready:
            for link, _ in ready:
                if link is self._fronts:
                    front, data = self._fronts.recv_multipart()
                    messages += self._of_front(front, decode_to_engine(data))
                else:
                    messages += self._of_parent(decode_to_engine(self._socket.recv()))
            ready = self._poller.poll(0)
        return messages

    def send(self, messages: Sequence[FromEngine]) -> None:
        by_front: dict[bytes, list[FromEngine]] = {}
        own: list[FromEngine] = []
        for message in messages:
            if isinstance(message, AudioChunk):
                front = self._owners.get(message.request_id)
            elif isinstance(message, Finished | Failed):
                front = self._owners.pop(message.request_id, None)
            elif isinstance(message, VoiceEncoded | VoiceFailed):
                front, number = self._encoding.pop(message.number)
                message = msgspec.structs.replace(message, number=number)  # noqa: PLW2901
            elif isinstance(message, Stats):
                front = self._asked.popleft()
            elif isinstance(message, VoiceWanted):
                for each in self._known:
                    by_front.setdefault(each, []).append(message)
                continue
            else:
                own.append(message)
                continue
            if front is not None:
                by_front.setdefault(front, []).append(message)
        if own:
            super().send(own)
        for front, theirs in by_front.items():
            self._fronts.send_multipart([front, encode_from_engine(theirs)], zmq.NOBLOCK)

    def _of_front(self, front: bytes, message: ToEngine) -> list[ToEngine]:
        if front in self._ended:
            return []
        self._known.add(front)
        if isinstance(message, Submit):
            self._owners[message.request.id] = front
        elif isinstance(message, StatsRequest):
            self._asked.append(front)
        elif isinstance(message, EncodeVoice):
            number = next(self._numbers)
            self._encoding[number] = front, message.number
            return [msgspec.structs.replace(message, number=number)]
        return [message]

    def _of_parent(self, message: ToEngine) -> list[ToEngine]:
        """Cancel the requests of a front that has ended: nobody hears them, nor those of it that come later."""
        if not isinstance(message, FrontEnded):
            return [message]
        front = message.front.encode()
        self._known.discard(front)
        self._ended.add(front)
        lost = [name for name, owner in self._owners.items() if owner == front]
        for name in lost:
            del self._owners[name]
        return [Cancel(name) for name in lost]
