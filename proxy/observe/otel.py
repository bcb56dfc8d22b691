"""Spans of requests, created with OpenTelemetry when a request has ended; imported only if traced.

Attributes contain no text of clients except the names of model and API key. `SpanQueue` is a
bounded queue with a sender thread: the library's own processor starts a thread in every forked
process, and engines are forked. A collector that is down costs nothing else: rejected spans are
dropped and counted, with one warning until it accepts spans again.

Source: OpenTelemetry semantic conventions, "HTTP server spans" and "Generative AI client spans"
(gen_ai is in development); attributes outside them begin with `corral.`.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from http import HTTPMethod
from typing import Any, Final

from aiohttp import web
from attrs import define, field
from multidict import CIMultiDict
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from proxy.common.toml_text import table_beside
from proxy.observe.record import Emit, RequestTrace
from proxy.settings import TracingSettings

_QUEUE_MAX: Final = 2048
_REASON_MAX: Final = 400


@define(eq=False, slots=False)
class SpanQueue(SpanProcessor):
    """Sends spans in its own thread, in which it calls `on_failure` and `on_recovery`.

    Args:
        exporter: Sends one batch; blocks.
        delay_s: The longest time that a span waits for others, up to `max_batch` of them.
        close_s: The longest time for the remaining spans at the end.
        on_failure: Called with the reason, for the first lost batch in a row.
        on_recovery: Called with the number of spans lost since.
    """

    _exporter: SpanExporter
    _delay_s: float
    _on_failure: Callable[[str], None]
    _on_recovery: Callable[[int], None]
    _max_batch: int = 512
    _close_s: float = 0.5
    _lost: int = field(default=0, init=False)
    _is_failing: bool = field(default=False, init=False)
    _is_closed: bool = field(default=False, init=False)
    _woken: threading.Event = field(factory=threading.Event, init=False)

    def __attrs_post_init__(self) -> None:
        self._spans = deque[ReadableSpan](maxlen=_QUEUE_MAX)
        self._reasons = _Reasons()
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()

    def on_end(self, span: ReadableSpan) -> None:
        if len(self._spans) == _QUEUE_MAX:
            self._lost += 1
        self._spans.append(span)
        if len(self._spans) >= self._max_batch:
            self._woken.set()

    def shutdown(self) -> None:
        """Send the remaining spans within `close_s`."""
        self._is_closed = True
        self._woken.set()
        self._thread.join(self._close_s)
        self._exporter.shutdown()

    def _work(self) -> None:
        while not self._is_closed:
            self._woken.wait(self._delay_s)
            self._woken.clear()
            while self._spans:
                count = min(self._max_batch, len(self._spans))
                batch = [self._spans.popleft() for _ in range(count)]
                is_sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
                self._note(len(batch), is_sent=is_sent)

    def _note(self, spans: int, *, is_sent: bool) -> None:
        if not is_sent:
            self._lost += spans
            if not self._is_failing:
                self._on_failure(self._reasons.last)
        elif self._is_failing:
            lost, self._lost = self._lost, 0
            self._on_recovery(lost)
        self._is_failing = not is_sent


class _Reasons(logging.Handler):
    """Silences the library, and keeps the reason of the last failed attempt.

    A warning is about one attempt, and its first value is the reason; an error without several
    values only reports that the retries are exhausted.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = "no reason given"
        library = logging.getLogger("opentelemetry")
        library.handlers, library.propagate = [logging.NullHandler()], False
        logging.getLogger("opentelemetry.exporter").handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        values = record.args if isinstance(record.args, tuple) else ()
        if record.levelno == logging.WARNING and values:
            self.last = str(values[0])[:_REASON_MAX]
        elif len(values) > 1:
            self.last = record.getMessage()[:_REASON_MAX]


Attributes = Mapping[str, str | bool | int | float]

# Phases in order; the client's pauses are part of `decode`.
_BEFORE_TOKENS: Final = ("queued", "evict", "load", "slots", "prefill")
_SPAN_NAMES: Final = {"queued": "queue"}
_TABLES: Final = table_beside(__file__)
_OPERATIONS: Final[Mapping[str, str]] = _TABLES["operations"]
_ATTRIBUTES: Final[Mapping[str, str]] = _TABLES["attributes"]
_SERVER_ERROR: Final = 500


def method_of(method: str) -> str:
    return method if method in HTTPMethod.__members__ else "_OTHER"


