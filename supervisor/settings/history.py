"""`[history]`: how much is kept of requests that have ended."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from proxy.config.types import SettingsTable
from supervisor.settings.types import Bytes


class HistorySettings(SettingsTable):
    """`[history]`: figures of requests that have ended, never a text of theirs."""

    enabled: bool = Field(
        default=True,
        description="keep figures of each request on disk, for this user alone; `corral requests "
        "--last 20` shows them",
    )
    max_bytes: Annotated[Bytes, Field(ge=1024**2, le=2**40)] = Field(
        64 * 1024**2, description="disk space for them, in bytes or as in 64 MiB; the oldest go"
    )
    max_age_days: float = Field(90, gt=0, le=36_500, description="older ones are deleted")
