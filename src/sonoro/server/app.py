"""The ASGI application: middleware, error handlers and routes of the speech API; its uvicorn server. No torch.

Engines start in the background: the server is alive at once, and ready when they are."""

import asyncio
import contextlib
import ctypes
import dataclasses
import gc
import logging
import math
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from sonoro.core.errors import SonoroError
from sonoro.core.version import VERSION
from sonoro.server.api_page import api_page_routes
from sonoro.server.batch import batch_routes
from sonoro.server.config import ServerConfig
from sonoro.server.connection import connection
from sonoro.server.dialects import add_dialects, live_dialects
from sonoro.server.errors import RefusalResponse, plain_refusal, refusal
from sonoro.server.health import health_routes
from sonoro.server.lexicon_routes import lexicon_routes
from sonoro.server.local import local_routes
from sonoro.server.middleware import HeadAsGet, HostCheck, RequestIds
from sonoro.server.models import model_routes
from sonoro.server.playground import playground_routes
from sonoro.server.quotas.counts import LIMIT_HEADERS
from sonoro.server.quotas.routes import usage_routes
from sonoro.server.service import Service
from sonoro.server.sessions import session_routes
from sonoro.server.shared import Shared
from sonoro.server.speech import speech_routes
from sonoro.server.voices import voice_routes
from sonoro.server.websocket import FIRST_MESSAGE_BYTES, websocket_connection
from sonoro.server.websocket_session import CUT_OFF_S
from sonoro.transport.fleet import Fleet

logger = logging.getLogger(__name__)

_SHOWN_HEADERS = ("X-Sample-Rate", "X-Request-Id", "X-Sonoro-Warnings", "X-Sonoro-Ignored", "Retry-After")

BACKLOG = 512
"""Connections that may wait to be accepted; as many are accepted at once."""

GARBAGE_OBJECTS = 20_000
"""The first threshold of Python's garbage collector, in place of its default of 700 or 2,000 objects."""

MAPPED_BYTES = 2**20

_M_MMAP_THRESHOLD = -3


def create_app(
    client: Fleet,
    config: ServerConfig,
    on_failure: Callable[[SonoroError], None] | None = None,
    shared: Shared | None = None,
) -> FastAPI:
    """The application over `client`, which it starts and closes. `config` is resolved. `shared` is what it shares with
    other processes of the same server.
    `on_failure` is called with the error if the engines cannot be started or none is left; requests are then refused.
    """
    service = Service(client, config, on_failure, shared)
    app = FastAPI(title="sonoro", version=VERSION, lifespan=service.running, docs_url=None, redoc_url=None)
    _add_middleware(app, config, service)
    app.state.service = service

    async def answer_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, SonoroError), error
        refused = refusal(error)
        request.state.facts |= {"code": refused.error["code"], "param": refused.error["param"]}
        if request.state.dialect != "native" or request.scope["path"].startswith("/v1/audio/"):
            service.metrics.count_refusal(refused, request.state.request_id, request.state.dialect)
        return RefusalResponse(refused)

    app.add_exception_handler(SonoroError, answer_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(Exception, _answer_defect)
    # Routes are matched in order: speech first, then those of dialects, which share some paths with models and voices.
    app.include_router(speech_routes(service.speech, service.keys.required))
    app.include_router(session_routes(service, live_dialects(config)))
    add_dialects(app, service)
    app.include_router(batch_routes(service))
    app.include_router(model_routes(service))
    app.include_router(voice_routes(service))
    app.include_router(lexicon_routes(service))
    app.include_router(health_routes(service))
    app.include_router(local_routes(service))
    app.include_router(usage_routes(service))
    app.include_router(playground_routes(service))
    app.include_router(api_page_routes(app))
    app.router.default = _find_nothing
    return app


def _add_middleware(app: FastAPI, config: ServerConfig, service: Service) -> None:
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[*_SHOWN_HEADERS, *LIMIT_HEADERS],
        )
    if service.speech.traces is not None:
        app.add_middleware(service.speech.traces.middleware)
    app.add_middleware(HeadAsGet)
    app.add_middleware(HostCheck, config=config)
    app.add_middleware(RequestIds, caller=service.keys.keyless)


