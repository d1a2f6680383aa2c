"""uvicorn's WebSocket protocol, changed so that sessions can finish their utterance when the server shuts down."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

SHUTTING_DOWN = "ending"
"""The key, in a connection scope's state, of the event that is set when the server shuts down."""


class WebSocketConnection(WebSocketsSansIOProtocol):
    """Notifies the application of a shutdown, where uvicorn would close the connection at once."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._shutting_down = asyncio.Event()

    def handle_connect(self, event: Request) -> None:
        super().handle_connect(event)
        if not self.close_sent:  # sent already if the request was no handshake
            self.scope["state"][SHUTTING_DOWN] = self._shutting_down

    def send_receive_event_to_app(self) -> None:
        try:
            if self.curr_msg_data_type == "text":
                b"".join(self.frames).decode()
        except UnicodeDecodeError:
            # uvicorn would log this client error with a traceback.
            self.conn.fail(1007, "invalid UTF-8")
            self.handle_parser_exception()
        else:
            super().send_receive_event_to_app()

    async def send(self, message: ASGISendEvent) -> None:
        await super().send(message)
        # After a refusal by an HTTP response, uvicorn would otherwise log a failure of the application.
        self.handshake_complete = self.handshake_complete or self.close_sent

    def shutdown(self) -> None:
        if self.handshake_complete and not self.close_sent:
            self._shutting_down.set()
        else:
            super().shutdown()
