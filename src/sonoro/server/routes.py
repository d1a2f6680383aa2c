"""The HTTP routes: speech and batches, models, health and metrics."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from sonoro.audio.encoders import CONTENT_TYPES
from sonoro.core.types import ModelSpec
from sonoro.server.batch import RESULTS_SCHEMA, BatchResponse, read_batch
from sonoro.server.errors import Answers, NotReady, TooManyRequests, refusals
from sonoro.server.middleware import CLIENT_GONE, Budget
from sonoro.server.schemas import BatchBody, SpeechBody, parse, schema_of
from sonoro.server.service import Service
from sonoro.server.stream import Speech, SpeechResponse, cancel_on_disconnect

QUICK_BYTES = 4096
"""Bodies shorter than this hold no recording."""


def _takes(kind: type[SpeechBody | BatchBody]) -> dict[str, Any]:
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(kind)}}}}


_SPOKEN: Answers = {
    200: {
        "description": "audio, or events with audio, streamed as it is generated",
        "content": {kind: {} for kind in (*CONTENT_TYPES, "text/event-stream")},
        "headers": {"X-Sample-Rate": {"description": "of the audio, in Hz", "schema": {"type": "integer"}}},
    },
    **refusals(400, 401, 403, 404, 408, 413, 429, 503),
}
_BATCH: Answers = {
    200: {"description": "the result of each text", "content": {"application/json": {"schema": RESULTS_SCHEMA}}},
    **refusals(400, 401, 403, 408, 413, 429, 503),
}


async def respond(
    service: Service, request: Request, prepare: Callable[[bytes], Coroutine[Any, Any, Speech]]
) -> Response:
    """Read the body of `request` and respond with the speech that `prepare` makes of it. Raises what `prepare` does."""
    arrived_s, config = time.perf_counter(), service.config
    async with service.bodies.body(request, config.max_body_bytes) as payload:
        # Decoding of a recording stops when the client disconnects. A short body has none, unless by URL or file name.
        is_quick = len(payload) < QUICK_BYTES and not (config.allow_reference_urls or config.reference_folder)
        preparing = prepare(payload)
        speech = await (preparing if is_quick else cancel_on_disconnect(request.receive, preparing))
    if speech is None:
        return Response(status_code=CLIENT_GONE)
    observation = service.observe(speech.encoding.encoder.speed, arrived_s, request.state.dialect)
    return SpeechResponse(speech, service.client, service.gate, observation, config.slow_reader_timeout_s)


def speech_routes(service: Service) -> APIRouter:
    """Routes of the speech API; they need a key if the server has keys."""
    router = APIRouter(prefix="/v1", dependencies=[Depends(service.authorise)])
    config = service.config
    answers = Budget(config.max_total_answer_bytes, "responses held in memory have {} bytes")

    @router.post("/audio/speech", response_class=Response, responses=_SPOKEN, openapi_extra=_takes(SpeechBody))
    async def speech(request: Request) -> Response:
        """Speak a text; the audio is streamed as it is generated."""

        async def prepare(payload: bytes) -> Speech:
            body = parse(SpeechBody, payload)
            speech = await service.speech(body, request.state.request_id, request.state.caller)
            try:
                speech.held.enter_context(answers.take(speech.body.max_bytes))
            except TooManyRequests:
                speech.encoding.close()
                raise
            return speech

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
        """The loaded model under each of its names, and the server's configuration."""
        return {"object": "list", "data": shown(service.spec()), "configuration": service.configuration}

    @router.get("/models/{name:path}", responses=refusals(401, 403, 404, 503))
    async def model(name: str) -> dict[str, Any]:
        """The loaded model by one of its names."""
        spec = service.spec()
        service.check_model(name, spec)
        return next(entry for entry in shown(spec) if entry["id"] == name)

    return router


def operator_routes(service: Service) -> APIRouter:
    """Routes for operators; they need no key."""
    router = APIRouter()

    @router.get("/health", responses=refusals(403))
    async def health() -> dict[str, str]:
        """Liveness: whether the server process answers, whatever the state of its engines."""
        return {"status": "alive"}

    @router.get("/ready", responses=refusals(403, 503))
    async def ready() -> dict[str, Any]:
        """Readiness: whether requests are accepted now, and the state of each engine."""
        if (reason := service.unready) is not None:
            raise NotReady(reason)
        return {"status": "ready", "model": service.spec().name, "replicas": service.replicas}

    @router.get("/v1/audio/models", responses=refusals(401, 403, 503), dependencies=[Depends(service.identify)])
    async def speech_models() -> dict[str, Any]:
        """The names of the loaded model, for Open WebUI, which sends no key here."""
        return {"models": [{"id": name, "name": name} for name in service.names(service.spec())]}

    exposed = {"description": "Prometheus' text format", "content": {"text/plain": {}}}
    metrics_answer: Answers = {200: exposed, **refusals(403)}

    @router.get("/metrics", response_class=Response, responses=metrics_answer)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(await service.exposition(), media_type=CONTENT_TYPE_LATEST)

    return router
