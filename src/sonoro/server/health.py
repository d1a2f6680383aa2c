"""Health of the server and its engines: the operators' routes, which need no key."""

import asyncio
import contextlib
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from sonoro.core.errors import EngineError
from sonoro.server.errors import Answers, NotReady, refusals
from sonoro.server.metrics import EngineState
from sonoro.server.service import Service
from sonoro.transport.client import EngineRequests

STATS_TIMEOUT_S = 2.0
"""How long /metrics waits for an engine before it counts as down."""


def health_routes(service: Service) -> APIRouter:
    """The routes of liveness, readiness and metrics."""
    router = APIRouter()

    @router.get("/health", responses=refusals(403))
    async def health() -> dict[str, str]:
        """Liveness: whether the server process answers, whatever the state of its engines."""
        return {"status": "alive"}

    @router.get("/ready", responses=refusals(403, 503))
    async def ready() -> dict[str, Any]:
        """Readiness: whether requests are accepted now, and the state of each engine."""
        if (reason := service.speech.unready) is not None:
            raise NotReady(reason)
        replicas = [_described(engine) for engine in service.client.replicas]
        return {"status": "ready", "model": service.speech.spec().name, "replicas": replicas}

    exposed = {"description": "Prometheus' text format", "content": {"text/plain": {}}}
    metrics_answer: Answers = {200: exposed, **refusals(403)}

    @router.get("/metrics", response_class=Response, responses=metrics_answer)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        has_started = service.speech.no_start is None
        engines = await asyncio.gather(*(_state(engine, has_started=has_started) for engine in service.client.replicas))
        text = service.metrics.exposition(engines, queued=service.speech.gate.waiting)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return router


def _described(engine: EngineRequests) -> dict[str, Any]:
    return {
        "device": engine.settings.device,
        "status": "ready" if engine.is_ready else "starting" if engine.closed_reason is None else "ended",
        "restarts": engine.restarts,
        "graphs_to_come": engine.ready.graphs_to_come if engine.is_ready else 0,
    }


async def _state(engine: EngineRequests, *, has_started: bool) -> EngineState:
    """The state of an engine; its stats are None if they do not arrive in time."""
    stats = None
    if has_started and engine.is_ready:
        with contextlib.suppress(EngineError, TimeoutError):
            stats = await asyncio.wait_for(engine.stats(), STATS_TIMEOUT_S)
    return EngineState(stats, engine.restarts, engine.settings.config.slots)
