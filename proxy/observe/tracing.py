"""Decides whether requests are traced; imports OpenTelemetry only then."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final

from proxy.errors import ConfigError
from proxy.observe.record import Emit, Tracer
from proxy.settings import TracingSettings

_PACKAGES: Final = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def endpoint_of(settings: TracingSettings, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the collector from the settings or the environment; None if traces are off.

    Source: OpenTelemetry, "Environment Variable Specification".
    """
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_off or environ.get("OTEL_TRACES_EXPORTER", "").lower() == "none":
        return None
    named = (settings.endpoint, *map(environ.get, _ENDPOINTS))
    return next(filter(None, named), None)


def check_tracing(settings: TracingSettings) -> None:
    """Check that OpenTelemetry is installed if the settings name a collector.

    Raises ConfigError: it is not installed.
    """
    if settings.endpoint and endpoint_of(settings) and not _is_installed():
        raise ConfigError(
            "traces are on, but OpenTelemetry is not installed",
            hint="pip install '.[otel]' in the clone, or unset proxy.tracing.endpoint",
        )


def start_tracer(settings: TracingSettings, process: str, emit: Emit) -> Tracer | None:
    """Return the tracer of a proxy, or None if traces are off.

    An environment variable meant for other programs does not stop the daemon.
    """
    if endpoint_of(settings) is None:
        return None
    if not _is_installed():
        reason = "OTEL_EXPORTER_OTLP_ENDPOINT is set, but the extra otel is not installed"
        emit("traces.export_failed", reason=reason)
        return None
    # Imported here, because most daemons do not trace and save its memory.
    from proxy.observe.otel import OpenTelemetryTracer  # noqa: PLC0415

    return OpenTelemetryTracer(settings, process, emit)


def _is_installed() -> bool:
    try:
        return all(find_spec(package) for package in _PACKAGES)
    except ModuleNotFoundError:  # its parent package is missing
        return False