def span_name(method: str, fields: Mapping[str, Any]) -> str:
    name = "HTTP" if method == "_OTHER" else method
    return f"{name} {fields['path']}" if fields.get("path") else name


def attributes(fields: Mapping[str, Any]) -> Attributes:
    """Return the attributes of a request's span."""
    found = {
        name: fields[field] for field, name in _ATTRIBUTES.items() if fields.get(field) is not None
    }
    kind, model = fields.get("kind"), fields.get("fallback_for") or fields.get("model")
    if kind:
        found["gen_ai.operation.name"] = _OPERATIONS.get(kind, kind)
        found["gen_ai.provider.name"] = "llama.cpp"
    if model:
        found["gen_ai.request.model"] = model
    if fields.get("prompt_tokens") is not None:
        prompt_tokens = fields["prompt_tokens"] + (fields["cached_tokens"] or 0)
        found["gen_ai.usage.input_tokens"] = prompt_tokens
    if fields.get("first_token_ms") is not None:
        found["gen_ai.response.time_to_first_chunk"] = round(fields["first_token_ms"] / 1000, 4)
    return found


def is_error(fields: Mapping[str, Any]) -> bool:
    """Return whether the server failed; a client's mistake is not a server error."""
    return (fields["status"] or 0) >= _SERVER_ERROR


def phases(fields: Mapping[str, Any]) -> Iterator[tuple[str, float, float]]:
    """Yield the phases that took any time, in the order of the request: name, begin and end.

    The times are milliseconds since the beginning of the request. A phase that a retry repeated is
    one span of their total time.
    """
    waits_ms = [(name, fields[f"{name}_ms"]) for name in _BEFORE_TOKENS]
    decode_ms = fields["decode_ms"] + fields["stalled_ms"] if fields["decode_ms"] else 0.0
    before_ms = sum(took_ms for _, took_ms in waits_ms)
    decode_at_ms = _decode_at_ms(fields, decode_ms, before_ms)
    at_ms = max(0.0, decode_at_ms - before_ms)
    for name, took_ms in (*waits_ms, ("decode", decode_ms)):
        if took_ms:
            yield _SPAN_NAMES.get(name, name), at_ms, at_ms + took_ms
        at_ms += took_ms


def _decode_at_ms(fields: Mapping[str, Any], decode_ms: float, before_ms: float) -> float:
    """Return the time of the first token: measured, if known, and no later than decoding allows."""
    if not decode_ms:
        return before_ms
    latest_ms = float(fields["duration_ms"]) - decode_ms
    known_ms = fields.get("first_token_ms")
    return max(before_ms, latest_ms if known_ms is None else min(known_ms, latest_ms))


_PROPAGATOR: Final = TraceContextTextMapPropagator()
_TRACES_PATH: Final = "/v1/traces"
_FIELDS: Final = ("traceparent", "tracestate")
# Timeout of the collector for one batch with all its retries.
_TIMEOUT_S: Final = 10.0
_DELAY_S: Final = 2.0
_NS_PER_MS: Final = 1_000_000


class OpenTelemetryTracer:
    """Begins the trace of each request, or continues the client's.

    `process` distinguishes daemons of the same service name.
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
        # Repeated header fields make no valid parent. Source: W3C Trace Context, 3.2.
        given = {name: ",".join(request.headers.getall(name, ())) for name in _FIELDS}
        method = method_of(request.method)
        span = self._tracer.start_span(
            method,
            context=_PROPAGATOR.extract({name: value for name, value in given.items() if value}),
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
        for phase, begin_ms, end_ms in phases(fields):
            begin_ns = began_ns + round(begin_ms * _NS_PER_MS)
            child = self._tracer.start_span(phase, context, start_time=begin_ns)
            child.end(began_ns + round(end_ms * _NS_PER_MS))
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
    """Return the time between two batches. Source: OpenTelemetry, "Batch Span Processor"."""
    given = environ.get("OTEL_BSP_SCHEDULE_DELAY", "")
    return int(given) / 1000 if given.isascii() and given.isdigit() else _DELAY_S


def _exporter(settings: TracingSettings) -> SpanExporter:
    if settings.endpoint is None:
        return OTLPSpanExporter()
    base = settings.endpoint.rstrip("/").removesuffix(_TRACES_PATH)
    return OTLPSpanExporter(endpoint=f"{base}{_TRACES_PATH}", timeout=_TIMEOUT_S)
