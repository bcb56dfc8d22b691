"""Traces as a collector gets them, by OTLP over HTTP."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from support.corral_cli import PATIENCE_S
from support.proxy_harness import ProxyHarness
from support.upstream import Call

from proxy.errors import ConfigError
from proxy.observe import tracing
from proxy.observe.otel import SpanQueue
from proxy.observe.tracing import check_tracing, endpoint_of
from proxy.settings import TracingSettings

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
CANARY = "xylophonic"
STREAM = b"".join(
    b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}\n\n' % word
    for word in (b"xylo", b"phonic")
)
TIMINGS = (
    b'data: {"choices":[],"timings":{"cache_n":3,"prompt_n":4,"prompt_ms":5.0,"predicted_n":2,'
    b'"predicted_ms":6.0}}\n\ndata: [DONE]\n\n'
)


async def say_words(call: Call) -> None:
    await call.begin_stream()
    await call.chunk(STREAM)
    await call.chunk(TIMINGS)
    await call.end()


class Collector:
    """Listens on a port and keeps the requests."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._arrived = asyncio.Event()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_post("/v1/traces", self._take)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()

    async def _take(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        self._arrived.set()
        return web.Response()

    async def spans(self) -> list[Span]:
        """Wait for the spans of a request; its own comes last."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := self._found()) or found[-1].kind != Span.SPAN_KIND_SERVER:
                self._arrived.clear()
                await self._arrived.wait()
        return found

    def _found(self) -> list[Span]:
        return [
            span
            for body in self.bodies
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    yield
    logger = logging.getLogger("opentelemetry")
    logger.handlers, logger.propagate = [], True


async def traced(proxy: ProxyHarness, endpoint: str) -> None:
    await proxy.open(tracing=TracingSettings(endpoint=endpoint))


async def test_a_request_is_one_trace_that_goes_on_from_the_clients(proxy: ProxyHarness) -> None:
    collector = Collector()
    fake = await proxy.fake(say_words)
    async with collector.listening() as endpoint:
        await traced(proxy, endpoint)
        headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=1"}
        body = {"model": "chat", "messages": [{"role": "user", "content": CANARY}], "stream": True}
        async with proxy.http.post("/v1/chat/completions", json=body, headers=headers) as response:
            assert "xylo" in await response.text()
        *children, root = await collector.spans()
    assert {span.trace_id.hex() for span in (root, *children)} == {TRACE_ID}
    assert root.parent_span_id.hex() == SPAN_ID
    assert root.kind == Span.SPAN_KIND_SERVER
    assert root.name == "POST /v1/chat/completions"
    assert {child.name for child in children} >= {"prefill"}
    assert {child.parent_span_id for child in children} == {root.span_id}
    assert min(child.start_time_unix_nano for child in children) >= root.start_time_unix_nano
    told = {attribute.key: attribute.value for attribute in root.attributes}
    assert told["gen_ai.usage.input_tokens"].int_value == 7
    assert told["gen_ai.usage.output_tokens"].int_value == 2
    call = fake.calls.get_nowait()
    assert call.headers["traceparent"] == f"00-{TRACE_ID}-{root.span_id.hex()}-01"
    assert call.headers["tracestate"] == "vendor=1"
    assert CANARY.encode() not in b"".join(collector.bodies)
    assert b"xylo" not in b"".join(collector.bodies)


async def test_what_a_client_does_not_sample_is_passed_on_and_not_sent(
    proxy: ProxyHarness,
) -> None:
    collector = Collector()
    fake = await proxy.fake(say_words)
    async with collector.listening() as endpoint:
        await traced(proxy, endpoint)
        not_sampled = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}
        for headers in (not_sampled, {"traceparent": "garbage"}):
            body = {"model": "chat", "messages": []}
            async with proxy.http.post("/v1/chat/completions", json=body, headers=headers):
                pass
        *children, root = await collector.spans()
    assert TRACE_ID not in {span.trace_id.hex() for span in (root, *children)}
    assert not root.parent_span_id
    passed_on = fake.calls.get_nowait().headers["traceparent"]
    assert passed_on.startswith(f"00-{TRACE_ID}-")
    assert passed_on.endswith("-00")


class _Exporter(SpanExporter):
    """Fails while it is down."""

    def __init__(self) -> None:
        self.is_down = True
        self.sent = 0
        self.tried = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE if self.is_down else SpanExportResult.SUCCESS
        if self.is_down:
            logger = logging.getLogger("opentelemetry.exporter")
            logger.warning("Transient error %s, retrying in %s", "refused", 1)
            logger.error("Failed to export %s due to timeout", "spans")
        else:
            self.sent += len(spans)
        self.tried.set()
        return result

    def shutdown(self) -> None:
        pass


def test_a_collector_that_is_down_is_one_warning_and_lost_spans_are_counted() -> None:
    exporter, told = _Exporter(), list[str | int]()
    queue = SpanQueue(exporter, 0.01, told.append, told.append, close_s=20)

    def send() -> None:
        exporter.tried.clear()
        queue.on_end(ReadableSpan("POST"))
        assert exporter.tried.wait(60)

    send()
    send()
    exporter.is_down = False
    send()
    queue.shutdown()
    assert told == ["refused", 2]
    assert exporter.sent == 1


def test_a_full_queue_drops_the_oldest() -> None:
    exporter, told = _Exporter(), list[str | int]()
    queue = SpanQueue(exporter, 3600, told.append, told.append, max_batch=10_000, close_s=20)
    for _ in range(2050):
        queue.on_end(ReadableSpan("POST"))
    exporter.is_down = False
    queue.shutdown()
    assert exporter.sent == 2048


def test_tracing_is_on_where_something_names_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    off, on = TracingSettings(), TracingSettings(endpoint="http://127.0.0.1:4318")
    named = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}
    assert endpoint_of(off, {}) is None
    assert endpoint_of(on, named) == on.endpoint
    assert endpoint_of(off, named) == "http://c:4318"
    assert endpoint_of(on, {"OTEL_SDK_DISABLED": "true"}) is None
    assert endpoint_of(off, {**named, "OTEL_TRACES_EXPORTER": "none"}) is None
    monkeypatch.setattr(tracing, "find_spec", lambda _package: None)
    check_tracing(off)
    with pytest.raises(ConfigError, match="not installed"):
        check_tracing(on)


@pytest.mark.parametrize(
    "endpoint", ["127.0.0.1:4318", "grpc://c:4317", "http://u:p@c", "http://c?k=1", "http://c:x"]
)
def test_an_endpoint_is_an_address(endpoint: str) -> None:
    with pytest.raises(ValueError, match="endpoint"):
        TracingSettings(endpoint=endpoint)
