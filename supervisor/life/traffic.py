"""What an instance needs of whoever sends it requests."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from supervisor.life.facts import InstanceFacts


@dataclass(frozen=True, slots=True)
class Pulse:
    """What an instance does for clients at one moment.

    Attributes:
        in_flight: Requests it holds.
        awaited: Those of them whose next bytes it owes; the others wait for a slow client.
        bytes_seen: Bytes of answers that came from it so far. Only a change of it means anything.
        is_silent: Whether requests were moved away because it does not answer `/health`.
    """

    in_flight: int = 0
    awaited: int = 0
    bytes_seen: int = 0
    is_silent: bool = False


class NotLent(Exception):
    """An instance was not lent, or was asked back: clients want it, or it is to leave."""


class Traffic(Protocol):
    """Sends requests to instances that are in service. A name it does not know is no error."""

    def admit(self, facts: InstanceFacts, /) -> None:
        """Take the instance into service."""

    def withdraw(self, name: str, /) -> None:
        """Send it nothing new; what it holds goes on."""

    def pulse(self, name: str, /) -> Pulse:
        """Return what it does now; cheap enough to be asked several times a second."""

    def lend(self, name: str, /) -> AbstractAsyncContextManager[Callable[[], bool]]:
        """Hold one of its slots for the length of the block, for a request that is nobody's.

        What the block is given tells whether somebody wants the instance, who then comes first:
        leave the block with NotLent.

        Raises:
            NotLent: No slot was free, or the instance is stopped.
        """

    def ended(self, name: str, /, *, is_crash: bool) -> int:
        """Hear that its process is gone, before it is withdrawn.

        Args:
            name: The instance.
            is_crash: Whether a signal ended it that nobody here sent.

        Returns:
            How many requests of clients it computed at its end.
        """

    async def idle(self, name: str, /) -> None:
        """Wait until it holds no request."""

    async def close(self, name: str, /) -> None:
        """Cut every connection to it."""
