"""A client's side of a session over a WebSocket, for the tests of what such clients see."""

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

from engine_processes import alone
from guard import GUARD_S
from server_processes import Server
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from sonoro.core.types import SpeechRequest

PATH = "/v1/audio/speech/stream"
TEXT = "Some words, which come one by one."


@dataclasses.dataclass
class Session:
    """A client's side of a session. `created` is what it was greeted with."""

    socket: ClientConnection
    created: dict[str, Any]
    is_spoken_to: bool = False

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send(json.dumps({"type": kind, **fields}))

    async def hear(self) -> dict[str, Any] | bytes:
        """The next event, or the next audio, of which there is none but between its events."""
        message = await asyncio.wait_for(self.socket.recv(), GUARD_S)
        if isinstance(message, bytes):
            assert self.is_spoken_to
            return message
        event = json.loads(message)
        if event["type"] == "audio.start":
            assert not self.is_spoken_to
            self.is_spoken_to = True
        elif event["type"] in ("audio.done", "response.cancelled") or event.get("request_id"):
            self.is_spoken_to = False
        return event

    async def listen(self) -> tuple[bytes, list[dict[str, Any]]]:
        """All audio up to the next event that ends an utterance, an error included; and the events."""
        audio, events = b"", []
        while not events or events[-1]["type"] == "audio.start":
            heard = await self.hear()
            if isinstance(heard, bytes):
                audio += heard
            else:
                events.append(heard)
        return audio, events

    async def speak(self, *pieces: str) -> tuple[bytes, list[dict[str, Any]]]:
        """An utterance, from its pieces to its end."""
        for piece in pieces:
            await self.say("input.text", text=piece)
        await self.say("input.done")
        return await self.listen()

    async def refused(self, kind: str, **fields: Any) -> dict[str, Any]:
        """The error that a message is answered with."""
        await self.say(kind, **fields)
        event = await self.hear()
        assert event["type"] == "error", event
        assert set(event["error"]) == {"message", "type", "param", "code"}
        return event["error"]


@contextlib.asynccontextmanager
async def session(server: Server, **settings: Any) -> AsyncIterator[Session]:
    """A session; what it is configured with is of its own."""
    url = server.url.replace("http", "ws") + PATH
    async with connect(url, proxy=None, compression=None, **settings) as socket:
        created = json.loads(await socket.recv())
        assert created["type"] == "session.created"
        yield Session(socket, created)


def whole(text: str = TEXT, **fields: Any) -> bytes:
    """What is said of a text that is whole from the start."""
    return alone(SpeechRequest(id="a", text=text, **fields))


async def ended(session: Session) -> tuple[list[dict[str, Any]], int | None]:
    """What is still said until the connection is closed, and its code."""
    said = []
    with contextlib.suppress(ConnectionClosed):
        while True:
            said.append(await session.hear())
    return said, session.socket.close_code
