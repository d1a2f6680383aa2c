"""The HTTP face of an engine: OpenAI's speech API, and what operators ask. Loads no torch.

The engine is started behind it: the server is alive from its first moment and ready when the engine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hmac
import logging
import math
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from sonoro.core.errors import ConfigError, EngineError, SonoroError
from sonoro.core.types import ModelSpec
from sonoro.server.config import ServerConfig
from sonoro.server.encode import Encoder
from sonoro.server.errors import (
    BodyTooLarge,
    BodyTooSlow,
    NotReady,
    Unauthorized,
    UnknownModel,
    plain_refusal,
    refusal,
)
from sonoro.server.metrics import Metrics, Observation
from sonoro.server.schemas import SpeechBody, body_schema, parse_body, speech_request
from sonoro.server.stream import NO_ENGINE, Gate, Speech, SpeechResponse, error_response
from sonoro.transport.client import EngineClient
from sonoro.transport.messages import Stats

__all__ = ["create_app", "listen", "serve"]

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 2.0
"""How long /metrics waits for the engine before it counts as down."""

_BODY = {"requestBody": {"required": True, "content": {"application/json": {"schema": body_schema()}}}}
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"description": "audio, as it is made", "content": {"audio/*": {}, "text/event-stream": {}}},
    **{status: {"description": "refused, and why"} for status in (400, 401, 404, 408, 413, 429, 503)},
}


class Service:
    """An engine that is started behind its back, and what the endpoints share.

    `on_failure` is told what was wrong with an engine that could not be started.
    """

    def __init__(
        self, client: EngineClient, config: ServerConfig, on_failure: Callable[[SonoroError], None] | None
    ) -> None:
        self.client, self.config, self.metrics = client, config, Metrics()
        self.gate = Gate(config.max_concurrency, config.max_waiting, config.max_queue_wait_ms / 1000)
        self.created_s = int(time.time())
        self.aliases: dict[str, str] = {}
        self._keys = [key.encode() for key in config.api_keys]
        self._on_failure, self._failure, self._is_started = on_failure, "", False

    @contextlib.asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """Start the engine in the background; end it with the block."""
        starting = asyncio.create_task(self._start())
        try:
            yield
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self.client.close()

    async def _start(self) -> None:
        try:
            await self.client.start()
            self.aliases = self.config.aliases(self.client.spec)
        except Exception as error:
            failure = error if isinstance(error, SonoroError) else EngineError(repr(error))
            self._failure = str(failure)
            if self._on_failure is not None:
                self._on_failure(failure)
            else:
                logger.error("event=engine_not_started reason=%r", self._failure)
            return
        self.metrics.model, self._is_started = self.client.spec.name, True
        logger.info("event=ready model=%s ready_s=%.1f", self.client.spec.name, self.client.ready.ready_s)

    @property
    def unready(self) -> str | None:
        """Why nothing can be spoken now; None if it can."""
        if self._failure:
            return f"the engine could not be started: {self._failure}"
        if not self._is_started:
            return "the engine is being started"
        return None if self.client.is_ready else NO_ENGINE

    def spec(self) -> ModelSpec:
        """What the model can do. Raises `NotReady`."""
        if (reason := self.unready) is not None:
            raise NotReady(reason)
        return self.client.spec

    def authorise(self, request: Request) -> None:
        """Raises `Unauthorized` unless the request has one of the keys, if there are any."""
        if not self._keys:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        # Each is compared, in full: how long it takes must not tell how much of a key was right.
        matches = [hmac.compare_digest(given.strip().encode("latin-1"), key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized("give one of the API keys of this server, as Authorization: Bearer KEY")

    def names(self, spec: ModelSpec) -> tuple[str, ...]:
        """What the model of `spec` may be called."""
        return tuple(dict.fromkeys((spec.name, *self.config.model_aliases)))

    def check_model(self, name: str | None, spec: ModelSpec) -> None:
        """Raises `UnknownModel` unless the model of `spec` goes by that name."""
        known = self.names(spec)
        if name is not None and name not in known:
            raise UnknownModel("model", name, "known models: " + ", ".join(known))

    async def body(self, request: Request) -> bytes:
        """The body of `request`. Raises `BodyTooLarge` as soon as it is, `BodyTooSlow` if it does not come."""
        limit, payload = self.config.max_body_bytes, bytearray()
        too_large = BodyTooLarge(f"the body must have at most {limit} bytes")
        if (length := request.headers.get("content-length", "")).isdecimal() and int(length) > limit:
            raise too_large
        try:
            async with asyncio.timeout(self.config.body_timeout_s):
                async for part in request.stream():
                    payload += part
                    if len(payload) > limit:
                        raise too_large
        except TimeoutError as error:
            raise BodyTooSlow(f"the body must arrive within {self.config.body_timeout_s:g} s") from error
        return bytes(payload)

    async def stats(self) -> Stats | None:
        """How the engine is doing; None if it does not say."""
        if self.unready is not None:
            return None
        with contextlib.suppress(EngineError, TimeoutError):
            return await asyncio.wait_for(self.client.stats(), STATS_TIMEOUT_S)
        return None

    async def speech(self, request: Request, request_id: str) -> Response:
        """The answer to a speech request. Raises what is wrong with it."""
        arrived_s = time.perf_counter()
        body = parse_body(await self.body(request))
        spec = self.spec()
        speech = await self._understand(body, request_id, spec)
        observation = Observation(self.metrics, spec.sample_rate, arrived_s)
        return SpeechResponse(speech, self.client, self.gate, observation, self.config.slow_reader_timeout_s)

    async def _understand(self, body: SpeechBody, request_id: str, spec: ModelSpec) -> Speech:
        self.check_model(body.model, spec)
        arguments = body, request_id, spec, self.aliases, self.config.max_characters
        # A recording takes long to decode, and the others would wait.
        made = await asyncio.to_thread(speech_request, *arguments) if body.ref_audio else speech_request(*arguments)
        encoder = Encoder(body.response_format, spec.sample_rate, speed=body.speed, out_rate=body.sample_rate)
        return Speech(made, encoder, is_events=body.stream_format == "sse")


def create_app(
    client: EngineClient, config: ServerConfig, on_failure: Callable[[SonoroError], None] | None = None
) -> FastAPI:
    """The application over `client`, which it starts and closes. `config` is resolved.

    `on_failure` is told why the engine could not be started; requests are then refused until somebody ends the server.
    """
    service = Service(client, config, on_failure)
    app = FastAPI(title="sonoro", version=version("sonoro"), lifespan=service.running, docs_url=None, redoc_url=None)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["X-Sample-Rate", "X-Request-Id", "Retry-After"],
        )
    app.add_exception_handler(SonoroError, _tell)
    app.add_exception_handler(HTTPException, _tell_of_http)
    app.add_exception_handler(Exception, _tell_of_defect)
    app.include_router(_speech_routes(service))
    app.include_router(_operator_routes(service))
    return app


def _speech_routes(service: Service) -> APIRouter:
    """What clients ask, with a key if there are keys."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(service.authorise)])

    @router.post("/audio/speech", response_class=Response, responses=_ANSWERS, openapi_extra=_BODY)
    async def speech(request: Request) -> Response:
        """Speak a text; the audio is sent as it is made."""
        request_id = uuid.uuid4().hex
        try:
            return await service.speech(request, request_id)
        except SonoroError as error:
            refused = refusal(error)
            fields = request_id, refused.status, error.code, refused.error["param"]
            service.metrics.refused(error.code)
            logger.info("event=request_refused id=%s status=%d code=%s param=%s", *fields)
            return error_response(refused, request_id)

    @router.get("/models")
    async def models() -> dict[str, Any]:
        """The loaded model, under each of its names."""
        spec = service.spec()
        facts = {"object": "model", "created": service.created_s, "owned_by": "sonoro", "root": spec.name}
        able = {
            "sample_rate": spec.sample_rate,
            "voice_modes": spec.voice_modes,
            "languages": spec.languages,
            "options": {option.name: option.limit for option in spec.options},
            "max_characters": service.config.max_characters,
        }
        return {"object": "list", "data": [{"id": name, **facts, **able} for name in service.names(spec)]}

    @router.get("/audio/voices")
    async def voices() -> dict[str, Any]:
        """The model's voices, and the names that stand for one of them."""
        return {"voices": service.spec().voices, "aliases": service.aliases}

    return router


