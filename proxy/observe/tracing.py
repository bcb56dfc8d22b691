"""Whether requests are traced, and the tracer if so; imports OpenTelemetry only then."""

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
    """Return the collector that settings or environment name; None where traces are off.

    Source: OpenTelemetry, "Environment Variable Specification".
    """
    is_off = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if is_off or environ.get("OTEL_TRACES_EXPORTER", "").lower() == "none":
        return None
    named = (settings.endpoint, *map(environ.get, _ENDPOINTS))
    return next(filter(None, named), None)


def check_tracing(settings: TracingSettings) -> None:
    """Check that what traces need is installed.

    Raises:
        ConfigError: It is not.
    """
    if settings.endpoint and endpoint_of(settings) and not _is_installed():
        raise ConfigError(
            "traces are on, but OpenTelemetry is not installed",
            hint="pip install '.[otel]' in the clone, or unset proxy.tracing.endpoint",
        )


def start_tracer(settings: TracingSettings, process: str, emit: Emit) -> Tracer | None:
    """Return the tracer of a proxy, or None where it makes no traces.

    A variable that is there for other programs stops no daemon.
    """
    if endpoint_of(settings) is None:
        return None
    if not _is_installed():
        reason = "OTEL_EXPORTER_OTLP_ENDPOINT is set, but the extra otel is not installed"
        emit("traces.export_failed", reason=reason)
        return None
    # Imported here: most daemons need no memory for it.
    from proxy.observe.otel import OpenTelemetryTracer  # noqa: PLC0415

    return OpenTelemetryTracer(settings, process, emit)


def _is_installed() -> bool:
    try:
        return all(find_spec(package) for package in _PACKAGES)
    except ModuleNotFoundError:  # the package that it is in
        return False
