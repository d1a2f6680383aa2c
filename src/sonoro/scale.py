"""The speech server as an application of Ray Serve: `serve run sonoro.scale:app model=... gpus=1`.

Needs the extra `scale`. Each replica is the server of `sonoro.server` over engines of its own; Ray places, counts and
replaces replicas and proxies their responses."""

import asyncio
import os
from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.autoscaling_policy import replica_queue_length_autoscaling_policy
from ray.serve.config import AutoscalingContext
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from sonoro.core.config import EngineConfig
from sonoro.core.errors import EngineError
from sonoro.server.app import create_app
from sonoro.server.config import ServerConfig
from sonoro.transport.fleet import Fleet
from sonoro.transport.launch import Limits
from sonoro.transport.messages import DEFAULT_FACTORY, WorkerSettings

_WAIT = "queue_wait_s"

_WATCH_S = 0.02
"""How often a replica checks its engines: without one it refuses requests that another would serve."""


class Arguments(BaseModel):
    """The arguments of `app`: `key=value` of `serve run`, or `args` in a configuration of Ray Serve.

    `engine` and `server` are the sections of `sonoro serve --config`; address and idle timeout are Ray's. A replica has
    an engine on each of its `gpus`, or one on the CPU if that is 0. The number of replicas, from `min_replicas` to
    `max_replicas`, keeps the requests per replica, waiting ones included, at `target_load` of its capacity; it grows
    by one while requests wait longer than `target_wait_ms`. A replica that is removed has `drain_s` to finish its
    requests. To share uploaded voices, replicas need the same `voices_folder`: a bucket, or a volume mounted on all
    nodes."""

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
    target_load: float = Field(default=0.7, gt=0, le=1)
    target_wait_ms: float = Field(default=100.0, gt=0)
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
    # Requests beyond these wait, at the gate or in an engine; Ray counts them as running.
    at_once = min(slots, server.max_concurrency)
    deployment = serve.deployment(
        name="sonoro",
        ray_actor_options={"num_gpus": wanted.gpus, "num_cpus": wanted.cpus},
        # Queueing and refusing is left to the gate; a session counts even while idle.
        max_ongoing_requests=server.max_concurrency + server.max_waiting + server.max_sessions,
        autoscaling_config={
            "min_replicas": wanted.min_replicas,
            "max_replicas": wanted.max_replicas,
            "target_ongoing_requests": max(1.0, wanted.target_load * at_once),
            "policy": {
                "policy_function": ByLoadAndWait,
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
        """Called by Ray periodically, for `ByLoadAndWait`."""
        return {_WAIT: self._app.state.service.speech.gate.longest_wait_s}

    async def _watch(self) -> None:
        """Exit as soon as no engine is left; Ray would keep sending requests."""
        while self._can_speak or self._app.state.service.is_ending:
            await asyncio.sleep(_WATCH_S)
        os._exit(1)

    @property
    def _can_speak(self) -> bool:
        """Whether an engine runs, or will be restarted here."""
        return self._fleet.is_ready or (len(self._fleet.replicas) > 1 and self._fleet.closed_reason is None)


class ByLoadAndWait:
    """Autoscaling policy: as many replicas as the load asks for, and one more than now while the mean over replicas of
    the longest wait exceeds `target_wait_s`. The load alone is not enough, as a batch counts as one request."""

    def __init__(self, target_wait_s: float) -> None:
        self._target_wait_s = target_wait_s

    def __call__(self, context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
        by_load, state = replica_queue_length_autoscaling_policy(context)
        waits = (context.aggregated_metrics or {}).get(_WAIT, {}).values()
        is_late = bool(waits) and sum(waits) / len(waits) > self._target_wait_s
        return max(by_load, context.current_num_replicas + 1 if is_late else 0), state


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
