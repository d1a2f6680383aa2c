"""Health of the server and its engines: the operators' routes, which need no key."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from sonoro.core.errors import EngineError
from sonoro.server.errors import Answers, NotReady, refusals
from sonoro.server.gate import NO_ENGINE
from sonoro.server.metrics import EngineState, Metrics
from sonoro.server.speech import SpeechFactory
from sonoro.transport.client import EngineClient
from sonoro.transport.fleet import Fleet

STATS_TIMEOUT_S = 2.0
"""How long /metrics waits for an engine before it counts as down."""


class Health:
    """Whether requests are accepted, and the state of each engine."""

    def __init__(self, client: Fleet, speech: SpeechFactory, metrics: Metrics) -> None:
        self._client, self._speech, self._metrics = client, speech, metrics

    @property
    def unready(self) -> str | None:
        """Why requests would be refused now; None if they would not."""
        return self._speech.no_model or (None if self._client.is_ready else NO_ENGINE)

    @property
    def replicas(self) -> list[dict[str, Any]]:
        """Device, status, restarts and number of graphs to come of each engine."""
        return [
            {
                "device": engine.settings.device,
                "status": "ready" if engine.is_ready else "starting" if engine.closed_reason is None else "ended",
                "restarts": engine.restarts,
                "graphs_to_come": engine.ready.graphs_to_come if engine.is_ready else 0,
            }
            for engine in self._client.replicas
        ]

    async def exposition(self) -> bytes:
        """The metrics of server and engines in Prometheus' text format."""
        engines = await asyncio.gather(*map(self._state, self._client.replicas))
        return self._metrics.exposition(engines, queued=self._speech.gate.waiting)

    async def _state(self, engine: EngineClient) -> EngineState:
        """The state of an engine; its stats are None if they do not arrive in time."""
        stats = None
        if self._speech.no_start is None and engine.is_ready:
            with contextlib.suppress(EngineError, TimeoutError):
                stats = await asyncio.wait_for(engine.stats(), STATS_TIMEOUT_S)
        return EngineState(stats, engine.restarts, engine.settings.config.slots)


def health_routes(states: Health, speech: SpeechFactory) -> APIRouter:
    """The routes of liveness, readiness and metrics."""
    router = APIRouter()

    @router.get("/health", responses=refusals(403))
    async def health() -> dict[str, str]:
        """Liveness: whether the server process answers, whatever the state of its engines."""
        return {"status": "alive"}

    @router.get("/ready", responses=refusals(403, 503))
    async def ready() -> dict[str, Any]:
        """Readiness: whether requests are accepted now, and the state of each engine."""
        if (reason := states.unready) is not None:
            raise NotReady(reason)
        return {"status": "ready", "model": speech.spec().name, "replicas": states.replicas}

    exposed = {"description": "Prometheus' text format", "content": {"text/plain": {}}}
    metrics_answer: Answers = {200: exposed, **refusals(403)}

    @router.get("/metrics", response_class=Response, responses=metrics_answer)
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(await states.exposition(), media_type=CONTENT_TYPE_LATEST)

    return router
