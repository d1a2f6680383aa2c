"""Traces of texts by OpenTelemetry, from the extra `otel`: a span for each, with spans below it for what it waited for.

Imported only where traces are switched on. What a span needs of a request, `server.stream.Observation` tells it; a
client's trace goes on by the header `traceparent`. The address of the collector, the service's name and the sampling
are OpenTelemetry's own settings (`OTEL_...`)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from importlib import import_module

from opentelemetry import context
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from sonoro.core.events import Timings
from sonoro.core.version import VERSION

_PROPAGATOR = TraceContextTextMapPropagator()

CLOSE_S = 5.0

_GOOD = ("stop", "length", "cancelled")
"""Reasons of an end that are no errors."""


def exporter() -> SpanExporter:
    """What sends spans to a collector, over HTTP."""
    made: SpanExporter = import_module("opentelemetry.exporter.otlp.proto.http.trace_exporter").OTLPSpanExporter()
    return made


class TraceContext:
    """Lets spans go on with the trace that a request's header `traceparent` names (W3C Trace Context)."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        token = context.attach(_PROPAGATOR.extract(dict(Headers(scope=scope))))
        try:
            await self._app(scope, receive, send)
        finally:
            context.detach(token)


class Traces:
    """Makes spans, which a thread of its own sends in batches."""

    middleware = TraceContext

    def __init__(self) -> None:
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter()))
        self._tracer = self._provider.get_tracer("sonoro", VERSION)

    def begin(self, arrived_s: float, dialect: str) -> Trace:
        """Begin the trace of a text that arrived at `arrived_s`, a time of `time.perf_counter`; it goes on with that of
        its client."""
        return Trace(self, arrived_s, dialect)

    def close(self) -> None:
        """Send what is left, for `CLOSE_S` at most. Blocks."""
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)


class Trace:
    """The span of one text."""

    def __init__(self, traces: Traces, arrived_s: float, dialect: str) -> None:
        self._tracer = traces._tracer
        # Of the clock that spans have, at 0 of the one that all else is measured by.
        self._zero_ns = time.time_ns() - time.perf_counter_ns()
        self._arrived_s, self._permit_s = arrived_s, 0.0
        kind, began_ns = SpanKind.SERVER, self._ns(arrived_s)
        self._span = self._tracer.start_span("speech", kind=kind, start_time=began_ns, attributes={"dialect": dialect})
        self.timings: Timings | None = None
        """The engine's, once it has told them."""

    @property
    def headers(self) -> dict[str, str]:
        """The response header that names the span."""
        carrier = dict[str, str]()
        _PROPAGATOR.inject(carrier, set_span_in_context(self._span))
        return {"traceresponse": carrier["traceparent"]}

    def enter(self) -> None:
        """Note that it has got its permit."""
        self._permit_s = time.perf_counter()
        self._add("queue", self._arrived_s, self._permit_s)

    def send(self) -> None:
        """Note that its first packet is sent."""
        self._span.add_event("first_packet")

    def end(self, reason: str, attributes: Mapping[str, str | int | float]) -> None:
        """End it by `reason`, with the spans of what the engine did."""
        if (told := self.timings) is not None and told.slot_s > 0:
            names = ("voice", "slot", "prefill", "speak")
            ends_s = (told.queued_s, told.slot_s, told.first_audio_s, told.total_s)
            for name, since_s, until_s in zip(names, (0.0, *ends_s), ends_s, strict=False):
                self._add(name, self._permit_s + since_s, self._permit_s + until_s)
        self._span.set_attributes({"reason": reason, **attributes})
        if reason not in _GOOD:
            self._span.set_status(Status(StatusCode.ERROR, reason))
        self._span.end()

    def _add(self, name: str, since_s: float, until_s: float) -> None:
        """Add a span below, of times of `time.perf_counter`."""
        parent = set_span_in_context(self._span)
        self._tracer.start_span(name, parent, start_time=self._ns(since_s)).end(self._ns(until_s))

    def _ns(self, at_s: float) -> int:
        return self._zero_ns + round(1e9 * at_s)
