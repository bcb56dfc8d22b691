"""What a request for a canary says. Pure."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from supervisor.canary.canary import CanaryRequest
from supervisor.engines.installed import EngineSetting, is_build_name
from supervisor.errors import SettingsInvalid

LIMIT_MAX_S: Final = 31 * 86_400
MARGIN_MAX: Final = 1.0


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    engine: str = Field(min_length=1)
    share: float = Field(gt=0, lt=1)
    limit_s: float | None = Field(gt=0, le=LIMIT_MAX_S)
    margin: float = Field(ge=0, le=MARGIN_MAX)


def engine_setting(text: str) -> EngineSetting:
    """Return the name of an installed build, or else a path."""
    return text if is_build_name(text) else Path(text)


def canary_request(model: str, body: bytes) -> CanaryRequest:
    """Read a body; raises SettingsInvalid."""
    try:
        found = _Body.model_validate_json(body)
    except ValidationError as error:
        raise SettingsInvalid(
            'the body must be {"engine": PATH, "share": 0 to 1, "limit_s": seconds or null, '
            '"margin": 0 to 1}'
        ) from error
    return CanaryRequest(
        model, engine_setting(found.engine), found.share, found.limit_s, found.margin
    )
