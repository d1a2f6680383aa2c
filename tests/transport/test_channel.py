"""The link: messages arrive whole and in order, nobody waits for a reader, and nothing is left on the disk."""

import asyncio
from pathlib import Path

from processes import GUARD_S
from sine_engines import Peer

from sonoro.core.types import AudioChunk, SpeechRequest
from sonoro.transport.channel import WorkerLink
from sonoro.transport.messages import Cancel, Submit


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
