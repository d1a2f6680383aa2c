"""The speech server as an application of Ray Serve: `serve run sonoro.scale:app model=... gpus=1`.

Needs the extra `scale`. Each replica is the server of `sonoro.server` over engines of its own; Ray places, counts and
replaces replicas and proxies their responses."""

import asyncio
import os
from dataclasses import asdict, fields
from typing import Any

import numpy as np
from fastapi import FastAPI
from numpy.typing import NDArray
from prometheus_client import Histogram
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingContext
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sonoro.core.config import EngineConfig
from sonoro.core.errors import ConfigError, EngineError
from sonoro.scale_wait import LoadEstimate, ReplicaLoad, replicas_for
from sonoro.server.app import create_app
from sonoro.server.config import ServerConfig
from sonoro.server.gate import Gate
from sonoro.server.metrics import Metrics
from sonoro.transport.fleet import Fleet
from sonoro.transport.launch import Limits
from sonoro.transport.messages import DEFAULT_FACTORY, WorkerSettings

_WATCH_S = 0.02
"""How often a replica checks its engines: without one it refuses requests that another would serve."""

_LOOKS = round(1 / _WATCH_S)


class Arguments(BaseModel):
    """The arguments of `app`: `key=value` of `serve run`, or `args` in a configuration of Ray Serve.

    `engine` and `server` are the sections of `sonoro serve --config`; address and idle timeout are Ray's. A replica has
    an engine on each of its `gpus`, or one on the CPU if that is 0. The number of replicas, from `min_replicas` to
    `max_replicas`, is as low as keeps the predicted mean wait for a first packet at `target_wait_ms`. A replica that is
    removed has `drain_s` to finish its requests. To share uploaded voices, replicas need the same `voices_folder`: a
    bucket, or a volume mounted on all nodes."""

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    dtype: str | None = None
    load_format: str = "auto"
    factory: str = DEFAULT_FACTORY
    engine: dict[str, Any] = {}
    server: dict[str, Any] = {}
    gpus: int = Field(default=0, ge=0, le=64)
    cpus: float = Field(default=1.0, ge=0)
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(default=1, ge=1)
    target_wait_ms: float = Field(default=100.0, gt=0, le=600_000)
    drain_s: float = Field(default=600.0, gt=0)
    health_check_s: float = Field(default=5.0, gt=0)


def app(args: dict[str, Any]) -> serve.Application:
    """The application for `args`, the fields of `Arguments`. Raises `ValidationError` or `ConfigError`, by field."""
    wanted = Arguments.model_validate(args)
    devices = tuple(f"cuda:{number}" for number in range(wanted.gpus)) or ("cpu",)
    config = EngineConfig.from_mapping(wanted.engine)
    settings = WorkerSettings(
        model=wanted.model,
        device=",".join(devices),
        dtype=wanted.dtype,
        load_format=wanted.load_format,
        config=config,
        factory=wanted.factory,
    )
    slots = config.slots * len(devices)
    # Any Host: requests come through Ray's proxy.
    server = ServerConfig.from_mapping({"allowed_hosts": ["*"], **wanted.server}).resolve(slots)
    most_ms = server.max_queue_wait_ms
    if wanted.max_replicas > wanted.min_replicas and wanted.target_wait_ms > most_ms:
        asked = f"it must be at most max_queue_wait_ms, {most_ms}: who waits longer for a permit is refused"
        raise ConfigError("target_wait_ms", wanted.target_wait_ms, asked)
    deployment = serve.deployment(
        name="sonoro",
        ray_actor_options={"num_gpus": wanted.gpus, "num_cpus": wanted.cpus},
        # Queueing and refusing is left to the gate; a session counts even while idle.
        max_ongoing_requests=server.max_concurrency + server.max_waiting + server.max_sessions,
        autoscaling_config={
            "min_replicas": wanted.min_replicas,
            "max_replicas": wanted.max_replicas,
            "policy": {
                "policy_function": ByPredictedWait,
                "policy_kwargs": {"target_wait_s": wanted.target_wait_ms / 1000},
            },
        },
        graceful_shutdown_timeout_s=wanted.drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=wanted.health_check_s,
    )(serve.ingress()(Replica))
    return deployment.bind(settings, devices, server)


