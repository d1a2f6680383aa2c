"""The HTTP routes: speech and batches, models, health and metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from sonoro.core.types import ModelSpec
from sonoro.server.batch import RESULTS_SCHEMA, BatchResponse, read_batch
from sonoro.server.encode import CONTENT_TYPES
from sonoro.server.errors import Answers, NotReady, refusals
from sonoro.server.middleware import CLIENT_GONE, Budget
from sonoro.server.schemas import BatchBody, SpeechBody, parse, schema_of
from sonoro.server.service import Service
from sonoro.server.stream import Speech, SpeechResponse, cancel_on_disconnect

__all__ = ["operator_routes", "respond", "speech_routes"]

QUICK_BYTES = 4096
"""Of a body that holds no recording."""


def _takes(kind: type[SpeechBody | BatchBody]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(kind)}}}}


_SPOKEN: Answers = {
    200: {
        "description": "audio, or events that hold it, as it is made",
        "content": {kind: {} for kind in (*CONTENT_TYPES, "text/event-stream")},
        "headers": {"X-Sample-Rate": {"description": "of the audio, in Hz", "schema": {"type": "integer"}}},
    },
    **refusals(400, 401, 403, 404, 408, 413, 429, 503),
}
_BATCH: Answers = {
    200: {"description": "what each came to", "content": {"application/json": {"schema": RESULTS_SCHEMA}}},
    **refusals(400, 401, 403, 408, 413, 429, 503),
}


async def respond(
    service: Service, request: Request, prepare: Callable[[bytes], Coroutine[Any, Any, Speech]]
) -> Response:
    """Respond with the speech that `prepare` makes of the body of `request`. Raises what `prepare` does."""
    arrived_s, config = time.perf_counter(), service.config
    async with service.bodies.body(request, config.max_body_bytes) as payload:
        # Decoding a recording stops when its client disconnects; a short body may only name one that is elsewhere.
        is_quick = len(payload) < QUICK_BYTES and not (config.allow_reference_urls or config.reference_folder)
        preparing = prepare(payload)
        speech = await (preparing if is_quick else cancel_on_disconnect(request.receive, preparing))
    if speech is None:
        return Response(status_code=CLIENT_GONE)
    observation = service.observe(speech.encoding.encoder.speed, arrived_s, request.state.dialect)
    return SpeechResponse(speech, service.client, service.gate, observation, config.slow_reader_timeout_s)


def speech_routes(service: Service) -> APIRouter:
    """The speech API, with a key if there are keys."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(service.authorise)])
    config = service.config
    answers = Budget(config.max_total_answer_bytes, "answers of {} bytes are at work")

    @router.post("/audio/speech", response_class=Response, responses=_SPOKEN, openapi_extra=_takes(SpeechBody))
    async def speech(request: Request) -> Response:
        """Speak a text; the audio is sent as it is made."""

        async def prepare(payload: bytes) -> Speech:
            return await service.speech(parse(SpeechBody, payload), request.state.request_id, request.state.caller)

        return await respond(service, request, prepare)

    @router.post("/audio/speech/batch", response_class=Response, responses=_BATCH, openapi_extra=_takes(BatchBody))
    async def batch(request: Request) -> Response:
        """Speak 1 to 32 texts; answered when all are spoken."""
        async with contextlib.AsyncExitStack() as held:
            payload = await held.enter_async_context(service.bodies.body(request, config.max_body_bytes))
            items = read_batch(service, payload)
            held.enter_context(answers.take(sum(item.max_bytes for item in items)))
            return BatchResponse(service, items, request.state.request_id, request.state.caller, held.pop_all())

    def shown(spec: ModelSpec) -> list[dict[str, Any]]:
        facts = {"object": "model", "created": service.created_s, "owned_by": "sonoro", "root": spec.name}
        able = {
            "sample_rate": spec.sample_rate,
            "voice_modes": spec.voice_modes,
            "languages": spec.languages,
            "accepts_instructions": spec.accepts_instructions,
            "options": {option.name: option.limit for option in spec.options},
            "max_characters": config.max_characters,
        }
        return [{"id": name, **facts, **able} for name in service.names(spec)]

    @router.get("/models", responses=refusals(401, 403, 503))
    async def models() -> dict[str, Any]:
        """The loaded model, under each of its names, and how it is served."""
        return {"object": "list", "data": shown(service.spec()), "configuration": service.configuration}

    @router.get("/models/{name:path}", responses=refusals(401, 403, 404, 503))
    async def model(name: str) -> dict[str, Any]:
        """The loaded model, under one of its names."""
        spec = service.spec()
        service.check_model(name, spec)
        return next(entry for entry in shown(spec) if entry["id"] == name)

    return router


def operator_routes(service: Service) -> APIRouter:
    """The operators' routes, without a key."""
    router = APIRouter()

    @router.get("/health", responses=refusals(403))
    async def health() -> dict[str, str]:
        """Whether the server is alive, whatever its engine does."""
        return {"status": "alive"}

    @router.get("/ready", responses=refusals(403, 503))
    async def ready() -> dict[str, Any]:
        """Whether a request would be spoken now, and which of the engines run."""
        if (reason := service.unready) is not None:
            raise NotReady(reason)
        return {"status": "ready", "model": service.spec().name, "replicas": service.replicas}

    @router.get("/v1/audio/models", responses=refusals(401, 403, 503), dependencies=[Depends(service.identify)])
    async def speech_models() -> dict[str, Any]:
        """The names of the loaded model, as Open WebUI asks for them, which sends no key."""
        return {"models": [{"id": name, "name": name} for name in service.names(service.spec())]}

    exposed = {"description": "Prometheus' text format", "content": {"text/plain": {}}}
    metrics_answer: Answers = {200: exposed, **refusals(403)}

    @router.get("/metrics", response_class=Response, responses=metrics_answer)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(await service.exposition(), media_type=CONTENT_TYPE_LATEST)

    return router
