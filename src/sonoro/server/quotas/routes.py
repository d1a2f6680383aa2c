"""Shows the usage of keys: `GET /v1/usage` to each key its own, to admins all; and as metrics."""

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from sonoro.server.errors import refusals
from sonoro.server.quotas.counts import KINDS, Quotas
from sonoro.server.service import Service


def usage_routes(service: Service) -> APIRouter:
    """The route of usage, which needs a key if the server has keys; none where nothing is counted. Adds the metrics of
    usage."""
    router = APIRouter(prefix="/v1", dependencies=service.keys.required)
    if (quotas := service.shared.quotas) is None:
        return router
    service.metrics.show(UsageCollector(quotas))

    def shown(owner: str) -> dict[str, Any]:
        used: dict[str, Any] = {kind: quotas.used(owner, kind)._asdict() for kind in KINDS}
        used["concurrent_requests"] = service.speech.gate.held(owner)
        used["stored_voices"] = service.voices.store.count(owner)
        quota = quotas.limits[owner]
        limits = {entry.name: getattr(quota, entry.name) or None for entry in fields(quota)}
        limits["stored_voices"] = service.stored_voices(owner)
        return {"key": quotas.names[owner], **used, "limits": limits}

    @router.get("/usage", responses=refusals(401, 403))
    async def usage(request: Request) -> dict[str, Any]:
        """What the key has used today (UTC) and in all, and its limits; an admin key sees those of all keys."""
        caller = request.state.caller
        await service.voices.catch_up()
        owners = list(quotas.limits) if caller.is_admin else [caller.owner]
        return {"object": "list", "data": [shown(owner) for owner in owners]}

    return router


class UsageCollector(Collector):
    """Exports the usage of all front processes, labelled by the names of keys."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas

    def collect(self) -> Iterator[Metric]:
        all_used = self._quotas.all_used()
        helps = "requests that were spoken, by key", "characters of their texts"
        for at, (kind, help) in enumerate(zip(KINDS, helps, strict=True)):
            family = CounterMetricFamily(f"sonoro_key_{kind}", help, labels=["key"])
            for name, used in all_used.items():
                family.add_metric([name], used[at].total)
            yield family
