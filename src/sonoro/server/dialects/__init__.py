"""Wire formats of other speech servers, so that their clients can use this one: a module per format, which translates.

To add one, write `dialects/NAME.py` with a function `routes(service) -> Sequence[BaseRoute]`, and name it in
`DIALECTS`. A `Dialect(NAME, service, shape)` gives the shape of its errors and makes its routes: `dialect.http`
and `dialect.socket` handle keys, errors, logs and metrics, so that an endpoint is just

    async def speak(request: Request) -> Response:
        return await dialect.speak(request, read)       # read(payload: bytes) -> Asked

A WebSocket session derives from `LiveSession` (one text after the other) or `DialectSession` (texts in pieces, each
under an id). Raise `InvalidRequest` for an invalid message; limits, permits, encoding, slow readers and disconnects are
handled. For a path that OpenAI's API has too, `is_ours` decides by the headers. A WebSocket on the path of the native
sessions derives from `OtherSession` and is named in `LIVE_DIALECTS`: its first message decides."""

from collections.abc import Callable, Sequence

from fastapi import FastAPI
from starlette.routing import BaseRoute

from sonoro.core.errors import ConfigError
from sonoro.server.config import ServerConfig
from sonoro.server.dialects import cartesia, deepgram, elevenlabs, kokoro, vllm_omni
from sonoro.server.dialects.wyoming import wyoming_routes
from sonoro.server.service import Service
from sonoro.server.sessions import OtherSession

__all__ = ["DIALECTS", "LIVE_DIALECTS", "add_dialects", "live_dialects"]

DIALECTS: dict[str, Callable[[Service], Sequence[BaseRoute]]] = {
    "elevenlabs": elevenlabs.routes,
    "cartesia": cartesia.routes,
    "deepgram": deepgram.routes,
    "kokoro": kokoro.routes,
}

LIVE_DIALECTS: dict[str, type[OtherSession]] = {"vllm_omni": vllm_omni.OmniSession}


def live_dialects(config: ServerConfig) -> list[type[OtherSession]]:
    """The sessions of other servers on the path of the native ones, except `dialects_off`."""
    return [kind for name, kind in LIVE_DIALECTS.items() if name not in config.dialects_off]


def add_dialects(app: FastAPI, service: Service) -> None:
    """Add the routes of all dialects to `app` except `dialects_off`. Raises `ConfigError` for an unknown one there."""
    known = (*DIALECTS, *LIVE_DIALECTS)
    for name in service.config.dialects_off:
        if name not in known:
            raise ConfigError("dialects_off", name, f"there is no such dialect; there are {', '.join(known)}")
    for name, routes in DIALECTS.items():
        if name not in service.config.dialects_off:
            app.router.routes.extend(routes(service))
    app.include_router(wyoming_routes(service))
