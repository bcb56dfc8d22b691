"""Checks of traces: whether their collector takes connections."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from proxy.errors import ConfigError
from proxy.tracing.start import check_tracing, endpoint_of
from proxy.tracing_config import TracingSettings
from supervisor.doctor.finding import Finding

_CONNECT_S: Final = 2.0
_PORTS: Final = {"http": 80, "https": 443}


def check_traces(settings: TracingSettings) -> Iterator[Finding]:
    """Yield a finding where requests are traced."""
    endpoint = endpoint_of(settings)
    if endpoint is None:
        return
    try:
        check_tracing(settings)
    except ConfigError as error:
        yield Finding("traces", "fail", error.message, error.hint)
        return
    yield _connected(endpoint)


def _connected(endpoint: str) -> Finding:
    parts = urlsplit(endpoint)
    address = (parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 0))
    shown = f"{parts.scheme}://{parts.hostname}:{address[1]}"
    try:
        socket.create_connection(address, _CONNECT_S).close()
    except OSError as error:
        text = f"the collector {shown} takes no connection: {error.strerror or error}"
        return Finding("traces", "warn", text, "start it, or correct proxy.tracing.endpoint")
    return Finding("traces", "ok", f"sent to {shown}")
