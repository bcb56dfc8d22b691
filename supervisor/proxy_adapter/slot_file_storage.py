"""Has engines write and read slot files (proxy.slot_files.storage.SlotFileStorage)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from proxy.prompt_cache.fingerprint import ConversationFingerprint
from proxy.slot_files.storage import Transfer
from supervisor.engine_client.client import EngineClient
from supervisor.fleet.fleet import Fleet
from supervisor.fleet.model import Replica
from supervisor.instance.states import State
from supervisor.slot_store.manager import SlotManager

_UP: Final = frozenset({State.READY, State.DRAINING})
_Work = Callable[[SlotManager, EngineClient, int], Awaitable[Transfer | None]]


class SlotFileStorageAdapter:
    """The slot files of a fleet, for the router.

    The router is built first: `connect` closes the circle. An engine ends what it was asked for,
    whether or not a client still waits for it: so it is waited for here, one for each slot.
    """

    def __init__(self) -> None:
        self._transfers: dict[tuple[str, int], asyncio.Task[Transfer | None]] = {}

    def connect(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def may_save(self, _instance: str, size_bytes: float, /) -> bool:
        return self._fleet.slot_files.may_save(size_bytes)

    async def save(
        self, instance: str, id_slot: int, tokens: int, fingerprint: ConversationFingerprint, /
    ) -> Transfer | None:
        return await self._finish(
            instance,
            id_slot,
            lambda slots, *engine: slots.save_one(*engine, id_slot, tokens, fingerprint),
        )

    async def restore(self, instance: str, id_slot: int, name: str, /) -> Transfer | None:
        return await self._finish(
            instance, id_slot, lambda slots, *engine: slots.restore_one(*engine, id_slot, name)
        )

    async def settle(self) -> None:
        """Wait for what engines write and read now, within a limit."""
        if self._transfers:
            limit_s = self._fleet.slot_files.timeout_s
            await asyncio.wait(tuple(self._transfers.values()), timeout=limit_s)

    async def _finish(self, instance: str, id_slot: int, work: _Work) -> Transfer | None:
        """Wait for a transfer, within a limit; it goes on without its caller."""
        key, limit_s = (instance, id_slot), self._fleet.slot_files.timeout_s
        if before := self._transfers.get(key):
            await asyncio.wait({before}, timeout=limit_s)
        replica = next((one for one in self._fleet.all_replicas() if one.name == instance), None)
        if replica is None or key in self._transfers:
            return None
        task = self._fleet.slot_files.start(_transfer(replica, work), f"slot {id_slot}, {instance}")
        if task is None:
            return None
        self._transfers[key] = task
        task.add_done_callback(lambda _: self._transfers.pop(key))
        await asyncio.wait({task}, timeout=limit_s)
        is_done = task.done() and not task.cancelled() and task.exception() is None
        return task.result() if is_done else None


async def _transfer(replica: Replica, work: _Work) -> Transfer | None:
    snapshot = replica.instance.snapshot()
    if snapshot.state not in _UP:
        return None
    async with EngineClient(snapshot.endpoint, snapshot.api_key) as client:
        return await work(replica.slots, client, snapshot.run)
