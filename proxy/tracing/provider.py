"""Spans of requests, made with OpenTelemetry when a request has ended."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web
from multidict import CIMultiDict
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy.access_log import Emit
from proxy.request_trace import RequestTrace
from proxy.tracing.span_queue import SpanQueue
from proxy.tracing.spans import attributes, is_error, method_of, phases, span_name
from proxy.tracing_config import TracingSettings

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_TRACES_PATH: Final = "/v1/traces"
_FIELDS: Final = ("traceparent", "tracestate")
# Of the collector, for one batch with all its retries.
_TIMEOUT_S: Final = 10.0
_DELAY_S: Final = 2.0
_NS_PER_MS: Final = 1_000_000


class OpenTelemetryTracer:
    """Begins the trace of each request, or goes on with the client's.

    `process` tells several daemons of one name apart.
    """

    def __init__(self, settings: TracingSettings, process: str, emit: Emit) -> None:
        ratio = settings.sample_ratio
        self._provider = TracerProvider(
            sampler=None if ratio is None else ParentBasedTraceIdRatio(ratio),
            resource=_resource(settings, process),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(_queue(settings, emit))
        self._tracer = self._provider.get_tracer("llama-corral")

    def begin(self, request: web.BaseRequest) -> RequestTrace:
        # Several fields of one name make no valid parent. Source: W3C Trace Context, 3.2.
        given = {name: ",".join(request.headers.getall(name, ())) for name in _FIELDS}
        method = method_of(request.method)
        span = self._tracer.start_span(
            method,
            context=_PROPAGATOR.extract({name: one for name, one in given.items() if one}),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": method, "url.scheme": request.scheme},
        )
        return _Trace(self._tracer, span, method)

    def close(self) -> None:
        self._provider.shutdown()


class _Trace:
    def __init__(self, tracer: trace.Tracer, span: Span, method: str) -> None:
        self._tracer = tracer
        self._span = span
        self._method = method

    def pass_on(self, headers: CIMultiDict[str]) -> None:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
        for name in _FIELDS:
            headers.pop(name, None)
        headers.update(carrier)

    def end(self, name: str, fields: Mapping[str, Any]) -> None:
        span = self._span
        is_last = name in {"request.finished", "request.rejected"}
        if not is_last or not isinstance(span, ReadableSpan) or span.start_time is None:
            return  # not sampled
        began_ns = span.start_time
        span.update_name(span_name(self._method, fields))
        span.set_attributes(attributes(fields))
        if is_error(fields):
            span.set_status(Status(StatusCode.ERROR))
        context = trace.set_span_in_context(span)
        for phase in phases(fields):
            begin_ns = began_ns + round(phase.begin_ms * _NS_PER_MS)
            child = self._tracer.start_span(phase.name, context, start_time=begin_ns)
            child.end(began_ns + round(phase.end_ms * _NS_PER_MS))
        span.end(began_ns + round(fields["duration_ms"] * _NS_PER_MS))


def _resource(settings: TracingSettings, process: str) -> Resource:
    own = {SERVICE_INSTANCE_ID: process} if process else {}
    if settings.service_name:
        return Resource.create({**own, SERVICE_NAME: settings.service_name})
    found = Resource.create(own)
    unnamed = str(found.attributes.get(SERVICE_NAME, "")).startswith("unknown_service")
    return found.merge(Resource({SERVICE_NAME: "llama-corral"})) if unnamed else found


def _queue(settings: TracingSettings, emit: Emit) -> SpanQueue:
    loop = asyncio.get_running_loop()

    def emit_soon(name: str, **fields: object) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(functools.partial(emit, name, **fields))

    return SpanQueue(
        _exporter(settings),
        _delay_s(os.environ),
        on_failure=lambda reason: emit_soon("traces.export_failed", reason=reason),
        on_recovery=lambda lost: emit_soon("traces.export_resumed", lost=lost),
    )


def _delay_s(environ: Mapping[str, str]) -> float:
    """The time between two batches. Source: OpenTelemetry, "Batch Span Processor"."""
    given = environ.get("OTEL_BSP_SCHEDULE_DELAY", "")
    return int(given) / 1000 if given.isascii() and given.isdigit() else _DELAY_S


def _exporter(settings: TracingSettings) -> SpanExporter:
    if settings.endpoint is None:
        return OTLPSpanExporter()
    base = settings.endpoint.rstrip("/").removesuffix(_TRACES_PATH)
    return OTLPSpanExporter(endpoint=f"{base}{_TRACES_PATH}", timeout=_TIMEOUT_S)
