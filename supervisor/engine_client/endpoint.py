"""The address of an engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A unix socket, or, if `socket` is None, a TCP port; 0 until the engine reports its port."""

    socket: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0

    @property
    def is_known(self) -> bool:
        return self.socket is not None or self.port > 0
