"""A WebSocket under uvicorn that may finish what it says when the server is ended. Knows no speech."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

__all__ = ["ENDING", "WebSocketConnection"]

ENDING = "ending"
"""The name, in the state of a connection's scope, of the event that is set when the server is being ended."""


class WebSocketConnection(WebSocketsSansIOProtocol):
    """Tells its application that the server is being ended, where uvicorn would close the connection at once."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._ending = asyncio.Event()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # as it is when the request was no handshake
            self.scope["state"][ENDING] = self._ending

    def shutdown(self) -> None:
        if self.handshake_complete and not self.close_sent:
            self._ending.set()
        else:
            super().shutdown()
