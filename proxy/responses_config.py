"""`[proxy.stored_responses]`: responses that later requests name as `previous_response_id`."""

from __future__ import annotations

from pydantic import Field

from proxy.config.types import SettingsTable


class StoredResponseSettings(SettingsTable):
    """`[proxy.stored_responses]`: conversations of the Responses API that the proxy remembers."""

    enabled: bool = Field(
        default=False,
        description="whether responses are kept in memory for previous_response_id and "
        "GET /v1/responses/{id}, for the API key that created them",
    )
    max_count: int = Field(
        10_000, ge=1, le=10_000_000, description="most stored responses; the oldest go first"
    )
    max_bytes: int = Field(
        64 * 1024**2,
        ge=1024**2,
        le=1024**4,
        description="memory for stored responses and what they answer, in bytes",
    )
    keep_s: int = Field(
        86_400, ge=1, le=10 * 365 * 86_400, description="seconds until a response is deleted"
    )
