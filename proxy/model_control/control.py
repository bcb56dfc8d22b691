"""What loading and unloading by request needs of the supervisor."""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager
from typing import Protocol


class ModelControl(Protocol):
    """Loads and unloads models of this machine; neither waits until that is done."""

    def load(self, model: str, /) -> None:
        """Begin to load a model.

        Raises:
            Unavailable: It was stopped by command.
            UnknownModel: It is no longer configured.
        """

    async def load_for_others(self, model: str, /) -> None:
        """Begin to load a model that another llama-corral asks for, unless one in use had to go.

        Raises:
            Unavailable: It was stopped or failed, or there is no memory for it.
            UnknownModel: It is no longer configured.
        """

    def unload(self, model: str, /) -> None:
        """Begin to unload a model: its requests finish first, and the next one loads it again.

        Raises:
            UnknownModel: It is no longer configured.
        """

    def changes(self) -> AbstractContextManager[asyncio.Event]:
        """Return what is set after each change of a model's state or of its load progress."""
