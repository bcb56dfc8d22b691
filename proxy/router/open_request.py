"""A client's request in flight, as operators see it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from proxy.access_log import AccessRecord


@dataclass(frozen=True, slots=True)
class OpenRequest:
    """`record` is filled in as the request passes; `began_at_s` is monotonic."""

    record: AccessRecord
    client: str
    path: str
    began_at_s: float = field(default_factory=time.monotonic)