def _operator_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> dict[str, str]:
        """Whether the server is alive, whatever its engine does."""
        return {"status": "alive"}

    @router.get("/ready", responses={503: {"description": "not ready, and why"}})
    async def ready() -> dict[str, str]:
        """Whether a request would be spoken now."""
        return {"status": "ready", "model": service.spec().name}

    @router.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text format."""
        text = service.metrics.exposition(await service.stats(), service.client.restarts)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router


async def _tell(request: Request, error: Exception) -> Response:
    assert isinstance(error, SonoroError), error
    return error_response(refusal(error))


async def _tell_of_http(request: Request, error: Exception) -> Response:
    """A path or method that is not there."""
    assert isinstance(error, HTTPException), error
    refused = plain_refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}", "http")
    return error_response(dataclasses.replace(refused, headers={**refused.headers, **(error.headers or {})}))


async def _tell_of_defect(request: Request, error: Exception) -> Response:
    return error_response(plain_refusal(500, "the server failed; its log says how", "internal"))


def listen(config: ServerConfig) -> socket.socket:
    """A socket that listens where `config` says. Raises `ConfigError` naming host or port if it cannot."""
    try:
        family, *_, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError("host", config.host, f"it must be a name or an address of this machine ({error})") from error
    try:
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        raise ConfigError("port", config.port, f"cannot listen there: {error.strerror}") from error


def serve(client: EngineClient, config: ServerConfig, sock: socket.socket) -> None:
    """Serve on `sock` until a signal ends it; what is under way then gets `shutdown_timeout_s`.

    Raises what was wrong with an engine that could not be started.
    """
    failures: list[SonoroError] = []

    def give_up(error: SonoroError) -> None:
        failures.append(error)
        server.should_exit = True

    server = uvicorn.Server(
        uvicorn.Config(
            create_app(client, config, give_up),
            loop="asyncio",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=math.ceil(config.shutdown_timeout_s),
        )
    )
    server.run(sockets=[sock])
    if failures:
        raise failures[0]
