"""The link: messages arrive whole and in order, nobody waits for a reader, and nothing is left on the disk."""

import asyncio
from pathlib import Path

import zmq
from processes import GUARD_S
from sine_engines import Peer

from sonoro.core.types import AudioChunk, SpeechRequest
from sonoro.transport.channel import MessageSocket, WorkerLink, fronts_endpoint
from sonoro.transport.messages import Cancel, FrontEnded, Pong, Submit, ToEngine
from sonoro.transport.process import encode_to_engine
from sonoro.transport.shared_link import SharedWorkerLink


def test_messages_arrive_in_order_both_ways() -> None:
    async def talk() -> None:
        client = Peer()
        worker = WorkerLink(client.endpoint)
        try:
            chunks = [AudioChunk(request_id="a", index=index, pcm=bytes(1000)) for index in range(3000)]
            # More than any default bound of ZMQ, with nobody reading meanwhile.
            for chunk in chunks:
                worker.send([chunk, chunk])
            for chunk in chunks:
                assert await client.receive() == [chunk, chunk]
            assert worker.receive(0) == []
            sent = [Submit(SpeechRequest(id=str(number), text="Hi")) for number in range(3000)]
            for message in sent:
                client.send(message)
            client.send(Cancel("last"))
            got = []
            while len(got) <= len(sent):
                got += worker.receive(5.0)
            assert got == [*sent, Cancel("last")]
        finally:
            worker.close()
            client.close()

    asyncio.run(asyncio.wait_for(talk(), GUARD_S))


def test_the_folder_is_private_and_gone_at_the_end() -> None:
    async def look() -> None:
        link = Peer()
        folder = Path(link.endpoint.removeprefix("ipc://")).parent
        assert folder.stat().st_mode & 0o077 == 0
        link.close()
        assert not folder.exists()

    asyncio.run(look())


def test_sending_to_nobody_neither_waits_nor_raises() -> None:
    async def send() -> None:
        client = Peer()
        client.send(Cancel("a"))
        worker = WorkerLink(client.endpoint)
        worker.send([])
        assert await client.receive() == []
        client.close()
        worker.send([])
        worker.close()

    asyncio.run(asyncio.wait_for(send(), GUARD_S))


def test_what_a_front_had_sent_before_it_ended_is_dropped() -> None:
    """The parent's word of its end may be read before its last messages, which nobody would cancel."""

    async def end() -> None:
        parent = Peer()
        worker = SharedWorkerLink(parent.endpoint)
        fronts = {name: MessageSocket(zmq.DEALER, name) for name in ("gone", "other")}
        try:
            for name, front in fronts.items():
                front.connect(fronts_endpoint(parent.endpoint))
                front.send(encode_to_engine(Submit(SpeechRequest(id=name, text="Hi"))))
            got: list[ToEngine] = []
            while len(got) < 2:
                got += worker.receive(GUARD_S)
            # Connected in this direction too: else what the parent sends is lost.
            worker.send([Pong()])
            assert await parent.receive() == [Pong()]
            parent.send(FrontEnded("gone"))
            assert worker.receive(GUARD_S) == [Cancel("gone")]
            fronts["gone"].send(encode_to_engine(Submit(SpeechRequest(id="late", text="Hi"))))
            assert worker.receive(GUARD_S) == []
            fronts["other"].send(encode_to_engine(Cancel("other")))
            assert worker.receive(GUARD_S) == [Cancel("other")]
        finally:
            for front in fronts.values():
                front.close()
            worker.close()
            parent.close()

    asyncio.run(asyncio.wait_for(end(), 2 * GUARD_S))
