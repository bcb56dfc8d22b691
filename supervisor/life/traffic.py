"""What an instance needs of whoever sends it requests."""

from __future__ import annotations

from typing import Protocol

from supervisor.life.facts import InstanceFacts


class Traffic(Protocol):
    """Sends requests to instances that are in service. A name it does not know is no error."""

    def admit(self, facts: InstanceFacts, /) -> None:
        """Take the instance into service."""

    def withdraw(self, name: str, /) -> None:
        """Send it nothing new; what it holds goes on."""

    async def idle(self, name: str, /) -> None:
        """Wait until it holds no request."""

    async def close(self, name: str, /) -> None:
        """Cut every connection to it."""
