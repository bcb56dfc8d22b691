"""What an instance needs of others: the proxy's traffic, the slot store and the calibrator."""

from __future__ import annotations

from typing import Protocol

from proxy.router.instances import ProcessExit
from supervisor.engine_client.client import EngineClient
from supervisor.warmup.prompts import WarmPrompt
from supervisor.warmup.queue import BackgroundLeases


class Traffic(BackgroundLeases, Protocol):
    """The part of proxy.router.router.Router that an instance needs.

    An unknown instance name is not an error.
    """

    def withdraw(self, name: str, /) -> None:
        """Send no new requests; those in flight continue."""

    def ended(self, name: str, process_exit: ProcessExit, /, *, reason: str = "") -> int:
        """Note that the process has exited; called before `withdraw`.

        `reason` is for clients whose answers it cuts.

        Returns:
            The number of client requests it was computing.
        """

    async def wait_idle(self, name: str, /) -> None:
        """Wait until the instance has no request in flight."""

    async def close(self, name: str, /) -> None:
        """Close every connection to the instance."""


class SlotPersister(Protocol):
    """Saves and restores KV slots. Neither call raises for an error of the engine."""

    async def restore(self, client: EngineClient, run: int, /) -> int:
        """Restore slots of an engine that serves no requests yet; return how many."""

    def has_prompt(self, prompt: WarmPrompt, /) -> bool:
        """Return whether requests that begin with a prompt go on from a file of it."""

    async def save(self, client: EngineClient, run: int, /) -> None:
        """Save the idle slots that are not saved yet, within a time limit of its own."""


class Calibrator(Protocol):
    """Measures how fast a run is, before it serves."""

    async def needs_restart(self, client: EngineClient, run: int, /) -> bool:
        """Measure a run; return whether another one with other flags must follow."""


class NoCalibrator:
    """Measures nothing."""

    async def needs_restart(self, _client: EngineClient, _run: int, /) -> bool:
        return False


class NoSlotPersister:
    """Persists nothing."""

    async def restore(self, _client: EngineClient, _run: int, /) -> int:
        return 0

    def has_prompt(self, _prompt: WarmPrompt, /) -> bool:
        return False

    async def save(self, _client: EngineClient, _run: int, /) -> None: ...
