"""What an instance needs of whoever keeps its conversations while it is away."""

from __future__ import annotations

from typing import Protocol

from supervisor.engine_client.client import EngineClient


class SlotPersister(Protocol):
    """Saves what slots hold, and puts it back. Neither call raises for what an engine does."""

    async def restore(self, client: EngineClient, run: int, /) -> int:
        """Fill slots of an engine that serves nobody yet; return how many.

        Args:
            client: The engine, which has answered a request.
            run: Its run.
        """

    async def save(self, client: EngineClient, run: int, /) -> None:
        """Save what idle slots hold and is not saved yet; ends by itself within its budget."""


class NoSlotPersister:
    """A keeper for instances whose caches may go with them."""

    async def restore(self, _client: EngineClient, _run: int, /) -> int:
        """Fill nothing."""
        return 0

    async def save(self, _client: EngineClient, _run: int, /) -> None:
        """Save nothing."""