class Replica:
    """One server and its engines. It exits with the last engine, so that Ray starts another replica."""

    def __init__(self, settings: WorkerSettings, devices: tuple[str, ...], server: ServerConfig) -> None:
        # Do not restart a single engine: Ray would keep sending requests meanwhile.
        limits = Limits(
            slow_reader_timeout_s=server.slow_reader_timeout_s,
            max_restarts=server.max_restarts if len(devices) > 1 else 0,
            restart_window_s=server.restart_window_s,
        )
        self._fleet, self._config = Fleet(settings, devices, limits), server
        self._watching: asyncio.Task[None] | None = None
        self._estimate = LoadEstimate()

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray to build the application, in the event loop that will run it."""
        self._app = create_app(self._fleet, self._config)
        self._app.add_middleware(_Unnamed)
        return self._app

    async def check_health(self) -> None:
        """Called by Ray periodically, and before the first request: raises unless the server is ready."""
        service = self._app.state.service
        await service.until_started()
        if (reason := service.speech.unready) is not None:
            raise EngineError(reason)
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Ray periodically, for `ByPredictedWait`."""
        slots = self._fleet.settings.config.slots * len(self._fleet.replicas)
        load = self._estimate.load(min(slots, self._config.max_concurrency) * self._fleet.ready_share)
        return {**asdict(load), "predicted_wait_s": min(load.wait_s, self._config.max_queue_wait_ms / 1000)}

    async def _watch(self) -> None:
        """Note the load. Exit as soon as no engine is left; Ray would keep sending requests."""
        service = self._app.state.service
        seconds = _Seconds(service.speech.gate, service.metrics, self._estimate)
        while self._can_speak or service.is_ending:
            await asyncio.sleep(_WATCH_S)
            seconds.look()
        os._exit(1)

    @property
    def _can_speak(self) -> bool:
        """Whether an engine runs, or will be restarted here."""
        return self._fleet.is_ready or (len(self._fleet.replicas) > 1 and self._fleet.closed_reason is None)


class _Seconds:
    """Tells `estimate` what `gate` and `metrics` show of each second, in which `look` is called `_LOOKS` times."""

    def __init__(self, gate: Gate, metrics: Metrics, estimate: LoadEstimate) -> None:
        self._gate, self._metrics, self._estimate = gate, metrics, estimate
        self._looks, self._running, self._waiting = 0, 0.0, 0.0
        self._totals = self._read()

    def look(self) -> None:
        """Look once."""
        self._looks += 1
        self._running += self._gate.running / _LOOKS
        self._waiting += self._gate.waiting / _LOOKS
        if self._looks == _LOOKS:
            totals = self._read()
            (firsts, firsts_s), (ended, held_s), (spoken, rtf) = totals - self._totals
            self._estimate.note(self._running, self._waiting, firsts, firsts_s)
            if ended and spoken:
                self._estimate.note_ended(self._running, held_s / ended, rtf / spoken)
            self._looks, self._running, self._waiting, self._totals = 0, 0.0, 0.0, totals

    def _read(self) -> NDArray[np.float64]:
        """The count and the sum so far of first packets, of whole requests, and of their RTFs [3, 2]."""
        shown = (self._metrics.first_packet, self._metrics.end_to_end, self._metrics.rtf)
        return np.array([[_total(histogram, end) for end in ("_count", "_sum")] for histogram in shown])


def _total(histogram: Histogram, end: str) -> float:
    """The sum over all labels of the samples of `histogram` whose names have this `end`."""
    return sum(one.value for metric in histogram.collect() for one in metric.samples if one.name.endswith(end))


class ByPredictedWait:
    """Autoscaling policy: `replicas_for` of what the replicas tell; as many as there are until they have."""

    def __init__(self, target_wait_s: float) -> None:
        self._target_wait_s = target_wait_s

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        told = context.aggregated_metrics or {}
        names = [entry.name for entry in fields(ReplicaLoad)]
        # During an update some tell what others do not.
        replicas = set.intersection(*({*told.get(name, {})} for name in names))
        loads = [ReplicaLoad(*(told[name][replica] for name in names)) for replica in replicas]
        return replicas_for(loads, self._target_wait_s) if loads else context.target_num_replicas, {}


class _Unnamed:
    """Drops `X-Request-Id` from responses: Ray's proxy sets it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_unnamed(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        await self._app(scope, receive, send_unnamed)
