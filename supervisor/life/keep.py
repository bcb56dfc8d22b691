"""What an instance needs of whoever keeps its conversations while it is away."""

from __future__ import annotations

from typing import Protocol

from supervisor.life.llama import Llama


class Keeper(Protocol):
    """Saves what slots hold, and puts it back. Neither call raises for what an engine does."""

    async def restore(self, llama: Llama, run: int, /) -> int:
        """Fill slots of an engine that serves nobody yet; return how many.

        Args:
            llama: The engine, which has answered a request.
            run: Its run.
        """

    async def save(self, llama: Llama, run: int, /) -> None:
        """Save what idle slots hold and is not saved yet; ends by itself within its budget."""


class KeepsNothing:
    """A keeper for instances whose caches may go with them."""

    async def restore(self, _llama: Llama, _run: int, /) -> int:
        """Fill nothing."""
        return 0

    async def save(self, _llama: Llama, _run: int, /) -> None:
        """Save nothing."""