async def _find_nothing(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a path without a route; Starlette would refuse a WebSocket there with 403 and without a word."""
    raise HTTPException(404)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path or method."""
    assert isinstance(error, HTTPException), error
    detail = error.detail
    if error.status_code == 404:
        detail += "; /docs lists what is here"
    elif error.status_code == 405:
        detail += f"; use {' or '.join(_methods(request))}"
    method = request.scope.get("method", "WS")
    refused = plain_refusal(error.status_code, f"{method} {request.url.path}: {detail}", "http")
    request.state.facts["code"] = refused.error["code"]
    headers = {**refused.headers, **(error.headers or {})}
    if error.status_code == 405:
        headers["Allow"] = ", ".join(_methods(request))
    return RefusalResponse(dataclasses.replace(refused, headers=headers))


def _methods(request: Request) -> list[str]:
    """The methods of the path of `request`; the router names only those of the first route with that path."""
    at = {name: request.scope[name] for name in ("type", "path", "root_path", "headers")}
    methods = [
        method
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE")
        if any(route.matches({**at, "method": method})[0] is Match.FULL for route in request.app.routes)
    ]
    return sorted({*methods, "HEAD"}) if "GET" in methods else methods


async def _answer_defect(request: Request, error: Exception) -> Response:
    """Answer a bug. This handler runs outside of `RequestIds`, so it adds the id itself."""
    refused = plain_refusal(500, "internal error; see the server's log", "internal")
    return RefusalResponse(dataclasses.replace(refused, headers={"X-Request-Id": request.state.request_id}))


def uvicorn_config(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """The uvicorn configuration that serves `app`."""
    return uvicorn.Config(
        app,
        loop="asyncio",
        http=connection(config.head_timeout_s),
        backlog=BACKLOG,
        ws=websocket_connection(config.max_total_body_bytes, config.slow_reader_timeout_s),
        ws_max_size=FIRST_MESSAGE_BYTES,
        ws_ping_interval=20.0,
        ws_ping_timeout=20.0,
        # Audio does not compress, and texts are small.
        ws_per_message_deflate=False,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=config.keep_alive_timeout_s,
        timeout_graceful_shutdown=math.ceil(config.shutdown_timeout_s),
    )


class _Server(uvicorn.Server):
    """Lets what it cuts off at the end of a shutdown tell its clients so."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        if (tasks := self.server_state.tasks) and not self.force_exit:
            await asyncio.wait(tasks, timeout=CUT_OFF_S)


class LoopErrors:
    """Logs the event loop's errors. While connections cannot be accepted for want of file descriptors, it logs one line
    a second: the loop reports each of `BACKLOG` tries."""

    def __init__(self) -> None:
        self._told_s = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or "accept" not in context["message"]:
            loop.default_exception_handler(context)
        elif loop.time() >= self._told_s + 1:
            self._told_s = loop.time()
            logger.error("event=not_accepted reason=%r", error.strerror)


def return_freed_buffers() -> None:
    """Let buffers of `MAPPED_BYTES` go back to the system once they are freed. By default glibc does so only for those
    longer than any freed before, or than 32 MiB; a heap with holes between keeps the others."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


async def serve(client: Fleet, config: ServerConfig, *sockets: socket.socket, shared: Shared | None = None) -> None:
    """Serve on `sockets` until a signal ends it; running requests then get `shutdown_timeout_s`.
    Raises the error of an engine that could not be started, and `EngineClosed` once none is left."""
    failures: list[SonoroError] = []

    def give_up(error: SonoroError) -> None:
        failures.append(error)
        server.should_exit = True

    server = _Server(uvicorn_config(create_app(client, config, give_up, shared), config))
    # Imported objects stay; a collection that walks them stalls streams for 40 to 70 ms. With the higher threshold most
    # objects of a request are freed before the collector looks at them.
    gc.collect()
    gc.freeze()
    gc.set_threshold(GARBAGE_OBJECTS)
    return_freed_buffers()
    asyncio.get_running_loop().set_exception_handler(LoopErrors())
    await server.serve(sockets=list(sockets))
    if failures:
        raise failures[0]
