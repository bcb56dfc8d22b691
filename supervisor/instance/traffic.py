"""What an instance needs of whoever sends it requests."""

from __future__ import annotations

from typing import Protocol

from supervisor.instance.snapshot import InstanceSnapshot
from supervisor.warmup.background import BackgroundLeases


class Traffic(BackgroundLeases, Protocol):
    """Sends requests to instances that are in service. A name it does not know is no error."""

    def admit(self, facts: InstanceSnapshot, /) -> None:
        """Take the instance into service."""

    def withdraw(self, name: str, /) -> None:
        """Send it nothing new; what it holds goes on."""

    def ended(self, name: str, /, *, is_crash: bool) -> int:
        """Hear that its process is gone, before it is withdrawn.

        Args:
            name: The instance.
            is_crash: Whether a signal ended it that nobody here sent.

        Returns:
            How many requests of clients it computed at its end.
        """

    async def wait_idle(self, name: str, /) -> None:
        """Wait until it holds no request."""

    async def close(self, name: str, /) -> None:
        """Cut every connection to it."""
