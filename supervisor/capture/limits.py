"""How much is captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

DURATION_MAX_S: Final = 86_400.0
SIZE_MIN_BYTES: Final = 64 * 1024
SIZE_MAX_BYTES: Final = 64 * 1024**3


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """A capture ends at the first of them; `requests` None: any number."""

    duration_s: float
    size_bytes: int
    requests: int | None = None
