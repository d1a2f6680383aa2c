"""A client's side of a dialect's WebSocket, for the tests of what such clients see."""

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from guard import GUARD_S
from server_processes import Server
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed


class Socket:
    """What is said and heard on one connection; `closed` is its code once it is."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.closed: int | None = None

    async def say(self, *messages: dict[str, Any] | str | bytes) -> None:
        for message in messages:
            await self.connection.send(json.dumps(message) if isinstance(message, dict) else message)

    async def hear(self) -> Any:
        """The next message: an object, or bytes; None once the connection is closed."""
        try:
            message = await asyncio.wait_for(self.connection.recv(), GUARD_S)
        except ConnectionClosed:
            self.closed = self.connection.close_code
            return None
        return message if isinstance(message, bytes) else json.loads(message)

    async def hear_until(self, **fields: Any) -> list[Any]:
        """Everything up to a message that has `fields`, or to the end."""
        heard = []
        while (message := await self.hear()) is not None:
            heard.append(message)
            if fields and isinstance(message, dict) and fields.items() <= message.items():
                break
        return heard


@contextlib.asynccontextmanager
async def socket(server: Server, path: str, **settings: Any) -> AsyncIterator[Socket]:
    async with connect(server.url.replace("http", "ws") + path, proxy=None, compression=None, **settings) as connection:
        yield Socket(connection)


def audio_of(messages: list[Any], field: str = "audio") -> bytes:
    """The audio in `messages`, base64 in `field` of those that have it, or as it is."""
    parts = (each if isinstance(each, bytes) else base64.b64decode(each.get(field) or "") for each in messages)
    return b"".join(parts)
