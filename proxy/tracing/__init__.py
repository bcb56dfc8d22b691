"""Traces of requests for OpenTelemetry; `provider` and `span_queue` need the extra `otel`."""
