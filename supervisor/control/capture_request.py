"""What a request for a capture says. Pure."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from supervisor.capture.limits import (
    DURATION_MAX_S,
    SIZE_MAX_BYTES,
    SIZE_MIN_BYTES,
    CaptureLimits,
)
from supervisor.errors import SettingsInvalid


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    duration_s: float = Field(gt=0, le=DURATION_MAX_S)
    size_bytes: int = Field(ge=SIZE_MIN_BYTES, le=SIZE_MAX_BYTES)
    requests: int | None = Field(ge=1)


def capture_request(body: bytes) -> tuple[str, CaptureLimits]:
    """Return a model and the limits; raises SettingsInvalid."""
    try:
        found = _Body.model_validate_json(body)
    except ValidationError as error:
        raise SettingsInvalid(
            'the body must be {"model", "duration_s", "size_bytes", "requests": number or null}'
        ) from error
    return found.model, CaptureLimits(found.duration_s, found.size_bytes, found.requests)
