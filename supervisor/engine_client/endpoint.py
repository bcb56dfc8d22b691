"""Where an engine listens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine listens: a unix socket, or a TCP port.

    Attributes:
        socket: Path of the socket, or None for TCP.
        host: Address to connect to, for TCP.
        port: Port to connect to, for TCP; 0 until the engine has told which one it took.
    """

    socket: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0

    @property
    def is_known(self) -> bool:
        """Return whether one can connect to it yet."""
        return self.socket is not None or self.port > 0
