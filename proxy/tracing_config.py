"""`[proxy.tracing]`: where traces of requests are sent."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from proxy.config.types import SettingsTable, Text


def _endpoint(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.port == 0:
        raise ValueError("not the address of a collector, as http://127.0.0.1:4318")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(
            "more than an address; what else a collector demands is for OTEL_EXPORTER_OTLP_HEADERS"
        )
    return url


class TracingSettings(SettingsTable):
    """`[proxy.tracing]`: OpenTelemetry, which the extra `otel` installs."""

    endpoint: Annotated[Text, AfterValidator(_endpoint)] | None = Field(
        None,
        description="base URL of an OTLP collector that gets a trace of each request, as "
        "http://127.0.0.1:4318; unset: that of OTEL_EXPORTER_OTLP_ENDPOINT, or no traces",
    )
    service_name: Text | None = Field(
        None,
        min_length=1,
        description="service.name of the traces; unset: that of OTEL_SERVICE_NAME, or llama-corral",
    )
    sample_ratio: float | None = Field(
        None,
        ge=0,
        le=1,
        description="share of the requests without a trace of their own that get one; unset: as "
        "OTEL_TRACES_SAMPLER says, or all",
    )
