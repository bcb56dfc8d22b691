"""Commands on the KV caches of serving instances: save slots, restore one, prefill a prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from proxy.cache.fingerprint import ConversationFingerprint
from proxy.cache.save_policy import Transfer
from proxy.request.models import PrefillResult
from proxy.upstream.upstream import Timings
from supervisor.engine import client as client_module
from supervisor.engine.client import EngineClient, EngineUnreachable, ErrorResponse
from supervisor.engine.prompts import WarmPrompt
from supervisor.engine.states import InstanceSnapshot, State
from supervisor.engine.warmup import PrefillQueue
from supervisor.errors import AccessDenied, CorralError, SaveFailed, SettingsInvalid, StartFailed
from supervisor.fleet.model import Model, Replica
from supervisor.slot_store.manager import SlotManager
from supervisor.slot_store.manifest import Manifest, cache_key
from supervisor.slot_store.slot_files import SlotFiles
from supervisor.slot_store.store_config import SlotPersistence

if TYPE_CHECKING:
    from proxy.router.router import Router

# How long a prefill waits for an instance to be idle.
_IDLE_TIMEOUT_S: Final = 60.0
# How long a request waits for the list of files of other daemons.
_LOOK_MAX_S: Final = 0.25
_TICK_S: Final = 0.1
# How long a successor waits for its predecessor's list of slots. An idle engine sends it at once.
_LISTED_TIMEOUT_S: Final = 2.0


async def save_predecessors(model: Model, replica: Replica) -> None:
    """Save the slots of the instances that a replica will replace, for it to restore.

    An instance that does not list its slots soon is left out: it hangs, or computes a long batch.
    """
    for other in model.all_replicas:
        if other is replica or other.place != replica.place or not (other.plan and replica.plan):
            continue
        if cache_key(replica.plan).fits(cache_key(other.plan)) and await _answers(other):
            await _save(other)


async def _answers(replica: Replica) -> bool:
    if snapshot := _serving_snapshot(replica):
        with suppress(TimeoutError, EngineUnreachable):
            async with (
                asyncio.timeout(_LISTED_TIMEOUT_S),
                EngineClient(snapshot.endpoint, snapshot.api_key) as client,
            ):
                return not isinstance(await client_module.get_slots(client), ErrorResponse)
    return False


async def save(
    replicas: Iterable[Replica], persistence: SlotPersistence
) -> list[Manifest] | SaveFailed:
    """Save the idle slots of serving instances; return all saved slots of their models."""
    replicas = list(replicas)
    failures = [
        f"{replica.name}: {reason}" for replica in replicas for reason in await _save(replica)
    ]
    if failures:
        message = "\n".join(["some idle slots were not saved", *failures])
        return SaveFailed(message, hint="corral slots list shows those that are")
    saved: list[Manifest] = []
    try:
        for model in dict.fromkeys(replica.place.model for replica in replicas):
            saved += await asyncio.to_thread(persistence.store.list_saved, model)
    except AccessDenied as error:
        return SaveFailed(f"the idle slots are saved, but not listed: {error}")
    return saved


async def save_until_idle(replicas: Sequence[Replica], traffic: Router) -> None:
    """Save idle slots at once, and each other slot when its request has ended."""
    saved = dict.fromkeys(replicas, -1)
    while any(saved.values()):
        for replica, before in saved.items():
            in_flight = traffic.activity(replica.name).in_flight
            if in_flight != before:
                saved[replica] = in_flight
                await _save(replica)
        await asyncio.sleep(_TICK_S)


async def warm(
    replicas: Sequence[Replica], prompt: WarmPrompt, traffic: Router
) -> list[PrefillResult] | CorralError:
    """Prefill a prompt on each serving instance that becomes idle within a minute."""
    serving = [replica for replica in replicas if _serving_snapshot(replica)]
    if not serving:
        return StartFailed("no instance is ready", hint="run corral start")
    done = []
    for replica in serving:
        found = await _prefill(replica, prompt, traffic)
        if isinstance(found, ErrorResponse):
            return SettingsInvalid(
                f"{replica.name} refused the prompt {prompt.name}: {found.message or found.status}"
            )
        if found is None:
            return StartFailed(
                f"{replica.name} was not idle for the prompt {prompt.name}",
                hint="retry when it has no client requests",
            )
        done.append(PrefillResult(replica.name, found.prompt_tokens, found.cached_tokens))
    return done


async def _prefill(
    replica: Replica, prompt: WarmPrompt, traffic: Router
) -> Timings | ErrorResponse | None:
    """Prefill a prompt on an instance; None if it was not idle or has stopped."""
    snapshot = _serving_snapshot(replica)
    if snapshot is None:
        return None
    found: list[Timings | ErrorResponse] = []
    queue = PrefillQueue([prompt], lambda _, result: found.append(result))
    async with (
        EngineClient(snapshot.endpoint, snapshot.api_key) as client,
        asyncio.TaskGroup() as group,
    ):
        prefilled = group.create_task(queue.resume(client, traffic, snapshot.name, _IDLE_TIMEOUT_S))
        stopped = group.create_task(replica.instance.wait(frozenset(State) - {State.READY}))
        await asyncio.wait((prefilled, stopped), return_when=asyncio.FIRST_COMPLETED)
        prefilled.cancel()
        stopped.cancel()
    return found[0] if found else None


async def _save(replica: Replica) -> Sequence[str]:
    """Save the idle slots of a serving instance; return what failed."""
    if snapshot := _serving_snapshot(replica):
        async with EngineClient(snapshot.endpoint, snapshot.api_key) as client:
            return await replica.slots.save(client, snapshot.run)
    return ()


def _serving_snapshot(replica: Replica) -> InstanceSnapshot | None:
    snapshot = replica.instance.snapshot()
    return snapshot if snapshot.state is State.READY else None


_Work = Callable[[SlotManager, EngineClient, int], Awaitable[Transfer | None]]


class SlotStorage:
    """Saves and restores single slots for the router (`proxy.cache.save_policy.SlotFileStorage`).

    An engine finishes a transfer whether or not a client still waits for it. So transfers run on
    here, at most one per slot.
    """

    def __init__(self, files: SlotFiles, find: Callable[[str], Replica | None]) -> None:
        self._files = files
        self._find = find
        self._transfers: dict[tuple[str, int], asyncio.Task[Transfer | None]] = {}

    def may_save(self, _instance: str, size_bytes: float, /) -> bool:
        return self._files.may_save(size_bytes)

    async def save(
        self, instance: str, id_slot: int, tokens: int, fingerprint: ConversationFingerprint, /
    ) -> Transfer | None:
        def work(slots: SlotManager, client: EngineClient, run: int) -> Awaitable[Transfer | None]:
            return slots.save_slot(client, run, id_slot, tokens, fingerprint)

        return await self._finish(instance, id_slot, work)

    async def restore(self, instance: str, id_slot: int, name: str, /) -> Transfer | None:
        return await self._finish(
            instance, id_slot, lambda slots, *engine: slots.restore_slot(*engine, id_slot, name)
        )

    async def look(self, _instance: str, /) -> None:
        await self._files.look(_LOOK_MAX_S)

    async def settle(self) -> None:
        """Wait for the running transfers, within a limit."""
        if self._transfers:
            await asyncio.wait(tuple(self._transfers.values()), timeout=self._files.timeout_s)

    async def _finish(self, instance: str, id_slot: int, work: _Work) -> Transfer | None:
        """Wait for a transfer, within a limit; it continues without its caller."""
        key, limit_s = (instance, id_slot), self._files.timeout_s
        if before := self._transfers.get(key):
            await asyncio.wait({before}, timeout=limit_s)
        replica = self._find(instance)
        if replica is None or key in self._transfers:
            return None
        task = self._files.start(_transfer(replica, work), f"slot {id_slot}, {instance}")
        if task is None:
            return None
        self._transfers[key] = task
        task.add_done_callback(lambda _: self._transfers.pop(key))
        await asyncio.wait({task}, timeout=limit_s)
        is_done = task.done() and not task.cancelled() and task.exception() is None
        return task.result() if is_done else None


async def _transfer(replica: Replica, work: _Work) -> Transfer | None:
    snapshot = replica.instance.snapshot()
    if snapshot.state not in {State.READY, State.DRAINING}:
        return None
    async with EngineClient(snapshot.endpoint, snapshot.api_key) as client:
        return await work(replica.slots, client, snapshot.run)
