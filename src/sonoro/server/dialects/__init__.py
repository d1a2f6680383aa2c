"""How clients of other speech servers reach this one: a file for each wire format, which only translates.

To add one: write `dialects/NAME.py` with a function `routes(service) -> Sequence[BaseRoute]`, and name it in
`DIALECTS`. In it a `Dialect(NAME, service, shape)` says how its errors look, and makes its routes: `dialect.get`,
`dialect.post` and `dialect.socket` put key, errors, log and metrics right, so that an endpoint is left with

    async def speak(request: Request) -> Response:
        return await dialect.speak(request, read)       # read(payload: bytes) -> Asked

A WebSocket is a class derived from `WebSocketSession` (sonoro.server.websocket_session): from `LiveSession` for one
text after the other, from `DialectSession` for texts that come piece by piece under an id. What is wrong with a message
is raised as `InvalidRequest`; limits, permits, encoding, slow readers and clients that leave are the callee's matter.
A path that OpenAI's API has too is shared by `is_ours`, which looks at the headers; routes here are asked first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import FastAPI
from starlette.routing import BaseRoute

from sonoro.core.errors import ConfigError
from sonoro.server.dialects import cartesia, deepgram, elevenlabs, vllm_omni
from sonoro.server.dialects.wyoming import wyoming_routes
from sonoro.server.service import Service

__all__ = ["DIALECTS", "add_dialects"]

DIALECTS: dict[str, Callable[[Service], Sequence[BaseRoute]]] = {
    "elevenlabs": elevenlabs.routes,
    "cartesia": cartesia.routes,
    "deepgram": deepgram.routes,
    "vllm_omni": vllm_omni.routes,
}


def add_dialects(app: FastAPI, service: Service) -> None:
    """Have `app` answer in every dialect but those switched off. Raises `ConfigError` for one that is not there."""
    for name in service.config.dialects_off:
        if name not in DIALECTS:
            raise ConfigError("dialects_off", name, f"there is no such dialect; there are {', '.join(DIALECTS)}")
    for name, routes in DIALECTS.items():
        if name not in service.config.dialects_off:
            app.router.routes.extend(routes(service))
    app.include_router(wyoming_routes(service))
